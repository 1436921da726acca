"""What the papers claim, row by row, and what shows it: tests for a machine without a GPU, and on one tests or figures.

The rows are those of eLLM, but for its scheduling (Algorithms 1 and 2), of Select-N, Oneiros and SwiftCache, and of the
reclaim order that is common to them. A row whose test or figure is gone, or is no part of what runs on a GPU, is an
error.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Row:
    """`cpu`: tests, as file::function under tests/. `gpu`: the same, of those that a GPU runs too, or figure:NAME, the
    table of that name of a part of benchmarks/run.py."""

    claim: str
    cpu: list[str]
    gpu: list[str]


ROWS = """
# eLLM
ownership: every page has one owner, and their sum is what exists
  cpu test_core_stateful.py::test_anything_in_any_order
  cpu test_core_cached_ranges.py::test_a_fault_at_every_driver_call_of_their_lives
  cpu streaming/test_sources.py::test_a_square_wave
  gpu gpu/test_balloon_tokens.py::test_several_models_and_threads
KV slot reuse: of the mapped free slots the smallest that fits
  cpu test_core_cached_ranges.py::test_the_cached_range_taken_is_the_smallest_that_fits
  cpu test_core_cached_ranges.py::test_serving_one_request_after_the_other_comes_to_call_the_driver_no_more
  gpu gpu/test_balloon_core.py::test_requests_come_to_call_the_driver_no_more figure:decode
idle activations: free pages of activations become KV, and nothing is copied
  cpu test_core_events.py::test_pages_go_to_the_cache_and_back
  gpu figure:context
deflate: the reverse, only when activations ask
  cpu test_core_events.py::test_pages_go_to_the_cache_and_back
  cpu test_core_events.py::test_page_found_without_effort_is_no_event
  gpu gpu/test_balloon_tokens.py::test_a_budget_that_shrinks_meanwhile figure:oom
pre-map, late unmap: the next page is mapped ahead, and unmapping is off the critical path
  cpu kv/test_tiers.py::test_the_next_page_is_mapped_before_it_is_needed
  cpu kv/test_tiers.py::test_pages_lie_ahead_just_in_time_and_never_more_than_allowed
  cpu test_core_background.py::test_pages_mapped_ahead_are_claimed_without_the_driver
  cpu test_core_background.py::test_unmapping_is_no_business_of_who_retires
  cpu test_core_background.py::test_no_more_is_mapped_ahead_than_fifty_megabytes
  gpu gpu/test_balloon_core.py::test_requests_come_to_call_the_driver_no_more
KV on the host: full pages are copied behind, taken in order, read in place, and are restored
  cpu kv/test_tiers.py::test_full_pages_lie_on_the_host_once_taken_and_on_the_device_once_back
  cpu kv/test_tiers.py::test_pages_copied_behind_are_clean_and_written_ones_dirty
  cpu kv/test_tiers.py::test_many_rows_read_copies_of_what_is_away kv/test_generate.py::test_tokens_are_those_of_stock
  gpu gpu/test_balloon_tokens.py::test_a_budget_that_shrinks_meanwhile figure:context
# The reclaim order, which is of the design, not of a paper
the reclaim order: one order, above every floor, and back without flapping
  cpu test_reclaim_order.py::test_candidates_are_in_order test_reclaim_order.py::test_no_floor_is_ever_crossed
  cpu test_reclaim_order.py::test_pages_that_cost_most_are_restored_first
  cpu test_reclaim_order.py::test_a_square_wave_flaps_nothing_and_leaks_nothing
  cpu streaming/test_sources.py::test_a_square_wave streaming/test_sources.py::test_four_verbs
  gpu gpu/test_balloon_tokens.py::test_several_models_and_threads
spill: pages of the host in the place of pages of the device, rather than a refusal
  cpu test_core_spill.py::test_spilled_block_goes_when_it_is_freed_and_device_pages_come_first_again
  gpu gpu/test_balloon_core.py::test_spilled_block_computes_the_same figure:oom
live budget: met with the driver, or refused with the number and nothing changed
  cpu test_core_stateful.py::test_anything_in_any_order
  cpu test_core_budget.py::test_from_a_signal_on_the_thread_that_leases
  gpu gpu/test_balloon_tokens.py::test_a_budget_that_shrinks_meanwhile figure:shrink
captures: nothing that one forbids is done while it lasts
  cpu test_core_spill.py::test_not_during_a_capture test_core_budget.py::test_a_capture_that_ends_meanwhile
  gpu gpu/test_balloon_core.py::test_a_capture_pulls_no_source
captures: what a graph has captured stays where it is, and its replays are leased
  cpu streaming/test_graphs.py::test_a_captured_model_gives_nothing streaming/test_graphs.py::test_a_replay_is_leased
  gpu gpu/test_weights_order.py::test_graphs_while_pages_run_out
# Select-N
interval i streams the last layer of every i, double-buffered, and frees the others' pages
  cpu test_tables.py::test_interval_streams_the_last_of_every_i_layers
  cpu streaming/test_streaming.py::test_tokens_equal_stock
  gpu gpu/test_remap_architectures.py::test_tokens_are_stocks figure:streaming
the record: powers of two, phases apart, a 2 ms grid; conservative; a file that is reused
  cpu test_record.py::test_the_table_holds_the_smallest_interval_that_meets_the_slo
  cpu test_record.py::test_a_looked_up_time_is_never_below_that_of_less_work
  cpu test_record.py::test_a_record_is_kept_in_a_file test_profile.py::test_a_record_is_measured_once
  cpu test_record.py::test_the_slo_is_listed_every_2_ms
  gpu figure:slo
phases: prefill and decode with SLOs of their own, in turn with one plan for both
  cpu test_tables.py::test_prefill_may_stream_more_than_decode
  cpu test_manager_slo.py::test_nothing_is_loaded_where_prefills_and_steps_take_turns
  gpu figure:slo
admission: refused with the reason and the nearest SLO
  cpu test_tables.py::test_no_interval_is_an_answer_and_not_an_exception test_manager_slo.py::test_admission
  cpu test_coordinator.py::test_a_refusal_says_what_would_work
  gpu figure:slo
coordinator: the models of one link share its bandwidth, most host memory used, re-chosen each iteration
  cpu test_coordinator.py::test_the_choice_is_the_best_of_all_combinations
  cpu test_coordinator.py::test_whoever_shares_the_link_meets_its_slo
  cpu test_coordinator.py::test_intervals_follow_the_link_and_no_slo_is_missed_that_was_not_given_up
  cpu test_manager_slo.py::test_no_slo_is_missed_that_was_promised
  gpu figure:slo
# Oneiros
when: pages of the cache are exhausted, not before
  cpu test_manager.py::test_no_layer_is_taken_while_pages_are_free
  cpu test_remap.py::test_remapping_frees_what_is_wanted_or_all_that_the_caps_allow
  cpu streaming/test_sources.py::test_an_idle_model_gives_and_gets_back
  gpu gpu/test_remap_kv.py::test_pages_of_layers_go_to_a_cache
which model: idle with the lowest priority, else the most recently used; never a whole model
  cpu test_remap.py::test_models_give_once_those_before_them_are_at_their_caps
  cpu test_remap.py::test_most_recently_used_reloads_less_than_least_recently_used_in_a_round
  cpu test_manager.py::test_of_equals_the_one_used_last_gives_first
  gpu gpu/test_remap_kv.py::test_pages_of_layers_go_to_a_cache
how many: T_T·m ≤ T_compute
  cpu test_remap.py::test_a_cap_grows_with_bandwidth_and_compute
  gpu figure:slo figure:streaming
which layers: evenly around the circle
  cpu test_tables.py::test_layers_are_spread_around_the_circle
  cpu test_tables.py::test_no_placement_is_faster_than_an_even_one
  gpu figure:streaming
slots: one or two by the closed forms
  cpu test_tables.py::test_one_slot_or_two test_schedule.py::test_the_simulator_agrees_with_the_closed_forms
  cpu test_ring.py::test_every_number_of_layers_and_slots
  gpu gpu/test_remap_architectures.py::test_tokens_are_stocks figure:streaming
one direction: weights are never copied back
  cpu streaming/test_streaming.py::test_tokens_equal_stock
  gpu gpu/test_remap_architectures.py::test_tokens_are_stocks figure:streaming
reversion: pages that the cache leaves return to the weights
  cpu test_remap.py::test_layers_given_back_fit_and_cost_no_time
  cpu test_reclaim_order.py::test_a_square_wave_flaps_nothing_and_leaks_nothing
  cpu streaming/test_sources.py::test_an_idle_model_gives_and_gets_back
  gpu gpu/test_remap_kv.py::test_pages_of_layers_go_to_a_cache
# SwiftCache
sizing: Eq. 1-5 in bytes, Eq. 5 never less than nothing; a double buffer halves what streams
  cpu test_layer_stream.py::test_the_worked_example test_layer_stream.py::test_no_other_split_stores_more
  gpu gpu/test_prefix_sizes.py::test_a_cache_goes_to_the_limit figure:context
layer stream: the load of layer j waits for attention j-1 and its store, and overlaps what follows
  cpu kv/test_stream.py::test_a_load_waits_for_the_attention_before_and_attention_for_its_own_load
  cpu kv/test_stream.py::test_copy_behind_waits_for_the_stream_that_wrote
  cpu kv/test_stream.py::test_any_sequence_of_calls_equals_stock
  cpu kv/test_generate.py::test_tokens_are_those_of_stock_through_slots
  cpu test_layer_stream.py::test_seconds_are_those_of_a_pass_and_the_least_of_all_that_fits
  gpu gpu/test_kv_stream.py::test_layers_take_turns_in_slots gpu/test_kv_slots.py::test_tokens_are_stocks
  gpu gpu/test_kv_stream.py::test_slots_are_taken_while_a_layer_is_read
layout: resizing moves no bytes, in as many calls whatever there is
  cpu gpu/test_prefix_sizes.py::test_resizing_costs_the_same_whatever_there_is
  gpu gpu/test_prefix_sizes.py::test_resizing_costs_the_same_whatever_there_is
minimum unit: whole blocks of both models, and whole pages
  cpu test_lending.py::test_the_unit_is_the_least_that_is_whole_for_both test_lending.py::test_lwm_with_qwen3_14b
  gpu gpu/test_prefix_sizes.py::test_lwm_and_qwen3_14b_exchange_40_mib
lend, take back: up is rounded up, down is rounded down, by what was in use at once; hashes go before pages
  cpu test_lending.py::test_up_is_rounded_up_and_down_is_rounded_down
  cpu test_lending.py::test_the_window_against_all_that_ever_was
  cpu test_lending.py::test_lending_over_random_traces_takes_no_page_in_use
  cpu prefix/test_lend.py::test_a_worker_that_comes_back_takes_what_it_lacks
  cpu prefix/test_lend.py::test_prefixes_the_host_has_not_are_forgotten_first
  cpu prefix/test_lend.py::test_random_lending_while_all_generate
  gpu gpu/test_prefix_lending.py::test_models_take_their_pages_back
tiers: a peer's pages first, then the host's, and all is restored
  cpu kv/test_peer.py::test_the_peer_is_filled_first_and_the_host_after_it_and_all_is_restored
  cpu kv/test_peer.py::test_tokens_are_those_of_stock_while_pages_go_all_ways
  cpu test_core_places.py::test_a_second_pool_is_labelled_so_and_has_a_budget_of_its_own
  gpu gpu/test_kv_stream.py::test_kv_goes_to_the_peer_and_on_to_the_host_and_is_restored figure:prefix
prefix reuse: what is stored is the same cache held by hand, to the bit
  cpu prefix/test_lives.py::test_random_lives_have_the_tokens_of_stock prefix/test_sessions.py::test_a_session
  cpu prefix/test_trouble.py::test_threads_on_one_model
  cpu test_prefixes.py::test_blocks_evicted_by_odds_are_leaves_nobody_pinned
  gpu gpu/test_prefix.py::test_conversations_while_pages_move figure:prefix
"""


def rows(text: str) -> list[Row]:
    """A line of a claim, and below it those of its proofs."""
    table: list[Row] = []
    for line in text.splitlines():
        if line and line[0] not in " #":
            table.append(Row(line, [], []))
        elif line.startswith("  "):
            kind, *proofs = line.split()
            {"cpu": table[-1].cpu, "gpu": table[-1].gpu}[kind].extend(proofs)
    return table


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/run.py, which finds its neighbours in its own folder."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import run

    return run


@functools.cache
def functions(path: str) -> set[str]:
    """Names of the functions in a file under tests/."""
    file = ROOT / "tests" / path
    body = ast.parse(file.read_text()).body if file.exists() else []
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


def is_there(proof: str) -> bool:
    """Whether the file has a test of that name."""
    path, _, name = proof.partition("::")
    return name in functions(path)


@pytest.mark.parametrize("row", rows(ROWS), ids=lambda row: row.claim.partition(":")[0])
def test_every_row_is_shown(row: Row, run: ModuleType) -> None:
    parts = [part for part in run.PARTS.values() if part.gpu]
    figures = {f"figure:{name}" for part in parts for name in part.benchmarks}
    tests = {path for part in parts for pattern in (*part.alone, *part.tests) for path in ROOT.glob(pattern)}
    assert row.cpu
    assert row.gpu
    missing = [proof for proof in row.cpu if not is_there(proof)]
    for proof in row.gpu:
        if proof.startswith("figure:"):
            shown = proof in figures
        else:
            shown = is_there(proof) and ROOT / "tests" / proof.partition("::")[0] in tests
        missing += [] if shown else [proof]
    assert not missing


def test_a_row_that_lost_its_proof_is_noticed(run: ModuleType) -> None:
    assert not is_there("test_tables.py::test_that_there_is_not")
    with pytest.raises(AssertionError, match="figure:none"):
        test_every_row_is_shown(Row("it", ["test_tables.py::test_one_slot_or_two"], ["figure:none"]), run)
