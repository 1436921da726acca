"""What is released, as a user installs it: the sdist and the manylinux wheel of `make wheel`, each in a fresh
environment and used from another folder, with neither make nor the checkout.

It takes minutes, so that it runs where it is asked for: make test-release. Only torch and the other dependencies are
those of the environment of the tests, which are not fetched again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import ballonet
from ballonet.allocator import companion, torch_parts

ROOT = Path(__file__).parent.parent
SECONDS = 3600  # that a build may take: only one that hangs takes them
# A program of a user: tokens on the stand-in, the same as without ballonet, and what it did is in the pool.
PROGRAM = """
import sys, torch, ballonet
from transformers import LlamaConfig, LlamaForCausalLM
assert ballonet.__file__.startswith(sys.argv[1]), ballonet.__file__
torch.manual_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
model = LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0)).eval()
asked = {"input_ids": torch.arange(3, 12)[None], "max_new_tokens": 8, "do_sample": False}
stock = model.generate(**asked)
ballonet.install("64MiB", page_size="64KiB", device="cpu")
ballonet.manage(model)
assert torch.equal(model.generate(**asked), stock)
pages = ballonet.stats().pages
print(ballonet.__version__, pages.weights, pages.activations)
"""

pytestmark = pytest.mark.release


def run(*command: object, folder: Path = ROOT, **variables: str) -> str:
    """Runs a command, which must end well, and returns what it printed."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith(("BALLONET_", "PYTHON", "MAKE"))}
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={**keep, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        start_new_session=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def installed(folder: Path, package: Path, **variables: str) -> Path:
    """The interpreter of a fresh environment in which pip has installed the package."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", package, folder=folder, **variables)
    (reuse,) = folder.glob("lib/python3*/site-packages")
    (reuse / "reuse.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out)
    (made,) = out.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The manylinux wheel of `make wheel`, which brings the companion for the torch of this Python."""
    parts, out = tmp_path_factory.mktemp("parts"), tmp_path_factory.mktemp("wheel")
    build = companion.this_torch()
    torch_parts.compile_part(torch_parts.COMPANION, build, parts / torch_parts.file_name(torch_parts.COMPANION, build))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / ".ci"))
        import wheels
    wheels.BUILD.mkdir(exist_ok=True)
    made: Path = wheels.make_wheel(sdist, Path(sys.executable), parts, out)
    return made


def test_it_is_of_this_version(sdist: Path) -> None:
    assert sdist.name == f"ballonet-{ballonet.__version__}.tar.gz"


def test_the_wheel_is_manylinux_and_runs_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """Without a compiler, activations in the pool included."""
    assert re.search(r"-manylinux_2_\d+_", wheel.name), wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if ".libs/" in name] == [], "no library comes with it"
    libraries = {name.rpartition("/")[2] for name in names if name.endswith(".so")}
    part = torch_parts.file_name(torch_parts.COMPANION, companion.this_torch())
    assert libraries == {f"_native{sysconfig.get_config_var('EXT_SUFFIX')}", "_standin.so", part}
    python = installed(tmp_path / "environment", wheel, PATH="/nowhere")
    alone = {"PATH": "/nowhere", "BALLONET_CACHE_DIR": str(tmp_path / "cache")}
    said = run(python, "-c", PROGRAM, tmp_path / "environment", folder=tmp_path, **alone)
    assert "compil" not in said
    version, weights, activations = said.split()[-3:]
    assert version == ballonet.__version__
    assert int(weights) > 0
    assert int(activations) > 0
    assert list((tmp_path / "cache").glob("*.so")) == []


def test_the_sdist_installs_without_a_compiler(sdist: Path, tmp_path: Path) -> None:
    python = installed(tmp_path / "environment", sdist, CXX="false")
    code = "import ballonet\ntry: ballonet.install()\nexcept ballonet.CoreMissing as error: print(error)"
    assert "false cannot build a small program" in run(python, "-c", code, folder=tmp_path)
    assert '"checks"' in run(python, "-m", "ballonet", "info", "--json", folder=tmp_path)
