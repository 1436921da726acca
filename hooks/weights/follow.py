"""Follows a managed model through its changes: moves new tensors into ranges before they are used again; and refuses
models whose weights another library moves, before anything is touched.

Note [A model that changes]
    Nothing is intercepted. `half()`, `load_state_dict(assign=True)`, `resize_token_embeddings`, an adapter: torch puts
    new tensors into its own memory, and the pages of replaced tensors go with those (ranges.py, Note [Whose pages they
    are]). At the next outermost forward, if no other thread runs one, all of the model's tensors are looked at: those
    outside of the ranges are moved into new ones, addresses of the others stay, and the decoder layers are found anew.
    A tensor that does not fit, or lies on another device, is used where it is, and `left` says why.

Note [Noticing a change]
    A check for changes must cost nothing per parameter and forward. There are three signs: a tensor over the ranges was
    freed (counted by the core), a parameter, buffer or module was registered in a module of the model (torch's global
    registration hooks), or a list of decoder layers has another length (`ModuleList.insert` registers nothing). Memory
    that is replaced while the old is still referred to (`weight.data = x` beside a view of it) shows none of them; it
    is moved with the next sign.

Note [Left for good]
    A tensor that could have been moved at one look and was not stays outside until it is replaced: a CUDA graph may
    have been captured with its address meanwhile. For the same reason nothing is moved during a capture, and tensors
    that are outside of the ranges then stay there. A tensor that forwards replace again and again, as of a module that
    assigns a buffer in its own, stays outside after a number of moves. What a program replaces between forwards, as RL
    does with the weights of each step, is moved each time. Which of the two it was says when tensors over the ranges
    were freed: their number is noted at the end of each (`Weights.freed_at_end`).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from ...allocator._native import Device
from ...allocator.errors import BallonetError, ManageError
from ...allocator.patches import SharedPatch, Undo
from ...offload.policy.plan import Fewest, Plan, Rule, Same
from ...offload.policy.tuning import WeightPlans
from ..device.streams import torch_device
from . import ranges
from .model_parts import Blocks, TensorMember, TensorSpan, decoder_layers, layer_lists, members, spans, survey
from .moving import tenants_of
from .ranges import FROM_CPU, NOTHING, Files, Vacated, Weights

_REPLACED = "forwards have replaced it more than {} times"
_SHARED = "it lies in the ranges of another managed model, which has it in common with this one"
_CAPTURED = "it was new when a CUDA graph was captured, which may hold its address"
_capturing = torch.cuda.is_current_stream_capturing
# Times that one tensor that a model replaces in its forward is moved in again. Chosen: what it replaces in each forward
# reaches it at once, what is converted or given adapters by hand does not.
MOVES: Final = 8


def refuse_what_moves_weights(model: nn.Module) -> None:
    """Raises ManageError where another library gives the weights of `model` other memory while it runs."""
    for name, module in model.named_modules():
        where = f"{type(module).__name__} {name!r}" if name else type(module).__name__
        if getattr(module, "_is_fsdp_managed_module", False):  # FSDP1 and fully_shard alike
            raise ManageError(
                f"{where} is sharded by FSDP, which gives its weights other memory in every forward: manage the model "
                "instead of sharding it, or leave it to FSDP"
            )
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ManageError(
                f"{where} copies the model to {len(module.device_ids)} devices in every forward: manage the model "
                "inside (its `module`) and call that, or use one process per device with DistributedDataParallel"
            )
        if any(map(_offloads, _accelerate_hooks(module))):
            raise ManageError(
                f"{where} is offloaded by accelerate (a device_map with 'cpu' or 'disk', cpu_offload, disk_offload), "
                "which brings its weights in for each forward: load the model without offloading, or call "
                "accelerate.hooks.remove_hook_from_submodules(model) first"
            )


def _accelerate_hooks(module: nn.Module) -> Iterator[Any]:
    hook = getattr(module, "_hf_hook", None)
    yield from getattr(hook, "hooks", () if hook is None else (hook,))  # a SequentialHook has several


def _offloads(hook: Any) -> bool:
    """Does the hook offload weights? AlignDevicesHook has an attribute for it; CpuOffload is known by its class."""
    return bool(getattr(hook, "offload", False)) or type(hook).__name__ == "CpuOffload"


def check_budget(model: nn.Module, device: Device, rule: Rule, plans: WeightPlans, vacated: Vacated) -> None:
    """Raises BudgetError where the model would not fit, once what is `vacated` is free. Idle models give pages."""
    layers = decoder_layers(model)
    surveyed = survey(members(model, layers), torch_device(device))
    layout = ranges.layout_of(surveyed.spans, _still(layers), device.page_size, plans)
    working = ranges.working_pages(model, layers, device.page_size)
    ranges.plan_under_budget(device, layout, surveyed.spans, working, len(layers), rule, vacated)


Facts = frozenset[tuple[Any, ...]]


def _facts_of(model: nn.Module) -> Facts:
    """The modules of a model, and where its parameters and buffers lie and what they look like."""
    modules = ((name, id(module), type(module)) for name, module in model.named_modules())
    tensors = ((name, *_looks(value)) for name, value in (*model.named_parameters(), *model.named_buffers()))
    return frozenset((*modules, *tensors))


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
    except (RuntimeError, ValueError, NotImplementedError):  # of a lazy module, sparse, or a wrapper
        return (id(tensor),)


class WeightsFollower:
    """Brings the weights of one model into ranges and keeps them there. Does not keep the model alive."""

    def __init__(self, weights: Weights) -> None:
        self.left: dict[str, str] = {}  # name of a tensor outside of the ranges, at the last look -> why
        self._weights = weights
        self._cuda = weights.device.kind == "cuda"
        self.parts: set[int] = set()  # ids of all modules
        self._lists: list[tuple[weakref.ref[Blocks], int]] = []
        self._unpinned = 0  # tensors over the ranges that were freed until the last look
        self._by_forward = False  # was what is new now replaced in a forward?
        self._rule: Rule | None = None
        self._facts: Facts = frozenset()
        self.registered = False
        self._settled: dict[int, str] = {}  # address of a tensor left for good -> why
        self._moved: Counter[str] = Counter()

    def adopt(
        self,
        model: nn.Module,
        rule: Rule,
        files: Files | None = None,
        progress: Callable[[int], object] = int,
        vacated: Vacated = NOTHING,
    ) -> Plan:
        """Moves every parameter and buffer of `model` into ranges, all or none, and follows it until `close()`.

        `rule`: which of its decoder layers stream. `files`: tensors that lie in files, for a model that was just loaded
        and may be on the CPU. `progress`, `vacated`: as for `Weights.adopt`. Raises WrongDevice, ManageError,
        BudgetError, torch.OutOfMemoryError, WeightsFileChanged, DriverError.
        """
        refuse_what_moves_weights(model)
        layers = decoder_layers(model)
        all_members = members(model, layers)
        shared = self._of_others(all_members)
        device = torch_device(self._weights.device)
        surveyed = survey(_without(shared, all_members), device, from_host=files is not None)
        if files is FROM_CPU:
            self._weights.home = torch.device("cpu")
        if surveyed.refused is not None:
            raise surveyed.refused
        working = ranges.working_pages(model, layers, self._weights.device.page_size)
        plan = self._weights.adopt(surveyed.spans, working, len(layers), rule, _still(layers), files, progress, vacated)
        self._rule = rule
        self.left = dict(surveyed.left) | dict.fromkeys(shared.values(), _SHARED)
        self._remember(model)
        self._facts = _facts_of(model)
        _followers.add(id(self), self)
        return plan

    @property
    def pending(self) -> bool:
        """May the model have changed? See Note [Noticing a change], Note [Left for good]."""
        if self.registered or self._weights.group.unpinned != self._unpinned or (self._cuda and _capturing()):
            return True
        for reference, length in self._lists:
            module = reference()
            if module is None or len(module._modules) != length:
                return True
        return False

    def catch_up(self, model: nn.Module) -> bool:
        """Moves new tensors into ranges, as far as they can be moved; no other thread may use the model meanwhile.
        Returns whether modules, or what lies at the addresses of weights, are others than before: layers that left and
        came back show the first sign, and are the same."""
        layers = decoder_layers(model)
        self._remember(model)
        tensors = members(model, layers)
        known = {id(member.tensor): member.name for member, _ in tenants_of(self._weights.all_ranges(), tensors)}
        self._adopt_new(_without(known, tensors), model, layers)
        self._weights.sort(tenants_of(self._weights.all_ranges(), tensors))
        before, self._facts = self._facts, _facts_of(model)
        return before != self._facts

    def close(self) -> None:
        """Stops following the model. Idempotent."""
        _followers.remove(id(self))

    def _remember(self, model: nn.Module) -> None:
        """Notes the model's present state. Called before a look, so that a change during it is noticed."""
        now = self._weights.group.unpinned
        self._by_forward = self._unpinned != self._weights.freed_at_end == now
        self._unpinned = self._weights.freed_at_end = now
        self.registered = False
        self.parts = {id(module) for module in model.modules()}
        self._lists = [(weakref.ref(modules), len(modules)) for modules in layer_lists(model)]

    def _adopt_new(self, new: Sequence[TensorMember], model: nn.Module, layers: Sequence[nn.Module]) -> None:
        names = {id(member.tensor): member.name for member in new}
        shared = self._of_others(new)
        try:
            refuse_what_moves_weights(model)
            surveyed = survey(_without(shared, new), torch_device(self._weights.device))
        except ManageError as error:
            self.left = dict.fromkeys(names.values(), str(error))
            self.registered = True  # the end of that refusal may leave no sign
            return
        reasons = [self._reason_to_leave(span, names) for span in surveyed.spans]
        chosen = [span for span, reason in zip(surveyed.spans, reasons, strict=True) if reason is None]
        stay = [(span, reason) for span, reason in zip(surveyed.spans, reasons, strict=True) if reason is not None]
        try:
            if chosen:
                away = frozenset((*self._weights.ring.streamed, *self._weights.on_host()))
                self._weights.adopt(
                    chosen, 0, len(layers), Same(away, further=isinstance(self._rule, Fewest)), _still(layers)
                )
        except (BallonetError, torch.OutOfMemoryError) as error:
            # The move was undone, which freed the ranges and may have given the tensors other memory.
            self._unpinned = self._weights.group.unpinned
            stay += [(next(spans(span.tensors, {})), str(error)) for span in chosen]
        else:
            if self._by_forward:
                self._moved.update(names[id(tensor)] for span in chosen for tensor in span.tensors)
        self._settled = {span.start: reason for span, reason in stay}
        self.left = dict(surveyed.left) | dict.fromkeys(shared.values(), _SHARED)
        self.left |= {names[id(tensor)]: reason for span, reason in stay for tensor in span.tensors}

    def _of_others(self, tensors: Sequence[TensorMember]) -> dict[int, str]:
        """Returns, id -> name, the tensors that lie in another managed model's ranges, and may be in use."""
        others = [
            range_ for follower in _followers.users if follower is not self for range_ in follower._weights.all_ranges()
        ]
        return {id(member.tensor): member.name for member, _ in tenants_of(others, tensors)}

    def _reason_to_leave(self, span: TensorSpan, names: Mapping[int, str]) -> str | None:
        """Returns why the span is not moved, None where it is: see Note [Left for good]."""
        if span.start in self._settled:
            return self._settled[span.start]
        if self._cuda and _capturing():
            return _CAPTURED
        if any(self._moved[names[id(tensor)]] >= MOVES for tensor in span.tensors):
            return _REPLACED.format(MOVES)
        return None


def _still(layers: Sequence[nn.Module]) -> set[int]:
    """Returns the layers that must stay resident, as they cannot have hooks."""
    return {index for index, layer in enumerate(layers) if isinstance(layer, torch.jit.ScriptModule)}


def _without(some: Mapping[int, str], tensors: Sequence[TensorMember]) -> list[TensorMember]:
    return [member for member in tensors if id(member.tensor) not in some]


def _listen() -> Iterator[Undo]:
    yield torch_module.register_module_parameter_registration_hook(_registered).remove
    yield torch_module.register_module_module_registration_hook(_registered).remove
    yield torch_module.register_module_buffer_registration_hook(_buffer_registered).remove


_followers: Final = SharedPatch[WeightsFollower](_listen)  # by id


def _registered(module: nn.Module, *_: Any) -> None:
    # Models make lists of their layers in each forward: modules of other models must cost nothing.
    for follower in _followers.users:
        if id(module) in follower.parts:
            follower.registered = True


def _buffer_registered(module: nn.Module, name: str, *_: Any) -> None:
    """Notes a new buffer. One that is assigned again, as modules do while they run, is noticed by the freed tensor."""
    if name not in module._buffers:
        _registered(module)
