"""What `make wheel` makes: for which Pythons, with what for which torch, and how it says so."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from ballonet.allocator import torch_parts
from ballonet.allocator.torch_parts import COMPANION, TORCH_ALLOCATOR, TorchBuild, TorchPart

ROOT = Path(__file__).parent.parent


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """.ci/wheels.py, which builds in a folder of the test, and for which pip finds nothing."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    import wheels

    for name in ("BUILD", "DIST"):
        monkeypatch.setattr(wheels, name, tmp_path / name.lower())
    (tmp_path / "build").mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return wheels


def interpreter(path: Path, answer: str) -> Path:
    """A file in place of a Python, which answers so."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return path


def test_each_python_that_can_have_a_wheel_is_chosen_once(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs, first, second = (tmp_path / name for name in ("stubs", "first", "second"))
    interpreter(stubs / "python3.98", "echo 'no version is chosen' >&2; exit 127")
    interpreter(first / "python3.9", "echo 3 9 True")
    interpreter(first / "python3.98", "echo 3 98 True")
    interpreter(first / "python3.98-config", "echo 3 14 True")
    interpreter(second / "python3.98", "echo 3 98 True")
    bare = interpreter(second / "python3.99", "echo 3 99 False")
    monkeypatch.setenv("PATH", f"{stubs}:{tmp_path / 'absent'}:{first}:{second}:{os.environ['PATH']}")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    folders = {stubs, first, second, Path(wheels.sys.executable).parent}
    chosen, left_out = wheels.choose_pythons(path for path in wheels.candidates() if path.parent in folders)
    assert chosen[wheels.sys.version_info[:2]].parent == Path(wheels.sys.executable).parent
    assert chosen[3, 98] == first / "python3.98"
    assert not any(version < (3, 11) for version in chosen)
    assert left_out == [f"Python 3.99: left out, as {bare} comes without Python.h"]


def test_a_torch_that_cannot_be_fetched_is_named_and_the_one_here_serves(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_part(part: TorchPart, build: TorchBuild, output: Path) -> None:
        if part.needs_cuda:
            raise wheels.CompanionUnavailable("it is built without CUDA")
        output.write_text("compiled")

    monkeypatch.setattr(wheels, "compile_part", compile_part)
    here = TorchBuild(Path("torch"), "2.12.0+cpu", "0" * 40, None)
    files, line = wheels.make_parts("2.12.0", tmp_path, here)
    assert files == [tmp_path / torch_parts.file_name(COMPANION, here)]
    assert line == "torch 2.12.0: companion, no CUDA allocator (it is built without CUDA)"
    files, line = wheels.make_parts("2.12.1", tmp_path, here)
    assert files == []
    assert line.startswith("torch 2.12.1: nothing, torch===2.12.1 cannot be fetched (ERROR: No matching")


@pytest.mark.skipif(torch_parts.compiler() is None, reason="no C++ compiler")
def test_a_part_names_torchs_library_that_it_was_not_linked_with(wheels: ModuleType, tmp_path: Path) -> None:
    """Whatever is used of it, and with a compiler that leaves out what is not: the companion is found by it."""
    folder = tmp_path / "build" / "torch-headers" / "2.12.0" / "torch"
    (folder / "include").mkdir(parents=True)
    (folder / "version.py").write_text("__version__ = '2.12.0+cu130'\ngit_version = '0'\ncuda: str = '13.0'\n")
    build = wheels.torch_of("2.12.0")
    assert build == TorchBuild(folder, "2.12.0+cu130", "0", "13.0")
    source = tmp_path / "part.cpp"
    source.write_text("int nothing() { return 0; }\n")
    torch_parts.compile_part(TorchPart("part", (source,), ("c10",)), build, tmp_path / "part.so")
    assert b"libc10.so" in (tmp_path / "part.so").read_bytes()


def test_the_end_says_which_wheels_there_are_and_what_they_bring(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled, brought = list[tuple[str, str]](), dict[str, list[str]]()

    def compile_part(part: TorchPart, build: TorchBuild, output: Path) -> None:
        compiled.append((part.name, build.version))
        output.write_text("compiled")

    def make_sdist(into: Path) -> Path:
        return Path(shutil.copy(__file__, into / "ballonet-1.0.tar.gz"))

    def make_wheel(sdist: Path, python: Path, parts: Path, into: Path) -> Path:
        if python.name == "python3.13":
            raise subprocess.CalledProcessError(1, "pip", "", "building\nerror: it broke\n")
        brought[python.name] = [path.name for path in parts.iterdir()]
        wheel = into / f"ballonet-1.0-{python.name}.whl"
        wheel.write_bytes(bytes(1_500_000))
        return wheel

    build = TorchBuild(Path("torch"), "2.12.0+cu130", "0" * 40, "13.0")
    for name, value in {"torch_of": lambda version: build, "find_cuda_headers": lambda cuda: None}.items():
        monkeypatch.setattr(wheels, name, value)
    for function in (compile_part, make_sdist, make_wheel):
        monkeypatch.setattr(wheels, function.__name__, function)
    names = [interpreter(tmp_path / f"python3.{n}", f"echo 3 {n} True") for n in (13, 12)]
    monkeypatch.setattr("sys.argv", ["wheels", "--torch", "2.12.0", "--python", " ".join(map(str, names))])
    assert wheels.main() == 1, "a wheel that was to be made was not"
    assert wheels.main() == 1
    assert compiled == [(part.name, build.version) for part in (COMPANION, TORCH_ALLOCATOR)], "once, and kept"
    assert {*brought["python3.12"]} == {torch_parts.file_name(part, build) for part in (COMPANION, TORCH_ALLOCATOR)}
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "dist/ballonet-1.0-python3.12.whl  1.5 MB",
        "torch 2.12.0: companion, CUDA allocator",
        "Python 3.13: its wheel cannot be made (error: it broke)",
        "any other torch: compiled at the first install(), which takes a C++ compiler",
    ]
