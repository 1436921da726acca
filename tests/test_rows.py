"""What the papers claim, row by row, and what shows it: tests for a machine without a GPU, and on one tests or figures.

The rows are those of Select-N and Oneiros. A row whose test or figure is gone, or is no part of what runs on a GPU, is
an error here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Row:
    """`cpu`: tests, as file::function under tests/. `gpu`: the same, of those that a GPU runs too, or figure:NAME, the
    table of benchmarks/bench_NAME.py."""

    claim: str
    cpu: tuple[str, ...]
    gpu: tuple[str, ...]


SELECT_N = (
    Row(
        "interval i streams the last layer of every i, double-buffered, and frees the others' pages",
        (
            "test_tables.py::test_interval_streams_the_last_of_every_i_layers",
            "streaming/test_streaming.py::test_tokens_equal_stock",
        ),
        ("gpu/test_weights_streaming.py::test_tokens_at_every_interval", "figure:streaming"),
    ),
    Row(
        "the record: powers of two, phases apart, a 2 ms grid; conservative; a file that is reused",
        (
            "test_tables.py::test_the_interval_looked_up_meets_the_slo_at_the_point_measured",
            "test_record.py::test_a_looked_up_time_is_never_below_that_of_less_work",
            "test_record.py::test_a_record_is_kept_in_a_file",
            "test_profile.py::test_a_record_is_measured_once",
            "test_record.py::test_the_slo_is_listed_every_2_ms",
        ),
        ("figure:slo",),
    ),
    Row(
        "phases: prefill and decode with intervals of their own",
        (
            "test_tables.py::test_prefill_may_stream_more_than_decode",
            "test_governor_slo.py::test_an_slo_frees_memory_at_once_and_each_phase_has_its_interval",
        ),
        ("figure:slo",),
    ),
    Row(
        "admission: refused with the reason and the nearest SLO",
        (
            "test_tables.py::test_no_interval_is_an_answer_and_not_an_exception",
            "test_governor_slo.py::test_admission",
            "test_ledger.py::test_a_refusal_says_what_would_work",
        ),
        ("figure:slo",),
    ),
    Row(
        "coordinator: the models of one link share its bandwidth, most host memory used, re-chosen each iteration",
        (
            "test_ledger.py::test_the_choice_is_the_best_of_all_combinations",
            "test_ledger.py::test_whoever_shares_the_link_meets_its_slo",
            "test_ledger.py::test_intervals_follow_the_link_and_no_slo_is_missed_that_was_not_given_up",
            "test_governor_slo.py::test_no_slo_is_missed_that_was_promised",
        ),
        ("figure:slo",),
    ),
)
ONEIROS = (
    Row(
        "when: pages of the cache are exhausted, not before",
        (
            "test_governor.py::test_nothing_is_taken_while_pages_are_free",
            "test_remap.py::test_remapping_frees_what_is_wanted_or_all_that_the_caps_allow",
            "streaming/test_remapping.py::test_an_idle_model_gives_and_gets_back",
        ),
        ("gpu/test_remap_kv.py::test_pages_of_layers_go_to_a_cache",),
    ),
    Row(
        "which model: idle with the lowest priority, else the most recently used; never a whole model",
        (
            "test_remap.py::test_nobody_gives_before_those_in_front_of_it_are_at_their_caps",
            "test_remap.py::test_most_recently_used_reloads_less_than_least_recently_used_in_a_round",
            "test_governor.py::test_of_equals_the_one_used_last_gives_first",
        ),
        ("figure:reactivate", "gpu/test_remap_kv.py::test_pages_of_layers_go_to_a_cache"),
    ),
    Row(
        "how many: T_T·m ≤ T_compute",
        (
            "test_tables.py::test_how_many_layers_hide_behind_an_iteration",
            "test_remap.py::test_a_cap_grows_with_bandwidth_and_compute",
        ),
        ("figure:knee",),
    ),
    Row(
        "which layers: evenly around the circle",
        (
            "test_tables.py::test_layers_are_spread_around_the_circle",
            "test_tables.py::test_first_and_last_is_a_bad_choice",
            "test_tables.py::test_no_placement_is_faster_than_an_even_one",
        ),
        ("figure:knee", "figure:streaming"),
    ),
    Row(
        "slots: one or two by the closed forms",
        (
            "test_tables.py::test_one_slot_or_two",
            "test_schedule.py::test_the_simulator_agrees_with_the_closed_forms",
            "test_ring.py::test_every_number_of_layers_and_slots",
        ),
        ("gpu/test_weights_streaming.py::test_tokens_at_every_interval", "figure:streaming"),
    ),
    Row(
        "one direction: weights are never copied back",
        ("streaming/test_streaming.py::test_tokens_equal_stock",),
        ("gpu/test_weights_order.py::test_graphs_of_resident_layers", "figure:streaming"),
    ),
    Row(
        "reversion: pages that the cache leaves return to the weights",
        (
            "test_remap.py::test_weights_come_back_when_the_load_is_gone",
            "test_governor.py::test_weights_come_back_when_the_load_is_gone",
            "test_governor.py::test_nothing_flaps_on_a_square_wave",
            "streaming/test_remapping.py::test_an_idle_model_gives_and_gets_back",
        ),
        ("figure:reactivate",),
    ),
)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/run.py, which finds its neighbours in its own folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import run

    return run


def is_there(proof: str) -> bool:
    """Whether the file has a test of that name."""
    path, _, name = proof.partition("::")
    file = ROOT / "tests" / path
    return file.exists() and any(
        isinstance(node, ast.FunctionDef) and node.name == name for node in ast.parse(file.read_text()).body
    )


@pytest.mark.parametrize("row", [*SELECT_N, *ONEIROS], ids=lambda row: row.claim.partition(":")[0])
def test_every_row_is_shown(row: Row, run: ModuleType) -> None:
    parts = [part for part in run.PARTS.values() if part.gpu]
    figures = {f"figure:{name}" for part in parts for name in part.benchmarks}
    tests = {path for part in parts for group in part.tests for pattern in group for path in ROOT.glob(pattern)}
    assert row.cpu
    assert row.gpu
    missing = [proof for proof in row.cpu if not is_there(proof)]
    for proof in row.gpu:
        if proof.startswith("figure:"):
            found = proof in figures
        else:
            found = is_there(proof) and ROOT / "tests" / proof.partition("::")[0] in tests
        missing += [] if found else [proof]
    assert not missing


def test_a_row_that_lost_its_proof_is_noticed(run: ModuleType) -> None:
    assert not is_there("test_tables.py::test_that_there_is_not")
    with pytest.raises(AssertionError, match="figure:none"):
        test_every_row_is_shown(Row("it", ("test_tables.py::test_one_slot_or_two",), ("figure:none",)), run)
