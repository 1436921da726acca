"""A spliced model as what a stage runs."""

from __future__ import annotations

from typing import Any

from ...offload.policy.replicas.groups import Span
from ..splice.results import Hidden, Logits
from ..splice.splice import Splice, Stage
from .span_runner import States


class SplicedLayers:
    """Runs layers of the model of a Splice, whose span it sets.

    Made before the model's attention becomes one for batches (`GroupSettings.of`): the proof that its layers can run in
    parts calls the whole model, without a paged cache.
    """

    def __init__(self, splice: Splice) -> None:
        """SpliceError where the model cannot run in parts."""
        if len(splice.layers) > 1:
            before, splice.span = splice.span, Span(0, 1)
            splice.span = before
        self.splice = splice
        self._stage = Stage(splice)

    def __call__(self, layers: range, given: States | None, inputs: dict[str, Any]) -> States:
        """See span_runner.RunsLayers. What the model raises, and SpliceError."""
        span = Span(layers.start, layers.stop)
        if self.splice.span != span:
            self.splice.span = span
        found = self._stage.run(inputs, None if given is None else Hidden(given))
        return (found.logits,) if isinstance(found, Logits) else found.tensors
