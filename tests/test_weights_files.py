"""Which weights of a model are found in its files: those that are there byte for byte, under whatever name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.core_model_loading import WeightRenaming

from ballonet.allocator.errors import WeightsFileChanged
from ballonet.hooks.weights import files as weights_files
from ballonet.hooks.weights.model_parts import members
from ballonet.offload.residency.weights_file import WeightsFile

from . import weights
from .models import build
from .programs import run

pytestmark = pytest.mark.usefixtures("no_network")


def saved(folder: Path, name: str = "llama", shard: str = "1GB", **changes: Any) -> Path:
    build(name, **changes).save_pretrained(folder, max_shard_size=shard)
    return folder


def loaded(folder: Path | str, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    return auto.from_pretrained(folder, **options)


def names(model: Any) -> set[str]:
    return {member.name for member in members(model, ())}


def buffers(model: Any) -> set[str]:
    """What no file has: made anew with every model."""
    return {name for name, _ in model.named_buffers()} - set(model.state_dict())


def right(model: Any, found: weights_files.Found) -> None:
    """Read once more, by other means."""
    tensors = {member.name: member.tensor for member in members(model, ())}
    assert set(found.spans) | set(found.left) == set(tensors)
    assert not set(found.spans) & set(found.left)
    for name, span in found.spans.items():
        data = Path(span.file.path).read_bytes()[span.start : span.start + span.nbytes]
        assert data == bytes(tensors[name].detach().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("shard", ["1GB", "100KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_of_a_model_as_it_was_saved(tmp_path: Path, shard: str, tied: bool) -> None:
    model = loaded(saved(tmp_path, shard=shard, tie_word_embeddings=tied))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard != "1GB")
    sources = weights_files.find(model)
    assert set(sources.left) == buffers(model)
    assert set(sources.left.values()) == {"no file has it"}
    right(model, sources)


def test_a_tied_weight_is_found_by_either_of_its_names(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, path, {"format": "pt"})
    model = loaded(tmp_path)
    assert "model.embed_tokens.weight" in weights_files.find(model).spans


@pytest.mark.parametrize("where", ["whole", "inside"])
def test_the_part_without_a_head_and_the_whole_find_each_other(tmp_path: Path, where: str) -> None:
    if where == "inside":
        model = loaded(saved(tmp_path), AutoModel)
    else:
        build("llama").model.save_pretrained(tmp_path)
        model = loaded(tmp_path)
    sources = weights_files.find(model)
    assert set(sources.left) - buffers(model) == ({"lm_head.weight"} if where == "whole" else set())
    right(model, sources)


def test_merged_experts_are_not_what_the_file_has(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path, "mixtral"))
    sources = weights_files.find(model)
    merged = {name for name in sources.left if "experts" in name}
    assert len(merged) == 2 * model.config.num_hidden_layers
    assert set(sources.left) == merged | buffers(model)
    assert {sources.left[name] for name in merged} == {"its dtype or shape is not that in the file"}
    right(model, sources)


def test_a_model_that_is_not_loaded_yet_knows_where_its_weights_would_come_from(tmp_path: Path) -> None:
    file = WeightsFile(saved(tmp_path, "mixtral") / "model.safetensors")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    named = weights_files.candidates(model, [file])
    for name, parameter in model.named_parameters():
        entries = named[id(parameter)]
        assert len(entries) == 1 or "experts" in name
        assert [entry.shape for entry, _ in entries] == [tuple(parameter.shape)] or "experts" in name
    assert not any("mlp.gate." in key for key in file.tensors)
    assert set(weights_files.find(model).left) == names(model)


def test_another_dtype_is_another_weight(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path), dtype=torch.bfloat16)
    sources = weights_files.find(model)
    assert not sources.spans
    assert "its dtype or shape is not that in the file" in sources.left.values()


@pytest.mark.parametrize("element", [0, -1])
def test_a_weight_that_was_changed_is_left_out(tmp_path: Path, element: int) -> None:
    model = loaded(saved(tmp_path))
    weight = model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight.view(-1)[element] = torch.nextafter(weight.view(-1)[element], torch.tensor(9.0))
        norm = model.model.norm.weight
        norm[0] = float("nan")
    sources = weights_files.find(model)
    changed = {"model.layers.1.mlp.up_proj.weight", "model.norm.weight"}
    assert set(sources.left) == changed | buffers(model)
    assert {sources.left[name] for name in changed} == {"its values are not those in the file"}
    right(model, sources)


def test_a_weight_whose_memory_is_laid_out_otherwise_is_left_out(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path))
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert weight.shape[0] == weight.shape[1]
    weight.data = weight.data.t().contiguous().t()
    sources = weights_files.find(model)
    assert sources.left["model.layers.0.self_attn.q_proj.weight"] == "its memory is not laid out as in the file"


def test_a_name_that_a_renaming_should_have_spared_is_found(tmp_path: Path) -> None:
    model = loaded(saved(tmp_path))
    model._weight_conversions = [WeightRenaming("norm", "nope")]
    assert set(weights_files.find(model).left) == buffers(model)


def test_a_file_that_changes_under_the_last_comparison_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(saved(tmp_path))
    read, reads, last = WeightsFile.read, 0, -1

    def counted(file: WeightsFile, offset: int, nbytes: int) -> bytes:
        nonlocal reads
        reads += 1
        data = read(file, offset, nbytes)
        if reads == last:
            weights.CHANGES["rewritten"](Path(file.path))
        return data

    monkeypatch.setattr(WeightsFile, "read", counted)
    weights_files.find(model)
    last = 2 * reads
    with pytest.raises(WeightsFileChanged):
        weights_files.find(model)


def test_a_model_from_the_cache_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = "0" * 40
    repository = tmp_path / "models--some--model"
    saved(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = loaded("some/model", local_files_only=True, cache_dir=tmp_path)
    assert model.name_or_path == "some/model"
    sources = weights_files.find(model)
    assert set(sources.left) == buffers(model)


def test_where_there_is_no_file_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved(tmp_path / "elsewhere"))
    model = build("llama")
    for name in ("", "some/model", "no name at all/of any/model", str(tmp_path)):
        model.name_or_path = model.config._name_or_path = name
        sources = weights_files.find(model)
        assert not sources.spans
        assert set(sources.left) == names(model)
        assert set(sources.left.values()) == {"no file that it was loaded from is known"}
    sources = weights_files.find(torch.nn.Linear(2, 2))
    assert set(sources.left) == {"weight", "bias"}


@pytest.mark.parametrize("index", ["", '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_no_index(tmp_path: Path, index: str) -> None:
    model = loaded(saved(tmp_path, shard="100KB"))
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert not weights_files.find(model).spans


def test_a_damaged_file_is_the_reason(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    model = build("llama")
    model.config._name_or_path = model.name_or_path = str(tmp_path)
    os.truncate(path, 10_000)
    sources = weights_files.find(model)
    assert set(sources.left) == names(model)
    assert all(str(path) in reason and "not whole" in reason for reason in sources.left.values())


# -- files that change, each in a process of its own, which a SIGBUS would end -----------------------------------------

SCENE = """
    import sys
    from pathlib import Path
    import torch
    from transformers import AutoModelForCausalLM
    from ballonet.allocator.errors import WeightsFileChanged
    from ballonet.hooks.weights import files as weights_files
    from ballonet.offload.residency.weights_file import WeightsFile
    from tests import weights

    torch.set_num_threads(1)
    read = WeightsFile.read
    for name in sys.argv[2:]:
        folder = Path(sys.argv[1]) / name
        model = AutoModelForCausalLM.from_pretrained(folder)
        address = model.model.layers[0].mlp.up_proj.weight.data_ptr()
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        bounds = [(*(int(each, 16) for each in line[0].split("-")), line[-1]) for line in lines]
        (lies_in,) = (file for first, end, file in bounds if first <= address < end)
        assert lies_in.startswith(str(folder)), "the weights are no view of the mapped file"

        left = 5
        def late(file, offset, nbytes):
            global left
            left -= 1
            data = read(file, offset, nbytes)
            if left == 0:
                weights.CHANGES[name](Path(file.path))
            return data

        WeightsFile.read = late
        try:
            weights_files.find(model)
        except WeightsFileChanged as error:
            print(error.path)
"""


def test_a_file_that_changes_while_it_is_compared_is_a_typed_error_and_no_signal(tmp_path: Path) -> None:
    """The weights that it is compared with are pages of the same file."""
    changes = ["emptied", "rewritten", "replaced"]
    for change in changes:
        saved(tmp_path / change)
    assert run(SCENE, tmp_path, *changes).split() == [
        str(tmp_path / change / "model.safetensors") for change in changes
    ]
