"""What the papers claim, row by row, and what shows it: tests for a machine without a GPU, on one tests or figures, and
a planted bug in what the claim is about, which tests of the row find.

A row whose test, figure or bug is gone, or is no part of what runs on a GPU, is an error, and so is a bug that is found
by other tests than the row's. That they find it is for `make mutants`.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from .mutants.patches import read_all

ROOT = Path(__file__).parent.parent
BUGS = {f"{patch.area}/{patch.name}": patch for patch in read_all()}
A_TEST = "test_tables.py::test_one_slot_or_two"


@dataclass(frozen=True, slots=True)
class Row:
    """`cpu`: tests, as file::function under tests/. `gpu`: the same, of those that a GPU runs too, or figure:NAME, the
    table of that name of a part of benchmarks/run.py; simulated:NAME where that needs no GPU. `bug`: AREA/NAME of a
    planted bug, and the file that it is in."""

    claim: str
    cpu: list[str]
    gpu: list[str]
    bug: list[str]


ROWS = """
# eLLM
ownership: every page has one owner, and their sum is what exists
  bug core/read-blocks-are-reused allocator/csrc/heap/live_blocks.h
  cpu test_core_stateful.py::test_anything_in_any_order
  cpu test_core_cached_ranges.py::test_a_fault_at_every_driver_call_of_their_lives
  cpu streaming/test_sources.py::test_a_square_wave
  gpu gpu/test_balloon_tokens.py::test_several_models_and_threads
KV slot reuse: of the mapped free slots the smallest that fits
  bug core/claimed-for-good allocator/csrc/mapping/mapping.cpp
  cpu test_core_cached_ranges.py::test_the_cached_range_taken_is_the_smallest_that_fits
  cpu test_core_cached_ranges.py::test_serving_one_request_after_the_other_comes_to_call_the_driver_no_more
  gpu gpu/test_balloon_core.py::test_requests_come_to_call_the_driver_no_more figure:decode
  cpu test_core_cached_ranges.py::test_pages_claimed_for_a_request_that_fails_are_free_again
idle activations: free pages of activations become KV, and nothing is copied
  bug simgpu/graph-pool-pages allocator/csrc/heap/heap_pages.h
  cpu test_core_events.py::test_pages_go_to_the_cache_and_back
  gpu figure:context
  gpu gpu/test_core_allocator.py::test_graphs_keep_their_memory
deflate: the reverse, only when activations ask
  bug simgpu/idle-pages-are-waited-for allocator/csrc/heap/block_supply.cpp
  cpu test_core_events.py::test_pages_go_to_the_cache_and_back
  cpu test_core_events.py::test_page_found_without_effort_is_no_event
  gpu gpu/test_balloon_tokens.py::test_a_budget_that_shrinks_meanwhile figure:oom
  gpu gpu/test_core_order.py::test_pages_are_made_beside_a_busy_stream
pre-map, late unmap: the next page is mapped ahead, and unmapping is off the critical path
  bug simgpu/fence-retire allocator/csrc/mapping/retirement.cpp
  cpu kv/test_tiers.py::test_the_next_page_is_mapped_before_it_is_needed
  cpu kv/test_tiers.py::test_pages_lie_ahead_just_in_time_and_never_more_than_allowed
  cpu test_core_background.py::test_pages_mapped_ahead_are_claimed_without_the_driver
  cpu test_core_background.py::test_unmapping_is_no_business_of_who_retires
  cpu test_core_background.py::test_no_more_is_mapped_ahead_than_fifty_megabytes
  gpu gpu/test_balloon_core.py::test_requests_come_to_call_the_driver_no_more
  gpu gpu/test_core_order.py::test_pages_and_blocks
KV on the host: full pages are copied behind, taken in order, read in place, and are restored
  bug kv/written-pages-stay-clean hooks/kv/pages.py
  cpu kv/test_tiers.py::test_full_pages_lie_on_the_host_once_taken_and_on_the_device_once_back
  cpu kv/test_tiers.py::test_pages_copied_behind_are_clean_and_written_ones_dirty
  cpu kv/test_tiers.py::test_many_rows_read_copies_of_what_is_away kv/test_generate.py::test_tokens_are_those_of_stock
  gpu gpu/test_balloon_tokens.py::test_a_budget_that_shrinks_meanwhile figure:context
# eLLM, scheduling
admission: Algorithm 1, a request gets all that it needs in an iteration or nothing
  bug policy/admitted-one-by-one offload/policy/admission.py
  cpu test_admission.py::test_admission_is_the_papers_where_nobody_is_passed
  cpu test_admission.py::test_all_or_nothing_and_never_more_than_there_is
  cpu test_admission.py::test_nobody_is_passed_more_often_than_patience_allows
  gpu gpu/test_serve_batches.py::test_requests_that_do_not_fit_wait figure:serve
buffer: Algorithm 2, late steps halve it before late first tokens double it
  bug policy/first-tokens-before-gaps offload/policy/admission.py
  cpu test_admission.py::test_the_buffer_follows_algorithm_2
  cpu serving/test_batches.py::test_the_buffer_on_the_host_follows_what_is_violated
  gpu gpu/test_serve_batches.py::test_prompts_whose_kv_goes_to_the_host
prompts to the host: KV of layers that have run is copied beside the others, and read once it is there
  bug serving/new-kv-is-freed-before-it-is-copied hooks/batching/pages.py
  cpu serving/test_host_writes.py::test_blocks_are_copied_beside_the_computation
  cpu serving/test_host_writes.py::test_blocks_on_their_way_are_not_read_before
  gpu gpu/test_serve_batches.py::test_prompts_whose_kv_goes_to_the_host
# The price, which is of the design, not of a paper
the reclaim order: limits, then priority, then the price of absence
  bug policy/priority-counts-for-nothing offload/policy/reclaim_order.py
  cpu test_reclaim_order.py::test_candidates_are_in_order test_reclaim_order.py::test_no_floor_is_ever_crossed
  cpu test_price.py::test_layer_costs_what_the_fastest_pass_takes_longer_without_it_and_those_before
  cpu test_price.py::test_pages_taken_are_the_cheapest_choice_of_all
  cpu streaming/test_sources.py::test_a_square_wave streaming/test_sources.py::test_four_verbs
  gpu gpu/test_balloon_tokens.py::test_several_models_and_threads
rent: what is away comes back once its absence has cost that, twice where others' pages go for it
  bug policy/an-exchange-is-as-cheap-as-a-return offload/policy/rental.py
  cpu test_rental.py::test_alone_it_costs_at_most_twice_the_best_in_hindsight_and_one_change
  cpu test_rental.py::test_in_exchange_it_costs_at_most_three_times_the_best_fixed_choice_and_one_exchange
  cpu test_rental.py::test_on_a_square_wave_of_any_period_it_keeps_to_that
  cpu test_reclaim_order.py::test_on_a_square_wave_moves_take_no_longer_than_the_link_was_used_and_nothing_leaks
  gpu gpu/test_remap_kv.py::test_pages_of_layers_go_to_a_cache
turns: models share the device or take turns, whichever loses less, and nobody waits longer than a bound
  bug policy/a-turn-has-no-end offload/policy/turns.py
  cpu test_loop_turns.py::test_nobody_waits_for_longer_than_the_bound_whatever_others_have_to_do
  cpu test_loop_turns.py::test_models_share_where_all_fit_or_copies_hide
  gpu gpu/test_remap_kv.py::test_pages_of_layers_go_to_a_cache
events: nothing is decided anew until something has happened
  bug policy/an-event-is-not-seen offload/manager/overview.py
  cpu test_manager_repeats.py::test_answer_is_made_anew_after_an_event
  cpu test_manager_repeats.py::test_a_repeated_answer_is_what_a_new_one_would_be
  gpu gpu/test_weights_order.py::test_graphs_while_pages_run_out
spill: pages of the host in the place of pages of the device, rather than a refusal
  bug core/spilled-during-a-capture allocator/csrc/heap/block_supply.cpp
  cpu test_core_spill.py::test_spilled_block_goes_when_it_is_freed_and_device_pages_come_first_again
  gpu gpu/test_balloon_core.py::test_spilled_block_computes_the_same figure:oom
  cpu test_core_spill.py::test_not_during_a_capture
live budget: met with the driver, or refused with the number and nothing changed
  bug simgpu/lease-takes allocator/csrc/mapping/takes.cpp
  cpu test_core_stateful.py::test_anything_in_any_order
  cpu test_core_budget.py::test_from_a_signal_on_the_thread_that_leases
  gpu gpu/test_balloon_tokens.py::test_a_budget_that_shrinks_meanwhile figure:shrink
  gpu gpu/test_core_order.py::test_pages_taken_beside_a_forward
captures: nothing that one forbids is done while it lasts
  bug simgpu/capture-asked allocator/csrc/driver/streams.cpp
  cpu test_core_spill.py::test_not_during_a_capture test_core_budget.py::test_a_capture_that_ends_meanwhile
  gpu gpu/test_balloon_core.py::test_a_capture_pulls_no_source
  gpu gpu/test_core_order.py::test_captures_go_on
captures: what a graph has captured stays where it is, and its replays are leased
  bug simgpu/graph-keeps-layers hooks/device/graphs.py
  cpu streaming/test_graphs.py::test_a_captured_model_gives_nothing streaming/test_graphs.py::test_a_replay_is_leased
  gpu gpu/test_weights_order.py::test_graphs_while_pages_run_out
# Select-N
interval i streams the last layer of every i, double-buffered, and frees the others' pages
  bug policy/first-of-every-interval offload/policy/schedule.py
  cpu test_tables.py::test_interval_streams_the_last_of_every_i_layers
  cpu streaming/test_streaming.py::test_tokens_equal_stock
  gpu gpu/test_remap_architectures.py::test_tokens_are_stocks figure:streaming
the record: powers of two, phases apart, a 2 ms grid; conservative; a file that is reused
  bug policy/slo-is-rounded-up offload/record/record.py
  cpu test_record.py::test_the_table_holds_the_smallest_interval_that_meets_the_slo
  cpu test_record.py::test_a_looked_up_time_is_never_below_that_of_less_work
  cpu test_record.py::test_a_record_is_kept_in_a_file test_profile.py::test_a_record_is_measured_once
  cpu test_record.py::test_the_slo_is_listed_every_2_ms
  gpu figure:slo
phases: prefill and decode with SLOs of their own, in turn with one plan for both
  bug policy/prompts-have-the-slo-of-tokens offload/manager/clients.py
  cpu test_tables.py::test_prefill_may_stream_more_than_decode
  cpu test_manager_slo.py::test_nothing_is_loaded_where_prefills_and_steps_take_turns
  cpu test_manager_slo.py::test_a_phase_without_an_slo
  gpu figure:slo
admission: refused with the reason and the nearest SLO
  bug policy/last-model-is-refused offload/policy/coordinator.py
  cpu test_tables.py::test_no_interval_is_an_answer_and_not_an_exception test_manager_slo.py::test_admission
  cpu test_coordinator.py::test_a_refusal_says_what_would_work
  gpu figure:slo
coordinator: the models of one link share its bandwidth, most host memory used, re-chosen each iteration
  bug policy/link-has-room-for-all offload/policy/coordinator.py
  cpu test_coordinator.py::test_the_choice_is_the_best_of_all_combinations
  cpu test_coordinator.py::test_whoever_shares_the_link_meets_its_slo
  cpu test_coordinator.py::test_intervals_follow_the_link_and_no_slo_is_missed_that_was_not_given_up
  cpu test_manager_slo.py::test_no_slo_is_missed_that_was_promised
  gpu figure:slo
# Oneiros
when: pages of the cache are exhausted, not before
  bug policy/more-is-taken-than-lacks offload/manager/reclaim.py
  cpu test_manager.py::test_no_layer_is_taken_while_pages_are_free
  cpu replicas/test_duplicates.py::test_wish_comes_before_what_passes_wait_for
  cpu streaming/test_sources.py::test_an_idle_model_gives_and_gets_back
  gpu gpu/test_remap_kv.py::test_pages_of_layers_go_to_a_cache
which model: idle with the lowest priority, else the most recently used; never a whole model
  bug policy/least-recently-used-gives-first offload/policy/price.py
  cpu test_giving.py::test_models_in_a_round_give_most_recently_used_first_once_their_turns_are_known
  cpu test_giving.py::test_model_may_give_all_of_its_layers_but_a_slot
  cpu test_manager.py::test_idle_models_give_before_one_that_runs_and_important_ones_last
  cpu test_manager.py::test_of_equals_the_one_used_last_gives_first
  gpu gpu/test_remap_kv.py::test_pages_of_layers_go_to_a_cache
how many: T_T·m ≤ T_compute
  bug policy/what-is-waited-for-costs-nothing offload/policy/price.py
  cpu test_giving.py::test_a_layer_costs_more_than_its_way_there_and_back_once_copies_do_not_hide
  cpu test_giving.py::test_a_cap_grows_with_bandwidth_and_compute
  gpu figure:slo figure:streaming
  cpu test_giving.py::test_a_cap_is_what_hides_behind_an_iteration
which layers: evenly around the circle
  bug policy/first-layers-stream offload/policy/plan.py
  cpu test_tables.py::test_layers_are_spread_around_the_circle
  cpu test_tables.py::test_no_placement_is_faster_than_an_even_one
  gpu figure:streaming
slots: one or two by the closed forms
  bug policy/always-the-fewest-host-pages offload/policy/plan.py
  cpu test_tables.py::test_one_slot_or_two test_schedule.py::test_the_simulator_agrees_with_the_closed_forms
  cpu test_ring.py::test_every_number_of_layers_and_slots
  gpu gpu/test_remap_architectures.py::test_tokens_are_stocks figure:streaming
one direction: weights are never copied back
  bug streaming/write-through-a-kept-view-is-lost hooks/streaming/streamed.py
  cpu streaming/test_streaming.py::test_tokens_equal_stock
  gpu gpu/test_remap_architectures.py::test_tokens_are_stocks figure:streaming
  cpu streaming/test_who_looks.py::test_every_look_at_a_streamed_weight_shows_the_weight
reversion: pages that the cache leaves return to the weights
  bug policy/more-comes-back-than-fits offload/manager/decision.py
  cpu test_manager.py::test_layers_given_back_leave_room_for_the_next_tokens
  cpu test_reclaim_order.py::test_kv_and_layers_come_back_to_free_pages_once_the_link_was_used_for_as_long
  cpu streaming/test_sources.py::test_an_idle_model_gives_and_gets_back
  gpu gpu/test_remap_kv.py::test_pages_of_layers_go_to_a_cache
# SwiftCache
sizing: Eq. 1-5 in bytes, Eq. 5 never less than nothing; a double buffer halves what streams
  bug policy/slots-count-once offload/policy/kv_pages.py
  cpu test_layer_stream.py::test_the_worked_example
  cpu test_layer_stream.py::test_fewest_streamed_stores_what_the_equations_do
  gpu gpu/test_prefix_sizes.py::test_a_cache_goes_to_the_limit figure:context
layer stream: the load of layer j waits for attention j-1 and its store, and overlaps what follows
  bug simgpu/kv-slot-filled offload/residency/slots.py
  cpu kv/test_stream.py::test_a_load_waits_for_the_attention_before_and_attention_for_its_own_load
  cpu kv/test_stream.py::test_copy_behind_waits_for_the_stream_that_wrote
  cpu kv/test_stream.py::test_any_sequence_of_calls_equals_stock
  cpu kv/test_generate.py::test_tokens_are_those_of_stock_through_slots
  cpu test_layer_stream.py::test_seconds_are_those_of_a_pass_and_the_least_of_all_that_fits
  gpu gpu/test_kv_stream.py::test_layers_take_turns_in_slots gpu/test_kv_slots.py::test_tokens_are_stocks
  gpu gpu/test_kv_stream.py::test_slots_are_taken_while_a_layer_is_read
layout: resizing moves no bytes, in as many calls whatever there is
  bug kv/cut-keeps-pages hooks/kv/ranges.py
  cpu gpu/test_prefix_sizes.py::test_resizing_costs_the_same_whatever_there_is
  gpu gpu/test_prefix_sizes.py::test_resizing_costs_the_same_whatever_there_is
  cpu test_kv.py::test_the_tokens_lie_in_the_pool_and_pages_come_and_go_with_them
minimum unit: whole blocks of both models, and whole pages
  bug policy/unit-is-the-larger-block offload/policy/lending.py
  cpu test_lending.py::test_the_unit_is_the_least_that_is_whole_for_both test_lending.py::test_lwm_with_qwen3_14b
  gpu gpu/test_prefix_sizes.py::test_lwm_and_qwen3_14b_exchange_40_mib
lend, take back: up is rounded up, down is rounded down, by what was in use at once; hashes go before pages
  bug policy/lends-what-it-needs offload/policy/lending.py
  cpu test_lending.py::test_up_is_rounded_up_and_down_is_rounded_down
  cpu test_lending.py::test_the_window_against_all_that_ever_was
  cpu test_lending.py::test_lending_over_random_traces_takes_no_page_in_use
  cpu prefix/test_lend.py::test_a_worker_that_comes_back_takes_what_it_lacks
  cpu prefix/test_lend.py::test_prefixes_the_host_has_not_are_forgotten_first
  cpu prefix/test_lend.py::test_random_lending_while_all_generate
  gpu gpu/test_prefix_lending.py::test_models_take_their_pages_back
tiers: a peer's pages first, then the host's, and all is restored
  bug simgpu/kv-demoted offload/residency/backing.py
  cpu kv/test_peer.py::test_the_peer_is_filled_first_and_the_host_after_it_and_all_is_restored
  cpu kv/test_peer.py::test_tokens_are_those_of_stock_while_pages_go_all_ways
  cpu test_core_places.py::test_a_second_pool_is_labelled_so_and_has_a_budget_of_its_own
  gpu gpu/test_kv_stream.py::test_kv_goes_to_the_peer_and_on_to_the_host_and_is_restored figure:prefix
prefix reuse: what is stored is the same cache held by hand, to the bit
  bug prefix/dead-sequence-leaks hooks/prefix/index.py
  cpu prefix/test_lives.py::test_random_lives_have_the_tokens_of_stock prefix/test_sessions.py::test_a_session
  cpu prefix/test_trouble.py::test_threads_on_one_model
  cpu test_prefixes.py::test_blocks_evicted_by_density_are_leaves_nobody_pinned
  gpu gpu/test_prefix.py::test_conversations_while_pages_move figure:prefix
# Serving
batches: a request has stock's tokens however prompts are cut and blocks lie
  bug serving/rows-see-others-keys hooks/batching/attention.py
  cpu serving/test_attention.py::test_tokens_are_stocks_however_prompts_are_cut_and_lie
  cpu serving/test_batches.py::test_tokens_are_stocks
  gpu gpu/test_serve_attention.py::test_each_request_of_a_batch_attends_as_if_it_were_alone figure:serve
steps: one that finds no memory is tried again smaller, and all requests end
  bug serving/lost-steps-stay-as-large offload/policy/progress.py
  cpu test_progress.py::test_all_requests_end_whatever_steps_succeed
  gpu gpu/test_serve_batches.py::test_requests_that_do_not_fit_wait
preemption: a request that begins again has each token once
  bug serving/former-self-s-token hooks/batching/steps.py
  cpu serving/test_trouble.py::test_a_request_that_begins_again_gets_no_token_of_its_former_self
  gpu gpu/test_serve_batches.py::test_tokens_are_stocks_while_pages_move
shared prefixes: blocks that others have computed are found, and stay while somebody reads them
  bug serving/read-blocks-are-evicted hooks/batching/blocks.py
  cpu serving/test_one_index.py::test_the_index_and_the_ledger_agree_whatever_comes
  gpu gpu/test_serve_batches.py::test_beginnings_that_others_have_computed
# KunServe
drop plan: Fig. 6, the two groups with fewest members merge until enough is freed
  bug policy/merge-too-many offload/policy/replicas/drops.py
  cpu replicas/test_drops.py::test_groups_of_one_two_and_three_merge_as_in_the_paper
  cpu replicas/test_drops.py::test_the_plan_stops_once_enough_is_freed
  cpu replicas/test_drops.py::test_any_plan_in_several_levels
  gpu simulated:replicas
overload: layers are dropped where requests wait for memory, not where they wait to be computed
  bug policy/every-drop-helps offload/policy/replicas/drops.py
  cpu replicas/test_drops.py::test_a_load_that_waits_for_memory_drops
  cpu replicas/test_drops.py::test_a_load_that_waits_for_its_prompts_to_be_computed_does_not
  cpu replicas/test_controller.py::test_burst_is_answered_by_a_drop_and_calm_by_a_restore
  gpu simulated:replicas
exchange: each layer's KV comes to who holds it next, from one that has it
  bug replicas/kv-that-is-there-is-sent hooks/replicas/kv_exchange.py
  cpu replicas/test_kv_exchange.py::test_every_layer_comes_to_who_gets_it_from_one_that_has_it
  cpu replicas/test_kv_exchange.py::test_tokens_stay_while_spans_change
  gpu gpu/test_replicas_links.py::test_two_replicas_answer_as_stock
epochs: requests go on from one to the next, and a replica that waits for its next one rests
  bug replicas/kv-of-the-next-epoch-wakes hooks/replicas/replica.py
  cpu replicas/test_replica_loop.py::test_kv_for_an_epoch_that_a_replica_has_not_begun_ends_no_wait
  cpu replicas/test_replica_loop.py::test_requests_go_through_a_drop_and_a_restore
  gpu gpu/test_replicas_links.py::test_two_replicas_answer_as_stock simulated:replicas
cost of a chunk: Eq. 1-3, weights are read once for a batch
  bug policy/weights-are-read-for-each-chunk offload/policy/replicas/pipeline.py
  cpu replicas/test_pipeline_costs.py::test_a_chunk_costs_what_the_equation_says
  cpu replicas/test_pipeline_costs.py::test_a_decoding_request_has_its_own_cost_and_the_weights_are_read_once
  cpu replicas/test_pipeline_costs.py::test_the_fit_finds_what_made_the_samples
  gpu simulated:replicas
microbatches: they take as long as each other, and bubbles are near the floor, which those of Fig. 11 are not
  bug policy/batches-are-cut-by-tokens offload/policy/replicas/pipeline.py
  cpu replicas/test_pipeline_costs.py::test_batches_cost_alike_and_bubbles_are_near_the_floor
  cpu replicas/test_pipeline_costs.py::test_a_batch_behind_a_long_prefix_has_fewer_tokens
  gpu simulated:replicas
restore: below half of the memory, with nothing pending, for the whole dwell
  bug policy/restored-while-requests-wait offload/policy/replicas/demand.py
  cpu replicas/test_demand.py::test_calm_takes_the_whole_dwell
  cpu replicas/test_demand.py::test_half_of_the_undropped_memory_is_not_calm
  cpu replicas/test_demand.py::test_one_look_with_something_pending_starts_the_dwell_anew
  cpu replicas/test_fleet_run.py::test_square_wave_has_one_drop_and_one_restore_in_a_period_at_most
  gpu simulated:replicas
faults: whatever process ends, a client has each token of its answer once
  bug replicas/repeated-tokens-are-delivered-again hooks/replicas/client_requests.py
  cpu replicas/test_supervisor.py::test_clients_get_each_token_once replicas/test_kills.py::test_row
  gpu gpu/test_replicas_links.py::test_two_replicas_answer_as_stock
"""


def rows(text: str) -> list[Row]:
    """A line of a claim, and below it those of its proofs."""
    table: list[Row] = []
    for line in text.splitlines():
        if line and line[0] not in " #":
            table.append(Row(line, [], [], []))
        elif line.startswith("  "):
            kind, *proofs = line.split()
            getattr(table[-1], kind).extend(proofs)
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
    figures |= {f"simulated:{name}" for part in run.PARTS.values() if not part.gpu for name in part.benchmarks}
    tests = {path for part in parts for pattern in (*part.alone, *part.tests) for path in ROOT.glob(pattern)}
    assert row.cpu
    assert row.gpu
    missing = [proof for proof in row.cpu if not is_there(proof)]
    for proof in row.gpu:
        if proof.startswith(("figure:", "simulated:")):
            shown = proof in figures
        else:
            shown = is_there(proof) and ROOT / "tests" / proof.partition("::")[0] in tests
        missing += [] if shown else [proof]
    assert not missing
    name, file = row.bug
    planted = BUGS[name]
    assert file in {edit.path for edit in planted.edits}
    proofs = [*row.cpu, *row.gpu]
    files = {proof.partition("::")[0] for proof in proofs}
    killers = [test.removeprefix("tests/").partition("[")[0] for test in planted.tests]
    assert [test for test in killers if test not in (proofs if "::" in test else files)] == []


def test_a_row_that_lost_its_proof_is_noticed(run: ModuleType) -> None:
    assert not is_there("test_tables.py::test_that_there_is_not")
    with pytest.raises(AssertionError, match="figure:none"):
        test_every_row_is_shown(Row("it", [A_TEST], ["figure:none"], []), run)
    with pytest.raises(KeyError, match="policy/none"):
        test_every_row_is_shown(Row("it", [A_TEST], ["figure:slo"], ["policy/none", "offload/policy/plan.py"]), run)
    strange = ["policy/first-layers-stream", "offload/policy/plan.py"]
    with pytest.raises(AssertionError, match="test_layers_are_spread"):
        test_every_row_is_shown(Row("it", [A_TEST], ["figure:slo"], strange), run)
