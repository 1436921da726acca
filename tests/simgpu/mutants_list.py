"""The bugs that `mutants.py` plants: each removes one fence, wait, `record_stream` or lease.

An edit replaces a text that stands in its file exactly once. `tests`: those that may fail, the most likely one first.
What an edit breaks is found on a device that runs behind the host, so they run with a delay.
"""

from __future__ import annotations

from typing import NamedTuple

Edit = tuple[str, str, str]  # (file, text, what stands there instead)


class Mutant(NamedTuple):
    name: str
    what: str  # that is removed
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    survives: str = ""  # why no GPU could show it; empty where one could
    delay: int = 50_000  # ns before each operation of the device
    seed: int = 1


def plant(
    name: str, what: str, tests: str | tuple[str, ...], *edits: Edit, survives: str = "", delay: int = 50_000
) -> Mutant:
    return Mutant(name, what, edits, (tests,) if isinstance(tests, str) else tests, survives, delay)


# fmt: off
COPIES = "tests/gpu/test_core_order.py::test_somebody_is_slow[copies-cuda]"
BLOCKS = "tests/gpu/test_core_order.py::test_somebody_is_slow[pages_and_blocks-cuda]"
CAPTURE = "tests/gpu/test_core_order.py::test_somebody_is_slow[captures_go_on-cuda]"
MOVES = "tests/gpu/test_core_order.py::test_a_lease_keeps_pages_where_they_are[moves_beside_a_forward-cuda]"
TAKES = "tests/gpu/test_core_order.py::test_a_lease_keeps_pages_where_they_are[pages_taken_beside_a_forward-cuda]"
GIVEN_UP = "tests/gpu/test_core_order.py::test_a_lease_keeps_pages_where_they_are[given_up_beside_moves-cuda]"
ATTENTION = "tests/gpu/test_core_pages.py::test_kv_moves_while_attention_runs[cuda]"
GRAPHS = "tests/gpu/test_core_allocator.py::test_graphs_keep_their_memory[cuda]"
ANNOUNCED = "tests/gpu/test_core_captures.py::test_nothing_is_looked_at_once_a_capture_may_begin"
AND_A_COPY = "tests/gpu/test_core_captures.py::test_a_capture_and_a_copy[cuda]"
AGAIN = "tests/gpu/test_kv_order.py::test_somebody_is_slow[who_writes_again_waits_for_the_copy-cuda]"
BEHIND = "tests/gpu/test_kv_order.py::test_somebody_is_slow[a_copy_behind_waits_for_who_writes-cuda]"
APPENDS = "tests/gpu/test_kv_order.py::test_somebody_is_slow[pages_wait_for_a_stream_that_only_appends-cuda]"
LATER = "tests/gpu/test_kv_order.py::test_somebody_is_slow[pages_wait_for_a_later_layer_of_a_forward-cuda]"
REPLAYS = "tests/gpu/test_kv_order.py::test_somebody_is_slow[a_replay_keeps_its_memory-cuda]"
FORWARDS = "tests/gpu/test_kv_order.py::test_a_lease_keeps_pages_where_they_are[True-cuda]"
CALLS = "tests/gpu/test_kv_order.py::test_a_lease_keeps_pages_where_they_are[False-cuda]"
KV_SLOTS = "tests/gpu/test_kv_stream.py::test_layers_take_turns_in_slots[cuda]"
HOME = "tests/gpu/test_kv_stream.py::test_pages_come_home_while_layers_compute[cuda]"
PEER = "tests/gpu/test_kv_peer.py::test_kv_goes_to_the_peer_and_on_to_the_host_and_comes_home[same-cuda]"
WRITTEN = "tests/gpu/test_prefix_order.py::test_prefixes_are_used_in_order[who_copies_waits_for_who_wrote-cuda]"
READ = "tests/gpu/test_prefix_order.py::test_prefixes_are_used_in_order[who_goes_on_waits_for_who_copied-cuda]"
COPIED = "tests/gpu/test_prefix_order.py::test_prefixes_are_used_in_order[other_threads_move_nothing_that_is_copied-cuda]"
SMALL = "tests/gpu/test_manage_order.py::test_weights_change_memory_after_what_was_launched[no_page_is_given_back-cuda]"
BEGINS = "tests/gpu/test_manage_order.py::test_a_forward_is_held_open[begins_meanwhile-cuda]"
RUNS = "tests/gpu/test_manage_order.py::test_a_forward_is_held_open[runs_already-cuda]"
STAY = "tests/gpu/test_manage_order.py::test_a_forward_is_held_open[pages_stay-cuda]"
FILLED = "tests/gpu/test_slots_order.py::test_slots_are_used_in_order[layers_wait_for_their_copies-cuda]"
FREE = "tests/gpu/test_slots_order.py::test_slots_are_used_in_order[copies_wait_for_layers-cuda]"
READERS = "tests/gpu/test_slots_order.py::test_slots_are_used_in_order[copies_wait_for_every_reader-cuda]"
KEPT = "tests/gpu/test_slots_order.py::test_slots_are_used_in_order[what_is_written_is_copied_again-cuda]"
ADOPTED = "tests/gpu/test_slots_order.py::test_slots_are_used_in_order[addresses_that_get_pages_wait_for_who_reads-cuda]"
RELEASED = "tests/gpu/test_manage_order.py::test_a_model_is_released_after_what_was_replayed[cuda]"
REPLAYED = "tests/gpu/test_manage_order.py::test_weights_stay_where_they_are_in_a_replay[cuda]"
RUN_OUT = "tests/gpu/test_weights_order.py::test_graphs_while_pages_run_out[cuda]"
CACHES = "tests/gpu/test_weights_order.py::test_caches_in_graphs[cuda]"

CORE = (
    plant("fence-retire", "the fence that pages pass before they are unmapped", BLOCKS,
          ("allocator/csrc/retirement.cpp", "unseen ? fences_.streams.fence_over_all() : Streams::fence()", "unseen ? fences_.streams.fence_over_all() : Fence{{}, true, 0}")),
    plant("fence-query", "the question whether the events of a fence have passed", BLOCKS,
          ("allocator/csrc/streams.cpp", "if (!asked.ok()) return false;", "if (!fence.recorded) return false;")),
    plant("fence-wait", "the host's wait for the events of a fence", COPIES,
          ("allocator/csrc/streams.cpp", 'driver_.cuEventSynchronize(event).or_throw("waiting for what a stream was given");', "(void)event;")),
    plant("fence-streams", "all streams but the default one, in a fence over those seen", BLOCKS,
          ("allocator/csrc/streams.cpp", "    record(fence, seen_);\n    if (!fence.recorded) return false;", "    record(fence, {seen_.front()});\n    if (!fence.recorded) return false;")),
    plant("stream-of-blocks", "the note of a stream at its first allocation", BLOCKS,
          ("allocator/csrc/heap.cpp", "if (fresh) mapper_->fences.note_stream(key.stream);", "(void)fresh;")),
    plant("stream-of-copies", "the note of the streams that copy: pages leave under a copy", BLOCKS,
          ("allocator/csrc/copies.cpp", "fences_.streams.note(*stream);  // a page that is copied to or from does not leave before", "")),
    plant("stream-of-after", "the note of a stream that a copy comes after", (BLOCKS, COPIES),
          ("allocator/csrc/copies.cpp", "if (after) streams.note(*after);", "")),
    plant("copy-fence", "the fence behind a copy, by which others wait for it", COPIES,
          ("allocator/csrc/copies.cpp", "Fence done = streams.fence({stream});", "Fence done{{}, true, 0};")),
    plant("copy-after", "the wait of a copy for the stream that it comes after", COPIES,
          ("allocator/csrc/copies.cpp", 'driver.cuStreamWaitEvent(stream, event, 0U).or_throw("ordering a copy after what runs");', "(void)event;")),
    plant("copy-after-all", "all streams but the default one, for a copy that names none", COPIES,
          ("allocator/csrc/copies.cpp", ": streams.seen();", ": std::vector<CUstream>{streams.seen().front()};")),
    plant("copy-order", "the one stream of all copies to the device", COPIES,
          ("allocator/csrc/copies.cpp", "const CUstream stream = to == Place::kDevice ? to_device_ : from_device_;", "static bool turn = false;\n  const CUstream stream = (turn = !turn) ? to_device_ : from_device_;\n  (void)to;")),
    plant("stream-waits", "the wait of a stream for a copy whose bytes it reads", COPIES,
          ("allocator/csrc/fences.cpp", 'space_.driver.cuStreamWaitEvent(stream, event, 0U).or_throw("ordering work after a copy");', "(void)event;")),
    plant("copy-passed", "the question whether a copy is done", COPIES,
          ("allocator/csrc/transfer.cpp", "return transfer_->mapper_->fences.passed(fence_);", "return true;")),
    plant("copy-wait", "the host's wait for a copy", COPIES,
          ("allocator/csrc/transfer.cpp", "transfer_->mapper_->fences.wait(fence_);", "")),
    plant("block-fence", "the fence that a block passes that other streams have used, before it is used again",
          BLOCKS,
          ("allocator/csrc/heap.cpp", "waiting_.push_back({mapper_->fences.over(users->second), block});", "release(block);")),
    plant("record-stream", "`record_stream` on a tensor of the heap", BLOCKS,
          ("allocator/csrc/heap.cpp", "  block->shared = true;\n", "")),
    plant("record-stream-range", "`record_stream` on a tensor over a range, such as a weight", BLOCKS,
          ("allocator/csrc/entry.cpp", "  note_range_stream(pointer, static_cast<CUstream>(stream));\n", "")),
    plant("graph-pool", "the memory of their own that graphs allocate from", GRAPHS,
          ("allocator/csrc/heap.cpp", "filling_.empty() ? MempoolId{} : pool_for(stream)", "MempoolId{}")),
    plant("graph-pool-pages", "the rule that a graph's memory keeps its pages while the graph can be replayed",
          GRAPHS,
          ("allocator/csrc/heap_pages.cpp", "return pools_.count(arena.key.pool) > 0;", "return arena.key.pool == MempoolId{99, 99};")),
    plant("quiesce", "the wait for everything that was submitted, before addresses lead elsewhere",
          (ATTENTION, MOVES),
          ("allocator/csrc/fences.cpp", "    await(in, streams.awaited(fence));\n", "")),
    plant("move-copied", "the waits for the copy of a page before its old one goes", (ATTENTION, MOVES),
          ("allocator/csrc/moves.cpp", 'space_.driver.cuStreamSynchronize(stream).or_throw("waiting for the copy of a page");', ""),
          ("allocator/csrc/moves.cpp", "if (!space_.driver.cuStreamSynchronize(space_.context.copy_stream).ok()) return false;", "")),
    plant("move-changed", "the second look at a page that was copied without the lock: somebody may have given it up",
          GIVEN_UP,
          ("allocator/csrc/moves.cpp", "if (range.closed || now.changed != before.changed ||", "if (range.closed ||"),
          delay=2_000_000),
    plant("take-copied", "the wait for a twin's bytes before the page that they came from goes", TAKES,
          ("allocator/csrc/takes.cpp", 'space_.driver.cuStreamSynchronize(stream).or_throw("waiting for a twin");', "")),
    plant("lease-moves", "the question whether another thread holds a lease, before pages move", MOVES,
          ("allocator/csrc/range.cpp", "return !group->leased_by_others();", "return true;")),
    plant("lease-takes", "the question whether another thread holds a lease, before pages are taken", TAKES,
          ("allocator/csrc/takes.cpp", "if (takeable.group->leased_by_others()) return {Taken::Fate::kLeased, 0};", "")),
    plant("capture-asked", "the question whether a stream is being captured, before an event is recorded on it or looked at",
          CAPTURE,
          ("allocator/csrc/streams.cpp", "return asked.ok() && status != cuda::kCaptureNone;", "return false;")),
    plant("capture-announced", "the rule that no fence is recorded once a thread has said that it may begin a capture", ANNOUNCED,
          ("allocator/csrc/streams.cpp", "if (captures_ > 0 || capturing()) return false;", "if (capturing()) return false;")),
    plant("capture-waits", "the host's wait in the place of a captured stream's, which cannot wait for what is not captured",
          AND_A_COPY,
          ("allocator/csrc/fences.cpp", "if (!events.empty() && streams.capturing(std::vector<CUstream>{stream})) return streams.wait(events);", "")),
)

KV = (
    plant("replay-unseen", "the wait of a graph's memory for streams that only replayed it", REPLAYS,
          ("allocator/csrc/retirement.cpp", "unseen ? fences_.streams.fence_over_all() : Streams::fence()", "Streams::fence()")),
    plant("kv-note-stream", "the note of the stream that appends to a cache", APPENDS,
          ("hooks/kv/range.py", "        else:\n            self.device.note_stream(self.pages.stream)\n", "")),
    plant("kv-note-layer", "the note of the stream of a layer that is not the first one of its forward", LATER,
          ("hooks/kv/range.py", "        else:\n            self.device.note_stream(stream)\n", "")),
    plant("kv-lease-forward", "the lease of a forward on its cache", FORWARDS,
          ("hooks/forward/lease.py", "            lease.enter_group(self._group)\n", "            pass\n")),
    plant("kv-lease-calls", "the lease that a thread keeps on a cache which it uses outside of forwards", CALLS,
          ("hooks/forward/lease.py", "            lease.enter(self._group)\n", "")),
    plant("kv-behind-after", "the wait of what is copied behind for the stream that writes", BEHIND,
          ("offload/governor/kv_saving.py", "extent.mover.arrive(stream)  # some may have come home just now\n            done = self._transfer.copy(copies, after=stream,", "extent.mover.arrive(stream)  # some may have come home just now\n            done = self._transfer.copy(copies, after=0,")),
    plant("kv-arrive", "the wait of a layer's stream for its KV that comes home", HOME,
          ("offload/residency/mover.py", "done.wait() if stream is None else done.before(stream)", "done.wait() if stream is None else None")),
    plant("kv-arrive-host", "the host's wait for KV that comes home while somebody else holds tensors over it", HOME,
          ("offload/residency/mover.py", "done.wait() if stream is None else done.before(stream)", "done.before(stream or 0)")),
    plant("kv-slot-filled", "the wait of a layer's stream for the copy into its slot", KV_SLOTS,
          ("offload/residency/slots.py", "            slot.done.before(stream)\n", "            pass\n")),
    plant("kv-slot-free", "the wait of a copy into a slot for the layer that read it before", KV_SLOTS,
          ("offload/residency/slots.py", "streams[-1] if streams else None)", "0)")),
    plant("kv-slot-streams", "the wait of a copy into a slot for another stream that read it", KV_SLOTS,
          ("offload/residency/slots.py", "        for stream in streams[:-1]:\n            self.copy([], stream)  # copies are made in the order of their submission\n", ""),
          survives="whoever computes on another stream has it wait for the layer before, whose output it needs, and the copy waits for that stream"),
    plant("kv-slot-held", "the question whether somebody has a tensor over the layer that a slot holds, before another takes it",
          KV_SLOTS,
          ("offload/residency/kv_slots.py", "        if extent is not None and not extent.alone():\n            self.map_to_host(extent)", "        del extent")),
    plant("kv-home-after", "the wait of what brings KV home for the stream that uses it", HOME,
          ("offload/residency/mover.py", 'self._arriving = transfer.copy(copies, after=stream, owner', 'self._arriving = transfer.copy(copies, after=0, owner'),
          survives="pages of its own come to a cache only after everything that was submitted, and the copies are submitted next, by the same thread"),
    plant("kv-clean-too-early", "the questions whether a page's copy has passed, before the page counts as clean",
          BEHIND,
          ("offload/residency/mover.py", "            elif done.passed():\n                passed.append(piece)", "            else:\n                passed.append(piece)"),
          ("offload/residency/mover.py", "for piece, done in saving if done is not None and done.passed()]", "for piece, done in saving if done is not None]")),
    plant("kv-written-again", "the wait of who writes to a full page again for its copy", AGAIN,
          ("offload/residency/mover.py", "            if done is not None:\n                done.before(stream)\n            found.add(piece)", "            found.add(piece)")),
    plant("kv-demoted", "the question whether a copy from the peer to the host has passed, before it takes the place",
          PEER,
          ("offload/residency/backing.py", "for piece, done in self.going.items() if done is not None and done.passed()]", "for piece, done in self.going.items() if done is not None]")),
    plant("prefix-after-writes", "the wait of who copies a stored prefix for the stream that wrote it", WRITTEN,
          ("hooks/prefix/sequence.py", "            stream.wait_event(self.written)\n", "            pass\n")),
    plant("prefix-after-reads", "the wait of who goes on with a stored prefix for the streams that copied from it",
          READ,
          ("hooks/prefix/sequence.py", "                    stream.wait_event(self.read.popitem()[1])\n", "                    self.read.popitem()\n")),
    plant("prefix-lease", "the lease on a stored prefix while it is copied from", COPIED,
          ("hooks/prefix/sequence.py", "                stack.enter_context(GroupLease(group))\n", "                pass\n")),
)

MODELS = (
    plant("slot-filled", "the wait of a layer's stream for the copy into its slot", FILLED,
          ("offload/residency/slots.py", "            slot.done.before(stream)\n", "            pass\n")),
    plant("slot-free", "the wait of a copy into a slot for the streams that read it", FREE,
          ("offload/residency/slots.py", "streams[-1] if streams else None)", "0)")),
    plant("slot-readers", "the wait of a copy into a slot for all of the streams that read it but one", READERS,
          ("offload/residency/slots.py", "        for stream in streams[:-1]:\n            self.copy([], stream)  # copies are made in the order of their submission\n", "")),
    plant("slot-kept", "the questions whether somebody can have written to a layer since it was copied for the next forward", KEPT,
          ("hooks/streaming/streamed.py", "return layer in self._unseen and bound.unheld() and self._versions.get(layer) == bound.written()", "return bound is not None"),
          ("hooks/streaming/streamed.py", "lambda following: self._layers[following].unheld()", "lambda following: True")),
    plant("slot-adopted", "the wait for everything that was submitted, before pages of a slot come to a layer's addresses", ADOPTED,
          ("allocator/csrc/aliasing.cpp", "if (!check() || !fences_.quiesce(in) || !check()) return false;", "if (!check()) return false;")),
    plant("manage-waits", "the waits for what was launched, before weights change memory", SMALL,
          ("hooks/managed.py", "            streams.wait_for_work(device)\n            seed", "            seed"),
          ("hooks/managed.py", "            streams.wait_for_work(device)  # other threads run it on other streams\n", "")),
    plant("gate", "the gate at which forwards of other threads wait while weights change memory", BEGINS,
          ("hooks/forward/gate.py", "            self.gate.wait()\n", "")),
    plant("gate-users", "the wait for forwards that run already, before weights change memory", RUNS,
          ("hooks/managed.py", "        gate.wait_until_unused()  # without the lock, for which a forward may wait\n", "")),
    plant("lease-forward", "the lease of a forward on its weights", STAY,
          ("hooks/forward/forwards.py", "outermost.lease.open().enter_group(self.weights.group)\n        if self._gate is not None", "outermost.lease.open()\n        if self._gate is not None")),
    plant("lease-replay", "the lease of a replay on what its graph has captured", REPLAYED,
          ("hooks/device/graphs.py", "        for _, group in self._groups:\n            lease.enter(group)\n", "")),
    plant("replay-stream", "the note of the stream that replays a graph", RELEASED,
          ("hooks/device/graphs.py", "            each.device.note_stream(stream_of(each.device)())\n", "            pass\n")),
    plant("end-mark", "the mark at the end of a forward: a model is idle when it was launched, and gives first",
          "tests/gpu/test_pace.py::test_in_use_until_the_device_is_done[cuda]",
          ("offload/governor/activity.py", "        if end is not None:\n            self._ends.append(end)\n", "")),
    plant("graph-keeps-layers", "the rule that layers stay on the device which a graph has captured", RUN_OUT,
          ("hooks/device/graphs.py", "        known[2].update(layers)\n", "")),
    plant("graph-keeps-cache", "what a graph holds of the caches that it reads", CACHES,
          ("hooks/device/graphs.py", "        self._shown += tensors\n", "")),
)
# fmt: on
MUTANTS = (*CORE, *KV, *MODELS)
