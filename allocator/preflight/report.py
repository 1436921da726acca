"""What a preflight found, for people: a line for each thing that was tried, what differs from what is assumed, and what
that means. Names of probes and of their facts become words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..units import format_size

Outcome = Mapping[str, Any]  # of a probe: status, facts, said

SUBJECTS: Final = {  # what a probe tries
    "granularity": "sizes of pages",
    "host_pages": "pages in host memory",
    "copies": "copies to and from them",
    "several_handles": "copies across several of them",
    "torch_copies": "torch's copies of them",
    "kernels": "kernels that read them",
    "graphs": "CUDA graphs after a page moved",
    "torch_graphs": "torch's CUDA graphs",
}
_STATUS: Final = {"crashed": "the driver or torch crashed", "no end": "it never ended", "failed": "not known"}
_COMPARED: Final = "allocated_"  # facts about memory that the driver allocates, to compare with
_NOT_NEEDED: Final = ("open_for_both", "cpu_reads")  # facts that nothing hangs on


def show(result: Mapping[str, Any], kept: object, *, verbose: bool = False) -> None:
    """Prints the result of `run.preflight`. `kept`: the file that `install()` reads, None where none was written;
    `verbose`: each fact by its name, too."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.print(f"{result['key']['device']}, {result['key']['driver']}")
    told = Table(show_header=False, box=None, pad_edge=False)
    for name, outcome in result["probes"].items():
        told.add_row(SUBJECTS.get(name, name), answer(outcome))
    console.print(told)
    if verbose:
        facts = Table("question", "answer")
        for asked in result["answers"]:
            facts.add_row(asked["question"], asked["answer"])
        console.print(facts)
    for difference in result["differences"]:
        what, assumed, found, effect = (difference[name] for name in ("what", "assumed", "found", "effect"))
        text = f"Differs: {what}: {found}. Assumed: {assumed}. So: {effect}."
        console.print(text if verbose else in_words(text, result["probes"]))
    for name, value in result["settings"].items() if verbose else ():
        console.print(f"chosen: {name} = {value} ({result['reasons'][name]})")
    console.print()
    console.print(conclusion(result, kept))


def answer(outcome: Outcome) -> str:
    """Says in words how a probe ended."""
    facts, last = outcome["facts"], outcome["said"].splitlines()[-1:]
    if outcome["status"] != "answered":
        return ": ".join([_STATUS[outcome["status"]], *last])
    if "skipped" in facts:
        return f"not tried: {facts['skipped']}"
    needed = {name: fact for name, fact in facts.items() if not name.startswith(_COMPARED) and name not in _NOT_NEEDED}
    wrong = [f"{_worded(name)}{why}" for name, fact in needed.items() if (why := _wrong(fact)) is not None]
    rates = {kind: [*_rates(facts, kind)] for kind in ("", _COMPARED)}
    text = f"wrong: {', '.join(wrong)}" if wrong else "right"
    if rates[""]:
        text += f", at {_span(rates[''])}"
    return text + (f"; memory that the driver allocates, {_span(rates[_COMPARED])}" if rates[_COMPARED] else "")


def _wrong(fact: Any) -> str | None:
    """Returns the words behind the name of a fact that is wrong; None where it is right."""
    if isinstance(fact, Mapping) and "error" in fact:
        return f" ({fact['error']})"
    is_wrong = fact is False or (isinstance(fact, Mapping) and False in (fact.get("equal"), fact.get("right")))
    return "" if is_wrong else None


def _rates(facts: Mapping[str, Any], kind: str) -> Iterator[float]:
    for name, fact in facts.items():
        if isinstance(fact, Mapping) and "gb_per_s" in fact and name.startswith(_COMPARED) == bool(kind):
            yield fact["gb_per_s"]


def _span(rates: list[float]) -> str:
    least, most = min(rates), max(rates)
    return f"{least:.3g} GB/s" if least == most else f"{least:.3g} to {most:.3g} GB/s"


def _worded(name: str) -> str:
    return re.sub(r"\b(to|from|on) (device|host)\b", r"\1 the \2", name.replace("_", " "))


def in_words(text: str, probes: Mapping[str, Outcome]) -> str:
    """Replaces the names of probes and facts in a sentence, and leaves out those of settings."""
    text = re.sub(r" \((?:host_pages|graphs|page_size)=\w+\)", "", text)
    for name, subject in SUBJECTS.items():
        text = re.sub(rf"\bprobe {name}\b", f"probe of {subject}", text)
        text = re.sub(rf"\b{name}(?=, \w+:)", subject, text)
    names = {name for outcome in probes.values() for name in outcome["facts"] if "_" in name}
    return re.sub(r"\w+", lambda word: _worded(word[0]) if word[0] in names else word[0], text)


def conclusion(result: Mapping[str, Any], kept: object) -> str:
    """Says in a sentence whether ballonet works here as it is, or what `install()` does instead."""
    changes = {
        "host_pages": "nothing moves to host memory: no layer streams, nothing spills, and KV stays on the device",
        "graphs": "models decode without CUDA graphs",
        "page_size": f"pages have {format_size(result['settings'].get('page_size', 0))}",
    }
    chosen = "; ".join(changes[name] for name in result["settings"])
    if chosen:
        until = f"from now on ({kept})" if kept else "as soon as a preflight is kept (without --no-save)"
        return f"Not all works here. install() goes round that {until}: {chosen}."
    where = f" Kept in {kept}." if kept else ""
    if result["differences"]:
        return f"What differs changes nothing in how ballonet works here: install() needs no other settings.{where}"
    return f"All that was tried works as ballonet assumes: install() needs no other settings.{where}"
