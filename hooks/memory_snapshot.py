"""`ballonet.snapshot()`: all pages of the device and their contents, for PyTorch's memory viewer."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ..allocator import devices, install
from ..allocator._native import Device
from ..allocator.errors import ConfigError
from ..allocator.memory_snapshot import SnapshotContents, pages_by_owner, viewed
from .device import managers
from .managed import all_managed
from .weights.model_parts import has_bytes, members

PROTOCOL: Final = 4  # the newest pickle protocol that the viewer's page reads


def snapshot(path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """Returns the device's memory at this moment in the format of PyTorch's memory viewer, and writes it to `path`, a
    file for pytorch.org/memory_viz. On the stand-in as on a GPU.

    The format is that of `torch.cuda.memory._snapshot()`, with all that torch recorded (`_record_memory_history`) where
    the compiled allocator is torch's. Blocks have frames that name their owner, and for weights and KV their contents
    (allocator/memory_snapshot.py, Note [Owners in the viewer]). `ballonet` holds page_size, budget and pages by owner.
    NotInstalled; ConfigError where the file cannot be written.
    """
    device = devices.of().device
    contents = [*_weights(device), *_caches(device)]
    view = viewed(device.segments(), contents, ordinal=device.ordinal, history=install.history())
    view["ballonet"] = {
        "page_size": device.page_size,
        "budget": device.budget,
        "pages": pages_by_owner(view, device.page_size),
    }
    if path is not None:
        _write(Path(path), view)
    return view


def _weights(device: Device) -> Iterator[SnapshotContents]:
    """Yields the contents of every managed model's weight pages: its tensors, and its slots."""
    for model, weights in all_managed():
        if weights.device is device:
            name = type(model).__name__
            for member in members(model, ()):
                if has_bytes(member.tensor):
                    storage, start = member.tensor.untyped_storage(), member.tensor.data_ptr()
                    left = int(storage.data_ptr() + storage.nbytes()) - start  # an expanded tensor has more than that
                    yield SnapshotContents(start, min(member.tensor.nbytes, left), member.name, name)
            for number, slot in enumerate(weights.ring.ranges):
                yield SnapshotContents(slot.address, slot.nbytes, f"slot {number} of layers that stream", name)


def _caches(device: Device) -> Iterator[SnapshotContents]:
    """Yields the contents of the KV pages."""
    for name, ranges in managers.of(device).ranges():
        for what, opened in ranges:
            yield SnapshotContents(opened.address, opened.nbytes, what, name)


def _write(path: Path, view: dict[str, Any]) -> None:
    """Writes the file, whole or not at all. ConfigError."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(pickle.dumps(view, PROTOCOL))
        os.replace(part, path)
    except OSError as error:
        raise ConfigError(
            f"the snapshot cannot be written to {path} ({error.strerror}): name a file in a folder that "
            "you may write to"
        ) from error
    finally:
        with suppress(OSError):
            part.unlink()
