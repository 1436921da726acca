"""Time per token while layers stream from the host, against what is possible: the longer of computing and copying.

The bound is the larger of the time with every layer resident and of the bytes that a token brings over the link, at the
bandwidth that the link gives large copies in the same run. Predicted is the schedule (offload/policy/schedule.py), from
the resident time and the link as measured. On a GPU there are two others: accelerate with half of the layers on the
host, and diffusers' group offloading with all of them.

Where a limit is missed a trace of the profiler is kept beside the results. The stand-in's link is slowed to 2 GB/s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common import MIB, Figure, Options, interleaved, report
from peer import Functions, Peer, answering, begin, peers
from streamed import WARM, environment, interval_of, is_managed, titled

from ballonet.offload.policy.interval import Costs

INTERVALS = {"cuda": (8, 4, 2, 1), "cpu": (8, 4, 2, 1), "tiny": (2,)}
OTHERS = {"accelerate": 2, "diffusers": 1}  # the interval that streams as many layers
ROUNDS = {"cuda": 2, "cpu": 3, "tiny": 1}  # each of several tokens
TOKENS = {"cuda": WARM + 4, "cpu": WARM + 3, "tiny": WARM + 2}  # of a round
SLOW = ("accelerate",)  # for whom it is that of tiny sizes
OVER_BOUND, PREDICTED, FASTER = 1.03, 0.1, 9.0


@dataclass(frozen=True, slots=True)
class Case:
    """Sequences, and the tokens that each holds."""

    batch: int
    held: int


CASES = {
    "cuda": (Case(1, 1024), Case(8, 4096)),
    "cpu": (Case(1, 256),),
    "tiny": (Case(1, 16),),
}


def main() -> None:
    chosen = begin("streaming", __doc__, functions)
    kind = chosen.kind
    ours = ("resident", *(f"interval {each}" for each in INTERVALS[kind]))
    names = (*ours, "link", *(OTHERS if chosen.cuda else ()))
    rows = []
    with peers(__file__, chosen, names, dict.fromkeys(names, environment(chosen))) as started:
        found = answering(started, (*ours, "link"), "about")
        about = found[ours[-1]].ask("about")
        for case in CASES[kind][: chosen.cases]:
            rows += rows_of(case, found, about, chosen, min(chosen.rounds or ROUNDS[kind], ROUNDS[kind]))
    title = f"decoding while layers stream: ms per token, {about['what']}"
    report(chosen, "streaming", titled(chosen, title), rows)


def functions(name: str, chosen: Options) -> Functions:
    import decoding

    return decoding.functions(name, chosen)


def rows_of(
    case: Case, found: Mapping[str, Peer], about: Mapping[str, Any], chosen: Options, rounds: int
) -> list[dict[str, Any]]:
    """Measures the peers in turn, those that can do it so."""
    answers: dict[str, dict[str, Any]] = {}

    def decode(name: str) -> float:
        tokens = TOKENS["tiny" if chosen.tiny or name in SLOW else chosen.device]
        answer = found[name].ask("decode", batch=case.batch, held=case.held, tokens=tokens)
        answers[name] = {**answer, "back": answer["back"] + answers.get(name, {"back": 0})["back"]}
        return float(answer["ms"])

    turns = {name: lambda name=name: decode(name) for name in found if name != "link"}
    taken = interleaved({**turns, "link": lambda: float(found["link"].ask("link"))}, rounds)
    link = taken.pop("link")
    rows = []
    for name, ms in taken.items():
        row = Row(case, name, ms, answers[name], taken["resident"], link, about, chosen.cuda)
        profiled = profile(row, found[name], chosen) if interval_of(name) and (case.batch == 1 or row.missed) else 0
        rows.append(row.cells(taken.get("accelerate"), profiled))
    return rows


def profile(row: Row, peer: Peer, chosen: Options) -> int:
    """Bytes that went to the host, as the profiler saw it. The trace is kept where the limit was missed."""
    case = row.case
    name = f"streaming-{row.name.replace(' ', '-')}-{case.batch}x{case.held}.trace.json.gz"
    path = (chosen.keep / name).resolve()
    nbytes = int(peer.ask("trace", batch=case.batch, held=case.held, path=str(path)))
    if not row.missed:
        path.unlink()
    return nbytes


@dataclass(frozen=True, slots=True)
class Row:
    """What a peer took in one case. `answer`, `about`: see decoding.py; `link`: bytes per second; `limited`: do limits
    count here?"""

    case: Case
    name: str
    ms: Figure
    answer: Mapping[str, Any]
    resident: Figure
    link: Figure
    about: Mapping[str, Any]
    limited: bool

    @property
    def interval(self) -> int | None:
        return interval_of(self.name) or OTHERS.get(self.name)

    @property
    def bound(self) -> float:
        """ms"""
        return max(self.resident.median, self.answer["bytes"] / self.link.median * 1e3)

    @property
    def over_bound(self) -> Figure:
        return Figure.of([self.ms.median / self.bound])

    @property
    def off(self) -> Figure:
        """How far the measured time is from the predicted one, as a part of that."""
        layers: int = self.about["layers"]
        costs = Costs((1,) * layers, self.resident.median / 1e3, self.about["layer"] / self.link.median)
        return Figure.of([abs(self.ms.median / 1e3 / costs.expected(costs.plan(self.interval or costs.none)) - 1)])

    @property
    def missed(self) -> bool:
        """Is it slower than it may be?"""
        return self.limited and self.over_bound.median > OVER_BOUND

    def cells(self, accelerate: Figure | None, profiled: int) -> dict[str, Any]:
        ours, streams = is_managed(self.name), interval_of(self.name) is not None
        over, off = self.over_bound, self.off
        if self.limited and streams:
            over, off = over.at_most(OVER_BOUND), off.at_most(PREDICTED)
        faster: Figure | str = ""
        if accelerate is not None and streams and self.interval == OTHERS["accelerate"]:
            faster = Figure.ratio(accelerate, self.ms).at_least(FASTER)
        back = Figure.of([float(self.answer["back"] + profiled)]).at_most(0)
        return {
            "sequences": self.case.batch,
            "tokens held": self.case.held,
            "what streams": self.name,
            "ms per token": self.ms,
            "MiB per token": round(self.answer["bytes"] / MIB, 1),
            "bound, ms": round(self.bound, 1) if ours else "",
            "ms / bound": over if ours else "",
            "off the prediction by": off if streams else "",
            "accelerate / it": faster,
            "bytes to the host": back if streams else "",
        }


if __name__ == "__main__":
    main()
