"""Adapts a spliced model to the interface that a stage runs."""

from __future__ import annotations

from typing import Any

from ...offload.policy.replicas.groups import Span
from ..splice.results import Hidden, Logits
from ..splice.splice import Splice, SpliceStage
from .span_runner import States


class SplicedLayers:
    """Runs layers of the model of a Splice, whose span it sets.

    To be made before `GroupSettings.of` sets paged attention: the proof that the layers can run in parts calls the
    whole model without a paged cache.
    """

    def __init__(self, splice: Splice) -> None:
        """Raises SpliceError where the model cannot run in parts."""
        if len(splice.layers) > 1:
            before, splice.span = splice.span, Span(0, 1)
            splice.span = before
        self.splice = splice
        self._stage = SpliceStage(splice)

    def __call__(self, layers: range, given: States | None, inputs: dict[str, Any]) -> States:
        """Runs these layers, see span_runner.RunsLayers. SpliceError, and what the model raises."""
        span = Span(layers.start, layers.stop)
        if self.splice.span != span:
            self.splice.span = span
        found = self._stage.run(inputs, None if given is None else Hidden(given))
        return (found.logits,) if isinstance(found, Logits) else found.tensors
