"""The numbers of replicas that tests and options set: when they drop parameters and restore them, how they run as a
pipeline, and when one is dead. Units, sources and *chosen* as in offload/policy/tuning.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaTuning:
    """The tuning of replicas of one model (policy/replicas, hooks/replicas). Times in seconds of real time."""

    # Seconds between looks at the load: a tenth of what a burst takes to fill memory (paper 003, the authors' code).
    period: float = 0.1
    # Overloaded: this part of the KV memory is used, and as much waits as is free (the authors' code).
    full: float = 0.95
    # Restored: less than this part of the memory that undropped replicas have for KV is used (paper 003, §4.4) for so
    # many seconds, the dwell of pages. Chosen; tests/replicas/test_fleet_run.py holds what it is for.
    calm: float = 0.5
    dwell: float = 10.0
    # Looks at the load that say whether it falls, the later half against the earlier, or how it grows: 4 s. Chosen.
    looks: int = 40
    # Seconds after a drop until there may be another level: the exchange takes 1-2 s (§4.2), and one burst should not
    # see two levels. Chosen; the paper's extreme burst sees two in 90 s (Fig. 17).
    settle: float = 30.0
    # Seconds for which demand is taken to grow as of late, when pairs are formed: requests stay for 11 s (§2.2).
    ahead: float = 10.0
    # Seconds after an epoch was discarded, or a drop declined, until there may be another. Chosen.
    again: float = 5.0
    # Part of the time to drain the queue that a drop has to save, for its KV exchange. Chosen: less than the error of
    # the cost model, 10-14 % on a loaded machine, as both predictions share it.
    gain: float = 0.05
    # Part of the time that a pipeline with batches of equal cost is idle. Measured: Azure code prompts, two stages,
    # 5.3 %, of which 2 % are the floor.
    bubble: float = 0.053
    # Tokens of prompts in one microbatch when times are predicted. Chosen: what servers use for chunked prefill.
    chunk: int = 512
    # Dead: its count of iterations stands still for so many seconds, or so many of the longest iterations among the
    # last `remembered`, whichever is more. Chosen: faults are to be noticed within a second.
    silent: float = 1.0
    iterations: int = 5
    remembered: int = 16
    # Seconds that replicas have to prepare, or to take up, an epoch: forming links takes 7 ms each, a cold twin 3 s.
    answer: float = 10.0
    # Seconds for an exchange of KV (1-2 s at 200 Gbit/s, §4.2), or for pulling layers. Chosen: a slow network.
    bulk: float = 60.0
    # Times that a request is computed anew, as replicas were lost, until it is refused: it may kill them. Chosen.
    lives: int = 5
    # Starts in a row of one replica that may fail where replicas have served before: memory that another has not given
    # back yet comes free meanwhile. Chosen.
    starts: int = 5
    # A replica lost within so many seconds since it joined is replaced after a wait, in seconds, which is doubled each
    # time up to the longest. Chosen: a start takes some 10 s of a CPU.
    steady: float = 60.0
    start_wait: float = 0.5
    longest_wait: float = 60.0
    # Bytes per second between two replicas, until it is measured. Measured: gloo on one machine, 0.5 to 1.5 GB/s.
    link: float = 1e9
    # Blocks of KV in one transfer: 64 KiB a layer of a small model, some MiB of a large one. Chosen: well below what a
    # stage takes at 1 GB/s.
    piece: int = 4
    # What a replica serves to measure its cost when it starts: so many requests, with prompts of up to so many batches
    # and answers of up to so many tokens, so many times, of which the least counts. Chosen: some 60 batches. Measured
    # (sdpa on a loaded CPU, its own time): 3 to 4 % error on held-out batches; 6 to 7 % where rounds had other batches.
    requests_measured: int = 32
    batches_measured: float = 4.0
    answer_measured: int = 32
    rounds_measured: int = 3
    # A main loop that has nothing to do beats so often: several times in `silent`. Chosen.
    beat: float = 0.2
    # The other end of a link is waited for while it is formed: 7 ms (gloo), seconds in a loaded process. Chosen.
    forming: float = 10.0
    # A link that is closed tells the other end, and waits so long until that has heard: a round trip. Chosen.
    linger: float = 1.0
    # A replica that joins, and the store, have to answer within this: round trips, on a loaded machine. Chosen.
    joining: float = 30.0
    store: float = 60.0
    # Seconds to form the links of an epoch in virtual time. Measured: 7 ms each on gloo.
    linking: float = 0.007


DEFAULT = ReplicaTuning()
