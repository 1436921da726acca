"""Decoding by pieces of CUDA graphs against stock: time by the clock, of kernels and of the host; what pieces cost.

Peers
    stock           torch's default attention, which on Hopper is cuDNN's; and the same process with that off
    no pieces       managed with `pieces=None`, without cuDNN's attention
    pieces          managed; cuDNN's attention is off
    plans kept      stock under TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1
    StaticCache     stock with `cache_implementation="static"`, which compiles a decode step ("reduce-overhead")

Each is a process with its own copy of the model, and they are asked in turn. Rows are written as they end: of a run
that is cut off those remain that were through; where a peer fails its rows are left out. The last are bench_serve.py's,
at one budget. Limits count on a GPU with the sizes made for it; that logits are equal counts everywhere.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import bench_serve
import torch
from bench_decode import prefill
from bench_serve import figure, in_rounds, ratio
from bench_streaming import decoded
from harness import (
    GIB,
    MIB,
    Benchmark,
    Figure,
    Functions,
    Options,
    Peer,
    PeerFailed,
    interleaved,
    keep,
    main,
    peers,
    report,
)
from models import (
    OURS,
    STOCK,
    Clock,
    answer,
    build,
    describe,
    environment,
    filled,
    layer_page_size,
    or_link,
    seconds,
    streamable,
    synchronize,
    timed,
    words,
)
from torch.backends import cuda
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

import ballonet

T = TypeVar("T")
OFF = "stock, cuDNN off"
OTHERS = ("plans kept", "StaticCache")
COLUMNS = ("stock", OFF, "no pieces", "pieces", *OTHERS)
ASKED = {OFF: "stock"}  # peers whose process has another name
WITH_CUDNN = ("stock", *OTHERS)
# (sequences, tokens held, whose time it is compared with, times faster)
CASES = {
    "cuda": ((1, 1024, "stock", 2.8), (8, 16384, OFF, 1.8), (1, 65536, "stock", 2.5)),
    "cpu": ((1, 256, "stock", 0.0),),
    "tiny": ((1, 16, "stock", 0.0), (2, 24, OFF, 0.0)),
}
PROMPTS = {"cuda": (256, 1024), "cpu": (256, 1024), "tiny": (24,)}  # tokens
MANY = {"cuda": 32, "cpu": 2, "tiny": 4}  # sequences whose pieces' memory is asked for
REPEATS = {"cuda": (12, 512), "cpu": (2, 64), "tiny": (2, 16)}  # sequences and tokens of attention under a mask
BUDGETS = {"cuda": 16 * GIB, "cpu": 288 * MIB, "tiny": 24 * MIB}
ROUNDS = 2
OF_KERNELS, FIRST, A_TENTH, PAGES = 1.15, 1.5, 0.1, 256
WARM = 4  # of a call of `generate()` before the first that is timed: by then all run by graphs
STEPS = 12  # tokens of each call
REPEATED = 100  # attentions with the same inputs
OF_LINK, OF_STATIC, PREFILL, SERVED, LATER = 1.03, 1.2, 1.02, 1.3, 1.5


class Rows:
    """The rows so far: one figure of each peer that has it, and what is limited of them."""

    def __init__(self, chosen: Options) -> None:
        self._chosen = chosen
        self._rows: list[dict[str, Any]] = []
        self._title = f"decoding by pieces, {describe(chosen)}"

    def add(self, what: str, found: Mapping[str, object], limited: str = "", figure: Figure | None = None) -> None:
        """Adds a row and writes all. `limited`, `figure`: what is made of these cells, and comes to that."""
        if figure is not None and self._chosen.kind != "cuda":
            figure = Figure.of([figure.median])
        cells = {name: found.get(name, "") for name in COLUMNS}
        self._rows.append({"what": what, **cells, "of these": limited, "is": "" if figure is None else figure})
        keep(self._chosen, self._title, self._rows)

    def end(self) -> None:
        report(self._chosen, self._title, self._rows)


def decoding_by_pieces(chosen: Options) -> None:
    rows = Rows(chosen)
    with peers(chosen, ("stock", "no pieces", "pieces", "link"), environments(chosen)) as found:
        decoding = Decoding(chosen, found, rows)
        attempt(decoding.attention)
        first = attempt(decoding.first_calls)
        ms = [attempt(partial(decoding.case, *case)) for case in CASES[chosen.kind][: chosen.cases]]
        for measure in (decoding.equality, decoding.memory, decoding.prefill, decoding.graphs, decoding.streaming):
            attempt(measure)
    with peers(chosen, OTHERS, environments(chosen)) as found:
        attempt((others := Decoding(chosen, found, rows)).attention)
        attempt(others.plans_kept)
        attempt(others.prefill)
        attempt(partial(compiled, chosen, found["StaticCache"], rows, ms[0], first))
    attempt(partial(serving, chosen, rows))
    rows.end()


def attempt(measure: Callable[[], T]) -> T | None:
    """Returns what it does; None where a peer has failed, with a word why."""
    try:
        return measure()
    except PeerFailed as error:
        print(f"left out: {error}", flush=True)
        return None


def environments(chosen: Options) -> dict[str, Mapping[str, str]]:
    found = dict.fromkeys((*COLUMNS, "link"), environment(chosen))
    return found | {"plans kept": {**environment(chosen), "TORCH_CUDNN_SDPA_AVOID_RECOMPILE": "1"}}


class Decoding:
    """Questions to the peers that were started, and the rows of their answers."""

    def __init__(self, chosen: Options, found: Mapping[str, Peer], rows: Rows) -> None:
        self._chosen = chosen
        self._kind = chosen.kind
        self._found = found
        self._rows = rows
        self._names = [name for name in COLUMNS if ASKED.get(name, name) in found]
        self._held = CASES[self._kind][0][1]
        self._rounds = min(chosen.rounds or ROUNDS, 1 if chosen.tiny else ROUNDS)

    def attention(self) -> None:
        """What cuDNN's plans cost, and whether its attention repeats itself."""
        names = [name for name in ("stock", OFF, "plans kept") if name in self._names]
        for new in (True, False):
            which = "a new" if new else "a known"
            found = {name: Figure.of([self._ask(name, "attention", held=self._held, new=new)]) for name in names}
            self._rows.add(f"host, ms of one attention at {which} length", found)
        batch, held = REPEATS[self._kind]
        found = {name: self._ask(name, "repeats", batch=batch, held=held) for name in names}
        self._rows.add("attentions that differ from the first, of 100", found)

    def first_calls(self) -> Figure:
        """Seconds that the first call of each process takes longer, of the one with pieces."""
        names = [name for name in self._names if name != OFF]  # the same process as stock's
        batch, held = CASES[self._kind][0][:2]
        found = {name: Figure.of([self._ask(name, "first", batch=batch, held=held)]) for name in names}
        over = Figure.of([found["pieces"].median - found["no pieces"].median]).at_most(FIRST)
        self._rows.add("first call, s longer than the next", found, "pieces - no pieces", over)
        return found["pieces"]

    def case(self, batch: int, held: int, base: str, limit: float) -> dict[str, Figure]:
        """The rows of so many sequences and tokens held; returns ms per token."""
        ms, hosts = self._decode(self._names, batch, held)
        where, add = f"{batch} x {held:,}", self._rows.add
        add(f"{where}: ms per token", ms, f"{base} / pieces", Figure.ratio(ms[base], ms["pieces"]).at_least(limit))
        add(f"{where}: of these the host's", hosts)
        if self._chosen.cuda:
            kernels = {name: Figure.of([self._ask(name, "kernels", batch=batch, held=held)]) for name in self._names}
            add(f"{where}: ms of kernels", kernels)
            if kernels["pieces"].median:  # a simulated device has none
                add("", {}, "ms / kernels", Figure.ratio(ms["pieces"], kernels["pieces"]).at_most(OF_KERNELS))
                add("", {}, "host / kernels", Figure.ratio(hosts["pieces"], kernels["pieces"]).at_most(1))
        return ms

    def plans_kept(self) -> None:
        """The same of stock with cuDNN's attention by plans that are kept."""
        for batch, held, *_ in CASES[self._kind][: self._chosen.cases]:
            ms, hosts = self._decode(OTHERS[:1], batch, held)
            self._rows.add(f"{batch} x {held:,}: ms per token", ms)
            self._rows.add(f"{batch} x {held:,}: of these the host's", hosts)

    def _decode(self, names: Sequence[str], batch: int, held: int) -> tuple[dict[str, Figure], dict[str, Figure]]:
        """Returns ms per token, and of those the host's."""
        host: dict[str, list[float]] = {name: [] for name in names}

        def decode(name: str) -> float:
            said = self._ask(name, "decode", batch=batch, held=held)
            host[name].append(said["host"])
            return float(said["ms"])

        ms = interleaved({name: partial(decode, name) for name in names}, self._rounds)
        return ms, {name: Figure.of(taken[1:]) for name, taken in host.items()}

    def equality(self) -> None:
        """How far logits of pieces are from those of eager code: not at all."""
        batch = 2
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "logits.pt")
            self._found["no pieces"].ask("logits", batch=batch, held=self._held, path=path)
            most = self._found["pieces"].ask("difference", batch=batch, held=self._held, path=path)
        self._rows.add("largest difference of a logit", {"pieces": Figure.of([most]).at_most(0)})

    def memory(self) -> None:
        """What the graphs take."""
        batch = MANY[self._kind]
        found = self._found["pieces"].ask("memory", batch=batch, held=self._held)
        mib = {"pieces": Figure.of([found["pages"] + found["driver"]])}
        parts = f"pages {found['pages']:.0f}, driver {found['driver']:.0f}"
        self._rows.add(f"MiB of graphs, {batch} sequences", mib, parts, mib["pieces"].at_most(PAGES))

    def prefill(self) -> None:
        """Prompts, which no graph computes, by every setting of attention; that of "StaticCache" is stock's."""
        names = [name for name in self._names if name != "StaticCache"]
        for tokens in PROMPTS[self._kind]:
            ms = interleaved({name: partial(self._ask, name, "prefill", tokens=tokens) for name in names}, self._rounds)
            what = f"prefill of {tokens:,}: ms"
            if "pieces" not in ms:
                self._rows.add(what, ms)
                continue
            for base, title, cells in ((OFF, what, ms), ("stock", "", {})):
                slower = Figure.ratio(ms["pieces"], ms[base]).at_most(PREFILL)
                self._rows.add(title, cells, f"pieces / {base}", slower)

    def streaming(self) -> None:
        """Every second layer from the host, against the link."""
        link = Figure.of([float(self._found["link"].ask("link")) for _ in range(self._rounds + 1)])
        said = {name: self._found[name].ask("stream", held=self._held) for name in ("no pieces", "pieces")}
        ms = {name: Figure.of([answer["ms"]]) for name, answer in said.items()}
        bound = said["pieces"]["bytes"] / link.median * 1e3
        what, over = "every second layer streams: ms per token", f"pieces / {bound:.3g} ms of the link"
        self._rows.add(what, ms, over, Figure.of([ms["pieces"].median / bound]).at_most(OF_LINK))

    def graphs(self) -> None:
        """Whether graphs were used at all, and which."""
        self._rows.add("how it decodes", {"pieces": self._found["pieces"].ask("pieces")})

    def _ask(self, name: str, what: str, **given: Any) -> Any:
        return self._found[ASKED.get(name, name)].ask(what, cudnn=name in WITH_CUDNN, **given)


def compiled(chosen: Options, peer: Peer, rows: Rows, ms: Mapping[str, Figure] | None, first: Figure | None) -> None:
    """The rows of transformers' own way, beside what pieces took for the same, where that is known."""
    batch, held = CASES[chosen.kind][0][:2]
    its = {what: Figure.of([value]) for what, value in peer.ask("static", batch=batch, held=held).items()}
    ours = {"ms": ms and ms["pieces"], "first": first}
    for what, name, most in (
        (f"{batch} x {held:,}: ms per token", "ms", OF_STATIC),
        ("first call, s longer than a later one", "first", A_TENTH),
    ):
        mine = ours[name]
        share = None if mine is None else Figure.ratio(mine, its[name]).at_most(most)
        rows.add(what, {"pieces": mine or "", "StaticCache": its[name]}, "pieces / StaticCache", share)
    rows.add("MiB that it takes", {"StaticCache": its["mib"]})


def serving(chosen: Options, rows: Rows) -> None:
    """Continuous batching at a budget, by the processes of bench_serve.py."""
    budget = BUDGETS[chosen.kind]
    by = replace(chosen, program=Path(bench_serve.__file__), benchmark="serve")
    said = in_rounds(by, (STOCK, OURS), budget, 1)
    faster, later = (ratio(said[OURS], said[STOCK], what) for what in ("speed", "later"))
    for what, name, limited in (
        ("tokens per second", "speed", faster.at_least(SERVED)),
        ("later tokens, P99 s", "later", later.at_most(LATER)),
    ):
        cells = {"stock": figure(said[STOCK], name), "pieces": figure(said[OURS], name)}
        rows.add(f"serving at {budget // MIB:,} MiB: {what}", cells, "pieces / stock", limited)


# Peers


def functions(name: str, chosen: Options) -> Functions:
    """What a peer answers. `cudnn`: may torch take cuDNN's attention?"""
    peer = SpeedPeer(name, chosen)
    names = ("first", "decode", "kernels", "logits", "difference", "memory", "static", "prefill", "stream", "pieces")
    return {"about": dict, **{each: getattr(peer, each) for each in (*names, "attention", "repeats")}}


class SpeedPeer:
    """One model, and what a token of it takes."""

    def __init__(self, name: str, chosen: Options) -> None:
        if chosen.kind != "cuda":
            torch.set_num_threads(1)
        self.name = name
        self.device = chosen.device
        self.is_managed = name in ("no pieces", "pieces")
        if self.is_managed:
            ballonet.install("60GiB" if chosen.kind == "cuda" else "4GiB", page_size=layer_page_size(chosen))
        self.model: PreTrainedModel = build(streamable(chosen), self.device)
        self.managed = ballonet.manage(self.model, pieces=self._pieces) if self.is_managed else None

    @property
    def _pieces(self) -> Any:
        return None if self.name == "no pieces" else "auto"

    def first(self, batch: int, held: int, cudnn: bool) -> float:
        """Seconds that the first call of `generate()` takes longer than the next one."""
        with attention_by(cudnn):
            took = [self._generated(batch, held)[1] for _ in range(2)]
        return took[0] - took[1]

    def decode(self, batch: int, held: int, cudnn: bool) -> dict[str, float]:
        """ms per token, and of those that the host takes to submit it."""
        with attention_by(cudnn):
            clock, _ = self._generated(batch, held)
        self._forget()
        return {"ms": clock.ms(WARM - 1), "host": clock.host_ms(WARM - 1)}

    def kernels(self, batch: int, held: int, cudnn: bool) -> float:
        """ms that kernels run per token."""
        with attention_by(cudnn):
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            seen = 0

            def count() -> int:
                nonlocal seen
                seen += 1
                if seen == WARM:
                    profiler.start()
                elif seen == STEPS:
                    profiler.stop()
                return 0

            self._generated(batch, held, Clock(self.device, count))
        self._forget()
        return sum(kernel.self_device_time_total for kernel in profiler.key_averages()) / (STEPS - WARM) / 1e3

    def logits(self, batch: int, held: int, path: str) -> None:
        """Writes the logits of each token to a file, without cuDNN's attention."""
        torch.save(self._logits(batch, held), path)

    def difference(self, batch: int, held: int, path: str) -> float:
        """The largest difference of a logit to those in the file."""
        mine, theirs = self._logits(batch, held), torch.load(path)
        return float((mine.double() - theirs.double()).abs().max()) if mine.shape == theirs.shape else float("inf")

    def memory(self, batch: int, held: int) -> dict[str, float]:
        """MiB of the pages under all graphs, and of what the driver has taken for graphs of this batch."""
        assert self.managed is not None
        self._generated(1, held)
        before = self._outside()
        self._generated(batch, held)
        driver = self._outside() - before
        found = self.managed.report().pieces
        pages = 0 if found is None else found.pages
        return {"pages": pages * ballonet.stats().page_size / MIB, "driver": driver / MIB}

    def static(self, batch: int, held: int) -> dict[str, float]:
        """transformers' `StaticCache`, of which a decode step is compiled: ms per token, seconds that the first call
        takes longer, MiB that it takes."""
        prompt = words(self.model, (batch, held), 0).to(self.device)
        before, clocks = self._free(), [Clock(self.device) for _ in range(3)]  # the second call may compile again

        def generate(clock: Clock) -> object:
            return answer(self.model, prompt, STEPS, clock, cache_implementation="static")

        took = [seconds(self.device, partial(generate, clock)) for clock in clocks]
        return {
            "ms": clocks[-1].ms(WARM - 1),
            "first": took[0] - took[-1],
            "mib": (before - self._free()) / MIB,
        }

    def prefill(self, tokens: int, cudnn: bool) -> float:
        """ms of a prompt's forward."""
        with attention_by(cudnn):
            return prefill(OURS if self.is_managed else STOCK, self.model, tokens, self.device)

    def stream(self, held: int) -> dict[str, Any]:
        """ms per token while every second layer streams, and the bytes that come over the link for it."""
        assert self.managed is not None
        self.managed.release()
        with ballonet.manage(self.model, interval=2, pieces=self._pieces):
            found = [decoded("interval 2", self.model, self.device, 1, held, STEPS) for _ in range(2)]
        self.managed = ballonet.manage(self.model, pieces=self._pieces)
        return found[-1]

    def pieces(self) -> str:
        """How the model decodes."""
        assert self.managed is not None
        return str(self.managed.report().pieces or "no graphs on this device")

    def attention(self, held: int, cudnn: bool, new: bool) -> float:
        """ms of the host for one attention, at a length that was there before, or a new one each time."""
        took = list[float]()
        with attention_by(cudnn):
            for step in range(WARM + STEPS):
                given = self._states(1, held + (step if new else 0))
                synchronize(self.device)
                begin = time.perf_counter()
                scaled_dot_product_attention(*given, enable_gqa=True)
                took.append((time.perf_counter() - begin) * 1e3)
        return statistics.median(took[WARM:])

    def repeats(self, batch: int, held: int, cudnn: bool) -> int:
        """How many of some attentions under a mask, with the same inputs, have other bits than the first."""
        given = self._states(batch, held)
        mask = torch.ones(batch, 1, 1, held, dtype=torch.bool, device=self.device)
        mask[0, ..., : held // 2] = False
        with attention_by(cudnn):
            first, *others = (
                scaled_dot_product_attention(*given, attn_mask=mask, enable_gqa=True) for _ in range(REPEATED)
            )
            return sum(not torch.equal(first, other) for other in others)

    def _states(self, batch: int, held: int) -> list[torch.Tensor]:
        """Queries, keys and values of one layer, for one new token."""
        config = self.model.config
        width = config.hidden_size // config.num_attention_heads
        kinds = ((config.num_attention_heads, 1), *((config.num_key_value_heads, held),) * 2)
        given = {"dtype": self.model.dtype, "device": self.device}
        return [torch.randn(batch, heads, tokens, width, **given) for heads, tokens in kinds]

    def _generated(self, batch: int, held: int, clock: Clock | None = None) -> tuple[Clock, float]:
        """Generates from a cache of so many tokens; returns the clock, and the seconds of all of it."""
        cache = filled("ballonet" if self.is_managed else "stock", self.model.config, batch, held, self.device)
        clock = clock or Clock(self.device)
        size = batch, held
        took = seconds(self.device, lambda: timed(self.model, cache, size, self.device, STEPS, clock))
        return clock, took

    def _logits(self, batch: int, held: int) -> torch.Tensor:
        """Logits of each new token, on the CPU."""
        prompt = words(self.model, (batch, held), 0).to(self.device)
        more = {"output_logits": True, "return_dict_in_generate": True}
        with attention_by(False):
            found = answer(self.model, prompt, STEPS, **more)
        return torch.stack(found.logits).cpu()

    def _outside(self) -> int:
        """Bytes of the device that are in use, and not by pages; 0 on a CPU."""
        if self.device != "cuda":
            return 0
        found = ballonet.stats()
        return -self._free() - sum(found.pages.values()) * found.page_size

    def _free(self) -> int:
        """Bytes of the device that nobody uses; 0 on a CPU."""
        if self.device != "cuda":
            return 0
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    def _forget(self) -> None:
        """Gives stock's memory back, as other peers need it."""
        if self.device == "cuda" and not self.is_managed:
            torch.cuda.empty_cache()


@contextlib.contextmanager
def attention_by(cudnn: bool) -> Iterator[None]:
    """Within it torch may take cuDNN's attention, or not. Where pieces have turned it off it stays so."""
    before = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(before and cudnn)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(before)


BENCHMARKS = {"speed": Benchmark(decoding_by_pieces, or_link(functions))}

if __name__ == "__main__":
    main(__doc__, BENCHMARKS)
