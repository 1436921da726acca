"""The pieces of one model: which forwards are recorded, captured, replayed, and why others are eager.

Note [Cuts]
    Two ways of cutting are tried in turn: *fine*, where the cache's update and the attention function are eager; and
    *coarse*, where the innermost modules that are given the cache are. What a model does is seen while it is recorded,
    and a way that does not fit is refused before anything is captured. Where graphs and eager code differ by a bit,
    though both compute the same, the next way is taken, with one warning. What is left is eager.

Note [One at a time]
    One thread at a time runs a model by pieces; a forward of another thread is eager meanwhile.

Note [Shortage]
    While device pages are scarce nothing is captured. Graphs that no call uses are given up at the next forward of any
    model that finds pages short (`Managed`), and first when pages are asked for; those in use where a token finds no
    memory at all: its forward is computed on without them.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from ...allocator._native import Device
from ...allocator.interrupts import Guarded, guarded
from ...allocator.notices import warn
from ...offload.manager.memory_manager import MemoryManager
from ..cache_argument import given_cache
from ..compat import Cache
from ..device import managers
from ..device.references import label
from ..device.streams import torch_device
from ..forward.hook_base import Hook, remove_all
from ..measure.pace import Pace
from ..measure.report import PiecesReport
from ..weights.model_parts import decoder_layers
from .batch import KEPT, ROWS, BatchStep
from .graph_pool import GraphPool
from .patches import ResumedForward, recording
from .plans import Act, KeyPlan, ModelSettings, Variant
from .program import BrokenOff, Forward, Program, Stale
from .recipe import difference, operands
from .recorder import BATCH, ForwardRecorder, RecordedLayers

GROWS: Final = frozenset(("attention_mask",))  # arguments of a forward that are longer each time
WAYS: Final = ("fine", "coarse", "eager")
# New tokens of each sequence: assisted decoding checks up to 21 at once; longer forwards hide their launches. And of
# all sequences: what graphs keep grows with them, by some 40 KiB a token and layer of an 8B model. Both chosen.
_NEW: Final = 32
_ROWS: Final = 512
KEYS: Final = 16  # kinds of forwards (batch, new tokens, arguments) whose graphs are kept. Chosen
# One in so many forwards by graphs is timed: a hundred calls of Python, beside the thousand that it takes. Chosen.
_TIMED: Final = 32


class _Output(NamedTuple):
    output: Any


class _Task(NamedTuple):
    """A forward: its keyword arguments, the call of `generate()` or the loop that it is in, its key, and the step of a
    loop that it is."""

    model: nn.Module
    given: dict[str, Any]
    call: Any
    key: Any
    batch: BatchStep | None = None


class PieceRunner:
    """Runs forwards of one model by pieces."""

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        manager: MemoryManager,
        away: Callable[[], Container[int] | None],
        between: Callable[[], object],
        pace: Pace,
        priority: int,
    ) -> None:
        """`manager`: of the device. `away`: returns the decoder layers that run on their own, as they are read from
        slots; None where no forward may run by pieces. `between`: called before a forward by graphs, in place
        of what hooks do between two layers. `pace`: times the forwards. `priority`: of the model."""
        self.priority = priority
        self.calls = weakref.WeakValueDictionary[int, Any]()  # of generate(), and loops, by id
        self.exhausted = False  # has a forward found no memory since?
        self.replayed = self.captures = 0
        self.way = WAYS[0]
        self.acted: Act = Act.EAGER  # what the last forward did
        self._model = weakref.ref(model)
        self._device = device
        self._name = label(model)
        self._away = away
        self._scarce: Callable[[], bool] = lambda: manager.pages.scarce  # are device pages short now?
        self._between = between
        self._pace = pace
        self._torch_device = torch_device(device)
        self._plans: OrderedDict[Any, KeyPlan] = OrderedDict()  # by key, the one used last at the end
        self._pool: GraphPool | None = None
        self._whole: Sequence[nn.Module] | None = None  # never captured, where the way is coarse
        self._never_alone: set[int] = set()  # layers without which nothing runs by pieces: they cannot run on their own
        self._why: dict[str, str] = {}  # by way
        self._unfit = ""  # why the last forward of few tokens had no key
        self._running: dict[int, object] = {}  # the forward that runs by pieces, under 0
        self._settings: ModelSettings | None = None  # of the last forward that was recorded, where they may change
        self._hooks = -1  # the number of the last hook that was registered anywhere, at the last look
        managers.add_giver(device, self, graphs=True)

    # -- forwards

    def forward(self, stock: Callable[..., Any], model: nn.Module, given: dict[str, Any], call: Any) -> Any:
        """Computes a forward within a call of `generate()`: `stock(model, **given)`, or the same by pieces. The first
        one reads the prompt."""
        key = None if call.eager or call.forwards == 1 or self.way == "eager" else self._key(given)
        if key is None or (computed := self._by_pieces(stock, _Task(model, given, call, key))) is None:
            self.acted = Act.EAGER
            return stock(model, **given)
        return computed.output

    def step(self, stock: Callable[..., Any], model: nn.Module, given: dict[str, Any], loop: Any) -> Any:
        """Computes a step of a generation loop in which each request has one new token: `stock(model, **given)`, or the
        same by pieces, see batch.py."""
        step = BatchStep(loop.cache, given)
        if not loop.eager and self.way == WAYS[0] and step.rows <= _ROWS and _may_run():
            padded = step.padded()
            key = "step", padded["input_ids"].shape[1], *sorted(given), *_flags()
            if (computed := self._by_pieces(stock, _Task(model, padded | {BATCH: step}, loop, key, step))) is not None:
                return step.cut(computed.output)
        self.acted = Act.EAGER
        return stock(model, **given)

    def _by_pieces(self, stock: Callable[..., Any], task: _Task) -> _Output | None:
        """Computes a forward by graphs, or records it; None where it is to be eager, and nothing was done."""
        away = self._away()
        if away is None or any(layer in away for layer in self._never_alone):
            return None
        with self._turn(task) as whose:
            if whose is not task:
                return None
            if self.exhausted:
                self._obey()
            plan = self._plans.setdefault(task.key, KeyPlan())
            self._plans.move_to_end(task.key)
            self._evict()
            if plan.replays(task.call) and (output := self._replay(stock, plan, task, away)) is not None:
                return output
            if plan.next(task.call, task.call.left, not self._scarce()) is Act.EAGER or self._watches(task):
                return None
            return self._record(stock, task, plan, away)

    def _turn(self, me: object) -> Guarded[object]:
        """A `with` block, and whose it is: that of `me`, unless another forward is in one."""

        def end(failed: bool) -> None:
            if self._running.get(0) is me:
                self._running.clear()

        return guarded(partial(self._running.setdefault, 0, me), end)

    def _replay(self, stock: Callable[..., Any], plan: KeyPlan, task: _Task, away: Container[int]) -> _Output | None:
        """Computes a forward by graphs; None where they do not fit it, and nothing was done."""
        program = plan.variants[0].program
        if program.worth_recording(away) and not self._scarce():
            return None
        if RemovableHandle.next_id != self._hooks and self._watches(task):  # a hook was registered somewhere
            return None
        if task.call.settable and self._settings is not None and self._settings.differ():
            for other in self._plans.values():
                other.call = None  # all are recorded anew
            return None
        self._between()
        forward = Forward(given_cache(task.given), task.given, away)
        pool = program.pool
        try:
            with pool.entered():
                self._device.note_stream(pool.handle)
                program.run(forward)
        except BrokenOff as broken:
            return self._finish(stock, plan, task, broken)
        self.acted = Act.REPLAY
        self.replayed += 1
        if self.replayed % _TIMED and not self._pace.listeners:
            self._pace.forget()
        else:
            self._pace.replayed()
        return _Output(program.output(forward))

    def _finish(self, stock: Callable[..., Any], plan: KeyPlan, task: _Task, broken: BrokenOff) -> _Output | None:
        """Computes a forward on eagerly, see patches.py; None where nothing of it was, and it can be recorded."""
        why = broken.__cause__
        if isinstance(why, Stale):
            plan.call = None  # the next one is recorded
            if not broken.done:
                return None
        elif isinstance(why, torch.OutOfMemoryError):
            self._drop()
            self._device.reap(wait=True)
        else:
            self._degrade(f"a graph cannot be replayed: {_first_line(why)}", task)
        stream = torch.cuda.current_stream(self._torch_device)
        for tensor in (leaf for _, result in broken.done for leaf in operands(result)):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)
        self.acted = Act.EAGER
        self._pace.forget()
        given = {name: value for name, value in task.given.items() if name != BATCH}
        resumed = ResumedForward(given_cache(given), task.batch, broken.done)
        with recording(resumed, task.model, resumed, resumed.fine):
            return _Output(stock(task.model, **given))

    def _watches(self, task: _Task) -> bool:
        """Does other code watch the model's modules? Then the whole call is eager."""
        self._hooks = RemovableHandle.next_id
        task.call.eager = task.call.eager or _is_watched(task.model)
        return bool(task.call.eager)

    def _record(self, stock: Callable[..., Any], task: _Task, plan: KeyPlan, away: Container[int]) -> _Output:
        """Computes a forward eagerly, and finds out what pieces of it can be made."""
        model, batch = task.model, task.batch
        self.acted = Act.RECORD
        self._pace.forget()
        if self.way == "coarse" and self._whole is None:
            output, self._whole = modules_with_cache(model, lambda: stock(model, **task.given))
            if not self._whole:
                self._degrade("no module of it is given the cache")
            return _Output(output)
        pool = self._opened()
        grows = GROWS if batch is None else task.given.keys() - {*ROWS, KEPT}
        given = {name: value if name in grows else _dense(value) for name, value in task.given.items() if name != BATCH}
        whole = [*(self._whole or ()), *deciding_by_length(model)]
        recorder = ForwardRecorder(
            weights_by_address(model), self._torch_device, given, given_cache(given), grows, batch
        )
        hooks = RecordedLayers(recorder, decoder_layers(model), whole, lambda layer: layer in away)
        with pool.entered():
            self._device.note_stream(pool.handle)
            with recording(recorder, model, hooks, self.way == "fine"):
                output = stock(model, **given)
            recipe = recorder.recipe(output)
            if recorder.never_alone:
                self._never_alone |= recorder.never_alone
                self._why["streaming"] = recorder.refusal
            elif recipe is None:
                self._degrade(recorder.refusal, task)
            else:
                variant, why = plan.recorded(task.call, recipe, difference)
                _close(plan.pop_surplus())
                if why:
                    self._degrade(why, task)
                else:
                    self._prove(variant, recipe, recorder, pool, away, task)
        for leaf in _tensors(output):
            leaf.record_stream(torch.cuda.current_stream(self._torch_device))
        self._hooks = RemovableHandle.next_id
        self._settings = ModelSettings(model) if task.call.settable else None
        return _Output(output)

    def _prove(
        self,
        variant: Variant,
        recipe: Any,
        recorder: ForwardRecorder,
        pool: GraphPool,
        away: Container[int],
        task: _Task,
    ) -> None:
        """Captures a variant that was seen for the second time, and compares graphs with what was recorded."""
        try:
            new = variant.program is None
            if new and (variant.recipe is recipe or self._scarce()):
                return  # seen for the first time, or at a bad time
            if new:
                variant.program = Program(recipe, recorder, pool)
                self.captures += 1
            elif variant.program.worth_recording(away):
                variant.program.adopt(recipe)
                new = True
            if name := variant.program.disagrees(recorder, recipe):
                self._degrade(f"graphs and eager code differ in {name}", task, unexplained=True)
                return
            variant.lengths.add(_length(task))
            if new and not pool.holds_only(self._tensors()):
                self._degrade("a module keeps a tensor that was made in a graph", task)
        except torch.OutOfMemoryError:
            self._drop()  # and again when the shortage is over
            self.exhausted = True
        except (RuntimeError, LookupError, NotImplementedError, TypeError) as error:
            self._degrade(f"it cannot be captured: {_first_line(error)}", task)
        except BaseException:  # Ctrl-C: what torch keeps of a capture that was broken off fits no later one
            self._drop()
            raise

    # -- what there is

    def _opened(self) -> GraphPool:
        if self._pool is None:
            self._pool = GraphPool(self._torch_device)
        return self._pool

    def _key(self, given: Mapping[str, Any]) -> Any:
        """Returns what forwards have in common that may run by the same graphs; None for one that is eager."""
        parts: list[Any] = []
        rows, cache = 0, None
        for name, value in given.items():
            if isinstance(value, torch.Tensor):
                if name in GROWS:
                    parts.append((name, value.dim()))
                    continue
                shape = value.shape
                if name in _TOKENS:
                    rows = shape[0] * shape[1]
                    if shape[1] > _NEW or rows > _ROWS:
                        return None
                parts.append((name, shape, value.dtype))
            elif isinstance(value, Cache):
                cache = value
                parts.append((name, type(value)))
            elif value is None or isinstance(value, (bool, int, float, str)):
                parts.append((name, value))
            elif name not in GROWS:
                self._unfit = f"{name} is a {type(value).__name__}"
                return None
        if cache is None:
            self._unfit = "no cache of transformers is given"
        if not rows or cache is None or not _may_run():
            return None
        return (*parts, *_flags())

    def _tensors(self) -> list[torch.Tensor]:
        programs = (
            variant.program for plan in self._plans.values() for variant in plan.variants if variant.program is not None
        )
        return [tensor for program in programs for tensor in program.tensors.values()]

    def _evict(self) -> None:
        """Drops the plans that were not used for longest, beyond so many; of those before the last, first such without
        graphs."""
        while len(self._plans) > KEYS:
            older = list(self._plans)[:-1]
            bare = (key for key in older if all(variant.program is None for variant in self._plans[key].variants))
            _close(self._plans.pop(next(bare, older[0])).variants)

    def _degrade(self, why: str, task: _Task | None = None, *, unexplained: bool = False) -> None:
        """Goes to the next coarser cut; steps of batches, for which there is none, are eager from now on."""
        if task is not None and task.batch is not None:
            self._why["batches"] = why
            task.call.eager = True
            if (plan := self._plans.pop(task.key, None)) is not None:
                _close(plan.variants)
        else:
            self._why[self.way] = why
            self.way = WAYS[WAYS.index(self.way) + 1]
            self._drop()
        if unexplained:
            warn(f"{self._name} decodes with fewer graphs from now on: {why}")

    def _drop(self) -> None:
        """Drops all graphs, which no kernel reads any more."""
        plans = [*self._plans.values()]
        self._plans.clear()
        for plan in plans:
            _close(plan.variants)
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _obey(self) -> None:
        """Gives up graphs, as a forward has found no memory."""
        self.exhausted = False
        self._drop()

    def invalidate(self) -> None:
        """Drops all graphs, as the model has changed. No forward of it runs."""
        self._drop()
        self._whole = None
        self._never_alone.clear()
        self.way, self._why = WAYS[0], {}

    def give_up(self, pages: int) -> int:
        """Gives back the pages of graphs that no call and no loop uses; returns how many. See `pressure.Giver`."""
        if self._pool is None or any((call := one()) is not None and call.runs for one in self.calls.valuerefs()):
            return 0
        with self._turn(me := object()) as whose:
            if whose is not me:
                return 0
            before = self._device.available
            self._drop()
            self._device.reap(wait=True)
            return max(0, int(self._device.available - before))

    def close(self) -> None:
        """Ends with the management of the model. Idempotent."""
        self.way = "eager"
        self._drop()

    def report(self) -> PiecesReport:
        """Returns how the model decodes."""
        reasons = self._why if self.replayed or not self._unfit else self._why | {"forwards": self._unfit}
        why = "; ".join(f"{way}: {reason}" for way, reason in reasons.items())
        pool = self._pool
        graphs = 0 if pool is None else pool.captured
        pages = 0 if pool is None else -(-pool.nbytes() // self._device.page_size)
        return PiecesReport(self.way, why, self.captures, graphs, self.replayed, pages)


_capturing: Final = torch.cuda.is_current_stream_capturing
_FLAGS: Final = (
    torch.is_inference_mode_enabled,
    torch._C._get_cublas_allow_tf32,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch._C._get_deterministic_algorithms,
)
_TOKENS: Final = ("input_ids", "inputs_embeds")


def _flags() -> tuple[Any, ...]:
    """Returns what of this process and thread decides which kernels compute a forward."""
    return tuple(flag() for flag in _FLAGS)


def _may_run() -> bool:
    """Is this thread in a state in which graphs do what eager code does?"""
    return not (torch.is_grad_enabled() or torch.is_autocast_enabled() or _capturing())


def _close(variants: Iterable[Variant]) -> None:
    """Lets go of the graphs of variants."""
    for program in (variant.program for variant in variants if variant.program is not None):
        program.close()


def _is_watched(model: nn.Module) -> bool:
    """Does other code watch calls of modules, or replace what they do? Then all of them have to be called."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return True
    for module in model.modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "forward" in vars(module) or not all(isinstance(hook, Hook) for hook in hooks):
            return True
    return False


def _length(task: _Task) -> Any:
    """Returns how long the sequences of a forward are; of a loop's step something new, as requests come and go."""
    mask = task.given.get("attention_mask")
    if task.batch is not None:
        return object()
    if isinstance(mask, torch.Tensor):
        return mask.shape[1]
    try:
        return given_cache(task.given).get_seq_length()
    except ValueError:  # no layer of the cache keeps tokens
        return task.call.forwards


def _dense(value: Any) -> Any:
    """Returns the tensor, as one whose elements share no memory."""
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _tensors(output: Any) -> Sequence[torch.Tensor]:
    values = output.values() if isinstance(output, Mapping) else (output,)
    return [value for value in values if isinstance(value, torch.Tensor) and value.is_cuda]


def weights_by_address(model: nn.Module) -> dict[int, tuple[torch.Tensor, ...]]:
    """The model's parameters and buffers, by the address of their storage."""
    weights: dict[int, tuple[torch.Tensor, ...]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        address = tensor.untyped_storage().data_ptr()
        weights[address] = (*weights.get(address, ()), tensor)
    return weights


def deciding_by_length(model: nn.Module) -> list[nn.Module]:
    """Modules of rotary positions that compute something else for longer sequences."""
    kinds = ("dynamic", "longrope")
    return [
        module for module in model.modules() if any(kind in str(getattr(module, "rope_type", "")) for kind in kinds)
    ]


def modules_with_cache(model: nn.Module, run: Callable[[], Any]) -> tuple[Any, list[nn.Module]]:
    """Calls `run`, a forward of the model on this thread, and returns its result and the innermost modules that were
    given a cache."""
    given: dict[nn.Module, None] = {}
    thread, handles = threading.get_ident(), list[RemovableHandle]()

    def look(module: nn.Module, args: Any, kwargs: Any = None) -> None:  # None: see RecordedLayers
        if threading.get_ident() == thread and any(isinstance(arg, Cache) for arg in (*args, *kwargs.values())):
            given[module] = None

    try:
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(look, with_kwargs=True))
        result = run()
    finally:
        remove_all(handles)
    inner = [module for module in given if not any(part in given for part in module.modules() if part is not module)]
    return result, [module for module in inner if module is not model]


def _first_line(error: BaseException | None) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
