"""Runs only the decoder layers of a span of a model.

Note [Running layers a to b]
    The model's own forward runs: it embeds, makes masks and rotary tables, and calls its layers. Layers before the span
    return their input (forms.py). A hook before the first layer of the span puts in the tensors of the stage before,
    and one before the first layer behind the span ends the forward by an exception that carries that layer's arguments.
    So a model's work between two layers is done on both sides, and its work on the hidden states by the sender. On the
    last stage the forward goes on to norm and head.
    The tensors that a layer needs of earlier ones are found for each model once (forms.py, Note [What travels]) and
    proven to be enough, when its layers first run in parts.

Note [What is proven]
    A tiny prompt of two rows, one of them padded, and a decode step after it, with another request in between, are
    computed by the whole model, and by as many stages as it has layers. Only the tensors that travel cross the
    boundaries. The logits must be bit-identical: kernels and inputs are the same, so a difference means that a tensor
    did not travel. It takes about as long as three tiny forwards. The result is kept for each class of models and
    configuration, as it does not depend on the weights' values.

    Replicas keep KV in a cache of their own layers (replicas/replica_model.py), which no model asks for lengths. A
    model asks an ordinary one, as a rule that of its first layer. So in the decode step of the proof each stage gets a
    copy of the whole model's cache, as it was after the prompt.

    In transformers 5.23 it refuses recurrent_gemma, which keeps its recurrent state in its modules, where only one
    request's state fits; and rwkv, whose own decode step mixes the rows of a batch.
"""

from __future__ import annotations

import copy
import inspect
import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...allocator.errors import DriverError, PoolExhausted, SpliceError
from ...offload.policy.replicas.groups import Span
from ..compat import cache_name, plain_attention, reads_all_tokens, settings_of
from ..forward.hook_base import LocalLayers, local_layers_of, remove_all
from ..weights.model_parts import decoder_layers
from .forms import (
    Call,
    LayerForm,
    Leaving,
    Now,
    Run,
    States,
    forms_of,
    get,
    pass_through,
    put,
    record,
    same_bits,
)

_PROMPT: Final = ((3, 4, 5, 6, 7), (0, 0, 3, 8, 9))  # tokens that every vocabulary has; 0 is a pad
_NEXT: Final = ((4,), (5,))
_OTHER: Final = ((8, 5, 3),)  # another request, computed between the prompt and the step
_NO_MEMORY: Final = (torch.OutOfMemoryError, PoolExhausted, DriverError)  # errors that do not depend on the model
_REFUSED: Final = (
    "{name} cannot be split between replicas: {reason}. Parts of it would write other tokens than the whole, so each "
    "replica has to hold all of its layers"
)

_known: dict[tuple[type, int, str], tuple[LayerForm, ...] | str] = {}  # forms, or why there are none


class Splice:
    """Runs a span of the decoder layers of a model; a context manager that undoes everything at its end.

    Forwards of the model that are not run by this object raise SpliceError while the span is not the whole model.
    """

    def __init__(self, model: nn.Module) -> None:
        """Raises SpliceError where the model has no decoder layers, or is spliced already."""
        self.layers = decoder_layers(model)
        name = type(model).__name__
        if not self.layers:
            raise SpliceError(f"{name} has no decoder layers that could run in parts")
        self._local_layers: LocalLayers = local_layers_of(model)
        if self._local_layers.spliced_by() is not None:
            raise SpliceError(f"this {name} is spliced already: close() the first Splice before, or change its span")
        self.model = model
        self.cache_name = cache_name(model)
        self._span = self.whole
        self._forms: tuple[LayerForm, ...] | None = None
        self._handles: list[RemovableHandle] = []
        self._passing: list[tuple[nn.Module, object]] = []  # (layer, what its forward was before)
        self._now = Now()
        self._running = 0  # forwards of stages, on all threads
        self._lock = threading.Lock()
        self._closed = False
        self._local_layers.spliced_by = weakref.ref(self)

    @property
    def whole(self) -> Span:
        """All layers."""
        return Span(0, len(self.layers))

    @property
    def span(self) -> Span:
        """The layers that run, to be set between forwards. The first time that layers are left out, the proof runs.
        SpliceError where it fails, where a forward runs, or where there are no such layers."""
        return self._span

    @span.setter
    def span(self, span: Span) -> None:
        if self._closed:
            raise SpliceError("this Splice is closed: make another one of the model")
        if not 0 <= span.begin < span.end <= len(self.layers):
            raise SpliceError(
                f"{type(self.model).__name__} has the layers [0, {len(self.layers)}), of which "
                f"[{span.begin}, {span.end}) is no part that can run"
            )
        if span != self.whole:
            self.prove()
        self.install(span, self._forms or ())

    def prove(self) -> None:
        """Runs the proof, unless it has run for such a model, or there is one layer only. SpliceError where it
        fails."""
        if self._forms is None and len(self.layers) > 1:
            self._forms = proven(self)

    def install(self, span: Span, forms: tuple[LayerForm, ...]) -> None:
        """Has the layers of `span` run, and no others, with these forms. SpliceError where a forward runs."""
        with self._lock:
            if self._running:
                raise SpliceError("a forward runs: change the span, or close the Splice, between two forwards")
            self._remove()
            self._span, self._forms = span, forms or None
            if span == self.whole:
                return
            self._local_layers.span = span
            for layer, form in zip(self.layers[: span.begin], forms, strict=False):
                self._passing.append((layer, layer.__dict__.get("forward", _NONE)))
                layer.__dict__["forward"] = partial(self._pass, form)
            if span.begin:
                enter = partial(self._enter, forms[span.begin])
                self._handles.append(self.layers[span.begin].register_forward_pre_hook(enter, with_kwargs=True))
            if span.end < len(self.layers):
                leave = partial(self._leave, forms[span.end])
                self._handles.append(self.layers[span.end].register_forward_pre_hook(leave, with_kwargs=True))

    def close(self) -> None:
        """Undoes all changes of the model. Idempotent. SpliceError where a forward runs."""
        if not self._closed:
            self.install(self.whole, self._forms or ())
            self._closed = True
            self._local_layers.spliced_by = lambda: None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Splice of {type(self.model).__name__}: layers [{self._span.begin}, {self._span.end})>"

    def __reduce__(self) -> NoReturn:
        """Raises SpliceError: the hooks of a copied model would act on this one."""
        raise SpliceError(
            f"only a part of this {type(self.model).__name__} runs: set the whole span, or close() its Splice, before "
            "it is copied or pickled"
        )

    def __call__(self, layers: range, given: States | None, inputs: dict[str, Any]) -> States:
        """Runs these layers, see replica_model.RunsLayers. SpliceError, and what the model raises."""
        span = Span(layers.start, layers.stop)
        if self.span != span:
            self.span = span
        return self.run(inputs, given)

    def run(self, inputs: Mapping[str, Any], given: States | None = None) -> States:
        """Runs the layers of the span, without gradients. `inputs`: of the model's forward, by name, the same on all
        stages except the cache; `given`: the result of the stage before. Returns what the next stage is given, or on
        the last one the logits, [batch, tokens, vocabulary].

        Raises the model's errors, and SpliceError; tokens that have been written to the cache by then stay there, as
        in a forward of the whole model, and the stage can be run again with another cache.
        """
        if self._closed:
            raise SpliceError("this Splice is closed: make another one of the model")
        if (given is None) != (self._span.begin == 0):
            raise SpliceError(
                f"layers [{self._span.begin}, {self._span.end}) run here: they are given what layer "
                f"{self._span.begin - 1} sends, or nothing where they begin with layer 0"
            )
        for name in ("output_hidden_states", "output_attentions"):
            if inputs.get(name):
                raise SpliceError(f"{name} asks for something of every layer, but only some run here: leave it out")
        with self._lock:
            self._running += 1
        try:
            return self._run(inputs, given)
        finally:
            with self._lock:
                self._running -= 1

    @torch.no_grad()
    def _run(self, inputs: Mapping[str, Any], given: States | None) -> States:
        with self._now.running(Run(given)) as run:
            try:
                return (_logits(self.model(**inputs)),)
            except Leaving as leaving:
                if leaving.run is not run:
                    raise
                return leaving.states

    def _pass(self, form: LayerForm, *args: Any, **kwargs: Any) -> Any:
        """Replaces the forward of a layer before the span."""
        self._check_run()
        return pass_through(form.answer, Call(args, kwargs))

    def _enter(self, form: LayerForm, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The hook before the first layer of the span."""
        run = self._check_run()
        given = run.given
        assert given is not None
        call: Any = Call(args, kwargs)._asdict()
        own = get(call, form.travels[0])
        if len(given) != len(form.travels) or given[0].shape != own.shape:
            raise SpliceError(
                f"layer {self._span.begin} is given {len(given)} tensors, the first of the shape "
                f"{tuple(given[0].shape)}, where it takes {len(form.travels)}, the first of "
                f"{tuple(own.shape)}: all stages of a forward are called with the same tokens"
            )
        for path, tensor in zip(form.travels, given, strict=True):
            call = put(call, path, tensor)
        return call["args"], call["kwargs"]

    def _leave(self, form: LayerForm, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """The hook before the first layer behind the span."""
        run, call = self._check_run(), Call(args, kwargs)._asdict()
        raise Leaving(run, tuple(get(call, path) for path in form.travels))

    def _check_run(self) -> Run:
        run = self._now.run
        if run is None:
            raise SpliceError(
                f"only layers [{self._span.begin}, {self._span.end}) of this {type(self.model).__name__} run here, so "
                "that its forward has no result: run the Splice, or close() it first"
            )
        return run

    def _remove(self) -> None:
        self._local_layers.span = None
        while self._passing:
            layer, before = self._passing.pop()
            if before is _NONE:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = before
        remove_all(self._handles)


_NONE: Final = object()


def proven(splice: Splice) -> tuple[LayerForm, ...]:
    """Returns the forms of the model's layers, with which they are proven to run in parts. SpliceError where they
    cannot."""
    model = splice.model
    if model.training:
        raise SpliceError(f"{type(model).__name__} is in training mode: call eval() before its layers run in parts")
    with plain_attention(model):
        settings = settings_of(getattr(model, "config", None))
        key = type(model), len(splice.layers), json.dumps(settings, sort_keys=True, default=str)
        if key not in _known:
            try:
                _known[key] = _prove(splice)
            except SpliceError as error:
                _known[key] = str(error)
            finally:
                splice.install(splice.whole, ())
    proof = _known[key]
    if isinstance(proof, str):
        raise SpliceError(_REFUSED.format(name=type(model).__name__, reason=proof))
    return proof


@torch.no_grad()
def _prove(splice: Splice) -> tuple[LayerForm, ...]:
    model, name = splice.model, splice.cache_name
    prompt = _prompt(model, _PROMPT)
    try:
        seen, first, cache = record(model, splice.layers, prompt)
        step = _step(model, prompt, cache)
        caches = [copy.deepcopy(cache) for _ in splice.layers]  # see Note [What is proven]
        second = model(**step, **{name: cache})
        forms = forms_of(model, splice.layers, prompt, seen)
    except _NO_MEMORY:
        raise
    except Exception as error:  # any error: the model's forward may not take such tokens and masks
        reason = (
            f"its own forward cannot run two rows, one of them padded, and decode ({type(error).__name__}: {error})"
        )
        raise error if isinstance(error, SpliceError) else SpliceError(reason) from error
    steps = [{**step, name: cache} for cache in caches]
    for what, inputs, output in (("a prompt", [prompt] * len(steps), first), ("a decode step", steps, second)):
        whole = _logits(output)
        if whole.shape[0] != len(_PROMPT) or (what == "a decode step" and whole.shape[1] != 1):
            raise SpliceError(f"its own logits of {what} of {len(_PROMPT)} rows have the shape {tuple(whole.shape)}")
        parts = _in_parts(splice, forms, inputs, what)
        if not same_bits(parts, whole):
            raise SpliceError(_difference(parts, whole, what))
        _in_parts(splice, forms, [_prompt(model, _OTHER)] * len(steps), "another request")
    return forms


def _in_parts(
    splice: Splice, forms: tuple[LayerForm, ...], inputs: Sequence[Mapping[str, Any]], what: str
) -> torch.Tensor:
    """Returns the logits of stages of one layer each, with these inputs."""
    given: States | None = None
    for layer, stage in enumerate(inputs):
        splice.install(Span(layer, layer + 1), forms)
        try:
            given = splice.run(stage, given)
        except _NO_MEMORY:
            raise
        except Exception as error:  # any error: the model's forward lacks tensors that did not travel
            reason = f"layer {layer} alone fails in {what} ({type(error).__name__}: {error})"
            raise SpliceError(reason) from error
    assert given is not None
    return given[0]


def _logits(output: Any) -> torch.Tensor:
    """Returns the logits among what a model returns, [batch, tokens, vocabulary]."""
    logits: torch.Tensor = output["logits"] if isinstance(output, dict) else output[0]
    return logits


def _difference(parts: torch.Tensor, whole: torch.Tensor, what: str) -> str:
    if parts.shape != whole.shape:
        return f"the logits of {what} have the shape {tuple(parts.shape)} in parts, and {tuple(whole.shape)} in one"
    difference = (parts.float() - whole.float()).abs().nan_to_num(nan=float("inf")).max().item()
    return (
        f"the logits of {what} differ in parts by up to {difference:.3g}, as something that its layers need is neither "
        "in their calls nor in the cache that they are given (in modules, for one, where each request overwrites it)"
    )


def _prompt(model: nn.Module, rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the inputs of a forward over these tokens."""
    ids = torch.tensor(rows, device=next(model.parameters()).device)
    masked = "attention_mask" in inspect.signature(model.forward).parameters
    return {"input_ids": ids, "use_cache": True} | ({"attention_mask": (ids != 0).long()} if masked else {})


def _step(model: Any, prompt: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Returns the inputs of a decode step after the prompt: a token, or all for a model that reads them anew."""
    before = prompt["input_ids"]
    ids = torch.cat([before, torch.tensor(_NEXT, device=before.device)], dim=1)
    inputs = {"input_ids": ids if reads_all_tokens(model, ids, cache) else ids[:, -1:], "use_cache": True}
    return inputs | ({"attention_mask": (ids != 0).long()} if "attention_mask" in prompt else {})
