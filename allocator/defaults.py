"""Default numbers of the allocator that decide something: unit, reason, and where they were measured.

Those of offload/ and hooks/ are in offload/policy/tuning.py, which this package does not import. Measurements of a GPU
are of one H200 at PCIe 5 x16, driver 580.
"""

from __future__ import annotations

from typing import Final

# Bytes per page: device_choice.py, Note [Page size].
PAGE_SIZE: Final = {"cuda": 8 * 2**20, "standin": 2 * 2**20}
# Pages of a budget, at least: fewer could not hold one model's weights, cache and activations apart.
SMALLEST_BUDGET: Final = 4
# What of the free device memory stays outside the pool, for the context, kernels, cuBLAS and NCCL: a part, and no fewer
# bytes than this. Chosen.
OUTSIDE_SHARE: Final = 0.04
OUTSIDE_BYTES: Final = 3 * 2**29
# Parts of the memory that is there, where nothing was set. On the stand-in device pages are RAM: half of what is
# available, and half of the rest for host pages. Beside a GPU host pages are pinned, which no other process can use: a
# quarter of the RAM, and no more than half of what is available. A peer gives half of its memory; a second pool is a
# quarter of the budget, or an eighth of what is there where there is none yet. Chosen.
STANDIN_BUDGET: Final = 2
STANDIN_HOST: Final = 2
HOST_OF_ALL: Final = 4
HOST_OF_AVAILABLE: Final = 2
PEER_OF_DEVICE: Final = 2
PEER_OF_BUDGET: Final = 4
PEER_OF_ALL: Final = 8
# A replayed trace (replay.py) may take so many times its own peak, and pages beside that: the heap makes pages beyond
# its peak, up to as many again (heap_pages.h, Note [Growing]). Parts of its operations of which the peaks are known,
# each a point of a picture. Chosen.
REPLAY_ROOM: Final = 2
REPLAY_PAGES: Final = 64
REPLAY_PARTS: Final = 600
# Calls of the driver for each operation of a trace, above which larger pages are advised: a call takes 10 to 20 times
# what an allocation without one does (device_choice.py, Note [Page size]). Chosen.
REPLAY_CALLS: Final = 0.5
# Events that are kept; all are counted. Chosen.
EVENTS: Final = 1 << 14
# Seconds between looks whether more may leave the device, while a lower budget waits. Chosen.
BUDGET_LOOK: Final = 0.01
# Seconds that the end of a process waits for an answer that is being made (control.py, Note [The end of a process]),
# and that a client may take for its line. Chosen: a line comes at once or not at all.
CONTROL_GRACE: Final = 2.0
CONTROL_PATIENCE: Final = 5.0
# Decisions that a look at another process hands over at most, the last ones. Chosen: more than any screen shows.
LOOK_EVENTS: Final = 32
# Seconds until a process that could not take a connection, being out of file descriptors, tries again. Chosen.
CONTROL_AGAIN: Final = 0.1
# Seconds that the lock of a ledger (shared_ledger.py) is waited for, which is held for a read and a write of a small
# file, and bytes beyond which a file is none. Chosen: far more than thousands of processes take.
LEDGER_PATIENCE: Final = 2.0
LEDGER_LONGEST: Final = 1 << 20
# Seconds that the companion may take to compile. Chosen: a busy machine may take minutes.
COMPILE: Final = 300
# Seconds that all probes of a preflight may take together. Chosen: they take seconds, one that hangs is killed.
PREFLIGHT: Final = 150.0
# A kind of host memory is slow below this part of the speed of memory from cuMemHostAlloc. Chosen.
PROBE_SLOW: Final = 0.8
