"""Mixed work for as long as one likes: models and threads that share a pool whose budget changes all the time.

    make soak MINUTES=60        or until Ctrl-C

Threads generate with several managed models (prompts of many lengths, beams, prompt lookup, conversations that lie idle
and go on, requests that break off in the middle of a layer), others allocate tensors, another one changes the budget,
at times from another process, and one forks children that allocate, too. Some models have chaos on. Work comes in
rounds: after each nothing is left but weights, it is looked whether that is so, and one model is released and managed
anew. What has to hold: the tokens of the same models unmanaged, `Device.check()` at any time, no page lost or unowned,
no cache page left after a round, and a process that does not grow. `torch.OutOfMemoryError`, and a budget that is
refused, are answers and no failures. The exit status says whether all of it held.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness import MIB, Options
from models import answer, build, decided, few, page_size, words
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

import ballonet
from ballonet import testing
from ballonet.allocator import devices
from ballonet.allocator.errors import BudgetInUse
from ballonet.hooks.cache_argument import given_cache
from ballonet.hooks.compat import cache_name

LAYERS = (4, 6, 8)  # of each model; the last one speaks on two threads
ROUND = 20.0  # s
OUTSIDE = 0.2  # of the budgets
LOWEST = 0.7  # of what weights take, and a round's budget is at least that
GROWTH = 0.05, 48 * MIB  # that a process may grow: of what it had, and bytes
WARM = 3  # rounds until everything was loaded once
PROMPTS = ((1, 150), (1, 24), (4, 60), (6, 100))  # sequences and tokens
TOKENS = 16  # new ones
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "lookup": {"prompt_lookup_num_tokens": 3},
}


class Broken(Exception):
    """As it should."""


class Speaker:
    """A model, and what it said at first."""

    def __init__(self, name: str, model: PreTrainedModel, sizes: Sequence[tuple[int, int]], seed: int) -> None:
        """`model`: as stock has it; it may be managed afterwards. `sizes`: sequences and tokens of the prompts."""
        self.name = name
        self.model = model
        self.prompts = [words(model, size, seed + number).to(model.device) for number, size in enumerate(sizes)]
        self.tasks = [
            (number, way)
            for number, prompt in enumerate(self.prompts)
            for way in WAYS
            if way != "lookup" or prompt.shape[0] == 1
        ]
        self.expected = {task: self.say(*task) for task in self.tasks}

    def say(self, number: int, way: str) -> torch.Tensor:
        """The prompt of that number and what follows, int64[sequences, tokens], on the CPU."""
        output: torch.Tensor = self._generate(self.prompts[number], TOKENS, **WAYS[way]).sequences
        return output.cpu()

    def later(self, number: int, meanwhile: Callable[[], None]) -> torch.Tensor:
        """Greedy, in two halves, with something else between them while the cache lies idle."""
        begun = self._generate(self.prompts[number], TOKENS // 2)
        meanwhile()
        more, given = TOKENS - TOKENS // 2, {cache_name(self.model): given_cache(begun)}
        output: torch.Tensor = self._generate(begun.sequences, more, **given).sequences
        return output.cpu()

    def breaks_off(self, number: int, layer: int) -> None:
        """A request that raises in that layer, on this thread only."""
        thread = threading.get_ident()

        def fail(*_: object) -> None:
            if threading.get_ident() == thread:
                raise Broken

        handle = self.model.get_submodule(f"model.layers.{layer}").register_forward_pre_hook(fail)
        try:
            self.say(number, "greedy")
        except Broken:
            return
        finally:
            handle.remove()
        raise RuntimeError("a request that should have broken off did not")

    def _generate(self, prompt: torch.Tensor, tokens: int, **more: Any) -> Any:
        return answer(self.model, prompt, tokens, return_dict_in_generate=True, **more)


@dataclass
class Counts:
    """What happened so far. `failures` says what went wrong."""

    done: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)  # bytes after each round
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, what: str, number: int = 1) -> None:
        with self.lock:
            self.done[what] += number

    def fail(self, what: str) -> None:
        with self.lock:
            self.failures.append(what)


class Soak:
    """The pool, who works in it, and what came of it."""

    def __init__(self, chosen: Options, seed: int) -> None:
        self.counts = Counts()
        self._random = random.Random(seed)
        self._over = threading.Event()  # the round
        self._place = chosen.device
        unit = 8 if chosen.cuda else 1
        self._budget = unit * 2**30
        ballonet.install(self._budget, page_size=page_size(chosen))
        self._device = devices.require()
        models = [build(few(chosen, layers), chosen.device) for layers in LAYERS[: 1 if chosen.tiny else None]]
        sizes = PROMPTS[:2] if chosen.tiny else PROMPTS
        self._speakers = [Speaker(f"model {number}", model, sizes, number) for number, model in enumerate(models)]
        self._seed = seed
        self._managed: dict[int, ballonet.Managed] = {}
        for number in range(len(models)):
            self._manage(number)
        self._settle()
        self._weights = self._pages("weights")
        self._room = self._most() - self._weights

    def round(self, seconds: float, stop: threading.Event) -> None:
        """Everybody works for so long, then it is looked what is left."""
        self._over.clear()
        work = [partial(self._speak, speaker) for speaker in [*self._speakers, self._speakers[-1]]]
        work += [self._allocate, self._budgets, self._children]
        threads = [threading.Thread(target=self._safely, args=(call, self._drawn()), daemon=True) for call in work]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not stop.wait(0.2) and not self.counts.failures:
            self._look()
        self._over.set()
        for thread in threads:
            thread.join(120)
            if thread.is_alive():
                self.counts.fail("a thread hangs: nothing of it for two minutes")
                return
        self._after()

    def release(self) -> None:
        for managed in self._managed.values():
            managed.release()

    def _drawn(self) -> random.Random:
        """For one thread."""
        return random.Random(self._random.getrandbits(30))

    def _safely(self, work: Callable[[random.Random], None], drawn: random.Random) -> None:
        try:
            work(drawn)
        except BaseException as error:
            self.counts.fail(f"{type(error).__name__}: {error}")
            self._over.set()

    def _speak(self, speaker: Speaker, drawn: random.Random) -> None:
        while not self._over.is_set():
            number, way = drawn.choice(speaker.tasks)
            how = drawn.choices(("say", "later", "breaks off"), (6, 2, 1))[0]
            try:
                if how == "breaks off":
                    speaker.breaks_off(number, drawn.randrange(speaker.model.config.num_hidden_layers))
                    self.counts.count("broken off")
                    continue
                if how == "later":
                    way = "greedy"
                    said = speaker.later(number, lambda: self._compare(speaker, *drawn.choice(speaker.tasks)))
                else:
                    said = speaker.say(number, way)
            except torch.OutOfMemoryError:
                self.counts.count("out of memory")
                continue
            self._same(speaker, number, way, said)

    def _compare(self, speaker: Speaker, number: int, way: str) -> None:
        self._same(speaker, number, way, speaker.say(number, way))

    def _same(self, speaker: Speaker, number: int, way: str, found: torch.Tensor) -> None:
        self.counts.count("requests")
        self.counts.count("tokens", found.numel())
        if not torch.equal(found, speaker.expected[number, way]):
            self.counts.fail(f"{speaker.name}, prompt {number}, {way}: other tokens than unmanaged")

    def _allocate(self, drawn: random.Random) -> None:
        """Tensors that are filled, and looked at before they go."""
        held: list[tuple[int, torch.Tensor]] = []
        while not self._over.wait(0.02):
            if len(held) > 6 or (held and drawn.random() < 0.5):
                number, tensor = held.pop(drawn.randrange(len(held)))
                try:
                    if not tensor.eq(number).all().item():
                        self.counts.fail("a tensor has changed")
                except torch.OutOfMemoryError:  # what is compared is a tensor, too
                    self.counts.count("out of memory")
                continue
            number, nbytes = drawn.randrange(256), round(2 ** drawn.uniform(12, 22))
            try:
                held.append((number, torch.full((nbytes,), number, dtype=torch.uint8, device=self._place)))
            except torch.OutOfMemoryError:
                self.counts.count("out of memory")

    def _budgets(self, drawn: random.Random) -> None:
        while not self._over.wait(drawn.uniform(0.05, 1.0)):
            budget = round(LOWEST * self._weights + drawn.random() * (self._room + 0.3 * self._weights))
            if drawn.random() < OUTSIDE:
                self._from_outside(budget * self._device.page_size)
                continue
            try:
                ballonet.set_budget(budget * self._device.page_size, timeout=5)
                self.counts.count("budgets set")
            except BudgetInUse:
                self.counts.count("budgets refused")

    def _from_outside(self, nbytes: int) -> None:
        ask = [sys.executable, "-m", "ballonet", "budget", str(os.getpid()), str(nbytes), "--timeout", "5s"]
        ended = subprocess.run(ask, capture_output=True, text=True, timeout=120, check=False)
        if ended.returncode == 0 and json.loads(ended.stdout)["pid"] == os.getpid():
            self.counts.count("budgets set from outside")
        elif "budget" in ended.stderr:
            self.counts.count("budgets refused")
        else:
            self.counts.fail(f"another process could not set the budget: {ended.stderr}")

    def _children(self, drawn: random.Random) -> None:
        """A child has one thread, and what it allocates is its own."""
        tensor = torch.arange(2**12)
        while not self._over.wait(drawn.uniform(0.05, 1.0)):
            if (child := os.fork()) == 0:
                signal.alarm(60)  # of a child that waits for a thread that it does not have
                made = [torch.full((drawn.randrange(1, 2**20),), 7.0) for _ in range(4)]
                held = tensor.sum().item() == 2**11 * (2**12 - 1) and all(block.eq(7).all().item() for block in made)
                del made
                os._exit(0 if held else 1)
            if status := os.waitpid(child, 0)[1]:
                self.counts.fail(f"a child ended with {os.waitstatus_to_exitcode(status)}")
            self.counts.count("children")

    def _look(self) -> None:
        self._device.check()
        found = self._device.snapshot()
        if sum(found["pages"].values()) != found["created"]:
            self.counts.fail(f"pages without an owner: {found['pages']}, {found['created']} exist")

    def _after(self) -> None:
        """After a round only weights are there."""
        ballonet.set_budget(self._budget)
        self._settle()
        self._look()
        if left := self._pages("kv"):
            self.counts.fail(f"{left} pages of caches that nobody has any more")
        if (found := self._device.snapshot())["spilled"]:
            self.counts.fail(f"{found['spilled']} pages are spilled, and nobody uses them")
        self.counts.resident.append(resident())
        self._again(self._random.randrange(len(self._managed)))

    def _again(self, number: int) -> None:
        """A model is released, says what it should as stock, and is managed again."""
        speaker, managed = self._speakers[number], self._managed[number]
        managed.release()
        self._compare(speaker, *self._random.choice(speaker.tasks))
        self._manage(number)

    def _manage(self, number: int) -> None:
        chaos = None if number % 2 else self._seed
        self._managed[number] = testing.manage(self._speakers[number].model, chaos=chaos, priority=number % 2)

    def _settle(self) -> None:
        gc.collect()
        self._device.synchronize()
        self._device.reap(wait=True)

    def _pages(self, owner: str) -> int:
        pages: int = self._device.snapshot()["pages"][owner]
        return pages

    def _most(self) -> int:
        """Pages that everybody together takes at most, about."""
        self._device.trim()
        self._device.reset_peaks()
        for speaker in self._speakers:
            for task in speaker.tasks:
                self._compare(speaker, *task)
        peak: int = self._device.snapshot()["physical_peak"]
        return 2 * peak // self._device.page_size


def resident() -> int:
    """Bytes of the host that this process holds for itself or as pages of files. What is shared (the stand-in's pages
    among it) is not counted."""
    sizes = re.findall(r"^Rss(?:Anon|File):\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return sum(map(int, sizes)) * 1024


def growth(resident: list[int]) -> str:
    """What is wrong with how the process grew, empty if nothing is. `resident`: bytes, after each round."""
    later = resident[WARM:]
    if len(later) < 4:
        return ""
    half = len(later) // 2
    first, last = median(later[:half]), median(later[half:])
    share, nbytes = GROWTH
    if last - first > share * first + nbytes:
        return f"the process grew from {first / MIB:,.0f} to {last / MIB:,.0f} MiB"
    return ""


def summary(counts: Counts) -> Table:
    """What happened so far."""
    table = Table(title="soak", title_justify="left", show_header=False)
    for what, number in sorted(counts.done.items()):
        table.add_row(what, f"{number:,}")
    now = ballonet.stats()
    table.add_row("pages", ", ".join(f"{owner} {pages}" for owner, pages in now.pages.items()))
    table.add_row("on the host", f"{now.host_pages} pages, of these {now.spilled} spilled")
    table.add_row("what gave pages", decided())
    if counts.resident:
        table.add_row("process, MiB", f"{counts.resident[0] / MIB:,.0f} → {counts.resident[-1] / MIB:,.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default %(default)g)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="one model, and rounds of a second")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="the device budget of ballonet is used up")
    torch.set_num_threads(1)  # there are as many threads as the machine has anyway
    try:
        soak = Soak(Options(given.tiny, torch.cuda.is_available()), given.seed)
    except KeyboardInterrupt:
        sys.exit("nothing was done yet")
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stop.set())  # an exception in a join() would have the thread count as ended
    counts, end = soak.counts, time.monotonic() + 60 * given.minutes
    while time.monotonic() < end and not stop.is_set() and not counts.failures:
        try:
            soak.round(min(1.0 if given.tiny else ROUND, max(0.5, end - time.monotonic())), stop)
        except Exception as error:
            counts.fail(f"{type(error).__name__}: {error}")
        counts.count("rounds")
        print(f"{counts.done['rounds']} rounds, {counts.done['requests']:,} requests", flush=True)
    if said := growth(counts.resident):
        counts.fail(said)
    console = Console()
    console.print(summary(counts))
    for failure in counts.failures[:20]:
        console.print(f"FAILED: {failure}", markup=False, style="bold")
    console.print("all of it held" if not counts.failures else f"{len(counts.failures)} failures", style="bold")
    sys.stdout.flush()
    if not counts.failures:
        soak.release()
    sys.exit(1 if counts.failures else 0)


if __name__ == "__main__":
    main()
