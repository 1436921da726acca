"""What `make wheel` makes: for which Pythons, with what for which torch, and how it says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ballonet.allocator import companion, torch_parts
from ballonet.allocator.errors import CompanionUnavailable
from ballonet.allocator.torch_parts import COMPANION, TORCH_ALLOCATOR, TorchBuild, TorchPart

ROOT = Path(__file__).parent.parent


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """release/wheels.py, which builds in a folder of the test."""
    monkeypatch.syspath_prepend(str(ROOT / "release"))
    import wheels

    monkeypatch.setattr(wheels, "BUILD", tmp_path / "build")
    monkeypatch.setattr(wheels, "DIST", tmp_path / "dist")
    (tmp_path / "build").mkdir()
    return wheels


@pytest.fixture
def compiled(wheels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[TorchPart, str]]:
    """What is compiled, by nothing: the part, and the version of torch."""
    parts = list[tuple[TorchPart, str]]()

    def compile_part(part: TorchPart, build: TorchBuild, output: Path) -> None:
        if part.needs_cuda and build.cuda is None:
            raise CompanionUnavailable(f"torch {build.version} is built without CUDA")
        parts.append((part, build.version))
        output.write_text("compiled")

    monkeypatch.setattr(wheels, "compile_part", compile_part)
    return parts


def interpreter(path: Path, answer: str) -> Path:
    """A file in place of a Python, which answers so."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return path


def test_one_wheel_is_for_each_python_that_is_found(wheels: ModuleType, tmp_path: Path) -> None:
    stubs, first, second = (tmp_path / name for name in ("stubs", "first", "second"))
    interpreter(stubs / "python3.12", "echo 'no version is chosen' >&2; exit 127")
    interpreter(first / "python3.9", "echo 3 9 True")
    interpreter(first / "python3.12", "echo 3 12 True")
    interpreter(first / "python3.12-config", "echo 3 14 True")
    interpreter(second / "python3.11", "echo 3 11 True")
    interpreter(second / "python3.12", "echo 3 12 True")
    bare = interpreter(second / "python3.13", "echo 3 13 False")
    chosen, left_out = wheels.choose_pythons(wheels.candidates([stubs, tmp_path / "absent", first, second]))
    assert chosen == [(second / "python3.11", (3, 11)), (first / "python3.12", (3, 12))]
    assert left_out == [
        "Python 3.9: left out, as 3.11 or newer is needed",
        f"Python 3.13: left out, as {bare} comes without Python.h",
    ]


def test_this_python_can_have_a_wheel(wheels: ModuleType) -> None:
    (chosen,), _ = wheels.choose_pythons([Path(sys.executable)])
    assert chosen.version == sys.version_info[:2]


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that pip finds, and no other. Its name."""
    folder = tmp_path / "offered"
    folder.mkdir()
    with zipfile.ZipFile(folder / "headers-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("torch/include/c10/a.h", "// a")
        archive.writestr("torch/lib/libc10.so", "large")
        archive.writestr("headers-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: headers\nVersion: 1.0\n")
        archive.writestr(
            "headers-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("headers-1.0.dist-info/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return "headers==1.0"


def test_of_a_torch_only_its_headers_are_kept(wheels: ModuleType, offered: str, tmp_path: Path) -> None:
    wheels.fetch(offered, r"torch/include/", tmp_path / "kept" / "1.0")
    assert [path.name for path in (tmp_path / "kept").rglob("*") if path.is_file()] == ["a.h"]
    assert list(wheels.BUILD.iterdir()) == []


@pytest.mark.usefixtures("offered", "compiled")
def test_a_torch_that_cannot_be_fetched_is_named_with_pips_reason(wheels: ModuleType, tmp_path: Path) -> None:
    release = wheels.make_parts("2.12.0", tmp_path, companion.this_torch())
    assert release.files == {}
    assert release.summary().startswith(
        "torch 2.12.0: no companion and no CUDA allocator: torch===2.12.0 cannot be fetched (ERROR: No matching"
    )


@pytest.mark.usefixtures("offered")
def test_the_torch_that_is_here_serves_as_far_as_it_goes(
    wheels: ModuleType, compiled: list[tuple[TorchPart, str]], tmp_path: Path
) -> None:
    here = TorchBuild(Path("torch"), "2.12.0+cpu", "0" * 40, None)
    release = wheels.make_parts("2.12.0", tmp_path, here)
    assert compiled == [(COMPANION, "2.12.0+cpu")]
    assert release.files == {COMPANION: tmp_path / torch_parts.file_name(COMPANION, here)}
    assert release.summary() == "torch 2.12.0: companion; no CUDA allocator: torch 2.12.0+cpu is built without CUDA"


def test_what_was_compiled_for_a_torch_is_not_compiled_again(
    wheels: ModuleType, compiled: list[tuple[TorchPart, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = TorchBuild(Path("torch"), "2.12.0+cu130", "0" * 40, "13.0")
    monkeypatch.setattr(wheels, "torch_of", lambda version: build)
    monkeypatch.setattr(wheels, "find_cuda_headers", lambda cuda: None)
    releases = [wheels.make_parts("2.12.0", tmp_path, None) for _ in range(2)]
    assert compiled == [(COMPANION, build.version), (TORCH_ALLOCATOR, build.version)]
    assert releases[0] == releases[1]
    assert {path.name for path in releases[0].files.values()} == {path.name for path in tmp_path.glob("*.so")}
    assert releases[0].summary() == "torch 2.12.0: companion and CUDA allocator"


@pytest.mark.skipif(torch_parts.compiler() is None, reason="no C++ compiler")
def test_a_library_to_link_to_has_the_name_that_torch_gives_it(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is used of it, and with a compiler that leaves out what is not: the companion is found by it."""
    folder = tmp_path / "build" / "torch-headers" / "2.12.0" / "torch"
    folder.mkdir(parents=True)
    (folder / "version.py").write_text("__version__ = '2.12.0+cu130'\ngit_version = '0'\ncuda: str = '13.0'\n")
    (folder / "include").mkdir()
    build = wheels.torch_of("2.12.0")
    assert build == TorchBuild(folder, "2.12.0+cu130", "0", "13.0")
    source = tmp_path / "part.cpp"
    source.write_text("int nothing() { return 0; }\n")
    part = TorchPart("part", (source,), ("c10",))
    torch_parts.compile_part(part, build, tmp_path / "part.so")
    assert b"libc10.so" in (tmp_path / "part.so").read_bytes()


def test_the_end_says_which_wheels_there_are_and_what_they_bring(
    wheels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    brought: dict[str, list[str]] = {}

    def make_sdist(into: Path) -> Path:
        return Path(shutil.copy(__file__, into / "ballonet-1.0.tar.gz"))

    def make_parts(version: str, into: Path, installed: Any) -> Any:
        if version == "2.12.0":
            return wheels.TorchRelease(version, {}, dict.fromkeys(wheels.PARTS, "it cannot be fetched (ERROR: no way)"))
        made = into / f"{version}.so"
        made.write_text("compiled")
        return wheels.TorchRelease(version, {COMPANION: made}, {TORCH_ALLOCATOR: "no headers"})

    def make_wheel(sdist: Path, python: Any, parts: Path, into: Path) -> Path:
        if python.version == (3, 13):
            raise subprocess.CalledProcessError(1, "pip", "", "building\nerror: it broke\n")
        brought[python.text] = [path.name for path in parts.iterdir()]
        wheel = into / f"ballonet-1.0-{python.text}.whl"
        wheel.write_bytes(bytes(1_500_000))
        return wheel

    for function in (make_sdist, make_parts, make_wheel):
        monkeypatch.setattr(wheels, function.__name__, function)
    names = [interpreter(tmp_path / f"python3.{n}", f"echo 3 {n} True") for n in (13, 12, 10)]
    monkeypatch.setattr(sys, "argv", ["wheels", "--torch", "2.11.0 2.12.0", "--python", " ".join(map(str, names))])
    assert wheels.main() == 1, "a wheel that was to be made was not"
    said = capsys.readouterr().out.splitlines()
    assert brought == {"3.12": ["2.11.0.so"]}
    assert said[-7].startswith("dist/ballonet-1.0.tar.gz  ")
    assert said[-6:] == [
        "dist/ballonet-1.0-3.12.whl  1.5 MB",
        "Python 3.10: left out, as 3.11 or newer is needed",
        "Python 3.13: its wheel cannot be made (error: it broke)",
        "torch 2.11.0: companion; no CUDA allocator: no headers",
        "torch 2.12.0: no companion and no CUDA allocator: it cannot be fetched (ERROR: no way)",
        "any other torch: compiled at the first install(), which takes a C++ compiler",
    ]
