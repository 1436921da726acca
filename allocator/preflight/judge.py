"""Judges the facts of a preflight: differences from what the code assumes, settings to go round them, answers.

Pure: facts in, a verdict out. A probe that broke off, or did not run, decides nothing by itself, but for one that
crashed over pages of the host or in a graph, or whose driver never returned: then those are not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ..defaults import PROBE_COUNTER, PROBE_LONG_MAP, PROBE_SLOW

# Probes that crash where pages of the host are bad, or hang: those that only the driver could hold up.
_CRASH: Final = ("host_pages", "several_handles", "torch_copies", "kernels")
_HANG: Final = ("host_pages", "several_handles")

Probes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference from an assumption. `effect`: its consequence, and what is done about it."""

    what: str
    assumed: str
    found: str
    effect: str


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    question: str
    answer: str


@dataclass(slots=True)
class ProbeVerdict:
    """The verdict of a preflight. `settings`: values for fields of Config, each with its `reasons`."""

    settings: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    answers: list[ProbeAnswer] = field(default_factory=list)


def judge(probes: Probes, page_size: int) -> ProbeVerdict:
    """Judges all facts. `probes`: name → status ("answered", "failed", "crashed", "no end"), facts, said. `page_size`:
    the default."""
    verdict = ProbeVerdict()
    _page_size(probes, page_size, verdict)
    wrong = list(_wrong_with_host_pages(probes))
    if wrong:
        verdict.settings["host_pages"] = False
        verdict.reasons["host_pages"] = "; ".join(wrong)
        verdict.differences += [
            Difference(
                "pages of the host",
                "work behind addresses of the device",
                each,
                "not used: nothing streams or spills, and KV stays on the device (host_pages=False)",
            )
            for each in wrong
        ]
    if reasons := list(_wrong_with_graphs(probes)):
        verdict.settings["graphs"] = False
        verdict.reasons["graphs"] = "; ".join(reasons)
        verdict.differences += [
            Difference(
                "a CUDA graph", "is right, also after a page moved", reason, "models decode without (graphs=False)"
            )
            for reason in reasons
        ]
    for look in (_aliases, _asynchrony, _setting, _speed, _waiting, _pinning, _counter, _handles):
        verdict.differences += look(probes)
    for name, outcome in probes.items():
        if outcome["status"] != "answered":
            last = outcome["said"].splitlines()
            verdict.differences.append(
                Difference(f"probe {name}", "answers", outcome["status"], last[-1] if last else "said nothing")
            )
    verdict.answers += [ProbeAnswer(question, ask(probes)) for question, ask in QUESTIONS.items()]
    return verdict


def _facts(probes: Probes, name: str) -> Mapping[str, Any]:
    return probes.get(name, {}).get("facts", {})  # type: ignore[no-any-return]


def _error(value: Any) -> str:
    return str(value["error"]) if isinstance(value, Mapping) and "error" in value else ""


def _page_size(probes: Probes, page_size: int, verdict: ProbeVerdict) -> None:
    found = _facts(probes, "granularity")
    sizes = [each for each in (found.get("device"), found.get("host")) if isinstance(each, int) and each > 0]
    least = math.lcm(*sizes) if sizes else page_size
    if page_size % least == 0:
        return
    chosen = math.lcm(page_size, least)
    why = f"pages of this driver are multiples of {least} bytes"
    verdict.settings["page_size"], verdict.reasons["page_size"] = chosen, why
    verdict.differences.append(Difference("page size", f"{page_size} bytes", why, f"pages of {chosen} bytes"))


def _wrong_with_host_pages(probes: Probes) -> Iterator[str]:
    """Yields why host pages cannot be used; nothing where they can, or it is not known."""
    tried = _facts(probes, "host_pages")
    for step in ("create", "map", "copied_there", "copied_back", "to_device", "from_device"):
        if why := _error(tried.get(step)):
            yield why
            return
        if tried.get(step) is False:
            yield f"bytes are not the same after the step {step}"
            return
    if why := _error(tried.get("open_for_device")):
        yield why
        return
    for name, checks in (
        ("copies", ("pages_to_device_by_address", "pages_from_device_by_address")),
        ("several_handles", ("to_device", "from_device", "on_host")),
        ("torch_copies", None),
        ("kernels", None),
        ("torch_graphs", ("on_host",)),
        ("graphs", ("host_page",)),
    ):
        for check, value in _facts(probes, name).items():
            if checks is not None and check not in checks:
                continue
            if _error(value):
                yield f"{name}, {check}: {_error(value)}"
            elif value is False or (isinstance(value, Mapping) and False in (value.get("equal"), value.get("right"))):
                yield f"{name}, {check}: not the same bytes"
    for name in _CRASH:
        ended = probes.get(name, {}).get("status")
        complete = name == "host_pages" and "from_device" in tried
        if (ended == "crashed" or (ended == "no end" and name in _HANG)) and not complete:
            yield f"the probe {name} {ended}: {probes[name]['said'].partition(chr(10))[0]}"


def _aliases(probes: Probes) -> Iterator[Difference]:
    found = _facts(probes, "aliases")
    if found and found.get("right") != found.get("rounds"):
        yield Difference(
            "a page at two addresses",
            "what is written through one is read through the other, in stream order",
            f"right in {found.get('right')} of {found.get('rounds')} rounds",
            "layers must not stream: manage(interval=None)",
        )


def _copy(probes: Probes, kind: str, way: str = "to_device", call: str = "by_address") -> Mapping[str, Any]:
    told = {**_facts(probes, "copies"), **_facts(probes, "file_copies")}
    found = told.get(f"{kind}_{way}_{call}")
    return found if isinstance(found, Mapping) else {}


def _asynchrony(probes: Probes) -> Iterator[Difference]:
    for way in ("to_device", "from_device"):
        for call in ("by_address", "with_direction"):
            if _copy(probes, "pages", way, call).get("at_once") is False:
                others = {kind: _copy(probes, kind, way, call).get("at_once") for kind in ("allocated", "registered")}
                better = ", ".join(kind for kind, at_once in others.items() if at_once) or "none of the others"
                yield Difference(
                    f"a copy between pages of the host and the device ({way}, {call})",
                    "returns at once",
                    "waits for the work in front of it",
                    f"whoever submits copies waits: streaming hides less. At once are: {better}",
                )
    for way in ("host_to_device", "device_to_host"):
        found = _facts(probes, "torch_at_once").get(way)
        if isinstance(found, Mapping) and found.get("at_once") is False:
            yield Difference(
                f"torch's copy_ over pages of the host ({way})",
                "returns at once",
                "waits for the work in front of it",
                "KV that is read in place or spilled holds up the thread that runs the model",
            )


def _setting(probes: Probes) -> Iterator[Difference]:
    """Judges a memset over several pages of the host, which every driver refuses so far; see docs/limits.md."""
    if why := _error(_facts(probes, "several_handles").get("host_page_set")):
        effect = "a library that clears spilled memory so gets an error; torch fills with kernels"
        yield Difference("a memset over a page of the host", "is done", why, effect)


def _speed(probes: Probes) -> Iterator[Difference]:
    for way in ("to_device", "from_device"):
        ours, theirs = (_copy(probes, kind, way).get("gb_per_s") for kind in ("pages", "allocated"))
        if ours and theirs and ours < PROBE_SLOW * theirs:
            yield Difference(
                f"copies of pages of the host ({way})",
                "as fast as memory from cuMemHostAlloc",
                f"{ours} GB/s against {theirs}",
                "streaming is slower than the link; files that are registered are not",
            )


def _waiting(probes: Probes) -> Iterator[Difference]:
    for call in ("map", "open", "unmap", "release"):
        found = _facts(probes, "beside_work").get(call)
        if isinstance(found, Mapping) and found.get("at_once") is False:
            yield Difference(
                f"the driver's call to {call} a page",
                "does not wait for what the device is at",
                f"waited ({found['behind_work_us']} us)",
                "pages change hands as slowly as kernels end; right all the same",
            )


def _pinning(probes: Probes) -> Iterator[Difference]:
    longest = _facts(probes, "pinning").get("longest_map_meanwhile_us")
    if isinstance(longest, int | float) and longest > PROBE_LONG_MAP:
        yield Difference(
            "mapping while another thread pins",
            f"waits no longer than {PROBE_LONG_MAP / 1000:g} ms",
            f"{longest / 1000:.1f} ms",
            "a model that spills for the first time holds up whoever needs pages",
        )


def _wrong_with_graphs(probes: Probes) -> Iterator[str]:
    """Yields why no graphs are to be used; nothing where they are right, or it is not known."""
    for name, checks in (
        ("graphs", ("as_captured", "another_page")),
        ("torch_graphs", ("as_captured", "on_device", "in_pieces", "in_pieces_on_device")),
    ):
        for check in checks:
            value = _facts(probes, name).get(check)
            if value is False or _error(value):
                yield f"{name}, {check}: {_error(value) or 'not the same bytes'}"
        if probes.get(name, {}).get("status") == "crashed":
            yield f"the probe {name} crashed: {probes[name]['said'].partition(chr(10))[0]}"


def _counter(probes: Probes) -> Iterator[Difference]:
    found = _facts(probes, "traffic").get("steady")
    if not isinstance(found, Mapping) or not found.get("counted_gb_per_s"):
        return
    copied, counted = found["copied_gb_per_s"], sorted(found["counted_gb_per_s"])
    middle = counted[len(counted) // 2]
    if copied and abs(middle - copied) > PROBE_COUNTER * copied:
        yield Difference(
            "NVML's counter of the link",
            f"is right within {PROBE_COUNTER:.0%}",
            f"{middle} GB/s for {copied} that were copied (from {counted[0]} to {counted[-1]})",
            "what others send over the link is misjudged, and intervals for an SLO with it",
        )


def _handles(probes: Probes) -> Iterator[Difference]:
    claimed = _facts(probes, "device").get("attributes", {}).get("posix_handles")
    refused = _error(_facts(probes, "handles").get("device_posix"))
    if claimed and refused:
        yield Difference(
            "pages that other processes can open", "can be made", refused, "made without: the pool is not shared"
        )


def _at_once(probes: Probes) -> str:
    parts = []
    for kind in ("pages", "one_handle", "allocated", "registered", "registered_file", "pageable"):
        found = _copy(probes, kind)
        word = {True: "yes", False: "no", None: "not known"}[found.get("at_once")]
        call, speed = found.get("call_us"), found.get("gb_per_s")
        parts.append(f"{kind}: {word}" + (f" (call {call} us, {speed} GB/s)" if call is not None else ""))
    return "; ".join(parts)


def _of(name: str, *checks: str) -> Callable[[Probes], str]:
    """Returns a function whose answer lists a probe's facts about `checks`, or all."""

    def ask(probes: Probes) -> str:
        facts, outcome = _facts(probes, name), probes.get(name)
        if outcome is None:
            return "not asked"
        told = {check: value for check, value in facts.items() if not checks or check in checks}
        text = "; ".join(f"{check}: {_plain(value)}" for check, value in told.items())
        return text or f"{outcome['status']}: {outcome['said'].splitlines()[-1] if outcome['said'] else 'nothing told'}"

    return ask


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if _error(value):
        return _error(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    return str(value)


QUESTIONS: Final[Mapping[str, Callable[[Probes], str]]] = {
    "Do pages of the host work behind addresses of the device?": _of("host_pages"),
    "Does a copy from memory of the host return at once?": _at_once,
    "Are torch's copies, which say that both sides are the device's, right over pages of the host?": _of(
        "torch_copies"
    ),
    "Do torch's copies over pages of the host return at once?": _of("torch_at_once"),
    "Is one copy right that spans several pages of the host, and may they be set?": _of("several_handles"),
    "Do kernels compute the same from pages of the host, and how fast do they read?": _of("kernels"),
    "Is a graph right that is replayed after its page moved?": _of("graphs"),
    "Is a graph of torch's?": _of("torch_graphs"),
    "How long does pinning take, and does mapping wait for it?": _of("pinning"),
    "Do calls for page tables wait for the device?": _of("beside_work"),
    "Does NVML's counter agree with what was copied?": _of("traffic"),
}
