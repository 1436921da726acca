"""Prompts for tests and benchmarks of replicas: those of the Azure code trace where it is there, and made ones."""

from __future__ import annotations

from pathlib import Path
from random import Random

from ballonet.offload.policy.replicas.pipeline import ChunkSize

AZURE = Path(__file__).parents[3] / "shared" / "data" / "traces" / "azure_2023_code.csv"


def chunks(prompts: list[int]) -> list[ChunkSize]:
    """The prompts, whole, in order; every fifth behind a cached prefix of 2,000 tokens."""
    return [ChunkSize(n, 2000 if n % 5 == 4 else 0, each) for n, each in enumerate(prompts)]


def made(count: int) -> list[int]:
    """Prompts whose lengths are spread as those of the trace: a median of 1,500 tokens, one in ten above 4,500."""
    random = Random(0)
    return [min(7500, max(3, round(random.lognormvariate(7.3, 0.9)))) for _ in range(count)]
