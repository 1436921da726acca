"""Lives of models that talk: requests and whatever else may happen, drawn at random, each request compared with stock,
and to rounding with computing all anew.
"""

from __future__ import annotations

import gc
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from typing import Any, Final

import pytest
import torch

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.errors import BudgetError
from ballonet.hooks.device import managers
from ballonet.hooks.kv import tensors
from ballonet.offload.policy.reclaim_order import LISTED, PageSource

from ..kv.pressure import around_appends, poison, press
from ..models import VOCABULARY
from ..pool import in_use
from .conversations import Asked, Sides, watched

PAGE: Final = 4096
CONTEXT: Final = 72  # tokens; a model with learned positions knows no more


class Talker(Sides):
    """A model that is managed again and again, and what was said to it."""

    def __init__(self, name: str, adapters: bool, folder: Path | None) -> None:
        super().__init__(
            name, add_adapters if adapters else None, {"num_hidden_layers": 2, "max_position_embeddings": CONTEXT}
        )
        self.folder = folder
        self.adapter = 0
        self.epoch = 0  # of its weights
        self.talks: deque[list[int]] = deque(maxlen=10)
        self.sessions: list[ballonet.Session] = []
        self.pins: list[list[bytes]] = []
        self.hits = self.moves = self.copies = 0
        self.manage_anew(None)

    @property
    def salt(self) -> int:  # type: ignore[override]
        return hash((self.adapter, self.epoch))

    def manage_anew(self, chaos: int | None, directory: bool = True) -> None:
        self.manage(chaos=chaos, prefix_dir=self.folder if directory else None)

    def release(self) -> None:
        counts = self.store.counts
        assert not {reason for reason in counts.why_not if not reason.startswith("storing failed")}, counts.why_not
        self.hits += counts.hits
        self.moves += counts.moves
        self.copies += counts.copies
        self.sessions.clear()
        self.pins.clear()
        self.managed.release()

    def say(
        self, rows: Sequence[Sequence[int]], act: Callable[[], torch.Tensor] | None = None, **options: Any
    ) -> torch.Tensor | None:
        """The tokens, int64[sequences, tokens]; None where the model and stock refuse alike. torch.OutOfMemoryError,
        which is the model's."""
        columns = max(map(len, rows))
        ids = torch.tensor([[0] * (columns - len(row)) + [*row] for row in rows])
        mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows])
        try:
            result = self.ask(ids, act, attention_mask=mask, **options)
        except (IndexError, ValueError):
            return None
        asked = self.asked[get_ident()]
        assert asked.left
        if options.get("num_beams", 1) == 1:
            with install.stock(), torch.no_grad():
                self._is_recomputed(asked, result, not options.get("do_sample"))
        return result

    def _is_recomputed(self, asked: Asked, result: torch.Tensor, greedy: bool) -> None:
        """As if nothing had been kept: one forward over all of it."""
        mask = torch.ones_like(result[:, : asked.end])
        for row, pad in enumerate(asked.pads):
            mask[row, :pad] = 0
        where = {} if not any(asked.pads) else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        output = self.stock(result[:, : asked.end], attention_mask=mask, use_cache=True, **where)
        for layer, pair in zip(output.past_key_values.layers, asked.left, strict=True):
            for ours, theirs in zip(pair, (layer.keys, layer.values), strict=True):
                for row, pad in enumerate(asked.pads):
                    torch.testing.assert_close(ours[row, :, pad:], theirs[row, :, pad:], rtol=1e-3, atol=1e-3)
        if greedy and asked.end == result.shape[1] - 1:
            last = output.logits[:, -1]
            chosen = last.gather(1, result[:, -1:])
            assert bool((chosen[:, 0] >= last.amax(1) - 1e-2).all()), "another token than all computed anew"


def add_adapters(model: Any) -> None:
    """Two, of which none is on. By peft itself: transformers' `add_adapter` may want a newer one."""
    from peft import LoraConfig, inject_adapter_in_model

    target = "c_attn" if hasattr(model, "transformer") else "v_proj"
    for number in (1, 2):
        torch.manual_seed(number)
        config = LoraConfig(r=2, target_modules=[target], init_lora_weights=False)
        inject_adapter_in_model(config, model, f"adapter{number}")
    switch((model,), 0)


def switch(models: Iterable[Any], adapter: int) -> None:
    """To one of `add_adapters`, or to none for 0."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for model in models:
        for layer in model.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.enable_adapters(bool(adapter))
                if adapter:
                    layer.set_adapter(f"adapter{adapter}")
        model.eval()


class Life:
    """The life of some models on one device."""

    def __init__(self, seed: int, names: Sequence[str], *, adapters: bool = False, folder: Path | None = None) -> None:
        self.draw = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.device = devices.require()
        self.budget = self.device.budget
        self.talkers = [
            Talker(name, adapters, None if folder is None else folder / str(number))
            for number, name in enumerate(names)
        ]
        self._asking = False

    def live(self, steps: int) -> None:
        """Takes `steps`, most of them requests; then everything goes."""
        with watched(self.talkers), pytest.MonkeyPatch.context() as patch:
            around_appends(patch, lambda _: self._meanwhile())
            for number in range(steps):
                talker = self.draw.choice(self.talkers)
                between = self.draw.random() < 0.25
                what = self.draw.choice(self._BETWEEN if between else ("one", "one", "one", "batch", "by_hand"))
                self.done[what] += 1
                with suppress(torch.OutOfMemoryError):
                    self._asking = not between
                    try:
                        getattr(self, f"_{what}")(talker)
                    except torch.OutOfMemoryError:
                        self.done["out of memory"] += 1
                        ballonet.set_budget(self.budget)
                    finally:
                        self._asking = False
                for speaker in self.talkers:
                    speaker.check(tokens=number % 8 == 0)
                if number % 8 == 0:
                    self._no_page_is_lost()
        ballonet.set_budget(self.budget)
        while self.talkers:
            self.talkers.pop().release()
        self._no_page_is_lost()

    def _no_page_is_lost(self) -> None:
        """Pages of KV are those of the stores, once what is garbage is gone. A collection does not look through what
        conftest.py has frozen, which may have become garbage since."""
        for thaw in (False, True):
            if thaw:
                gc.unfreeze()
            gc.collect()
            self.device.reap(wait=True)
            self.device.check()
            kept = sum(talker.store.contents.index.device_pages for talker in self.talkers)
            if self.device.snapshot()["pages"]["kv"] <= kept:
                return
        pytest.fail(f"{kept} pages of KV are kept, and nobody gives back the others\n{in_use()}")

    # -- requests

    def _words(self, count: int) -> list[int]:
        return [self.draw.randrange(2, VOCABULARY) for _ in range(count)]

    def _prompt(self, talker: Talker) -> list[int]:
        draw = self.draw
        old = draw.choice(talker.talks) if talker.talks else []
        kind = draw.choice(("on", "on", "on", "branch", "branch", "edit", "first", "again", "fresh", "long", "short"))
        self.done["sessions"] += kind != "on"
        if kind == "fresh" or len(old) < 2 or (kind != "long" and len(old) > CONTEXT - 10):
            return self._words(draw.randint(4, 40))
        if kind == "branch":
            old = old[: draw.randint(1, len(old))]
        elif kind == "edit":
            old = [*old]
            old[draw.randrange(len(old))] = draw.randrange(2, VOCABULARY)
        elif kind == "first":
            return [draw.randrange(2, VOCABULARY), *old[1:]]
        elif kind == "again":
            return old[: draw.randint(1, len(old))]
        elif kind == "long":  # than the model's context
            return (old + self._words(CONTEXT))[: CONTEXT + draw.randint(-2, 2)]
        elif kind == "short":
            return self._words(1)
        return old + self._words(draw.randint(1, 5))

    def _options(self) -> dict[str, Any]:
        new = self.draw.randint(1, 4)
        ways: tuple[dict[str, Any], ...] = ({"do_sample": True}, {"num_beams": 2}, {"num_return_sequences": 2})
        kind = dict(self.draw.choice(({}, {}, {}, {}, {}, *ways)))
        if "num_return_sequences" in kind:
            kind |= {"do_sample": True, "return_dict_in_generate": True}
        return {"max_new_tokens": new, "min_new_tokens": new, **kind}

    def _one(self, talker: Talker) -> None:
        self._said(talker, talker.say([self._prompt(talker)], **self._options()))

    def _batch(self, talker: Talker) -> None:
        rows = [self._prompt(talker) for _ in range(self.draw.randint(2, 3))]
        self._said(talker, talker.say(rows, **self._options()), max(map(len, rows)), [len(row) for row in rows])

    def _said(self, talker: Talker, result: Any, columns: int = 0, lengths: Sequence[int] = ()) -> None:
        if result is None:
            self.done["refused"] += 1
            return
        for number, row in enumerate(result.tolist()):
            self.done["answers"] += 1
            pad = columns - lengths[number * len(lengths) // len(result)] if lengths else 0
            talker.talks.append(row[pad:])

    def _by_hand(self, talker: Talker) -> None:
        draw = self.draw
        if not talker.sessions or draw.random() < 0.2:
            talker.sessions.append(ballonet.Session(talker.model))
        session = draw.choice(talker.sessions)
        if draw.random() < 0.2:
            talker.sessions.append(session := session.fork())
        if draw.random() < 0.2 or len(session.tokens) > CONTEXT - 12:
            session.close()
            talker.sessions.remove(session)
            return
        said, new = self._words(draw.randint(1, 6)), draw.randint(1, 4)
        options = {"max_new_tokens": new, "min_new_tokens": new}

        def act() -> torch.Tensor:
            session.generate(said, do_sample=False, **options)
            return torch.tensor([session.tokens])

        self._said(talker, talker.say([[*session.tokens, *said]], act, **options))

    # -- whatever else happens, also in the middle of a request

    def _meanwhile(self) -> None:
        if self._asking and self.draw.random() < 0.12:
            self._asking = False
            try:
                what = self.draw.choice(self._ANYTIME)
                self.done[what] += 1
                getattr(self, f"_{what}")(self.draw.choice(self.talkers))
            finally:
                self._asking = True

    def _pull(self, _: Talker) -> None:
        level = self.draw.choice(LISTED)
        self.done[f"pulled {level.label}"] += managers.of(self.device).sources.reclaim(level, self.draw.randint(1, 12))

    def _restore(self, _: Talker) -> None:
        managers.of(self.device).sources.restore(
            self.draw.choice((PageSource.PREFIX, PageSource.IDLE_KV)), self.draw.randint(1, 12)
        )

    def _press(self, _: Talker) -> None:
        self.done["pressed"] += press(self.device, self.draw.randint(1, 9))

    def _poison(self, _: Talker) -> None:
        poison(self.device)

    def _behind(self, talker: Talker) -> None:
        for sequence in tuple(talker.store.contents.index.idle):
            for tier in sequence._tiers():
                tier.client.write_behind(self.draw.randint(0, 3))

    def _evict(self, talker: Talker) -> None:
        self.done["evicted"] += talker.store.contents.give_up(self.draw.randint(1, 20))

    def _limit(self, talker: Talker) -> None:
        talker.store.limit = self.draw.choice((None, None, 40 * PAGE, 150 * PAGE))
        if talker.store.limit is not None and not talker.pins and not talker.sessions:
            assert talker.store.nbytes <= talker.store.limit

    def _pin(self, talker: Talker) -> None:
        if talker.talks and len(talker.pins) < 4:
            talker.pins.append(talker.store.pin(self.draw.choice(talker.talks)))

    def _unpin(self, talker: Talker) -> None:
        if talker.pins:
            talker.store.unpin_keys(talker.pins.pop(self.draw.randrange(len(talker.pins))))

    def _shrink(self, _: Talker) -> None:
        pages = self.budget // PAGE
        with suppress(BudgetError):
            ballonet.set_budget(self.draw.randint(pages // 8, pages) * PAGE, timeout="0.1s")
            self.done["shrunk"] += 1

    def _clear(self, talker: Talker) -> None:
        if self.draw.random() < 0.2:
            talker.store.clear()

    _ANYTIME = (
        *("pull", "pull", "pull", "restore", "press", "poison", "behind", "behind", "evict", "limit", "pin", "unpin"),
        *("shrink", "clear"),
    )

    # -- only between requests

    def _switch(self, talker: Talker) -> None:
        """To another adapter, if there are any."""
        if not getattr(talker.model, "_hf_peft_config_loaded", False):
            return
        talker.adapter = self.draw.randrange(3)
        switch((talker.model, talker.stock), talker.adapter)

    def _write(self, talker: Talker) -> None:
        """To a weight."""
        if self.draw.random() < 0.3:
            talker.epoch += 1
            for model in (talker.model, talker.stock):
                with torch.no_grad():
                    model.get_input_embeddings().weight[3:9].mul_(1.25)

    def _anew(self, talker: Talker) -> None:
        """Released and managed again, with files or without, with chaos or without."""
        talker.release()
        talker.manage_anew(self.draw.choice((None, self.draw.randrange(99))), self.draw.random() < 0.7)

    def _flush(self, talker: Talker) -> None:
        assert talker.store.flush(60)

    def _break(self, talker: Talker) -> None:
        """A request is broken off in the middle, by an error or as by Ctrl-C."""
        error, count = self.draw.choice((ZeroDivisionError, KeyboardInterrupt)), iter(range(99))
        at, write = self.draw.randrange(8), tensors.ShownTokens.write

        def fails(tokens: Any, *args: Any) -> Any:
            if next(count) == at:
                raise error
            return write(tokens, *args)

        prompt = torch.tensor([self._prompt(talker)])[:, : CONTEXT - 8]
        with pytest.MonkeyPatch.context() as patch, suppress(error):
            patch.setattr(tensors.ShownTokens, "write", fails)
            talker.model.generate(prompt, do_sample=False, max_new_tokens=4)

    _BETWEEN = (*_ANYTIME, "switch", "switch", "switch", "write", "anew", "flush", "break", "break")
