"""The house: imports go one way, the facade is light, the core needs no torch and no CUDA, the package is whole."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import ballonet
from ballonet.allocator import _native, device_choice
from ballonet.offload.policy.kv_pages import AHEAD

ROOT = Path(__file__).parent.parent
ROOMS = ("allocator", "offload", "hooks", "facade")
# folders of allocator/csrc, in import order
CORE = ("base", "driver", "torch", "pages", "mapping", "reclaim", "heap", "device", "bindings")
FACADE = ROOT / "src" / "ballonet"
CSRC = ROOT / "allocator" / "csrc"
SOURCES = [
    *((room, path) for room in ROOMS[:3] for path in sorted((ROOT / room).rglob("*.py"))),
    *(("facade", path) for path in sorted(FACADE.rglob("*.py"))),  # which does not follow the links to the rooms
]
OTHERS = [
    path for folder in ("tests", "examples", "benchmarks", ".ci") for path in sorted((ROOT / folder).rglob("*.py"))
]
# modules that need no torch
LIGHT = (
    *(
        "allocation_trace",
        "config",
        "control",
        "device_choice",
        "devices",
        "errors",
        "events",
        "findings",
        "info",
        "looks",
        "ram",
    ),
    *("replay", "shared_ledger", "stats", "units"),
)


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """Every file, parsed once."""
    return {path: ast.parse(path.read_text()) for path in [*(path for _, path in SOURCES), *OTHERS]}


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Absolute names of what is imported by a module of `package`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_no_room_is_imported_twice(trees: dict[Path, ast.Module]) -> None:
    """From the repository root `import hooks` is a second copy of every class. What else the package may import are
    contracts of `lint-imports` (pyproject.toml)."""
    roots = {path: {name.split(".")[0] for name in imported(tree, "ballonet.a.b.c")} for path, tree in trees.items()}
    assert {path: names for path, names in roots.items() if names & {*ROOMS}} == {}


def test_no_circles_where_import_linter_does_not_look(trees: dict[Path, ast.Module]) -> None:
    """The units of the core, each a header with its source, and the modules of benchmarks."""
    units: dict[str, set[str]] = {}
    for path in CSRC.rglob("*.*"):
        if path.suffix in (".h", ".cpp"):
            included = re.findall(r'^#include "(?:\.\./)?(\w+/\w+)\.h"', path.read_text(), re.MULTILINE)
            units.setdefault(f"{path.parent.name}/{path.stem}", set()).update(included)
    modules = {
        path.stem: {name.split(".")[0] for name in imported(trees[path], "benchmarks")}
        for path in OTHERS
        if path.parent.name == "benchmarks"
    }
    for graph in (units, modules):
        TopologicalSorter({name: used - {name} for name, used in graph.items()}).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({"peer": {"bandwidth"}, "bandwidth": {"peer"}}).prepare()


_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)


def numbers(body: Sequence[ast.stmt], fields: bool) -> Iterator[ast.stmt]:
    """Statements that give a number to a name: one in capitals, or a field of a class."""
    for node in body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.ClassDef) and fields:
            yield from numbers(node.body, fields)
            continue
        else:
            continue
        parts = list(ast.walk(value))
        constants = [part.value for part in parts if isinstance(part, ast.Constant)]
        if not all(isinstance(part, _ARITHMETIC) for part in parts) or not {*map(type, constants)} <= {int, float}:
            continue
        if isinstance(target, ast.Name) and (fields or target.id.isupper()):
            yield node


def unexplained(text: str, tree: ast.Module, fields: bool = False) -> list[str]:
    """Numbers with no comment on their line, nor above them in their paragraph."""
    lines, found = text.splitlines(), list[str]()
    for node in numbers(tree.body, fields):
        paragraph = itertools.takewhile(str.strip, reversed(lines[: node.lineno - 1]))
        if "#" not in lines[node.lineno - 1] and not any(line.strip().startswith("#") for line in paragraph):
            found.append(lines[node.lineno - 1].strip())
    return found


def test_numbers_say_why_they_are_so(trees: dict[Path, ast.Module]) -> None:
    """Numbers in capitals, which decide or are facts, and all fields that a manager or a controller hands on."""
    for _, path in SOURCES:
        assert unexplained(path.read_text(), trees[path], path.name == "tuning.py") == [], path
    example = "# Measured.\nA = 2**3\nB = 4\n\nC = 5\nclass D:\n    e: int = 6\n"
    assert unexplained(example, ast.parse(example)) == ["C = 5"]
    assert unexplained(example, ast.parse(example), fields=True) == ["C = 5", "e: int = 6"]


def includes_above(folder: str, text: str) -> list[str]:
    """What a C++ file includes from folders of the core that come after its own. torch/ is compiled apart and includes
    nothing of the core, standin/ only what the driver's functions are."""
    includes: list[str] = re.findall(r'^#include "(?:\.\./)?(\w+)/\w+\.h"', text, re.MULTILINE)
    allowed = {"torch": ("torch",), "standin": ("standin", "driver")}.get(folder) or CORE[: CORE.index(folder) + 1]
    return [include for include in includes if include not in allowed]


FACES = {  # the headers of a folder of the core that others include
    "mapping": {"mapper", "transfer"},
    "reclaim": {"reclaim"},
    "heap": {"arenas", "heap", "heap_report"},
    "device": {"device", "registry", "replay"},
    "bindings": set(),
    "torch": {"entry"},
}


def test_folders_of_the_core_include_faces_of_others() -> None:
    includes = {
        (path, folder, header)
        for path in CSRC.rglob("*.*")
        if path.suffix in (".h", ".cpp")
        for folder, header in re.findall(r'^#include "(?:\.\./)?(\w+)/(\w+)\.h"', path.read_text(), re.MULTILINE)
        if folder in FACES and folder != path.parent.name
    }
    assert {(path, folder, header) for path, folder, header in includes if header not in FACES[folder]} == set()
    assert {(folder, header) for folder, headers in FACES.items() for header in headers} <= {
        use[1:] for use in includes
    }


def test_folders_of_the_core_include_one_way() -> None:
    sources = [path for path in CSRC.rglob("*.*") if path.suffix in (".h", ".cpp") and path.parent.name != "crt"]
    assert {path.parent.name for path in sources} == {*CORE, "standin"}
    assert {path: above for path in sources if (above := includes_above(path.parent.name, path.read_text()))} == {}
    assert includes_above("pages", '#include "heap/heap.h"') == ["heap"]
    assert includes_above("standin", '#include "pages/pool.h"') == ["pages"]


def test_numbers_of_python_and_the_core_agree() -> None:
    match = re.search(r"kAheadBytes = ([\d']+);", (CSRC / "base" / "tuning.h").read_text())
    assert match is not None
    assert int(match[1].replace("'", "")) == AHEAD


def test_every_module_is_in_the_architecture() -> None:
    rows = re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    told = {(room, name) for room, files in rows for name in re.findall(r"`(\w+)`", files)}
    core = [(path, path.stem) for folder in CORE for path in (CSRC / folder).glob("*.*")]
    there = {
        (path.parent.relative_to(ROOT).as_posix(), name)
        for path, name in [*((path, path.stem) for _, path in SOURCES if path.parent != FACADE), *core]
    }
    assert {entry for entry in there - told if entry[1] != "__init__"} == set()
    assert {entry for entry in told if entry[0] != "allocator"} <= there


def test_the_documentation_is_soon_read() -> None:
    """Words of prose, tables and code not counted: the README takes two screens, all of it an hour."""

    def words(page: Path) -> int:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        return sum(len(line.split()) for line in prose.splitlines() if not line.startswith("|"))

    readme, pages = ROOT / "README.md", sorted((ROOT / "docs").glob("*.md"))
    assert words(readme) <= 700
    assert words(readme) + sum(map(words, pages)) <= 10_000


def test_decisions_are_pure(trees: dict[Path, ast.Module]) -> None:
    """What decides imports no torch, no driver and nothing that moves."""
    allowed = ("ballonet.offload.policy", "ballonet.allocator.errors", "ballonet.allocator.units")
    for path in sorted((ROOT / "offload" / "policy").rglob("*.py")):
        names = list(imported(trees[path], ".".join(("ballonet", *path.relative_to(ROOT).parent.parts))))
        assert [name for name in names if name.startswith("ballonet") and not name.startswith(allowed)] == [], path
        assert not {name.split(".")[0] for name in names} & {"torch", "transformers", "time", "random"}, path


LARGEST = 25  # methods of a class, with properties and special ones
LARGE = {  # and what has more, at most so many
    # A layer of a cache of transformers: 17 methods are transformers' and Python's, the others share what those change.
    "ElasticLayer": 35,
}


def methods(each: ast.ClassDef) -> int:
    return sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in each.body)


def test_classes_have_one_concept(trees: dict[Path, ast.Module]) -> None:
    classes = [node for _, path in SOURCES for node in ast.walk(trees[path]) if isinstance(node, ast.ClassDef)]
    large = {class_.name: methods(class_) for class_ in classes if methods(class_) > LARGEST}
    assert large.keys() == LARGE.keys()
    assert {name: count for name, count in large.items() if count > LARGE[name]} == {}


def test_a_class_name_has_one_meaning(trees: dict[Path, ast.Module]) -> None:
    """In the library; names with an underscore are their file's own."""
    names = [node.name for _, path in SOURCES for node in ast.walk(trees[path]) if isinstance(node, ast.ClassDef)]
    assert {name for name in names if names.count(name) > 1 and not name.startswith("_")} == set()


REFERENCE = re.compile(r"([\w/]+\.(?:py|h|cpp)),? Note \[([^\]]+)\]|Note \[([^\]]+)\](?: in ([\w/]+\.(?:py|h|cpp)))?")
FILE = re.compile(r"(?<![\w/.-])(?:[\w-]+/)*([\w-]+\.(?:py|h|cpp))\b")
NOTE = re.compile(r"^[ \t]*(?://|#)?[ \t]*Note \[([^\]]+)\](?:$|\. )", re.MULTILINE)
FOREIGN = {"cuda.h", "test_cuda.py", "bench_NAME.py"}  # of CUDA and torch; a pattern


def prose(path: str, text: str) -> str:
    """The docstrings and comments of a file, each on one line."""
    if path.endswith(".py"):
        blocks = re.findall(r"(?:^[ \t]*#(?!include).*\n)+|  # .*", text, re.MULTILINE)
        blocks += [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED)]
    else:
        blocks = re.findall(r"(?:^[ \t]*//.*\n)+|//.*", text, re.MULTILINE)
    return "\n".join(re.sub(r"\s*\n\s*(?:(?://|#) ?)?", " ", block) for block in blocks)


def broken_references(texts: dict[str, str]) -> list[str]:
    """References in docstrings and comments to files and Notes that do not exist. `texts`: of files, by path."""
    notes = {path: {*NOTE.findall(text)} for path, text in texts.items()}
    files = {Path(path).name for path in texts} | FOREIGN
    wrong = []
    for path, text in texts.items():
        said = prose(path, text)
        for before, noted, alone, after in REFERENCE.findall(said):
            file, note = before or after, noted or alone
            where = [candidate for candidate in texts if file and f"/{candidate}".endswith(f"/{file}")]
            if not file:  # a source may mean its header's
                where = [candidate for candidate in texts if candidate.rsplit(".", 1)[0] == path.rsplit(".", 1)[0]]
            if not any(note in notes[candidate] for candidate in where):
                wrong.append(f"{path}: {file or 'here'}, Note [{note}]")
        wrong += [f"{path}: {file}" for file in FILE.findall(said) if file not in files]
    return wrong


def test_docstrings_and_comments_name_files_and_notes_that_exist() -> None:
    paths = [*(path for _, path in SOURCES), *OTHERS, *CSRC.rglob("*.h"), *CSRC.rglob("*.cpp"), ROOT / "setup.py"]
    paths += [*(ROOT / "tests").rglob("*.h"), *(ROOT / "tests").rglob("*.cpp")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths if path != Path(__file__)}
    assert broken_references(texts | {"tests/test_house.py": "", "allocator/_native.pyi": ""}) == []
    for text in ('"""See b.h, Note [Lost]."""', "x = 1  # as lost.py does\n", '"""Note [Lost]."""'):
        assert broken_references({"b.h": "// Note [Kept]\n// It is.\n", "a.py": text}) != []


# What is changed and belongs to no device and to no model: file -> names, and why they are the process's.
PROCESS = {
    "allocator/captures.py": "_listeners",  # torch's class of graphs is wrapped once
    "allocator/companion.py": "_announce _temporary_folder",  # said once; deleted when the process ends
    "allocator/control.py": "_control",  # a process has one socket, named by its pid
    "allocator/install.py": "_installed _lock _warned",  # torch has one allocator; a warning is given once
    "allocator/interrupts.py": "_watched",  # Python calls back only as long as somebody keeps the reference
    "allocator/device_choice.py": "_standin_apart",  # a library is loaded once
    "allocator/devices.py": "_runtimes",  # the registry of runtimes by number, where what users call looks
    "allocator/trusted.py": "tell",  # a warning is given once per text and process
    "allocator/versions.py": "_told",  # a warning is given once per process
    "allocator/shared_ledger.py": "_here",  # locks of files are of a process, this one is between threads
    "hooks/batching/patches.py": "_attached _thread why_stock",  # transformers' names are replaced once
    "hooks/device/managers.py": "_unless_said _measuring",  # the link is measured for one at a time
    "hooks/device/graphs.py": "GRAPHS",  # torch's class of graphs is one for all devices
    "hooks/device/shared.py": "_joining",  # joining opens the socket of the process
    "hooks/forward/hook_base.py": "_known",  # by model: what splices and streams it know only the model
    "hooks/forward/lease.py": "on_this_thread _numbers caches",  # open leases of a thread; numbers; seen caches
    "hooks/kv/generation.py": "_attached _followed _thread",  # transformers' names are replaced once
    "hooks/managed.py": "models lock",  # the registry of managed models, where what users call looks
    # `forward` of a class is wrapped once; a loop is known by its cache; torch's switch of cuDNN's is the process's
    "hooks/pieces/calls.py": "_runners _loops _users",
    "hooks/pieces/graph_pool.py": "_without_collection",  # Python collects for the whole process, or not
    "hooks/pieces/recipe.py": "writes THE_CACHE UNREAD",  # an operator of torch has one schema; names in recipes
    "hooks/pieces/recorder.py": "_needs_host",  # an operator of torch has one schema
    "hooks/pieces/patches.py": "_recording _thread",  # transformers' names; who records, by thread
    "hooks/plan/forward.py": "seen _all_widths",  # a configuration has the same forwards whoever plans with it
    "hooks/prefix/sessions.py": "_stores _thread",  # `generate` is wrapped once; of one thread: may it be stored?
    "hooks/programs/first_use.py": "_installed _watching",  # a notebook loads the extension once
    "hooks/replicas/pair.py": "_device local_address",  # links share a thread of gloo, by the machine's address
    "hooks/server/rendering.py": "tokenizer_of answer_template _reserved",  # files of models, which nobody changes
    "hooks/splice/splice.py": "_known",  # what was proven of a class of models, which no model changes
    "hooks/watch/registry.py": "REGISTRY",  # Prometheus asks a process
    "hooks/weights/follow.py": "_followers",  # torch's hooks on registrations are of all modules
    "hooks/weights/ranges.py": "FROM_CPU",  # an empty mapping, known by its identity
    "offload/manager/decision.py": "_kept _needed",  # by numbers; the last some hundred are kept
    "offload/policy/coordinator.py": "_valid_anywhere",  # by numbers; the last some hundred are kept
    "offload/policy/plan.py": "_fewest",  # by numbers; the last some hundred are kept
    "offload/policy/price.py": "_lost_parts exposed_part",  # by numbers; the last some thousand are kept
    "offload/policy/giving.py": "_smallest nested",  # by numbers; the last some hundred are kept
    "offload/policy/replicas/groups.py": "_cut",  # by numbers; the last some hundred are kept
    "offload/record/link.py": "_gpu",  # NVML is opened once, and stays open; by the name of the GPU
}
FIXED = {  # functions of others whose results nobody changes
    *("Context", "Decoder", "Encoder", "Path", "Struct", "TypeVar", "attrgetter", "compile", "device", "frozenset"),
    *("getattr", "init_logger", "join", "len", "lru_cache", "methodcaller", "min", "object", "range", "slice", "split"),
    *("timedelta", "tuple", "with_name", "_alone"),
}
_MADE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
_REMEMBERS = {"cache", "lru_cache"}  # of functools


def last_name(node: ast.AST) -> str:
    """The name of what is called, or of a class: without what it is in, and without parameters."""
    while isinstance(node, ast.Subscript | ast.Call):
        node = node.value if isinstance(node, ast.Subscript) else node.func
    return getattr(node, "attr", getattr(node, "id", ""))


def frozen(tree: ast.Module) -> Iterator[str]:
    """Names of the classes of a module whose instances do not change."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = {last_name(base) for base in node.bases}
            given = [key for mark in node.decorator_list if isinstance(mark, ast.Call) for key in mark.keywords]
            if bases & {"NamedTuple", "Enum", "IntEnum", "StrEnum"} or "frozen" in {key.arg for key in given}:
                yield node.name


def process_state(tree: ast.Module, fixed: set[str]) -> set[str]:
    """What a module keeps for all of the process: names for what may change (tables of constants have names in
    capitals), and functions whose results are kept. `fixed`: what returns nothing that changes."""
    state = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            made = isinstance(node.value, _MADE) and isinstance(target, ast.Name) and not target.id.isupper()
            called = isinstance(node.value, ast.Call) and last_name(node.value) not in fixed
            if made or called or last_name(node.value) in _REMEMBERS:
                state.add(last_name(target))
    for owner in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and {*map(last_name, node.decorator_list)} & _REMEMBERS:
                state.add(node.name if owner is tree else f"{getattr(owner, 'name', '')}.{node.name}")
    return state - {"__all__"}


def test_process_wide_state_is_listed(trees: dict[Path, ast.Module]) -> None:
    """Two runtimes in one process know nothing of each other: what is the process's is listed, with the reason. Results
    that are kept of functions are so, too: they may keep alive what they were asked with."""
    fixed = {*FIXED, *(name for _, path in SOURCES for name in frozen(trees[path]))}
    owned = {path.relative_to(ROOT).as_posix(): process_state(trees[path], fixed) for _, path in SOURCES}
    assert {path: names for path, names in owned.items() if names} == {
        path: {*names.split()} for path, names in PROCESS.items()
    }


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
DANGLING = re.compile(r"(Of|That|It|Its|Those|They|Their|And|This|These|Such|Again|So|Also)\b")
# beginnings that send the reader elsewhere, or say of how many and not of what
ELSEWHERE = re.compile(r"(See|As|All of|Both of|Within it)\b")
STILL_ELSEWHERE = ("hooks/replicas/", "hooks/virtual_replicas/", "allocator/", "offload/")


def docstrings_like(words: re.Pattern[str], tree: ast.AST) -> list[str]:
    docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    return [docstring for docstring in docstrings if docstring and words.match(docstring)]


def test_docstrings_begin_with_what_a_thing_is_or_does(trees: dict[Path, ast.Module]) -> None:
    """Not with a word for something that was not said, and do not send the reader elsewhere."""
    assert {path: wrong for path, tree in trees.items() if (wrong := docstrings_like(DANGLING, tree))} == {}
    inside = {path.relative_to(ROOT).as_posix(): path for room, path in SOURCES if room != "facade"}
    checked = {name: path for name, path in inside.items() if not name.startswith(STILL_ELSEWHERE)}
    assert {name: wrong for name, path in checked.items() if (wrong := docstrings_like(ELSEWHERE, trees[path]))} == {}


def test_every_client_runs_the_contract() -> None:
    """What adds a client to a manager: another such file is another case of tests/test_client_contract.py."""
    adding = {
        path.relative_to(ROOT).as_posix()
        for _, path in SOURCES
        if re.search(r"manager\.(add|add_client)\(", path.read_text())
    } - {"offload/manager/client.py"}  # whose Note says how
    # layers of a model; requests that are batched; a cache in use, a cached prefix and a kept state
    assert adding == {"hooks/streaming/model_residency.py", "hooks/batching/pages.py", "offload/manager/kv_tier.py"}


def test_only_config_reads_the_environment() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for _, path in SOURCES
        if re.search(r"\bos\.environ\b|\bgetenv\b|from os import .*environ", path.read_text())
    }
    assert readers == {"allocator/config.py"}


def test_importing_the_package_and_what_needs_no_torch_imports_no_torch() -> None:
    code = (
        "import sys, ballonet, ballonet.__main__\n"
        f"for name in {LIGHT!r}: __import__('ballonet.allocator.' + name)\n"
        "ballonet.BallonetError, ballonet.stats, dir(ballonet)\n"
        "sys.exit(', '.join(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_facade_has_every_public_name() -> None:
    names = ["install", "allocator", "manage", "KVCache", "set_budget", "stats", "BallonetError", "Managed", "restore"]
    assert set(names) <= set(ballonet.__all__) <= set(dir(ballonet))
    for name in ballonet.__all__:
        assert getattr(ballonet, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'instal'"):
        _ = ballonet.instal


def test_the_allocator_is_a_room_and_can_be_called() -> None:
    from ballonet.allocator.install import allocator

    assert callable(ballonet.allocator)
    assert ballonet.allocator is sys.modules["ballonet.allocator"]
    assert ballonet.allocator.install.allocator is allocator


def test_the_version_is_that_of_the_package() -> None:
    from importlib.metadata import version

    assert ballonet.__version__ == version("ballonet")


@pytest.mark.parametrize("library", [_native.__file__, device_choice.standin_library()], ids=["core", "stand-in"])
def test_the_native_parts_link_neither_torch_nor_cuda_nor_python(library: str) -> None:
    listing = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.+?)\]", listing))
    assert "libc.so.6" in needed
    allowed = r"(libstdc\+\+|libgcc_s|libc|libm|libdl|libpthread|librt|ld-linux.*)\.so\.\d+"
    assert [name for name in needed if not re.fullmatch(allowed, name)] == []


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution, made from a copy so that the tree stays as it is."""
    copy = tmp_path_factory.mktemp("tree") / "copy"
    skip = shutil.ignore_patterns(
        ".git", ".venv", "build", "*.so", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=skip)
    setup(copy, "sdist", "--formats=gztar", "--dist-dir=..")
    (archive,) = copy.parent.glob("ballonet-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(copy.parent, filter="data")
    return copy.parent / archive.name.removesuffix(".tar.gz")


def setup(tree: Path, *command: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs setup.py of the tree. `more`: of `subprocess.run`."""
    words = [sys.executable, "setup.py", "-q", *command]
    return subprocess.run(words, **{"cwd": tree, "capture_output": True, "text": True, "check": True, **more})


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_sdist_holds_every_source(sdist: Path) -> None:
    sources = [*(path for _, path in SOURCES), *(path for path in CSRC.rglob("*.*") if path.is_file())]
    wanted = {path.relative_to(ROOT).as_posix() for path in sources}
    wanted |= {"LICENSE", "README.md", "Makefile", ".ci/wheels.py", "constraints.txt", "pyproject.toml", "setup.py"}
    assert wanted - files(sdist) == set()
    assert [name for name in files(sdist) if name.endswith((".so", ".o", ".pyc"))] == []


def test_installed_files_are_the_package_and_the_companion_s_source(sdist: Path, tmp_path: Path) -> None:
    setup(sdist, "build_py", f"--build-lib={tmp_path}")
    installed = files(tmp_path)
    python = {f"ballonet/{path.relative_to(FACADE if room == 'facade' else ROOT).as_posix()}" for room, path in SOURCES}
    data = {
        "py.typed",
        "allocator/_native.pyi",
        *(
            f"allocator/csrc/torch/{n}"
            for n in ("companion.cpp", "cuda_allocator.cpp", "entry.h", "history.h", "report.h")
        ),
        *(f"allocator/csrc/torch/crt/{n}" for n in ("host_config.h", "host_defines.h")),
    }
    assert installed == python | {f"ballonet/{name}" for name in data}


def test_a_build_says_how_far_it_is_and_has_what_it_is_to_bring(sdist: Path, tmp_path: Path) -> None:
    """Only the core is for one Python."""
    compiler, parts = tmp_path / "compiler", tmp_path / "parts"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: >"$2"\n')
    compiler.chmod(0o755)
    parts.mkdir()
    (parts / "companion.so").write_bytes(b"compiled")
    folders = [f"--build-base={tmp_path}", f"--build-lib={tmp_path / 'lib'}"]
    environment = {**os.environ, "CXX": str(compiler), "BALLONET_BUILD_JOBS": "1", "BALLONET_PARTS": str(parts)}
    said = setup(sdist, "build", *folders, env=environment, start_new_session=True).stderr
    progress = re.findall(r"^ballonet: compiled (\d+) of (\d+) parts of the native core \((\w+)\)$", said, re.MULTILINE)
    total = len(progress)
    assert [(int(number), int(of)) for number, of, _ in progress] == [(number, total) for number in range(1, total + 1)]
    assert {name for *_, name in progress} == {*CORE, "standin"} - {"torch"}
    package = tmp_path / "lib" / "ballonet" / "allocator"
    libraries = {path.relative_to(package).as_posix() for path in package.rglob("*.so")}
    assert libraries == {f"_native{sysconfig.get_config_var('EXT_SUFFIX')}", "_standin.so", "prebuilt/companion.so"}
    again = setup(sdist, "build", *folders, env=environment, start_new_session=True).stderr
    assert "compiled" not in again


def test_a_build_without_a_compiler_says_so_in_a_sentence(sdist: Path) -> None:
    done = setup(sdist, "build_ext", "--inplace", env={"PATH": "/nowhere"}, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "ballonet's native core cannot be built: it needs a C++17 compiler and finds no c++, g++ or clang++. "
        "To go on: install a compiler (Debian: apt install g++ python3-dev)\n"
    )


WITHOUT_CORE = """
import json, sys
import ballonet
from ballonet.__main__ import main

assert ballonet.__file__.startswith(sys.argv[1]), ballonet.__file__
for use in (lambda: ballonet.install(), lambda: ballonet.snapshot(), lambda: ballonet.manage):
    try:
        use()
    except ballonet.CoreMissing as error:
        assert isinstance(error, ballonet.BallonetError)
        assert "when ballonet was installed, false cannot build" in str(error), error
        assert "apt install g++" in str(error), error
    else:
        raise AssertionError("nothing was raised")
assert main(["info", "--json"]) == 0
assert main(["run", "-c", "print(1)"]) == 1
import ballonet.hooks.server.load, ballonet.offload.policy.replicas.controller
"""


def test_without_a_compiler_what_needs_no_pages_works(sdist: Path, tmp_path: Path) -> None:
    """Installed with a compiler that compiles nothing: said then, and by a typed error when the core is used."""
    built = tmp_path / "lib"
    environment = {"PATH": os.environ["PATH"], "CXX": "false"}
    # in a session of its own: what is said is not said on the terminal of whoever runs the tests
    done = setup(
        sdist, "build", f"--build-base={tmp_path}", f"--build-lib={built}", env=environment, start_new_session=True
    )
    assert "WITHOUT ITS NATIVE CORE: false cannot build a small program" in done.stderr
    assert [name for name in files(built) if name.endswith(".so")] == []
    used = subprocess.run(
        [sys.executable, "-c", WITHOUT_CORE, str(built)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(built)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert used.returncode == 0, used.stderr
    checks = {check["name"]: check for check in json.loads(used.stdout)["checks"]}
    assert not checks["pages on a device"]["works"]
    assert "native core is missing" in checks["pages on a device"]["detail"]
    assert "native core is missing" in used.stderr  # of `run`
