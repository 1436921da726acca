"""Prefixes in files: another process goes on from them with the right tokens, and nothing that is wrong with them, or
with their folder, is more than a miss."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import ballonet
from ballonet.allocator import devices
from ballonet.allocator.errors import AlreadyManaged
from ballonet.hooks.prefix import saving
from ballonet.hooks.prefix.identity import fingerprint
from ballonet.hooks.prefix.store import PrefixStore
from ballonet.offload.policy.prefixes import Reading, reading
from ballonet.offload.residency import prefix_files
from ballonet.offload.residency.prefix_files import PrefixFiles

from .. import models, programs
from ..pool import installing
from ..tuned import Clock, Tuned

PAGE = 65536
BLOCK = 256
Taken = tuple[int, int, int, Any]  # layer, start, end, and bytes of keys and values
FIRST = [Random(1).randrange(2, models.VOCABULARY) for _ in range(2 * BLOCK + 40)]


def built(**changes: Any) -> Any:
    return models.build("llama", max_position_embeddings=4096, **changes)


@contextmanager
def talking(model: Any, folder: Path, **options: Any) -> Iterator[PrefixStore]:
    """As in a process of its own: what was stored before is in files only."""
    with installing(2**25, PAGE) as put:
        put()
        managed = ballonet.manage(model, prefix_dir=folder, **options)
        assert managed.prefixes is not None
        try:
            yield managed.prefixes
        finally:
            managed.release()
            del managed
            gc.collect()


def say(model: Any, ids: list[int], cache: DynamicCache | None = None) -> list[int]:
    """The prompt and six tokens more. No tensor is left, which would be the pool's."""
    given = {} if cache is None else {"past_key_values": cache}
    output = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=6, min_new_tokens=6, **given)
    tokens: list[int] = output[0].tolist()
    return tokens


def by_hand(model: Any, ids: list[int], held: int = 0) -> list[int]:
    """With a cache of that many of the tokens, computed with all of `FIRST`."""
    cache = DynamicCache(config=model.config)
    if held:
        say(model, FIRST, cache)
        cache.crop(held - cache.get_seq_length())
    return say(model, ids, cache)


@pytest.fixture
def from_files(monkeypatch: pytest.MonkeyPatch) -> list[Taken]:
    """What requests took from files."""
    taken = []
    real = saving.SavedRun.part

    def part(run: saving.SavedRun, layer: int, start: int, end: int) -> Any:
        pair = real(run, layer, start, end)
        taken.append((layer, start, end, [bits(states) for states in pair]))
        return pair

    monkeypatch.setattr(saving.SavedRun, "part", part)
    return taken


def bits(tensor: torch.Tensor) -> Any:
    """In memory that is not the pool's."""
    return np.array(tensor.contiguous().view(torch.uint8).numpy())


def are_right(taken: list[Taken], model: Any) -> bool:
    """Are they what stock computes for `FIRST`?"""
    cache = DynamicCache(config=model.config)
    say(model, FIRST, cache)
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    return len(taken) == len(pairs) and all(
        np.array_equal(stored, bits(right[:, :, start:end]))
        for layer, start, end, pair in taken
        for stored, right in zip(pair, pairs[layer], strict=True)
    )


def longer(tokens: list[int]) -> list[int]:
    return tokens + FIRST[:30]


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("prefix-*"))


def test_another_process_goes_on_from_files_bit_for_bit(tmp_path: Path, from_files: list[Taken]) -> None:
    """With what memory has lost from the middle of a file, too."""
    model = built().bfloat16()
    wanted = by_hand(model, FIRST)
    further = longer(wanted)
    expected = by_hand(model, further, held=2 * BLOCK)
    with talking(model, tmp_path) as store:
        assert say(model, FIRST) == wanted
        assert store.flush(60)
        assert store.counts.on_disk == 0
        while store.get_num_new_matched_tokens(further) > BLOCK:
            assert store.contents.evict()
        assert say(model, further) == expected
        assert (store.counts.on_disk, store.counts.on_device) == (BLOCK, BLOCK)
        assert {(start, end) for _, start, end, _ in from_files} == {(BLOCK, 2 * BLOCK)}
        assert are_right(from_files, model)
        from_files.clear()
    assert len(files_of(tmp_path)) == 1
    with talking(model, tmp_path) as store:
        assert say(model, further) == expected
        assert store.counts.on_disk == 2 * BLOCK
    assert are_right(from_files, model)


def test_each_turn_writes_what_is_new(tmp_path: Path, tuned: Tuned) -> None:
    tuned(prefixes={"blocks": 2})
    model = built()
    said = FIRST + FIRST
    with talking(model, tmp_path) as store:
        for turn in range(3):
            said = say(model, said) + FIRST[: BLOCK + turn]
            assert store.flush(60)
    held = [prefix_files.read_part("", os.open(path, os.O_RDONLY)) for path in files_of(tmp_path)]
    keys = [key for part in held for key in part.keys]
    assert len(keys) == len(set(keys)) == (len(said) - BLOCK) // BLOCK
    assert max(len(part.keys) for part in held) == 2
    assert sum(not part.after for part in held) == 1
    with talking(model, tmp_path) as store:
        say(model, said)
        assert store.counts.on_disk == len(keys) * BLOCK


def test_another_model_has_another_fingerprint(tmp_path: Path) -> None:
    changed = [built() for _ in range(4)]
    with torch.no_grad():
        changed[1].model.layers[1].self_attn.k_proj.weight[-1] += 1e-3
        changed[2].model.layers[1].self_attn.v_proj.weight.mul_(1.001)
    changed[3].config.rope_parameters["rope_theta"] = 123.0
    changed.append(built().bfloat16())
    with talking(built(), tmp_path) as store:
        prints = [fingerprint(model, store.contents.device) for model in changed]
        assert len(set(prints)) == len(prints)
        assert prints[0] == fingerprint(built(), store.contents.device)


def test_weights_that_change_meanwhile_have_files_of_their_own(tmp_path: Path) -> None:
    model = built()
    with talking(model, tmp_path) as store:
        say(model, FIRST)
        assert store.flush(60)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.5)
        say(model, FIRST)
        assert store.counts.hits == 0
        assert store.flush(60)
    assert len(files_of(tmp_path)) == 2


def test_a_file_with_other_ids_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if two prompts had the same keys."""
    model = built()
    wanted = by_hand(model, FIRST)
    real = PrefixFiles.save

    def lying(files: PrefixFiles, keys: Any, ids: Any, tensors: Any, after: bytes = b"") -> bool:
        return real(files, keys, [*ids[:-1], ids[-1] + 1], tensors, after)

    monkeypatch.setattr(PrefixFiles, "save", lying)
    with talking(model, tmp_path):
        say(model, FIRST)
    monkeypatch.undo()
    with talking(model, tmp_path) as store:
        assert say(model, FIRST) == wanted
        assert store.counts.on_disk == BLOCK, "the first block is right"


def test_damage_and_a_full_disk_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    wanted = by_hand(model, FIRST)
    with talking(model, tmp_path):
        say(model, FIRST)
    (path,) = files_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prefix_files, "write", full)
    with talking(model, tmp_path) as store, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert say(model, FIRST) == wanted
        assert store.counts.on_disk == 0
        say(model, longer(longer(FIRST)))
        assert store.flush(60)
    told = [str(warning.message) for warning in said]
    assert [sum(what in message for message in told) for what in ("is damaged", "not stored in")] == [1, 1]


def test_requests_do_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    begun, go_on = threading.Event(), threading.Event()
    real = prefix_files.write

    def slow(*given: Any) -> None:
        begun.set()
        assert go_on.wait(600)
        real(*given)

    monkeypatch.setattr(prefix_files, "write", slow)
    with talking(model, tmp_path) as store:
        tokens = say(model, FIRST)
        assert begun.wait(600)
        for _ in range(2):
            tokens = say(model, longer(tokens))
        assert store.counts.moves == 2
        assert not store.flush(0.01)
        go_on.set()
        assert store.flush(60)
    assert files_of(tmp_path)


def test_a_folder_says_that_prefixes_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built()
    monkeypatch.setenv("BALLONET_PREFIX_DIR", str(tmp_path / "of the environment"))
    monkeypatch.setenv("BALLONET_PREFIX_DIR_LIMIT", "3MiB")
    with installing(2**25, PAGE) as put:
        put()
        with ballonet.manage(model) as managed:
            assert managed.prefixes is not None
            say(model, FIRST)
            assert managed.prefixes.flush(60)
            assert ballonet.manage(model, prefix_dir=tmp_path / "of the environment") is managed
            with pytest.raises(AlreadyManaged):
                ballonet.manage(model, prefix_dir=tmp_path)
        with ballonet.manage(model, prefix_cache=False, prefix_dir=tmp_path) as managed:
            assert managed.prefixes is None
        del managed
        gc.collect()
    assert len(files_of(tmp_path / "of the environment")) == 1


def files_take(seconds: float, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock by which everything takes a millisecond from one look to the next, and each file that is read so long."""
    clock, load = Clock(step=1e-3), PrefixFiles.load

    def loaded(files: PrefixFiles, *given: Any) -> Any:
        clock.now += seconds - clock.step
        return load(files, *given)

    monkeypatch.setattr(PrefixFiles, "load", loaded)
    return clock


def test_prefix_computed_faster_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tuned: Tuned) -> None:
    """By what was measured: files that took so long last time are left alone, until they are tried again."""
    model = built()
    wanted = by_hand(model, FIRST)
    with talking(model, tmp_path):
        say(model, FIRST)
    clock = files_take(1e3, monkeypatch)
    tuned(clock=clock, prefixes={"again": 2})
    with talking(model, tmp_path) as store:
        counts, events = store.counts, devices.of().events
        for turn, (on_disk, faster) in enumerate([(2, 0), (2, 2), (2, 4), (4, 4), (4, 6)]):
            store.clear()
            assert say(model, FIRST) == wanted
            assert (counts.on_disk, counts.faster) == (on_disk * BLOCK, faster * BLOCK), turn
        told = [event for event in events.since().events if event.what == "files"]
        assert [event.verb for event in told] == ["load", "compute", "compute", "load", "compute"]
        assert told[0].predicted is None, "nobody had measured it"
        assert 0 < told[1].predicted < 100, "what the model took before"
        assert told[3].predicted == pytest.approx(told[3].measured)
        assert told[3].measured == pytest.approx(1e3, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "worth"),
    [({}, True), ({"tokens": 299}, False), ({"tokens": 299, "link": None}, True), ({"tokens": 1, "disk": None}, True)],
)
def test_prefix_is_read_if_that_takes_no_longer(changes: dict[str, Any], worth: bool) -> None:
    given = {"tokens": 300, "disk": 100.0, "link": 50.0, "per_token": 0.1} | changes
    decision = reading(1000, given.pop("tokens"), **given)
    assert decision.worth == worth
    assert changes or decision == Reading(10.0, 20.0, pytest.approx(30.0))
    assert reading(1000, 1, **(given | {"per_token": None})).worth


PROGRAM = """
import sys, threading
import torch, ballonet
from transformers import LlamaConfig, LlamaForCausalLM
from ballonet.hooks.prefix import saving
from ballonet.offload.residency import prefix_files
prefix_files.PIECE = 1000  # as many as there are of a large model: several threads write
flushed, write, flush = threading.Event(), prefix_files.write, saving.Saver.flush
prefix_files.write = lambda *given: (flushed.wait(), write(*given))[1]
saving.Saver.flush = lambda *given: (flushed.set(), flush(*given))[1]
sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
managed = ballonet.manage(model, prefix_dir=sys.argv[1])
tokens = model.generate(torch.ones(1, 300, dtype=torch.int64), max_new_tokens=2)
print(tokens[0].tolist())
"""


def test_released_model_writes_prefixes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing begins only once it is waited for."""
    flushed, write, flush = threading.Event(), prefix_files.write, saving.Saver.flush

    def late(*given: Any) -> None:
        assert flushed.wait(600)
        write(*given)

    monkeypatch.setattr(prefix_files, "write", late)
    monkeypatch.setattr(saving.Saver, "flush", lambda *given: (flushed.set(), flush(*given))[1])
    with talking(model := built(), tmp_path):
        say(model, FIRST)
        say(model, [5, *FIRST])
        assert not flushed.is_set()
    flushed.set()
    assert sum(len(prefix_files.read_part("", os.open(path, os.O_RDONLY)).keys) for path in files_of(tmp_path)) == 4


def test_ending_python_writes_prefixes_first(tmp_path: Path) -> None:
    """Writing begins only once it is waited for."""
    environment = {**os.environ, "BALLONET_DEVICE": "cpu", "BALLONET_BUDGET": "64MiB", "OMP_NUM_THREADS": "1"}
    done = programs.python("-c", PROGRAM, str(tmp_path), variables=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[1, 1, ")
    assert len(files_of(tmp_path)) == 1
