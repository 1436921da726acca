"""`from_pretrained()`: a model from its files into the pool, never whole on the device and never twice on the host.

Note [Loading without reading]
    transformers loads the model, with its handling of names, ties, dtypes, experts and missing weights, on the CPU:
    there a weight that needs no conversion becomes a view of the mapped file, of which nothing is read (files.py).
    Only weights that differ from their file are in memory then: merged experts, another dtype, files of other formats.
    manage() fills the ranges layer by layer, from the files where it can (`pread`, or memory that the device copies
    from), else from memory that is freed as it goes. The mapping is never touched, so a file that changes meanwhile is
    an error and not a signal.

Note [Loaded on the device]
    Quantized weights are laid out for a device while they are loaded, and kernels from the hub are chosen by the device
    that the weights are on. transformers loads such a model to the device, where it has to fit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Literal

import torch

from ..allocator import devices, install, ram
from ..allocator.errors import BallonetError, ConfigError, ManageError
from ..allocator.units import format_size, progress
from ..offload.timeline.recorder import mark
from . import compat
from .device.streams import torch_device
from .manage import managed
from .options import ManageOptions, given
from .weights.files import file_spans
from .weights.model_parts import bytes_of_weights, members
from .weights.moving import bring

# Options of transformers that place or divide a model, as ballonet does itself
_PLACING: Final = (
    "device_map", "max_memory", "offload_folder", "offload_buffers", "tp_plan", "tp_size", "device_mesh",
    "distributed_config",
)  # fmt: skip
_WHEREVER: Final = ("auto", "balanced", "balanced_low_0", "sequential")  # values of device_map
_KERNELS: Final = ("use_kernels", "kernel_config")
_WEIGHTS: Final = ("*.safetensors*", "pytorch_model*.bin*", "*.gguf")  # files that hold or list weights


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    cls: Any = None,
    interval: int | Literal["auto"] | None = "auto",
    tpot_slo: float | str | None = None,
    ttft_slo: float | str | None = None,
    priority: int = 0,
    floor: int | str = 0,
    prefix_cache: bool | int | str | None = None,
    prefix_dir: str | os.PathLike[str] | None = None,
    prefix_dir_limit: int | str | None = None,
    shared_budget: int | str | bool | None = None,
    batches: str = "fast",
    pieces: Literal["auto"] | None = "auto",
    **options: Any,
) -> Any:
    """Loads a model and manages it: `cls.from_pretrained(name_or_path, **options)`, then `manage()`, except that the
    model may be larger than the device, and larger than the free host memory.

    `cls`: a class of transformers; by default the one that the checkpoint was saved from, if that generates text, else
    AutoModelForCausalLM. Weights that lie unchanged in safetensors files go from there to the device; those that
    transformers has to convert are on the host in between. `interval`, `tpot_slo` and `ttft_slo` (seconds), `priority`,
    `floor`, `prefix_cache`, `prefix_dir`, `prefix_dir_limit`, `shared_budget`, `batches`: as for `manage()`. A
    `device_map` other than "auto" or the device of ballonet, and the other options that place or divide a model
    (`offload_folder`, `tp_plan`, …), are refused. Quantized weights, and models with `use_kernels`, are loaded to the
    device by transformers and have to fit.

    Returns the result of `cls.from_pretrained`; `manage()` returns its Managed. Raises the errors of
    `cls.from_pretrained` and `manage()`, and WeightsFileChanged where a file changes meanwhile.
    """
    chosen = ManageOptions.of(given(locals()))  # the table of options says which names of these count
    if devices.current() is None:
        install.install()
    device = torch_device(devices.require())
    if _is_device(options.get("device_map"), device):
        options.pop("device_map")
    for option in _PLACING:
        if options.get(option) is not None and options[option] is not False:
            raise ManageError(
                f"ballonet.from_pretrained() brings the model to {device}, for which ballonet was "
                f"installed, and takes no {option}={options[option]!r}: leave it out, or load the model with "
                "transformers and call ballonet.manage(model)"
            )
    config = compat.peek_config(name_or_path, options)
    on_device = compat.quantization(config, options) or any(options.get(name) for name in _KERNELS)
    if on_device:
        options["device_map"] = {"": device}
    mark("from_pretrained()")
    with torch.device("cpu"), install.stock_everywhere():
        loaded = (cls or compat.causal_model(config)).from_pretrained(name_or_path, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded
    tensors = members(model, ())
    files = file_spans(tensors)
    with progress(f"Loading {type(model).__name__}", sum(member.tensor.nbytes for member in tensors)) as arrived:
        managed(model, chosen, files=files, progress=arrived)
    bring(tensors, device)
    return loaded


def load_or_draw(name: str, **options: Any) -> Any:
    """Loads a model as `from_pretrained`, for what it takes and not for what it says: where a folder has a
    configuration alone, its weights are random. ConfigError where it is no model that can be loaded; the errors of
    `from_pretrained`."""
    try:
        return from_pretrained(name, cls=None if has_weights(name) else DrawnWeights, dtype="auto", **options)
    except BallonetError:
        raise
    except (OSError, ValueError) as error:  # transformers' errors for a name that is no model
        raise ConfigError(f"{name!r} is no model that can be loaded: {' '.join(str(error).split())}") from error


def has_weights(name: str) -> bool:
    """Returns whether a model has weights, as far as is known: not a folder with a configuration alone."""
    folder = Path(name)
    return not (folder / "config.json").is_file() or any(path for kind in _WEIGHTS for path in folder.glob(kind))


class DrawnWeights:
    """Takes the place of a class of transformers for folders that have no weights: draws them at random."""

    @staticmethod
    def from_pretrained(name: str, **_: Any) -> Any:
        """Returns a model with that configuration. ManageError where it is quantized or memory is lacking."""
        from transformers import AutoModelForCausalLM

        config = compat.load_config(name)
        if compat.quantization(config, {}):
            raise ManageError(f"{name} is quantized and has no weights: give the model that it was made of")
        layers, rest = bytes_of_weights(config)
        if (nbytes := sum(layers) + rest) > ram.available():
            raise ManageError(
                f"{name} has no weights, and to draw them takes {format_size(nbytes)} of memory, of which "
                f"{format_size(ram.available())} are free: give a folder with weights, which may stay in their files"
            )
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32).eval()


def _is_device(device_map: Any, device: torch.device) -> bool:
    """Does `device_map` only put the whole model on `device`?"""
    if isinstance(device_map, dict) and list(device_map) == [""]:
        device_map = device_map[""]
    if isinstance(device_map, int):
        device_map = f"cuda:{device_map}"
    if not isinstance(device_map, str | torch.device):
        return False
    return device_map in _WHEREVER or str(device_map) in (str(device), device.type)
