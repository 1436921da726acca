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


CSRC = "allocator/csrc/"
COPIES = "tests/gpu/test_core_order.py::test_somebody_is_slow[copies-cuda]"
BLOCKS = "tests/gpu/test_core_order.py::test_somebody_is_slow[pages_and_blocks-cuda]"
CAPTURE = "tests/gpu/test_core_order.py::test_somebody_is_slow[captures_go_on-cuda]"
MOVES = "tests/gpu/test_core_order.py::test_a_lease_keeps_pages_where_they_are[moves_beside_a_forward-cuda]"
TAKES = "tests/gpu/test_core_order.py::test_a_lease_keeps_pages_where_they_are[pages_taken_beside_a_forward-cuda]"
GIVEN_UP = "tests/gpu/test_core_order.py::test_a_lease_keeps_pages_where_they_are[given_up_beside_moves-cuda]"
BESIDE = "tests/gpu/test_core_pages.py::test_pages_change_beside_a_kernel[cuda]"
ATTENTION = "tests/gpu/test_core_pages.py::test_kv_moves_while_attention_runs[cuda]"
GRAPHS = "tests/gpu/test_core_allocator.py::test_graphs_keep_their_memory[cuda]"
AND_A_COPY = "tests/gpu/test_core_captures.py::test_a_capture_and_a_copy[cuda]"

CORE = (
    # -- fences
    Mutant(
        "fence-retire",
        "the fence that pages pass before they are unmapped",
        (
            (
                CSRC + "mapper_retire.cpp",
                "unseen ? streams_.fence_over_all() : Streams::fence()",
                "unseen ? streams_.fence_over_all() : Fence{{}, true, 0}",
            ),
        ),
        (BLOCKS,),
    ),
    Mutant(
        "fence-query",
        "the question whether the events of a fence have passed",
        ((CSRC + "streams.cpp", "if (!asked.ok()) return false;", "if (!fence.recorded) return false;"),),
        (BLOCKS,),
    ),
    Mutant(
        "fence-wait",
        "the host's wait for the events of a fence",
        (
            (
                CSRC + "streams.cpp",
                'driver_.cuEventSynchronize(event).or_throw("waiting for what a stream was given");',
                "(void)event;",
            ),
        ),
        (COPIES,),
    ),
    Mutant(
        "fence-streams",
        "all streams but the default one, in a fence over those seen",
        (
            (
                CSRC + "streams.cpp",
                "    record(fence, seen_);\n    if (!fence.recorded) return false;",
                "    record(fence, {seen_.front()});\n    if (!fence.recorded) return false;",
            ),
        ),
        (BLOCKS,),
    ),
    Mutant(
        "stream-of-blocks",
        "the note of a stream at its first allocation",
        ((CSRC + "heap.cpp", "if (fresh) mapper_->note_stream(key.stream);", "(void)fresh;"),),
        (BLOCKS,),
    ),
    Mutant(
        "stream-of-copies",
        "the note of the streams that copy: pages leave under a copy",
        (
            (
                CSRC + "mapper.cpp",
                "streams_.note(*stream);  // a page that is copied to or from does not leave before",
                "",
            ),
        ),
        (BLOCKS,),
    ),
    Mutant(
        "stream-of-after",
        "the note of a stream that a copy comes after",
        ((CSRC + "mapper_move.cpp", "if (after) streams_.note(*after);", ""),),
        (BLOCKS, COPIES),
    ),
    # -- copies
    Mutant(
        "copy-fence",
        "the fence behind a copy, by which others wait for it",
        (
            (
                CSRC + "mapper_move.cpp",
                "Fence done = streams_.fence({stream});",
                "Fence done{{}, true, 0};",
            ),
        ),
        (COPIES,),
    ),
    Mutant(
        "copy-after",
        "the wait of a copy for the stream that it comes after",
        (
            (
                CSRC + "mapper_move.cpp",
                'driver_.cuStreamWaitEvent(stream, event, 0U).or_throw("ordering a copy after what runs");',
                "(void)event;",
            ),
        ),
        (COPIES,),
    ),
    Mutant(
        "copy-after-all",
        "all streams but the default one, for a copy that names none",
        ((CSRC + "mapper_move.cpp", ": streams_.seen();", ": std::vector<CUstream>{streams_.seen().front()};"),),
        (COPIES,),
    ),
    Mutant(
        "copy-order",
        "the one stream of all copies to the device",
        (
            (
                CSRC + "mapper_move.cpp",
                "const CUstream stream = to == Place::kDevice ? to_device_ : from_device_;",
                "static bool turn = false;\n  const CUstream stream = (turn = !turn) ? to_device_ : from_device_;\n  (void)to;",
            ),
        ),
        (COPIES,),
    ),
    Mutant(
        "stream-waits",
        "the wait of a stream for a copy whose bytes it reads",
        (
            (
                CSRC + "mapper.cpp",
                'driver_.cuStreamWaitEvent(stream, event, 0U).or_throw("ordering work after a copy");',
                "(void)event;",
            ),
        ),
        (COPIES,),
    ),
    Mutant(
        "copy-passed",
        "the question whether a copy is done",
        ((CSRC + "transfer.cpp", "return transfer_->mapper_->fence_passed(fence_);", "return true;"),),
        (COPIES,),
    ),
    Mutant(
        "copy-wait",
        "the host's wait for a copy",
        ((CSRC + "transfer.cpp", "transfer_->mapper_->fence_wait(fence_);", ""),),
        (COPIES,),
    ),
    # -- the heap
    Mutant(
        "block-fence",
        "the fence that a block passes that other streams have used, before it is used again",
        ((CSRC + "heap.cpp", "waiting_.push_back({mapper_->fence_over(users->second), block});", "release(block);"),),
        (BLOCKS,),
    ),
    Mutant(
        "record-stream",
        "`record_stream` on a tensor of the heap",
        ((CSRC + "heap.cpp", "  block->shared = true;\n", ""),),
        (BLOCKS,),
    ),
    Mutant(
        "record-stream-range",
        "`record_stream` on a tensor over a range, such as a weight",
        ((CSRC + "entry.cpp", "  note_range_stream(pointer, static_cast<CUstream>(stream));\n", ""),),
        (BLOCKS,),
    ),
    Mutant(
        "graph-pool",
        "the memory of their own that graphs allocate from",
        ((CSRC + "heap.cpp", "filling_.empty() ? MempoolId{} : pool_for(stream)", "MempoolId{}"),),
        (GRAPHS,),
    ),
    Mutant(
        "graph-pool-pages",
        "the rule that a graph's memory keeps its pages while the graph can be replayed",
        (
            (
                CSRC + "heap_pages.cpp",
                "return pools_.count(arena.key.pool) > 0;",
                "return arena.key.pool == MempoolId{99, 99};",
            ),
        ),
        (GRAPHS,),
    ),
    # -- what moves under use
    Mutant(
        "quiesce",
        "the wait for everything that was submitted, before addresses lead elsewhere",
        ((CSRC + "mapper_alias.cpp", "    await(lock, streams_.awaited(fence));\n", ""),),
        (ATTENTION, MOVES),
    ),
    Mutant(
        "move-copied",
        "the waits for the copy of a page before its old one goes",
        (
            (
                CSRC + "mapper_move.cpp",
                'driver_.cuStreamSynchronize(context_.copy_stream).or_throw("waiting for the copy of a page");',
                "",
            ),
            (
                CSRC + "mapper_move.cpp",
                "if (!driver_.cuStreamSynchronize(context_.copy_stream).ok()) return false;",
                "",
            ),
        ),
        (ATTENTION, MOVES),
    ),
    Mutant(
        "move-changed",
        "the second look at a page that was copied without the lock: somebody may have given it up",
        (
            (
                CSRC + "mapper_move.cpp",
                "if (range.closed_ || now.changed != before.changed ||",
                "if (range.closed_ ||",
            ),
        ),
        (GIVEN_UP,),
    ),
    Mutant(
        "take-copied",
        "the wait for a twin's bytes before the page that they came from goes",
        (
            (
                CSRC + "mapper_take.cpp",
                'driver_.cuStreamSynchronize(context_.copy_stream).or_throw("waiting for a twin");',
                "",
            ),
        ),
        (TAKES,),
    ),
    Mutant(
        "lease-moves",
        "the question whether another thread holds a lease, before pages move",
        ((CSRC + "mapper_alias.cpp", "return !range.group->leased_by_others();", "return true;"),),
        (MOVES,),
    ),
    Mutant(
        "lease-takes",
        "the question whether another thread holds a lease, before pages are taken",
        (
            (
                CSRC + "mapper_take.cpp",
                "if (takeable.group->leased_by_others()) return {Taken::Fate::kLeased, 0};",
                "",
            ),
        ),
        (TAKES,),
    ),
    # -- captures
    Mutant(
        "capture-asked",
        "the question whether a stream is being captured, before an event is recorded on it or looked at",
        (
            (
                CSRC + "streams.cpp",
                "return asked.ok() && status != cuda::kCaptureNone;",
                "return false;",
            ),
        ),
        (CAPTURE,),
    ),
    Mutant(
        "capture-waits",
        "the host's wait in the place of a captured stream's, which cannot wait for what is not captured",
        (
            (
                CSRC + "mapper.cpp",
                "if (!events.empty() && streams_.capturing(std::vector<CUstream>{stream})) return streams_.wait(events);",
                "",
            ),
        ),
        (AND_A_COPY,),
    ),
)

BEHIND = "tests/gpu/test_kv_order.py::test_somebody_is_slow[a_copy_behind_waits_for_who_writes-cuda]"
APPENDS = "tests/gpu/test_kv_order.py::test_somebody_is_slow[pages_wait_for_a_stream_that_only_appends-cuda]"
REPLAYS = "tests/gpu/test_kv_order.py::test_somebody_is_slow[a_replay_keeps_its_memory-cuda]"
FORWARDS = "tests/gpu/test_kv_order.py::test_a_lease_keeps_pages_where_they_are[True-cuda]"
CALLS = "tests/gpu/test_kv_order.py::test_a_lease_keeps_pages_where_they_are[False-cuda]"
BUFFERS = "tests/gpu/test_kv_stream.py::test_layers_take_turns_in_buffers[cuda]"
HOME = "tests/gpu/test_kv_stream.py::test_pages_come_home_while_layers_compute[cuda]"
PEER = "tests/gpu/test_kv_peer.py::test_kv_goes_to_the_peer_and_on_to_the_host_and_comes_home[same-cuda]"
TURNS = "tests/gpu/test_prefix.py::test_turns_on_different_streams[cuda]"
LEFT = "tests/gpu/test_prefix.py::test_prefixes_that_left_the_device[cuda]"
AT_ONCE = "tests/gpu/test_prefix.py::test_threads_that_talk_at_once[cuda]"

KV_TWIN, KV_STREAM, KV_TIER = "offload/move/kv_twin.py", "offload/move/kv_stream.py", "offload/govern/kv_tier.py"
KV = (
    Mutant(
        "replay-unseen",
        "the wait of a graph's memory for streams that only replayed it",
        ((CSRC + "mapper_retire.cpp", "unseen ? streams_.fence_over_all() : Streams::fence()", "Streams::fence()"),),
        (REPLAYS,),
    ),
    Mutant(
        "kv-note-stream",
        "the note of the stream that appends to a cache",
        (("hooks/kv/range.py", "        else:\n            self._device.note_stream(self.pages.stream)\n", ""),),
        (APPENDS,),
    ),
    Mutant(
        "kv-lease-forward",
        "the lease of a forward on its cache",
        (("hooks/lease.py", "            lease.enter_group(self._group)\n", "            pass\n"),),
        (FORWARDS,),
    ),
    Mutant(
        "kv-lease-calls",
        "the lease that a thread keeps on a cache which it uses outside of forwards",
        (("hooks/lease.py", "            lease.enter(self._group)\n", ""),),
        (CALLS,),
    ),
    Mutant(
        "kv-behind-after",
        "the wait of what is copied behind for the stream that writes",
        (
            (
                KV_TIER,
                "twin.arrive(self._stream)  # some may have come home just now\n            done = self.transfer.copy(copies, after=self._stream,",
                "twin.arrive(self._stream)  # some may have come home just now\n            done = self.transfer.copy(copies, after=0,",
            ),
        ),
        (BEHIND,),
    ),
    Mutant(
        "kv-arrive",
        "the wait of a layer's stream for its KV that comes home",
        (
            (
                KV_TWIN,
                "done.wait() if stream is None else done.before(stream)",
                "done.wait() if stream is None else None",
            ),
        ),
        (HOME,),
    ),
    Mutant(
        "kv-arrive-host",
        "the host's wait for KV that comes home while somebody else holds tensors over it",
        (
            (
                KV_TWIN,
                "done.wait() if stream is None else done.before(stream)",
                "done.before(stream or 0)",
            ),
        ),
        (HOME,),
    ),
    Mutant(
        "kv-buffer-filled",
        "the wait of a layer's stream for the copy into its buffer",
        ((KV_STREAM, "                flight.buffer.done.before(stream)\n", "                pass\n"),),
        (BUFFERS,),
    ),
    Mutant(
        "kv-buffer-free",
        "the wait of a copy into a buffer for the layer that read it before",
        (
            (
                KV_STREAM,
                "buffer.done = self._copy(self._copies(flight, twin), stream)",
                "buffer.done = self._copy(self._copies(flight, twin), 0)",
            ),
        ),
        (BUFFERS,),
    ),
    Mutant(
        "kv-buffer-streams",
        "the wait of a copy into a buffer for another stream that read it",
        (
            (
                KV_STREAM,
                "            self._copy([], buffer.stream)  # what comes next waits for that one too",
                "            pass",
            ),
        ),
        (BUFFERS,),
        survives="whoever computes on another stream has it wait for the layer before, whose output it needs, and the copy waits for that stream",
    ),
    Mutant(
        "kv-buffer-held",
        "the question whether somebody has a tensor over the layer that a buffer holds, before another takes it",
        (
            (
                KV_STREAM,
                "        if twin is not None and not twin.alone():\n            self.ground(twin)",
                "        del twin",
            ),
        ),
        (BUFFERS,),
    ),
    Mutant(
        "kv-home-after",
        "the wait of what brings KV home for the stream that uses it",
        (
            (
                KV_TWIN,
                'self._arriving = transfer.copy(copies, after=stream, owner="kv", to="device")',
                'self._arriving = transfer.copy(copies, after=0, owner="kv", to="device")',
            ),
        ),
        (HOME,),
        survives="pages of its own come to a cache only after everything that was submitted, and the copies are submitted next, by the same thread",
    ),
    Mutant(
        "kv-displace-copied",
        "the wait for the copy of a page before its address leads to it",
        (
            (
                KV_TWIN,
                'transfer.copy(copies, after=stream, owner="kv", to="host").wait()\n            led = 0',
                'transfer.copy(copies, after=stream, owner="kv", to="host")\n            led = 0',
            ),
        ),
        (HOME, BUFFERS),
    ),
    Mutant(
        "kv-clean-too-early",
        "the questions whether a page's copy has passed, before the page counts as clean",
        (
            (
                KV_TWIN,
                "            elif done.passed():\n                passed.append(piece)",
                "            else:\n                passed.append(piece)",
            ),
            (
                KV_TWIN,
                "for piece, done in copying if done is not None and done.passed()]",
                "for piece, done in copying if done is not None]",
            ),
        ),
        (BEHIND, HOME),
    ),
    Mutant(
        "kv-written-again",
        "the wait of who writes to a full page again for its copy",
        (
            (
                KV_TWIN,
                "            if done is not None:\n                done.before(stream)\n            found.add(piece)",
                "            found.add(piece)",
            ),
        ),
        (HOME, BEHIND),
    ),
    Mutant(
        "kv-demoted",
        "the question whether a copy from the peer to the host has passed, before it takes the place",
        (
            (
                KV_TWIN,
                "for piece, done in self._going.items() if done is not None and done.passed()]",
                "for piece, done in self._going.items() if done is not None]",
            ),
        ),
        (PEER,),
    ),
    # -- prefixes
    Mutant(
        "prefix-after-writes",
        "the wait of who copies a stored prefix for the stream that wrote it",
        (("hooks/prefix/sequence.py", "            stream.wait_event(self.written)\n", "            pass\n"),),
        (TURNS,),
    ),
    Mutant(
        "prefix-after-reads",
        "the wait of who goes on with a stored prefix for the streams that copied from it",
        (
            (
                "hooks/prefix/sequence.py",
                "                    stream.wait_event(self.read.popitem()[1])\n",
                "                    self.read.popitem()\n",
            ),
        ),
        (TURNS,),
    ),
    Mutant(
        "prefix-lease",
        "the lease on a stored prefix while it is copied from",
        (
            (
                "hooks/prefix/sequence.py",
                "                stack.enter_context(Holding(group))\n",
                "                pass\n",
            ),
        ),
        (AT_ONCE, TURNS),
    ),
)

LAUNCHED = "tests/gpu/test_manage_order.py::test_weights_change_memory_after_what_was_launched[cuda]"
WAITING = "tests/gpu/test_manage_order.py::test_forwards_wait_while_weights_change_memory[cuda]"
RELEASED = "tests/gpu/test_manage_order.py::test_a_model_is_released_after_what_was_replayed[cuda]"
REPLAYED = "tests/gpu/test_manage_order.py::test_weights_stay_where_they_are_in_a_replay[cuda]"
RUN_OUT = "tests/gpu/test_weights_order.py::test_graphs_while_pages_run_out[cuda]"
CACHES = "tests/gpu/test_weights_order.py::test_caches_in_graphs[cuda]"

MODELS = (
    Mutant(
        "manage-waits",
        "the waits for what was launched, before weights change memory",
        (
            (
                "hooks/managed.py",
                "            moving.wait_for_work(device)\n            seed",
                "            seed",
            ),
            (
                "hooks/managed.py",
                "            moving.wait_for_work(device)  # other threads run it on other streams\n",
                "",
            ),
        ),
        (LAUNCHED,),
    ),
    Mutant(
        "gate",
        "the gate at which forwards of other threads wait while weights change memory",
        (("hooks/gate.py", "            self.gate.wait()\n", ""),),
        (WAITING,),
    ),
    Mutant(
        "gate-users",
        "the wait for forwards that run already, before weights change memory",
        (
            (
                "hooks/managed.py",
                "        gate.wait_until_unused()  # without the lock, for which a forward may wait\n",
                "",
            ),
        ),
        (WAITING,),
    ),
    Mutant(
        "lease-forward",
        "the lease of a forward on its weights",
        (
            (
                "hooks/forwards.py",
                "outermost.lease.open().enter_group(self._weights.group)\n        if self._gate is not None",
                "outermost.lease.open()\n        if self._gate is not None",
            ),
        ),
        (WAITING,),
    ),
    Mutant(
        "lease-replay",
        "the lease of a replay on what its graph has captured",
        (("hooks/graphs.py", "        for _, group in self._groups:\n            lease.enter(group)\n", ""),),
        (REPLAYED,),
    ),
    Mutant(
        "replay-stream",
        "the note of the stream that replays a graph",
        (("hooks/graphs.py", "            device.note_stream(stream_of(device)())\n", "            pass\n"),),
        (RELEASED,),
    ),
    Mutant(
        "end-mark",
        "the mark at the end of a forward: a model is idle when it was launched, and gives first",
        (("offload/govern/activity.py", "        if end is not None:\n            self._ends.append(end)\n", ""),),
        ("tests/gpu/test_pace.py::test_in_use_until_the_device_is_done[cuda]",),
    ),
    Mutant(
        "graph-keeps-layers",
        "the rule that layers stay on the device which a graph has captured",
        (("hooks/graphs.py", "        known[2].update(layers)\n", ""),),
        (RUN_OUT,),
    ),
    Mutant(
        "graph-keeps-cache",
        "what a graph holds of the caches that it reads",
        (("hooks/graphs.py", "        self._shown += tensors\n", ""),),
        (CACHES,),
    ),
)

MUTANTS = (*CORE, *KV, *MODELS)
