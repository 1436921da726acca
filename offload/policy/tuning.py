"""What the manager of a device hands on: the numbers that a test, a policy of `whatif` or a benchmark sets otherwise,
each with its unit, why it is so, and where it was measured.

Code that decides gets its part as an argument, from the manager of a device or `manage()`. So a test gives other
values to what it builds and patches nothing. A number that nobody sets is a constant beside the line that reads it;
those of replicas, servers and processes that share a budget are in replicas/tuning.py, hooks/server/connections.py and
shares.py, what a user chooses in allocator/config.py, and the allocator's own in allocator/defaults.py.

A value that says *chosen* was never measured: it is a round number, for the reason given. Measurements of a GPU are of
one H200 at PCIe 5 x16, driver 580, an 8B Llama shape in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .shares import Sharing


@dataclass(frozen=True, slots=True)
class FreePages:
    """When free pages are short, ample, or to spare (manager/device_view.py)."""

    # Fewer than 1/4 of the budget free: worth host memory to prepare for less. Chosen; the steady state after a
    # shortage depends on it.
    short: int = 4
    # Seconds that pages have to be ample until copies on the host are given up. To make one again costs its bytes over
    # the link. Chosen; it delays the steady state after a shortage.
    forget: float = 60.0
    # Seconds after its last iteration, on the device, after which a model or a cache is idle: longer than a decode step
    # of any model here, shorter than a user reads. Chosen.
    idle: float = 1.0
    # Seconds between looks, while a thread waits, for pages that were freed without a wake-up. A tenth of a decode step
    # at most. Chosen.
    look: float = 0.005


@dataclass(frozen=True, slots=True)
class Prices:
    """How pages are priced (price.py)."""

    # Seconds that pages stay away, as long as none have come back; between which bounds what was seen counts, and the
    # returns that are remembered. Chosen: a burst, a step of a large batch, a coffee.
    horizon: float = 10.0
    shortest: float = 1.0
    longest: float = 300.0
    remembered: int = 8
    # Times what a change costs that is waited for what is away until it is made. Infinity: nothing comes back, to see
    # what that is worth.
    returns: float = 1.0
    # Part of itself by which a pass may take longer while copies count as hidden: the limit of docs/measuring.md,
    # bench_streaming.py.
    hidden: float = 0.03
    # Part by which a layer's time to copy, over that to compute, moves until its price is made again. Measured: a list
    # of 32 layers takes 34,000 calls of Python where none is kept, and 90 where all are.
    step: float = 0.1


@dataclass(frozen=True, slots=True)
class TurnLengths:
    """When models of a device take turns (turns.py)."""

    # Times what moves at the beginning of a turn, that others wait until the present model begins no more requests: a
    # turn also costs that the last requests run with few beside them. Measured (`bench_tenants`, 500 requests, two
    # models of 8B on 34 GiB): of Azure's 454 kept their SLOs, with 20 times 441; of chat in bursts 322, with 20 times
    # 278, with 10 times 277 (before what others use had a price).
    patience: float = 40.0
    # Seconds in which the KV that a model needed of late fades by half. Chosen: a burst. Of 120 of
    # Azure's requests 106 kept their SLOs, 66 where only what is needed now counts (before models shared turns).
    fades: float = 10.0


@dataclass(frozen=True, slots=True)
class WeightPlans:
    """Which layers stream and when that is looked at again (plan.py, manager/decision.py, hooks/streaming)."""

    # Numbers of slots that are tried: more than two are never faster (Oneiros §5.2).
    slots: tuple[int, ...] = (1, 2)
    # Part of the time that another plan has to save: below that copies and host pages cost more than it brings. Chosen.
    margin: float = 0.05
    # Iterations until it is looked whether another plan is faster, twice as many each time. Chosen: four times what a
    # record remembers of a point.
    look: int = 64
    # Iterations until what could not be arranged or measured is tried again. Chosen.
    again: int = 16
    # Decode steps that are alike, of which two are looked at and timed (steps_alike.py, kv_tier.py): the 85 calls of
    # Python that this takes are 5 a step then. Chosen.
    sampled: int = 32
    # Bytes from which on a tensor is streamed: a copy of 1 MiB has 48 of the 53 GB/s of an 8 MiB one, of 256 KiB 21.
    # Measured, pinned, host to device.
    large: int = 2**20
    # Bytes of a layer that a replica copies until its main loop counts on. Chosen: at 100 MB/s a third of
    # `ReplicaTuning.silent`, and far more than a copy needs to run at the full speed of the link.
    moved: int = 32 * 2**20


@dataclass(frozen=True, slots=True)
class KVReads:
    """How KV on the host is read: restored, through slots, or in place (kv_pages.py, manager/kv_read_plan.py)."""

    # Bytes per second of the link where it was not measured (a cache with no managed model): that of PCIe 4 x16.
    # Assumed (docs/limits.md).
    link: float = 25e9
    # The part of the link that reads in place have. Measured: 47 to 51 of 55 GB/s, bf16 matmul and decode attention.
    in_place: float = 0.9
    # Seconds that a copy takes beside its bytes. Measured: copies of 64 KiB have 6 GB/s, 11 us each.
    copy: float = 1e-5
    # Iterations until it is decided anew, at most; and where what is away does not stream. Chosen.
    look: int = 64
    again: int = 8


@dataclass(frozen=True, slots=True)
class ChaosMoves:
    """How much chaos moves (ballonet/testing/chaos.py)."""

    # Boundaries of layers for one at which a source is reclaimed, on average. Chosen: much in a short test.
    seldom: int = 8


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Sequences kept for prompts, in memory and in files (hooks/prefix)."""

    # Tokens that are stored and evicted together: what other prefix caches use.
    block: int = 256
    # Blocks in one file, at most: what is read or evicted at once. Chosen: 512 MiB of an 8B model.
    blocks: int = 16
    # Requests that compute what files have until it is tried again how fast those are. Chosen.
    again: int = 16
    # Seconds until a folder that could not be written to is tried again. Chosen: a full disk stays so for a while.
    rest: float = 60.0
    # So many times more than 1.3 times as often as wrong what was learned has to be right to decide which block goes
    # (prefixes.py): of 0, 3, 5 and 10 the least with which every row of bench_prefix.py, seeded twice, finds what least
    # recently used does. Measured there.
    doubt: float = 5.0


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long one thread waits for another, in seconds of the clock of waits, and how often it looks, in seconds that
    really pass. All chosen."""

    # Changes of layers for forwards that are running, and between looks at them: an order above a long prefill.
    gate: float = 30.0
    gate_look: float = 0.005
    # A forward for the slots: without them it reads the host, right and slower, so it need not wait long.
    slots: float = 1.0
    slots_look: float = 0.05
    # A cache for pages that other threads lease, at a time, and in all where the last wait was in vain.
    room: float = 5.0
    room_look: float = 0.1
    # A release of a model, the closing of its prefixes or the end of Python, for what is not written yet.
    files: float = 60.0


@dataclass(frozen=True, slots=True)
class Serving:
    """Requests that are served together (admission.py, progress.py, step_costs.py)."""

    # Iterations in which others may pass a request that does not fit. A prompt takes tens of iterations to be decoded,
    # so a waiting one is looked at again several times before it holds up the rest. Chosen.
    patience: int = 16
    # A request that is alone and finds no memory looks so often before it fails, ten times a second (the loop of
    # transformers): requests of other models end meanwhile. Chosen.
    lonely: int = 100
    # A step of one token of one request, which finds no memory while no other request of its loop has any, is tried
    # again so often (progress.py). Chosen: what is short for a moment is there then.
    tries: int = 3
    # Steps that give tokens, at most, until a larger one is tried. Chosen: one step in 33 is lost where no larger one
    # ever finds memory, and a shortage that is over has slowed down some 60 steps.
    pause: int = 32
    look: float = 0.1  # s, that this loop waits (hooks/plan/machine.py)
    # Steps until what lies idle in the heap is compared with what they needed, where layers stream. Chosen: a second or
    # two of decoding; a step that maps its pages anew takes some ms longer.
    idle: int = 64
    # Where models are swapped for comparison, another's oldest request waits so many times what the copies take until
    # the one that is there gets no new ones: a fifth of the time may go into swapping. After `turn` s its requests are
    # suspended: what leaves of the 4 s to the first token that bench_tenants counts by a second for the prompt. Chosen;
    # with 1 s half of the requests had a gap of more than a second.
    swaps: float = 4.0
    turn: float = 3.0
    # To measure what steps take, so many requests are answered, of so many tokens at the most, with answers of at most
    # so many: a few seconds of a small model on a CPU. Chosen.
    sample: int = 24
    prompt: int = 512
    answer: int = 48
    # After so many new steps the parts of their costs are worked out anew, 3 ms of numpy (step_costs.py). A smaller
    # batch must be so much faster: less is noise here. Chosen.
    refit: int = 8
    gain: float = 0.1
    # By each step that reads no KV on the host the longest of them that is remembered fades to so much (step_bound.py):
    # to half of it in 700 steps, in which some prompts come where any wait. Chosen.
    fading: float = 0.999
    # `most`: part of the host's memory that the buffer for KV of prompts may have, and begins with (eLLM's B_max; 0: no
    # prompt's KV goes there). `activations_give`: KV and activations exchange pages (eLLM §4.3), else what stock sets
    # aside for activations stays theirs. Changed only to see what either is worth: docs/measuring.md, bench_tenants.py.
    most: float = 1.0
    activations_give: bool = True
    # What is measured of each of several models before it is served: batches and lengths up to these, for so many
    # seconds. Chosen: enough to know what hides behind its steps while it is idle.
    measured: tuple[int, int, float] = (4, 512, 10.0)
    # Where operators are complete when they return, a page of layers costs this part of what the link takes, as long as
    # no step has copied any. Nothing hides there, so all of it.
    exposed: float = 1.0
    # Layers stream because a request's SLO allows it once no others have waited for so many seconds: a load that has
    # gaps is a load, and to move layers forth and back costs more than it gives. Chosen: a burst.
    behind: float = 10.0
    # eLLM §4.4.2: an event is `violations` within `window` iterations.
    violations: int = 3
    window: int = 5


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tuning of one device."""

    pages: FreePages = field(default_factory=FreePages)
    prices: Prices = field(default_factory=Prices)
    turns: TurnLengths = field(default_factory=TurnLengths)
    weights: WeightPlans = field(default_factory=WeightPlans)
    kv_reads: KVReads = field(default_factory=KVReads)
    chaos: ChaosMoves = field(default_factory=ChaosMoves)
    prefixes: Prefixes = field(default_factory=Prefixes)
    waiting: Waiting = field(default_factory=Waiting)
    serving: Serving = field(default_factory=Serving)
    sharing: Sharing = field(default_factory=Sharing)


DEFAULT = Tuning()
