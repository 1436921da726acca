"""Weights that are copied from their file: by the device's own engine, from a mapping that it may only read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

import ballonet
from ballonet.allocator import _native
from ballonet.allocator.errors import DriverError, WeightsFileChanged
from ballonet.hooks.device.streams import stream_of
from ballonet.hooks.weights import files as weights_files
from ballonet.offload.policy.layout import ALIGNMENT
from ballonet.offload.residency.backing import FileBackings
from ballonet.offload.residency.weights_file import WeightsFile

from .. import weights
from ..models import build
from .scene import Place, over, scene


@scene()
@pytest.mark.parametrize("first", [96, 240])
def test_a_layer_comes_from_its_file(place: Place, first: int) -> None:
    """Wherever its data begins, in pieces that are registered alone; and nothing faults when the file is cut short."""
    sizes = {"a": 3 * place.page + 512, "b": place.page, "gap": 300, "c": 2 * place.page + 7}
    with tempfile.TemporaryDirectory() as folder:
        path = weights.write(Path(folder) / "w", sizes, first)
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        file, twins = WeightsFile(path), FileBackings(place.device, 2 * place.page)
        transfer, stream = _native.Transfer(place.device), stream_of(place.device)
        places, end = [], 0
        for name in ("a", "b", "c"):
            places.append((end, file.span(name)))
            end += -(-sizes[name] // ALIGNMENT) * ALIGNMENT
        slot = place.range(-(-end // place.page), "weights")
        shown = over(slot, torch.uint8, end)
        twin = twins.twin(places)
        if not twin.registered:
            assert "CUDA_ERROR_NOT_SUPPORTED" in twin.reason
            return
        for _ in range(3):
            shown.zero_()
            parts = twin.parts(slot.address)
            transfer.copy(parts, after=stream(), owner="weights", to="device").before(stream())
            for offset, span in places:
                mine = shown[offset : offset + span.nbytes].cpu()
                assert torch.equal(mine, data[span.start : span.start + span.nbytes])
        assert 5 <= len(parts) <= 7
        os.truncate(path, 1000)
        with pytest.raises(WeightsFileChanged):
            twin.parts(slot.address)
        if not place.cuda:
            with pytest.raises(DriverError, match="gone"):
                transfer.copy(parts, after=stream(), owner="weights", to="device").before(0)
        elif "SIMGPU_HOME" not in os.environ:  # a GPU has pinned the pages; the simulated one ends the process
            transfer.copy(parts, after=stream(), owner="weights", to="device").wait()
        twins.close()
        place.synchronize()
        del shown
        slot.close()


@scene()
def test_a_model_is_found_in_its_files(place: Place) -> None:
    """What is compared is compared on the device."""
    with tempfile.TemporaryDirectory() as folder:
        build("llama").save_pretrained(folder, max_shard_size="100KB")
        model = type(build("llama")).from_pretrained(folder).to(place.kind)
        ballonet.manage(model)
        unsaved = {name for name, _ in model.named_buffers()} - set(model.state_dict())
        moved = place.device.snapshot()["copied"]
        assert set(weights_files.find(model).left) == unsaved
        changed = "model.layers.1.mlp.up_proj.weight"
        with torch.no_grad():
            model.get_parameter(changed)[-1, -1] += 1
        assert set(weights_files.find(model).left) == unsaved | {changed}
        assert place.device.snapshot()["copied"] == moved
