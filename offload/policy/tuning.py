"""Every number that decides something in offload/ and hooks/: its unit, why it is so, and where it was measured.

Code that decides gets its part as an argument, from the manager of a device or `manage()`. So a test gives other
values to what it builds and patches nothing. Not here: what a format or the driver fixes (bytes of a digest, a page of
the kernel), and what a user chooses (allocator/config.py); the allocator's own are in allocator/defaults.py.

A value that says *chosen* was never measured: it is a round number, for the reason given. Measurements of a GPU are of
one H200 at PCIe 5 x16, driver 580, an 8B Llama shape in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class FreePages:
    """When free pages are short, ample, or to spare (manager/device_view.py)."""

    # 1/32 of the budget never goes back to clients that gave pages, so that the next tokens find room. Chosen.
    spare: int = 32
    # Fewer than 1/4 of the budget free: worth host memory to prepare for less. Chosen; the steady state after a
    # shortage depends on it.
    short: int = 4
    # From 5/16 on it is not any more: above `short`, so that nothing flaps at the border. Chosen.
    ample: float = 5 / 16
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
    # 278, with 10 times 277.
    patience: float = 40.0
    # Seconds in which the KV that a model needed of late fades by half. Chosen: a burst. Of 120 of
    # Azure's requests 106 kept their SLOs, 66 where only what is needed now counts (before models shared turns).
    fades: float = 10.0


@dataclass(frozen=True, slots=True)
class WriteBehind:
    """How much KV is copied to the host ahead of need (manager/reclaim.py, Note [What is prepared])."""

    # 1/8 of the budget is kept clean, so that a cache that grows by less takes pages and copies nothing. Chosen.
    clean: int = 8
    # Bytes that are started at once: 1.2 ms of a PCIe 5 link, so that what must be copied now waits no longer. Computed
    # from 55 GB/s.
    step: int = 2**26


@dataclass(frozen=True, slots=True)
class Loans:
    """How models lend each other pages (offload/policy/lending.py, lending.py)."""

    # Seconds between looks whether a reserve can be spared: the window is a minute, so a second is soon enough. Chosen.
    check: float = 1.0
    # A unit is no more than 1/8 of the pool: the least common multiple of two models can be more than all of it
    # (lending.py, Note [Units of a pool]). Chosen.
    part: int = 8


@dataclass(frozen=True, slots=True)
class OtherTraffic:
    """How others' use of the link is watched (manager/device_view.py)."""

    # Seconds between two looks; one takes 20 ms of a thread of its own. Chosen.
    period: float = 1.0
    # Looks of which the middle one counts: copies come in bursts. Chosen.
    looks: int = 5
    # Traffic is told apart in sixteenths of the link: each change has all decisions made anew. Chosen.
    steps: int = 16


@dataclass(frozen=True, slots=True)
class WeightPlans:
    """Which layers stream and when that is looked at again (plan.py, manager/decision.py, hooks/streaming)."""

    # Numbers of slots that are tried: more than two are never faster (Oneiros §5.2).
    slots: tuple[int, ...] = (1, 2)
    # Times that a layer takes longer to copy than to compute, until it was measured. Measured: one sequence decoded
    # eagerly, PCIe 5. It decides between one slot and two and nothing else.
    assumed_ratio: Fraction = Fraction(4)
    # Part of the time that another plan has to save: below that copies and host pages cost more than it brings. Chosen.
    margin: float = 0.05
    # Iterations until it is looked whether another plan is faster; twice as many each time, up to `longest`. Chosen:
    # four times what a record remembers of a point.
    look: int = 64
    longest: int = 1024
    # Iterations until what could not be arranged or measured is tried again. Chosen.
    again: int = 16
    # Iterations after which new times are told, and the part of the last that they differ by: each telling has all
    # decisions made anew. Chosen.
    tell: int = 16
    news: float = 1 / 16
    # Sizes of each phase, the last ones, for which one plan keeps both SLOs of a model that prefills and decodes in
    # turn. Measured: the power of two above the longest of the last 16 prompts changes with 2 to 6 % of the requests of
    # three traces (Azure code, Mooncake, ShareGPT), of the last 8 with 9 to 13 %, of one alone with 56 to 84 %.
    sizes: int = 16
    # Decode steps that are alike, of which two are looked at and timed (steps_alike.py, kv_tier.py): the 85 calls of
    # Python that this takes are 5 a step then. Chosen.
    sampled: int = 32
    # Parts of the link by which needs are told apart (coordinator.py): a thousandth. Chosen.
    link_parts: int = 1024
    # Bytes from which on a tensor is streamed: a copy of 1 MiB has 48 of the 53 GB/s of an 8 MiB one, of 256 KiB 21.
    # Measured, pinned, host to device.
    large: int = 2**20
    # Part of a model's weights that a block of it may have at most to stream as a whole (model_parts.py): more would
    # make the slots, which hold the largest, as large as what is gained. Chosen.
    block: float = 0.25
    # Times that one tensor that a model replaces in its forward is moved in again. Chosen: what a model replaces in
    # each forward reaches it at once, what is converted or given adapters by hand does not.
    moves: int = 8
    # Tokens of the short `generate()` that a model has to have room for beside its weights (hooks/weights/ranges.py).
    # Chosen: a prompt and an answer of a line.
    short_use: int = 64
    # Bytes of a layer that a replica copies until its main loop counts on. Chosen: at 100 MB/s a third of
    # `ReplicaTuning.silent`, and far more than a copy needs to run at the full speed of the link.
    moved: int = 32 * 2**20
    # Pages for the allocator's small blocks in that. Chosen.
    small_blocks: int = 4
    # Rows of a product up to which it reads weights on the host as fast as the link copies them: 47 to 51 GB/s with 1
    # to 64 rows. Measured, bfloat16.
    rows: int = 64


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
    # Rows of queries of a sequence up to which pages are read in place; above them copying is better even where it
    # cannot hide. Measured: full speed with 1 to 64 rows, half of it with 512.
    rows: int = 64
    # Rows after which a kernel reads the same bytes again. Measured: 26 GB/s with 512 rows where 64 have 50.
    rows_of_a_pass: int = 256
    # 1/8 of a slot, and of what streams, may come before slots are arranged anew. Chosen.
    slack: int = 8
    # Iterations until it is decided anew, at most. Chosen.
    look: int = 64
    # The same where what is away does not stream. Chosen.
    again: int = 8
    # 1/32 of the budget stays with the cache, to be taken where activations need it before slots are. Chosen.
    left: int = 32
    # Beginnings of iterations that have not passed and are remembered: more than a host launches ahead. Chosen.
    pending: int = 16


@dataclass(frozen=True, slots=True)
class KVGrowth:
    """Pages made ready for tokens to come (kv_pages.py, manager/kv_tier.py, hooks/kv)."""

    # Bytes that may be mapped ahead of their use in all, or one page (eLLM §5.1). The core has the same (tuning.h).
    ahead: int = 50_000_000
    # Layers of a prefill for which pages are made ready: the one that runs next, and one more while its copies go
    # (eLLM §4.3.2). Chosen.
    layers: int = 2
    # 1/64 of the budget in new full pages of a prefill: then the manager is told at once, and makes a new list, which
    # takes milliseconds (docs/mechanisms.md). Chosen.
    tell: int = 64
    # Tokens that addresses are reserved for where nothing says how long sequences get. Chosen: they cost next to
    # nothing.
    tokens: int = 4096
    # Bytes in which sequences are reordered at a time. Chosen: 0.6 ms of the link.
    scratch: int = 32 * 2**20
    # Storages that are remembered before those that are gone are sorted out. Chosen.
    storages: int = 64


@dataclass(frozen=True, slots=True)
class PeerPages:
    """When pages leave the peer for the host (kv_pages.py, Note [Room])."""

    # 1/8 of the peer's pages is free at least, or 1/4 is made free. Chosen, apart so that it is not done all the time.
    low: int = 8
    enough: int = 4


@dataclass(frozen=True, slots=True)
class ChaosMoves:
    """How much chaos moves (ballonet/testing/chaos.py): much in a short test, and a forward still ends. Chosen."""

    # Attempts at each boundary of layers, for weights and for KV.
    moves: int = 2
    # Boundaries for one at which a source is reclaimed, on average.
    seldom: int = 8
    # Pages that a source is asked for in a reclaim, at most.
    pages: int = 32


@dataclass(frozen=True, slots=True)
class LinkMeasure:
    """How the link is measured (record/link.py, Note [Measuring the link])."""

    # Bytes that are taken of either side. Measured: a copy of 8 MiB has 53 of 55 GB/s.
    most: int = 8 * 2**20
    # Bytes from which it is known how much to copy at a time. Measured: a copy of 1 MiB has 48 of 55 GB/s.
    first: int = 2**20
    # Seconds that one measurement is to take: 2,000 times what a copy takes beside its bytes (`KVReads.copy`). Chosen.
    seconds: float = 0.02
    # Copies of one measurement, at most. Chosen.
    copies: int = 256
    # Measurements of which the best, or the median, counts. Chosen.
    rounds: int = 4
    # Bytes that are copied beside an operator, and seconds of that. Measured (2 cores, 32 MiB of cache): with 8 MiB an
    # operator loses 0.20 to 0.34 of its time, with 32 and more 0.35 to 0.39. Some tens of operators of a millisecond.
    wide: int = 64 * 2**20
    beside: float = 0.1
    # Bytes of one of these copies, as of a layer of a small model. Chosen.
    layer: int = 3 * 2**20


@dataclass(frozen=True, slots=True)
class Records:
    """How long iterations take (record/record.py, hooks/profile.py, hooks/measure)."""

    # Times that are remembered of what runs, for each point. Chosen.
    window: int = 16
    # Times among these, nearest in work, that say what an iteration takes as a rule. Chosen: odd, for a median.
    nearest: int = 5
    # Seconds: SLOs are listed at multiples of it (Select-N §4.4).
    grid: float = 0.002
    # Forwards that wait to be read. Chosen: more than a host launches ahead.
    pending: int = 64
    # Tokens of the shortest prompt that is measured, tokens that are generated (one by the prefill), and rounds that
    # count, of which the median is taken. Chosen: so a default grid is measured within a minute.
    shortest: int = 64
    tokens: int = 5
    rounds: int = 3
    # Every so many layers stream while it is measured what the host takes for each. Chosen: several, and few to copy.
    entering: int = 4
    # Times what an iteration takes: what copies may add and count as hidden. The limit of docs/measuring.md,
    # bench_streaming.py.
    hidden: float = 1.03


@dataclass(frozen=True, slots=True)
class BlockDensity:
    """How it is learned which blocks of a prefix cache go (prefixes.py). Chosen on prompts that were recorded and made:
    docs/measuring.md, hit rates."""

    # Keys that are gone and remembered, for each that is stored.
    remembered: int = 4
    # Uses that every kind of block starts with, which returned as those of all kinds.
    prior: float = 16.0
    # Octaves of ages, in blocks stored, that are told apart: more than any process stores.
    octaves: int = 48
    # Uses of a block from which on another request than this one and the one that stored it had it: two are those.
    shared: int = 3
    # Uses from which on they are not told apart.
    often: int = 8
    # Returns after which what was counted before weighs half.
    learned: int = 2**16
    # Blocks stored until densities are worked out again.
    again: int = 64
    # What was learned decides while it was right so many times as often as wrong, and so many times more: of 0, 3, 5
    # and 10 the least that had every row of bench_prefix.py, seeded twice, find what least recently used does.
    clearly: float = 1.3
    doubt: float = 5.0
    # Matches after which those before weigh half.
    matches: int = 4000


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Sequences kept for prompts, in memory and in files (hooks/prefix)."""

    # Tokens that are stored and evicted together: what other prefix caches use.
    block: int = 256
    # Tokens that are copied rather than take a sequence in which one more is lost for each. Chosen.
    worth: int = 4
    # 1/8 of the device's pages may be of prefixes that cannot be taken, as the host has no room. Chosen.
    stuck: int = 8
    # Bytes of a storage for each that a tensor shows, from which on a state is copied rather than kept whole. Chosen.
    loose: float = 1.25
    # Blocks in one file, at most: what is read or evicted at once. Chosen: 512 MiB of an 8B model.
    blocks: int = 16
    # Files whose speed is remembered. Chosen.
    reads: int = 8
    # Requests that compute what files have until it is tried again how fast those are. Chosen.
    again: int = 16
    # Seconds until a folder that could not be written to is tried again. Chosen: a disk that is full stays so for a
    # while.
    rest: float = 60.0
    # Tokens of a state, and of those computed behind it, by which it is seen whether a model goes on from one. Chosen:
    # few, as the model runs on them four times.
    proof: tuple[int, int] = (4, 3)
    # What decides which block goes first.
    density: BlockDensity = field(default_factory=BlockDensity)


@dataclass(frozen=True, slots=True)
class WeightsFiles:
    """How weights are read from files, in bytes at a time (residency/backing.py, hooks/weights)."""

    # Registered together: far more than a copy needs to run at the full speed of the link (`LinkMeasure.most`); a layer
    # of 400 MiB is cut six times.
    registered: int = 64 * 2**20
    # Read where a file cannot be registered, and compared with what is in memory. Chosen: little beside a layer.
    read: int = 16 * 2**20
    compared: int = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Waiting:
    """How long one thread waits for another, in seconds of the clock of waits, and how often it looks, in seconds that
    really pass. All chosen."""

    # changes of layers for forwards that are running, and between looks at them: an order above a long prefill.
    gate: float = 30.0
    gate_look: float = 0.005
    # A forward for the slots: without them it reads the host, right and slower, so it need not wait long.
    slots: float = 1.0
    slots_look: float = 0.05
    # A reader of a layer that only files have, for the forward thread, and between two looks.
    reveal: float = 60.0
    reveal_look: float = 0.02
    # A cache for pages that other threads lease, at a time, and in all where the last wait was in vain.
    room: float = 5.0
    room_look: float = 0.1
    # A release of a model, the closing of its prefixes or the end of Python, for what is not written yet.
    files: float = 60.0
    # Between looks whether there is room for a model that was refused; twice as long after each refusal.
    first_use: float = 1.0


@dataclass(frozen=True, slots=True)
class PieceForwards:
    """Which forwards run as pieces of CUDA graphs (hooks/pieces). All chosen."""

    # New tokens of each sequence: assisted decoding checks up to 21 at once. Longer forwards hide their launches.
    tokens: int = 32
    # New tokens of all sequences: what graphs keep grows with them, by some 40 KiB a token and layer of an 8B model.
    rows: int = 512
    # Kinds of forwards (batch, new tokens, arguments) whose graphs are kept.
    keys: int = 16
    # One in so many forwards by graphs is timed: a hundred calls of Python, beside the thousand that such one takes.
    timed: int = 32


@dataclass(frozen=True, slots=True)
class Timelines:
    """How much of a run a timeline keeps (timeline/recorder.py). Chosen for a trace that a browser opens at once."""

    # Seconds between two collections; the device's own log lasts for seconds.
    interval: float = 0.05
    # Rows of pages by owner, marks (the first ones), and decisions.
    rows: int = 20_000
    marks: int = 200
    events: int = 10_000
    # Requests (the first ones), and batches of each loop.
    requests: int = 2_000
    batches: int = 20_000
    # Bars of a server with replicas, the first ones: some minutes of its microbatches.
    bars: int = 50_000
    # Seconds between tries to write to a full disk, and tries of what is written at the end. Chosen: somebody who is
    # told of it has a minute to make room.
    rest: float = 2.0
    tries: int = 30


@dataclass(frozen=True, slots=True)
class Asking:
    """What one request to a server may ask for (hooks/server/fields.py). All chosen: more than clients were seen to
    send, and little enough that what a limit lets through is worked off in milliseconds, but for prompts."""

    messages: int = 4096
    parts: int = 1024  # of a message
    tools: int = 128  # as OpenAI
    stops: int = 16
    stop_length: int = 256  # characters
    biases: int = 4096
    ends: int = 128  # further tokens that end an answer
    choices: int = 128  # answers to all prompts of a request
    likeliest: int = 20  # tokens told with each one: as OpenAI
    variables: int = 32  # of a chat template, so many levels deep, of so many bytes as JSON
    variable_depth: int = 8
    variable_bytes: int = 2**16
    schema_bytes: int = 2**18  # a grammar, or a schema as JSON
    # Bytes of a body that the event loop parses at once: tens of milliseconds for small lists (measured). A larger one
    # is parsed by another process first.
    body: int = 2**18
    name: int = 128  # characters of an x-request-id, or of a function's name
    # tokens of an answer where neither the request nor the model's generation config says: as transformers
    answer: int = 1024


@dataclass(frozen=True, slots=True)
class Serving:
    """Requests that are served together (admission.py, progress.py, step_costs.py)."""

    # 1/64 of the budget stays free when requests are admitted (eLLM's threshold): what a forward allocates beyond the
    # estimate of its peak. Chosen.
    reserve: int = 64
    # Bytes for each logit while tokens are chosen: two copies of the scores, sorted ones with their ids, sums in
    # float64. By it rows of logits are chosen, and tokens of a prompt are scored, in parts that fit into the reserve.
    logit: int = 32
    # Iterations in which others may pass a request that does not fit. A prompt takes tens of iterations to be decoded,
    # so a waiting one is looked at again several times before it holds up the rest. Chosen.
    patience: int = 16
    # A request that is alone and finds no memory looks so often before it fails, ten times a second (the loop of
    # transformers): requests of other models end meanwhile. Chosen.
    lonely: int = 100
    # A step of one token of one request, which finds no memory while no other request of its loop has any, is tried
    # again so often (progress.py). Chosen: what is short for a moment is there then.
    tries: int = 3
    # Steps that give tokens until a larger one is tried: so many times as many after each lost step, half as many after
    # each larger one, and at most this many. Chosen: one step in 33 is lost where no larger one ever finds memory, and
    # a shortage that is over has slowed down some 60 steps.
    slower: int = 4
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
    told: float = 5.0  # s, between two lines about how far that is
    # What steps took (step_costs.py): so many of each size are remembered, and after so many new ones the parts are
    # worked out anew, 3 ms of numpy. A smaller batch must be so much faster: less is noise here. Chosen.
    remembered: int = 4
    refit: int = 8
    gain: float = 0.1
    # By each step that reads no KV on the host the longest of them that is remembered fades to so much (step_bound.py):
    # to half of it in 700 steps, in which some prompts come where any wait. Chosen.
    fading: float = 0.999
    # So many steps of prompts alone may follow one another before those that decode have one: a gap between two tokens
    # of five steps. Chosen.
    prompts: int = 4
    # Inputs and masks of the largest batch take no more than 1/16 of the budget: they are there all the time. Chosen.
    statics: int = 16
    # Seconds after which a request that was refused as too many wait may be sent again: some steps. Chosen.
    retry: float = 1.0
    # Rounding to pages may take 1/32 of what the weights leave (layout.py): pages of 256 KiB for the model of the
    # benchmark, where 2 MiB took twice as many steps as 256 KiB. No page is below 64 KiB: driver calls are per page. A
    # cache has about so many pages that are used in part: its guard, and where requests end. Chosen.
    rounding: float = 1 / 32
    smallest_page: int = 2**16
    ends: int = 4
    # Objects and lists within each other that a schema may have: tools have a dozen, and Python's encoder fails at
    # about 1,000. Chosen.
    nested: int = 64
    asking: Asking = field(default_factory=Asking)
    # The buffer for KV of prompts begins with this part of the host's memory: all, until steps miss an SLO. Chosen.
    buffer: float = 1.0
    # `most`: part of the host's memory that the buffer may have (eLLM's B_max; 0: no prompt's KV goes there).
    # `activations_give`: KV and activations exchange pages (eLLM §4.3), else what stock sets aside for activations
    # stays theirs. Not to be changed but to see what either is worth: docs/measuring.md, bench_tenants.py.
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
    # eLLM §4.4.2: an event is `violations` within `window` iterations, and changes the buffer by `factor`.
    violations: int = 3
    window: int = 5
    factor: int = 2


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What clients may take of a server (hooks/server). Seconds, bytes and counts."""

    # Seconds for the line and the headers of a request, from the connection or its first byte on. Chosen.
    headers: float = 20.0
    # Seconds for each `piece` of a body: the slowest client sends 4 KiB a second. Chosen.
    body: float = 60.0
    piece: int = 2**18
    # Seconds that a client which reads nothing of its answer is waited for, once the kernel's buffers are full. Chosen.
    reader: float = 60.0
    # Seconds that a connection stays open for its client's next request: longer than clients keep one (openai's 5 s,
    # nginx 60 s), as a request fails that is sent while the server closes its connection. Chosen.
    idle: int = 75
    sweep: float = 1.0  # s, between two looks at all connections: 1 ms for 4,000 (measured)
    # Connections at once: less where the process may have fewer files, of which it needs `files` more (at most a
    # quarter of all) for models and prefixes. Chosen: more than clients of one machine's models have.
    connections: int = 4096
    files: int = 1024
    # Connections that are accepted in one turn of the event loop: 0.2 ms each (measured), meanwhile nobody is answered.
    burst: int = 32
    # Lines of the log in a second, of each logger: a client may cause one with each request. Chosen.
    lines: int = 20
    # Bytes of a body: so many for each token of the longest sequence, and so many for all else (schemas, tools, short
    # prompts together). Text has 4 bytes a token in English, ids 7; escaped text three times as many. Of all bodies
    # that have come in part at once: an eighth of a small machine's memory. Chosen.
    token: int = 16
    rest: int = 2**20
    bodies: int = 2**28
    # Processes that render and tokenize: prompts of a million tokens take seconds each, others a millisecond. A job
    # beyond its seconds or bytes ends with its process; one that keeps more than `kept` is replaced. Chosen.
    renderers: int = 4
    render: float = 20.0
    render_memory: int = 2**30
    render_kept: int = 2**26
    # Jobs that wait for such a process. Chosen: as requests may wait for a model.
    jobs: int = 1024
    # Seconds that requests have to be told that a shutdown ends them, before connections are closed, and that all else
    # has after that, before the process is ended. Chosen.
    told: float = 5.0
    hung: float = 10.0


@dataclass(frozen=True, slots=True)
class Replicas:
    """When replicas drop parameters and restore them, how they run as a pipeline, and when one is dead
    (policy/replicas, hooks/replicas). Times in seconds of real time."""

    # Seconds between looks at the load: a tenth of what a burst takes to fill memory (paper 003, the authors' code).
    period: float = 0.1
    # Overloaded: this part of the KV memory is used, and as much waits as is free (the authors' code).
    full: float = 0.95
    # Restored: less than this part of the memory that undropped replicas have for KV is used (paper 003, §4.4).
    calm: float = 0.5
    # Seconds that it has to be so: the dwell of pages. Chosen; tests/replicas/test_fleet_run.py holds what it is for.
    dwell: float = 10.0
    # Looks at the load that say whether it falls, the later half against the earlier, or how it grows: 4 s. Chosen.
    looks: int = 40
    # Seconds after a drop until there may be another level: the exchange takes 1-2 s (§4.2), and a burst that one level
    # was made for should not see two. Chosen; the paper's extreme burst sees two in 90 s (Fig. 17).
    settle: float = 30.0
    # Seconds for which demand is taken to grow as it did of late, when pairs are formed: requests stay for 11 s on
    # average (§2.2), after which those that end make up for those that come.
    ahead: float = 10.0
    # Seconds after an epoch was discarded, or a drop declined, until there may be another. Chosen.
    again: float = 5.0
    # A drop is predicted to save this part of the time to drain the queue: below that its KV exchange is not worth it.
    # Chosen: less than the error of the cost model, 10-14 % on a loaded machine, as both predictions share it.
    gain: float = 0.05
    # Part of the time that a pipeline with batches of equal cost is idle. Measured: Azure code prompts, two stages,
    # 5.3 %, of which 2 % are the floor.
    bubble: float = 0.053
    # Tokens of prompts in one microbatch when times are predicted. Chosen: what servers use for chunked prefill.
    chunk: int = 512
    # Rounds of a predicted queue after which its end is not computed but counts as never. Chosen: minutes of decoding,
    # and the prediction takes a second of a CPU at most.
    rounds: int = 20_000
    # Dead: its count of iterations stands still for so many seconds, or so many of the longest iterations among the
    # last `remembered`, whichever is more. Chosen: issue 17 wants a second.
    silent: float = 1.0
    iterations: int = 5
    remembered: int = 16
    # Seconds between two ticks from which on the controller itself stood still, and no replica is judged by the time
    # between. Chosen: half of `silent`.
    late: float = 0.5
    # Seconds that replicas have to prepare, or to take up, an epoch: forming links takes 7 ms each, a cold twin 3 s.
    answer: float = 10.0
    # Seconds for an exchange of KV (1-2 s at 200 Gbit/s, §4.2), or for pulling layers. Chosen: a slow network.
    bulk: float = 60.0
    # Times that a request is computed anew because replicas were lost, until it is refused: it may be what kills them.
    # Chosen.
    lives: int = 5
    # Starts in a row of one replica that may fail, where replicas have served before. Chosen: memory that another has
    # not given back yet comes free meanwhile.
    starts: int = 5
    # A replica that was lost within so many seconds since it joined is replaced later than at once: the wait, in
    # seconds, is doubled each time, up to the longest. Chosen: a start takes some 10 s of a CPU.
    steady: float = 60.0
    start_wait: float = 0.5
    longest_wait: float = 60.0
    # Bytes per second between two replicas, until it is measured. Measured: gloo on one machine, 0.5 to 1.5 GB/s.
    link: float = 1e9
    # Blocks of KV in one transfer: 64 KiB a layer of a small model, some MiB of a large one. Chosen: well below what a
    # stage takes at 1 GB/s.
    piece: int = 4
    # Seconds of copies of KV between two microbatches, while it is exchanged. Chosen: less than a decoding step.
    exchanging: float = 0.01
    # Microbatches that the error of predictions is the mean of: some seconds of a replica. Chosen.
    judged: int = 64
    # Seconds for which pages that a replica lacked count as waited for: ten looks at the load. Chosen.
    wished: float = 1.0
    # Seconds between two reports of what a replica has moved and computed, for /metrics. Chosen: below what scrapes it.
    counting: float = 1.0
    # What a replica serves to measure its cost when it starts: so many requests, with prompts of up to so many batches
    # and answers of up to so many tokens, so many times, of which the least counts. Chosen: some 60 batches, as many
    # tokens as 25. Prompts that end in their first batch say nothing of the tokens before a chunk. Measured (sdpa on a
    # loaded CPU, its own time): 3 to 4 % error on held-out batches; 6 to 7 % where rounds had other batches, most of
    # which came once.
    requests_measured: int = 32
    batches_measured: float = 4.0
    answer_measured: int = 32
    rounds_measured: int = 3
    # So often all of that is done where its times say nothing. Chosen: seen once, at a load of 20 on two cores.
    tries_measured: int = 3
    # -- links and membership
    # A main loop that has nothing to do beats so often: several times in `silent`. Chosen.
    beat: float = 0.2
    # Bytes of a layer that are copied until the main loop counts on. Chosen: at 100 MB/s a third of `silent`, and far
    # more than a copy needs to run at the full speed of the link.
    moved: int = 32 * 2**20
    # The other end of a link is waited for while it is formed. Chosen: forming takes 7 ms (gloo), a loaded process
    # may take seconds to come.
    forming: float = 10.0
    # A link that is closed tells the other end, and waits so long until that has heard: a round trip. Chosen.
    linger: float = 1.0
    # A replica that joins has to answer within this. Chosen: two round trips, on a loaded machine.
    joining: float = 30.0
    # Seconds until an NCCL operation is looked at first, and between two looks at most. Chosen: less than what a
    # microbatch's states take, and a thousandth of a CPU while a large message is on its way.
    looked_first: float = 2e-5
    looked_last: float = 1e-3
    # The store has to answer a call within this. Chosen: a round trip, on a loaded machine.
    store: float = 60.0
    # On Ray: a front end that has asked for no news for so long is gone, and so are, later, its requests, and a fleet
    # without any front end. Chosen: another front end may be started meanwhile, and clients ask again.
    front_gone: float = 3.0
    orphaned: float = 120.0
    unattended: float = 300.0
    # A call for news returns after so long without any. A call that failed, as an actor is being started again, is
    # made again after so long. Chosen.
    news: float = 1.0
    retried: float = 0.1
    # Calls to the supervisor at the same time, two of each replica and front end, and lines that a first front end is
    # told later. Chosen.
    calls: int = 10_000
    unsaid: int = 99
    # Bytes of a file of the log of decisions, of which two are kept. Measured: a replica adds 2 kB a second, so five
    # have half a day in each.
    log_bytes: int = 2**29
    # -- the pipeline
    # KV is exchanged in parts that take 1/4 of a stage's time: an activation that waits for one delays its stage by no
    # more. Chosen; the link has at least as much to send in each stage as before.
    exchange_part: float = 1 / 4
    # Batches of a kind that a cost is fitted to at least, and the part of them that is held out: every fourth. Chosen:
    # five coefficients need more than five samples when three quarters of three quarters are left.
    samples: int = 16
    folds: int = 4
    # A form with more coefficients has to be better by 1/50 of the least error, and by a millionth of the time where a
    # form is exact. Chosen.
    simpler: float = 0.02
    exact: float = 1e-6
    # Tokens of prompts that a microbatch has at least, where it has any (Fig. 11's MIN). Chosen: with fewer the weights
    # are read for nothing.
    least: int = 128
    # Part of the KV memory that stays free when a request begins, so that those that decode find room. Chosen: vLLM's
    # watermark.
    watermark: float = 0.01
    # Seconds to form the links of an epoch, and to take layers out of a replica's memory. Measured: 7 ms each link on
    # gloo; paper 003, §4.1: 5 ms.
    linking: float = 0.007
    dropping: float = 0.005
    # Seconds until the other end of a link hears that it is lost. Measured: gloo after SIGKILL, 0.02 to 0.1 s.
    noticing: float = 0.05


@dataclass(frozen=True, slots=True)
class Planning:
    """Predictions of a run (policy/planner)."""

    # Parts of what a data sheet says that a model gets: of the operations per second in a large prefill, and of the
    # memory's bytes per second while decoding. Chosen: what large matrix products and copies have in practice.
    compute: float = 0.6
    memory: float = 0.8
    # Seconds to submit one operator from Python, eagerly: below that no small model gets. Chosen.
    call: float = 8e-6
    # Changes that are named, and the part of a token's time that one has to save where nothing else is wrong. Chosen.
    changes: int = 3
    saved: float = 0.1
    # Tokens that other contexts are rounded to, and steps in which they and batches are looked for. Chosen: a change
    # that is told to the token would say more than a prediction knows.
    rounded: int = 256
    # Bits of an element that quantized weights are tried with, the mildest first.
    bits: tuple[int, ...] = (8, 4)
    # Layers of a kind that are run without values before others count as they do: the first is seen beside what comes
    # before all layers.
    alike: int = 2
    # Budgets of a curve. Chosen.
    budgets: int = 40
    # Times that bytes of operators are more than was seen without values, as kernels allocate inside of themselves.
    # Measured: 8 architectures on the stand-in, 1.00 to 1.10 (tests/test_planner_pages.py).
    unseen: float = 1.1
    # Times that an iteration may take longer, or shorter, than was measured when it is asked whether copies hide.
    # Chosen: two processes on two cores.
    noise: float = 2.0


@dataclass(frozen=True, slots=True)
class Watching:
    """How a process is watched from outside (hooks/watch), and what it counts for that (hooks/measure/timings.py)."""

    # Seconds between two looks of `top` and `watch()`: less than a thousandth of the process's time, as a look takes
    # 0.4 ms of it. Measured: 2 shared cores, 32 layers of which 8 stream; tests/test_top.py holds the calls of a look.
    period: float = 1.0
    # Seconds that a process has to answer a look before it counts as busy. Chosen: a look is made between two others.
    patience: float = 1.0
    # Seconds that a lower budget may take to be met. Chosen: the default of `ballonet budget`.
    budget: float = 60.0
    # Decisions that are shown of a process. Chosen: what a terminal of 24 lines has room for beside the rest.
    decisions: int = 5
    # Columns of a bar. Chosen: half of a terminal.
    bar: int = 40
    # Columns that a row has beside its bar. Counted: the longest names and sizes.
    text: int = 56
    # Columns on a pipe, and in a notebook. Chosen: what mails and logs keep whole; a wide terminal.
    narrow: int = 96
    columns: int = 120
    # Looks at the keyboard, in seconds: a key is answered before anybody notices. Chosen.
    keys: float = 0.1
    # Last seconds of the buckets of durations: from a decode step of a tiny model to a prompt that waits for a minute,
    # about two to each factor of five. Chosen.
    buckets: tuple[float, ...] = (
        *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
        *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
    )


@dataclass(frozen=True, slots=True)
class Sharing:
    """How processes share one budget (shares.py, hooks/device/shared.py)."""

    # Seconds that a part which was raised counts as used: longer than a step of any model here. Chosen.
    dwell: float = 2.0
    # Less than 1/16 of the total is not worth to displace what others use. Chosen.
    margin: int = 16
    # 1/16 of the total more than it lacks is what a process takes of what is free, so that it asks seldom. Chosen.
    step: int = 16
    # Seconds between two looks whether a process that works has few free pages left. Chosen: some decode steps.
    look: float = 0.1
    # Seconds after which a ledger that seems unchanged is read nonetheless: a file that replaces another may look like
    # the one before. Chosen: a look that reads takes 0.11 ms of a core, one that does not 0.017 (measured).
    reread: float = 5.0
    # Seconds that an allocation waits for pages of other processes, at most. Chosen: a process that gives copies its
    # layers to the host meanwhile.
    patience: float = 2.0
    # Seconds that another process may take for an answer, and that it is not asked again where it took longer. Chosen.
    answer: float = 0.5
    silent: float = 10.0
    # Seconds that a refusal holds, twice as long each time up to `dwell`. Chosen: some decode steps.
    again: float = 0.2
    # Seconds that what a step has lacked counts as lacking. Chosen: as `dwell`.
    lacking: float = 2.0


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tuning of one device."""

    pages: FreePages = field(default_factory=FreePages)
    prices: Prices = field(default_factory=Prices)
    turns: TurnLengths = field(default_factory=TurnLengths)
    write_behind: WriteBehind = field(default_factory=WriteBehind)
    loans: Loans = field(default_factory=Loans)
    traffic: OtherTraffic = field(default_factory=OtherTraffic)
    weights: WeightPlans = field(default_factory=WeightPlans)
    kv_reads: KVReads = field(default_factory=KVReads)
    kv_growth: KVGrowth = field(default_factory=KVGrowth)
    peer: PeerPages = field(default_factory=PeerPages)
    chaos: ChaosMoves = field(default_factory=ChaosMoves)
    link: LinkMeasure = field(default_factory=LinkMeasure)
    records: Records = field(default_factory=Records)
    prefixes: Prefixes = field(default_factory=Prefixes)
    files: WeightsFiles = field(default_factory=WeightsFiles)
    waiting: Waiting = field(default_factory=Waiting)
    pieces: PieceForwards = field(default_factory=PieceForwards)
    timeline: Timelines = field(default_factory=Timelines)
    serving: Serving = field(default_factory=Serving)
    clients: ClientLimits = field(default_factory=ClientLimits)
    replicas: Replicas = field(default_factory=Replicas)
    planning: Planning = field(default_factory=Planning)
    watching: Watching = field(default_factory=Watching)
    sharing: Sharing = field(default_factory=Sharing)


DEFAULT = Tuning()
