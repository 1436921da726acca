"""`ballonet.from_pretrained`: the model that transformers would load, in the pool, with its weights in memory once."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig

import ballonet
from ballonet import testing
from ballonet.allocator import devices, install
from ballonet.allocator._native import Device
from ballonet.allocator.errors import ManageError, WrongDevice
from ballonet.hooks import loading
from ballonet.hooks.weights.model_parts import members, survey
from ballonet.testing import chaos_of

from .models import build, generate, prompts
from .pool import bytes_that_exist, installing
from .portrait import all_in_pool, contents
from .programs import run
from .tuned import Tuned

pytestmark = pytest.mark.usefixtures("no_network")
PAGE = 4096
BUDGET = 2**25
LAYERS = 8


@pytest.fixture(autouse=True)
def small_layers(tuned: Tuned) -> None:
    tuned(weights={"large": 2**13})  # so that the matrices of small layers have ranges of their own


@pytest.fixture
def device() -> Iterator[Device]:
    with installing(BUDGET, PAGE) as put:
        yield put()


def saved(
    folder: Path, name: str = "llama", shard: str = "1GB", dtype: torch.dtype | None = None, **changes: Any
) -> Path:
    with install.stock():
        build(name, **changes).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def deep(folder: Path, **more: Any) -> Path:
    """A model whose layers are most of it, and far larger than a page."""
    return saved(folder, **({"num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 768} | more))


def portrait(model: nn.Module) -> dict[str, Any]:
    """All that can be told of a loaded model from outside."""
    whole: Any = model
    return contents(model) | {
        "classes": [(name, type(module), module.training) for name, module in model.named_modules()],
        "attributes": sorted(vars(model).keys() - {"generate"}),
        "config": whole.config.to_dict(),
        "generation_config": whole.generation_config.to_dict() if whole.can_generate() else None,
        "renamings": [str(conversion) for conversion in whole._weight_conversions],
    }


def check_same(folder: Path, cls: Any = None, auto: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Loads the model in `folder` both ways and compares. Returns ours."""
    with install.stock():
        torch.manual_seed(5)
        stock = portrait((cls or auto).from_pretrained(folder, **options))
    torch.manual_seed(5)
    ours = ballonet.from_pretrained(folder, cls=cls, **options)
    assert portrait(ours) == stock
    assert all_in_pool(ours)
    assert not ballonet.manage(ours).report().unmanaged_tensors
    return ours


# The same model


@pytest.mark.parametrize(
    ("name", "kept", "options"),
    [("llama", {}, {}), ("llama", {"tie_word_embeddings": True, "shard": "100KB"}, {}),
     ("gpt2", {"tie_word_embeddings": True}, {}), ("mixtral", {"shard": "100KB"}, {}), ("falcon_h1", {}, {}),
     ("llama", {"dtype": torch.float16}, {"dtype": torch.float32}),
     ("llama", {"dtype": torch.float16}, {"dtype": "auto"}), ("llama", {"dtype": torch.bfloat16}, {})],
)  # fmt: skip
def test_loaded_model_is_the_one_transformers_loads(
    tmp_path: Path, device: Device, name: str, kept: dict[str, Any], options: dict[str, Any]
) -> None:
    saved(tmp_path, name, **kept)
    check_same(tmp_path, **options)


@pytest.mark.parametrize("name", ["t5", "llava"])
def test_a_model_that_is_no_decoder_is_of_the_class_that_it_was_saved_from(
    tmp_path: Path, device: Device, name: str
) -> None:
    config = saved(tmp_path / "inside", name) / "config.json"
    (architecture,) = json.loads(config.read_text())["architectures"]
    model = check_same(tmp_path, auto=getattr(transformers, architecture), subfolder="inside")
    assert type(model).__name__ == architecture


def test_a_class_that_is_given(tmp_path: Path, device: Device) -> None:
    saved(tmp_path)
    assert type(check_same(tmp_path, cls=AutoModel)).__name__ == "LlamaModel"
    assert type(check_same(tmp_path, cls=transformers.LlamaForSequenceClassification)).__name__ != "LlamaModel"


def without_a_head(folder: Path) -> dict[str, Any]:
    build("llama").model.save_pretrained(folder)
    return {}


def of_another_shape(folder: Path) -> dict[str, Any]:
    saved(folder)
    return {"num_key_value_heads": 1, "ignore_mismatched_sizes": True}


def inside_and_renamed(folder: Path) -> dict[str, Any]:
    path = saved(folder / "inside") / "model.safetensors"
    renamed = {name.replace("self_attn", "attention"): tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path, {"format": "pt"})
    return {
        "subfolder": "inside",
        "key_mapping": {r"\.attention\.": ".self_attn."},
        "attn_implementation": "eager",
    }


def pickled(folder: Path) -> dict[str, Any]:
    model = build("llama")
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return {}


def beside_an_adapter(folder: Path) -> dict[str, Any]:
    saved(folder)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=["q_proj"]))
    nn.init.normal_(adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    adapted.save_pretrained(folder)
    return {}


@pytest.mark.parametrize(
    "checkpoint", [without_a_head, of_another_shape, inside_and_renamed, pickled, beside_an_adapter]
)
def test_unusual_checkpoints(tmp_path: Path, device: Device, checkpoint: Callable[[Path], dict[str, Any]]) -> None:
    model = check_same(tmp_path, **checkpoint(tmp_path))
    adapted = any("lora_B" in name for name, _ in model.named_parameters())
    assert adapted == (checkpoint is beside_an_adapter)


def test_loading_info_is_returned_beside_the_model(tmp_path: Path, device: Device) -> None:
    saved(tmp_path)
    model, info = ballonet.from_pretrained(tmp_path, output_loading_info=True)
    _, stock = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info == stock
    assert ballonet.manage(model).model is model


def test_a_device_that_the_user_has_set_is_not_where_it_goes(tmp_path: Path, device: Device) -> None:
    saved(tmp_path)
    with torch.device("meta"):
        model = ballonet.from_pretrained(tmp_path)
        assert torch.get_default_device().type == "meta"
    assert model.device.type == "cpu"


def test_loaded_model_is_managed_as_asked(tmp_path: Path, device: Device) -> None:
    model = ballonet.from_pretrained(deep(tmp_path), interval=4)
    managed = testing.manage(model, chaos=7)
    assert managed.report().streamed == (3, 7)
    assert chaos_of(managed) is not None
    assert chaos_of(managed).seed == 7
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    inputs = prompts(2, 9)
    assert torch.equal(generate(model, "greedy", inputs).tokens, generate(stock, "greedy", inputs).tokens)
    managed.release()
    assert contents(model) == contents(stock)


def test_loading_installs_where_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    monkeypatch.setenv("BALLONET_BUDGET", str(BUDGET))
    with installing(BUDGET, PAGE):
        model = ballonet.from_pretrained(saved(tmp_path))
        assert all_in_pool(model)
        del model


# Larger than the device


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_a_model_larger_than_its_budget(tmp_path: Path, stored: torch.dtype) -> None:
    """Be it from the file, or converted by threads of transformers: what is on the device is never more than the
    budget (`installing` looks), and what streams comes from the file where it lies there."""
    deep(tmp_path, dtype=stored)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    size = sum(tensor.nbytes for tensor in stock.parameters())
    budget = 3 * size // 4 // PAGE * PAGE
    inputs = prompts(2, 9)
    expected = generate(stock, "greedy", inputs)
    peak = 0
    with installing(budget, PAGE) as put:
        put()

        def look(_: nn.Module, __: Any) -> None:
            nonlocal peak
            peak = max(peak, bytes_that_exist())

        model = ballonet.from_pretrained(tmp_path, dtype=torch.float32)
        managed = ballonet.manage(model)
        assert 0 < len(managed.report().streamed) < LAYERS
        assert (managed.report().host_pages == 0) == (stored == torch.float32)
        for layer in model.model.layers:
            layer.register_forward_pre_hook(look)
        generated = generate(model, "greedy", inputs)
        assert generated.agrees(expected)
        assert torch.equal(generated.tokens, expected.tokens)
        assert size // 2 < peak <= budget
        if stored == torch.float32:
            assert ballonet.stats().copied.weights_d2h == 0
        del model, layer, generated


MEMORY = """
    import re, sys
    from pathlib import Path
    import torch
    import ballonet
    from ballonet.allocator import devices
    from ballonet.hooks.weights import moving
    from ballonet.offload.residency.weights_file import WeightsFile

    def kib(name):
        return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

    torch.set_num_threads(1)
    folder, budget = sys.argv[1], int(sys.argv[2])
    ballonet.install(budget, page_size=2**16, device="cpu")
    from transformers import AutoModelForCausalLM
    ballonet.from_pretrained(sys.argv[3])  # imports what loading imports
    before, most = kib("RssAnon"), 0
    step = moving.MoveIn.do

    def watched(self, *args):
        global most
        step(self, *args)
        most = max(most, kib("RssAnon") - before)

    moving.MoveIn.do = watched
    model = ballonet.from_pretrained(folder)
    after = kib("RssAnon") - before
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]
    written = sum(" rw-p " in line for line in lines)
    print(most, after, kib("RssFile"), written, ballonet.manage(model).report().host_pages)
"""


def test_the_weights_are_in_memory_once(tmp_path: Path) -> None:
    """32 MiB of them and more, from a file: nothing like that is in memory of the process's own, at any time."""
    folder = deep(tmp_path / "large", hidden_size=384, intermediate_size=1536)
    size = (folder / "model.safetensors").stat().st_size
    assert size > 2**25
    small = saved(tmp_path / "small")
    out = run(MEMORY, folder, size // 2 // 2**16 * 2**16, small)
    most, after, _, mapped, host_pages = map(int, out.split())
    assert 1024 * most < size // 8
    assert 1024 * after < size // 8
    assert mapped == 0  # of the loader's; the twins have one of their own, which is not private
    assert host_pages == 0


# Files that change, each in a process of its own, which a SIGBUS would end

CHANGING = """
    import sys
    from pathlib import Path
    import torch
    import ballonet
    from ballonet.allocator.errors import WeightsFileChanged
    from ballonet.hooks import loading
    from tests import weights

    torch.set_num_threads(1)
    ballonet.install(2**24, page_size=4096, device="cpu")
    spans = loading.file_spans
    for name in sys.argv[2:]:
        when, change = name.split("-")
        folder = Path(sys.argv[1]) / name

        def late(found):
            if when == "before":
                weights.CHANGES[change](folder / "model.safetensors")
            known = spans(found)
            if when == "after":
                weights.CHANGES[change](folder / "model.safetensors")
            return known

        loading.file_spans = late
        try:
            ballonet.from_pretrained(folder)
        except WeightsFileChanged as error:
            print(error.path)
        assert ballonet.stats().pages.weights == 0
"""


def test_a_file_that_changes_while_it_is_loaded_is_a_typed_error_and_no_signal(tmp_path: Path) -> None:
    changes = [f"after-{damage}" for damage in ("emptied", "halved", "rewritten", "replaced", "removed")]
    changes += [f"before-{damage}" for damage in ("emptied", "halved")]
    saved(tmp_path / "first")
    for change in changes:
        shutil.copytree(tmp_path / "first", tmp_path / change)
    out = run(CHANGING, tmp_path, *changes)
    assert out.split() == [str(tmp_path / change / "model.safetensors") for change in changes]


# Wrong input


def nothing(folder: Path) -> Path:
    return folder / "nothing"


def empty(folder: Path) -> Path:
    folder.joinpath("empty").mkdir()
    return folder / "empty"


def without_weights(folder: Path) -> Path:
    build("llama").config.save_pretrained(folder)
    return folder


def cut_off(folder: Path) -> Path:
    file = saved(folder) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    return folder


def no_header(folder: Path) -> Path:
    saved(folder).joinpath("model.safetensors").write_bytes(b"what is this?" * 10)
    return folder


def without_a_shard(folder: Path) -> Path:
    sorted(saved(folder, shard="100KB").glob("*.safetensors"))[0].unlink()
    return folder


def test_errors_are_those_of_transformers(tmp_path: Path, device: Device) -> None:
    for n, wrong in enumerate((nothing, empty, without_weights, cut_off, no_header, without_a_shard)):
        folder = tmp_path / str(n)
        folder.mkdir()
        folder = wrong(folder)
        with pytest.raises((OSError, ValueError, SafetensorError)) as stock:
            AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        with pytest.raises(stock.type, match=re.escape(str(stock.value).splitlines()[0])):
            ballonet.from_pretrained(folder, local_files_only=True)


ELSEWHERE: tuple[dict[str, Any], ...] = (
    {"device_map": {"model": "cpu", "lm_head": "disk"}}, {"device_map": "cuda"}, {"device_map": 0},
    {"device_map": {"": "disk"}}, {"device_map": "auto", "max_memory": {0: 10}}, {"offload_folder": "x"},
    {"tp_plan": "auto"}, {"tp_size": 2},
)  # fmt: skip


def test_options_that_place_the_model(tmp_path: Path, device: Device) -> None:
    saved(tmp_path)
    for options in ELSEWHERE:
        with pytest.raises(ManageError, match=rf"takes no {list(options)[-1]}=.*leave"):
            ballonet.from_pretrained(tmp_path, **options)
    for here in ("auto", {"": "cpu"}, torch.device("cpu")):
        assert all_in_pool(ballonet.from_pretrained(tmp_path, device_map=here))


@pytest.mark.parametrize(
    ("device_map", "same"),
    [(0, True), (1, False), ("cuda", True), ("cuda:1", False), ({"": "cuda:0"}, True), ({"": "cpu"}, False),
     ("auto", True), (torch.device("cuda", 0), True), (None, False)],
)  # fmt: skip
def test_the_device_of_a_gpu_has_many_names(device_map: Any, same: bool) -> None:
    assert loading._is_device(device_map, torch.device("cuda", 0)) == same


# Quantized, and on a GPU: as far as can be seen without one


class Loader:
    """Stands for a class of transformers, and notes what it is asked."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def from_pretrained(self, name: Any, **options: Any) -> nn.Module:
        self.options = options
        return nn.Linear(4, 4)


@pytest.mark.parametrize("where", ["option", "checkpoint", "kernels", "nowhere"])
def test_checkpoint_that_depends_on_the_device_is_loaded_there(tmp_path: Path, device: Device, where: str) -> None:
    without_weights(tmp_path)
    options: dict[str, Any] = {}
    if where == "option":
        options["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True)
    if where == "kernels":
        options["use_kernels"] = True
    if where == "checkpoint":
        config = tmp_path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    loader = Loader()
    ballonet.from_pretrained(tmp_path, cls=loader, **options)
    assert loader.options.pop("device_map", None) == (None if where == "nowhere" else {"": torch.device("cpu")})
    assert loader.options == options


def test_only_what_was_loaded_goes_from_the_host_to_a_gpu(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved(tmp_path))
    gpu = torch.device("cuda", 0)
    surveyed = survey(members(model, ()), gpu, from_host=True)
    assert surveyed.refused is None
    assert {id(tensor) for span in surveyed.spans for tensor in span.tensors} == set(map(id, model.parameters())) | set(
        map(id, model.buffers())
    )
    refused = survey(members(model, ()), gpu).refused
    assert isinstance(refused, WrongDevice)
    assert re.search(r"model\.to\('cuda:0'\).*ballonet\.from_pretrained\(\)", str(refused))
    with torch.device("meta"):
        nowhere = nn.Linear(2, 2)
    assert isinstance(survey(members(nowhere, ()), gpu, from_host=True).refused, ManageError)


def test_memory_of_threads_is_stock_while_a_model_is_loaded() -> None:

    def in_pool() -> bool:
        tensors: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: tensors.append(torch.empty(2**16)))
        thread.start()
        thread.join()
        return bool(devices.require().block_size(tensors[0].data_ptr()))

    with installing(BUDGET, PAGE) as put:
        put()
        assert in_pool()
        first, second = install.stock_everywhere(), install.stock_everywhere()
        first.__enter__()
        second.__enter__()
        assert not in_pool()
        first.__exit__(None, None, None)
        put()
        assert not in_pool()
        second.__exit__(None, None, None)
        assert in_pool()
        with install.stock_everywhere():
            ballonet.restore()
        assert torch.empty(2**16).data_ptr()
        put()
        assert in_pool()
    with install.stock_everywhere():
        assert devices.current() is None


class Screen(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_how_far_it_is_is_shown_in_a_terminal(
    tmp_path: Path, device: Device, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    saved(tmp_path)
    screen = Screen(terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    told, shown = [], loading.progress

    @contextlib.contextmanager
    def noted(title: str, total: int) -> Iterator[Callable[[int], None]]:
        with shown(title, total) as arrived:
            yield lambda nbytes: (told.append(nbytes), arrived(nbytes))[1]  # type: ignore[func-returns-value]
        assert sum(told) == total

    monkeypatch.setattr(loading, "progress", noted)
    ballonet.from_pretrained(tmp_path)
    assert ("Loading LlamaForCausalLM" in screen.getvalue()) == terminal
    assert len(told) > 3


def test_a_timeline_marks_what_begins(tmp_path: Path, device: Device) -> None:
    folder = saved(tmp_path / "model")
    with ballonet.timeline(tmp_path / "run.json"):
        generate(ballonet.from_pretrained(folder), "greedy", prompts(2, 9))
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "call"] == [
        "from_pretrained()",
        "manage()",
        "generate()",
    ]
