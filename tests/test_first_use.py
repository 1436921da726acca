"""Models managed at their first use, and the notebook extension made of it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from torch import nn
from transformers import GenerationMixin, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import ballonet
from ballonet.allocator import devices, install
from ballonet.allocator.errors import PoolExhausted
from ballonet.hooks.manage import manage
from ballonet.hooks.options import ManageOptions
from ballonet.hooks.programs import first_use
from ballonet.hooks.programs.first_use import FirstUse

from . import programs
from .pool import take_out
from .tuned import Clock

TOKENS = torch.arange(1, 9)[None]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    ballonet.install(budget="256MiB", page_size="64KiB", device="cpu")
    yield
    take_out()


@pytest.fixture
def watching() -> Iterator[FirstUse]:
    watching = FirstUse(clock=Clock(step=1e6))  # there may be room whenever it is looked
    yield watching
    watching.close()


def llama(intermediate_size: int = 64) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def weight_pages() -> int:
    return devices.require().snapshot()["pages"]["weights"]


@pytest.mark.parametrize("use", ["forward", "generate"])
def test_a_model_is_managed_once_by_its_first_use(watching: FirstUse, use: str) -> None:
    model = llama()
    assert weight_pages() == 0
    for _ in range(2):
        if use == "forward":
            model(TOKENS)
        else:
            model.generate(TOKENS, max_new_tokens=2, do_sample=False)
        assert len(watching.managed) == 1
        assert weight_pages() > 0
    watching.managed[0].release()


def test_prefixes_are_kept_from_the_first_call_on() -> None:
    watching = FirstUse(ManageOptions(prefix_cache=True))
    model = llama()
    tokens = TOKENS
    for _ in range(2):
        tokens = model.generate(tokens, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    store = watching.managed[0].prefixes
    assert store is not None
    assert store.counts.requests == 2
    assert store.reused == tokens.shape[1] - 3
    watching.managed[0].release()
    watching.close()


def test_models_inside_a_model_are_part_of_it(watching: FirstUse) -> None:
    model = llama()
    model(TOKENS)
    model.model(TOKENS)
    assert len(watching.managed) == 1
    watching.managed[0].release()


def test_each_model_is_managed_and_gives_its_pages_back_when_collected(watching: FirstUse) -> None:
    models = [llama(), llama()]
    for model in models:
        model(TOKENS)
    assert len(watching.managed) == 2
    del models, model
    gc.collect()
    assert watching.managed == []
    devices.require().reap(wait=True)
    assert weight_pages() == 0


def test_model_the_program_manages_is_left_to_it(watching: FirstUse, recwarn: pytest.WarningsRecorder) -> None:
    model = llama()
    with manage(model):
        model(TOKENS)
        assert watching.managed == []
    assert recwarn.list == []


def test_other_modules_are_not_touched(watching: FirstUse) -> None:
    nn.Linear(8, 8)(torch.zeros(1, 8))
    assert watching.managed == []


def test_a_model_that_cannot_be_managed_runs_as_it_is_with_one_warning(watching: FirstUse) -> None:
    with install.stock():
        model = llama(intermediate_size=4096)
    ballonet.set_budget("2MiB")
    short = r"^ballonet: NOT managed: LlamaForCausalLM: budget 2MiB, needs [\d.]+MiB\. "
    with pytest.warns(RuntimeWarning, match=short) as warned:
        model.generate(TOKENS, max_new_tokens=2)
    assert len(warned) == 1
    assert watching.managed == []


@pytest.mark.parametrize("how", ["budget", "room"])
def test_a_model_that_was_left_is_managed_once_there_is_room(
    watching: FirstUse, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with install.stock():
        model = llama(intermediate_size=4096)
    ballonet.set_budget("2MiB" if how == "budget" else "8MiB")
    taken = None if how == "budget" else torch.empty(7 * 2**20, dtype=torch.uint8)
    managing, manage = [], first_use.managed

    def counted(*args: Any, **kwargs: Any) -> Any:
        managing.append(args)
        return manage(*args, **kwargs)

    monkeypatch.setattr(first_use, "managed", counted)
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with pytest.warns(RuntimeWarning, match="NOT managed: LlamaForCausalLM.*tried again") as warned:
        expected = [model.generate(TOKENS, **settings) for _ in range(3)]
    assert (len(warned), len(managing), watching.managed) == (1, 1, [])
    del taken
    if how == "budget":
        ballonet.set_budget("64MiB")
    assert torch.equal(model.generate(TOKENS, **settings), expected[-1])
    assert (len(managing), len(watching.managed)) == (2, 1)
    watching.managed[0].release()


def test_a_model_that_was_elsewhere_is_managed_once_it_has_come(watching: FirstUse) -> None:
    model = llama()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    model.to("meta")
    with pytest.warns(RuntimeWarning, match="NOT managed.*meta device"):
        model(TOKENS.to("meta"))
    for _ in range(2):
        model.to_empty(device="cpu").load_state_dict(plain)
        model(TOKENS)
        assert len(watching.managed) == 1
    watching.managed[0].release()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, PoolExhausted])
def test_weights_that_could_not_be_moved_do_not_end_the_program(
    watching: FirstUse, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise error("no room")

    monkeypatch.setattr(first_use, "managed", refuse)
    model = llama()
    with pytest.warns(RuntimeWarning, match="NOT managed.*no room"):
        model.generate(TOKENS, max_new_tokens=2)
    assert watching.managed == []


def test_closing_takes_the_patches_out_exactly() -> None:
    before = PreTrainedModel.__dict__.get("__call__"), GenerationMixin.__dict__["generate"], list(sys.meta_path)
    watching = FirstUse()
    assert "__call__" in PreTrainedModel.__dict__
    assert GenerationMixin.generate is not before[1]
    watching.close()
    after = PreTrainedModel.__dict__.get("__call__"), GenerationMixin.__dict__["generate"], list(sys.meta_path)
    assert after == before == (None, before[1], before[2])
    llama()(TOKENS)
    assert weight_pages() == 0


def test_transformers_is_not_imported_and_a_module_is_patched_when_it_is() -> None:
    code = """
        import importlib, importlib.util, sys
        from ballonet.hooks.programs.first_use import _AfterImport
        assert "transformers" not in sys.modules or not hasattr(sys.modules["transformers"], "modeling_utils")
        called = []
        sys.meta_path.insert(0, _AfterImport({"xmlrpc.client": called.append}))
        importlib.util.find_spec("xmlrpc.client")  # looking is not importing
        assert called == []
        from xmlrpc.client import Marshaller
        assert [module.__name__ for module in called] == ["xmlrpc.client"]
        assert called[0].Marshaller is Marshaller
        importlib.reload(called[0])
        assert len(called) == 1
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_extension_loads_twice_and_unloads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # which the shell takes
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "ballonet")
    assert "256MiB on the CPU (host stand-in) in pages of 64KiB" in capsys.readouterr().out
    ballonet.load_ipython_extension(shell)
    assert capsys.readouterr().out == "ballonet: loaded already\n"
    model = llama()
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    model(TOKENS)
    assert weight_pages() > 0
    shell.run_line_magic("unload_ext", "ballonet")
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert weight_pages() == 0
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
    assert devices.current() is not None, "what the notebook installed itself stays"
    ballonet.unload_ipython_extension(shell)
    assert capsys.readouterr().out == ""


def test_the_extension_installs_and_removes_the_pool(tmp_path: Path) -> None:
    code = """
        from IPython.core.interactiveshell import InteractiveShell
        import ballonet
        shell = InteractiveShell()
        for _ in range(2):
            shell.run_line_magic("load_ext", "ballonet")
            print(ballonet.stats().budget)
            shell.run_line_magic("reload_ext", "ballonet")
            shell.run_line_magic("unload_ext", "ballonet")
        try:
            ballonet.stats()
        except ballonet.BallonetError as error:
            print(error)
    """
    kept = {name: os.environ[name] for name in ("PATH", "BALLONET_CACHE_DIR")}
    variables = {"BALLONET_DEVICE": "cpu", "BALLONET_BUDGET": "64MiB", "HOME": str(tmp_path), **kept}
    done = programs.python("-c", textwrap.dedent(code), variables=variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(f"{64 * 2**20}\n") == 2
    assert "not installed" in done.stdout.splitlines()[-1]
