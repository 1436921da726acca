"""The house: imports go one way, the facade is light, the core needs no torch and no CUDA, the package is whole."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ballonet
from ballonet.allocator import _native, device_choice
from ballonet.offload.policy.tuning import DEFAULT

ROOT = Path(__file__).parent.parent
ROOMS = ("allocator", "offload", "hooks", "facade")
CORE = (
    "base",
    "driver",
    "torch",
    "pages",
    "mapping",
    "reclaim",
    "heap",
    "device",
    "bindings",
)  # of allocator/csrc, too
FACADE = ROOT / "src" / "ballonet"
CSRC = ROOT / "allocator" / "csrc"
SOURCES = [
    *((room, path) for room in ROOMS[:3] for path in sorted((ROOT / room).rglob("*.py"))),
    *(("facade", path) for path in sorted(FACADE.rglob("*.py"))),  # which does not follow the links to the rooms
]
OTHERS = [path for folder in ("tests", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
# modules that need no torch
LIGHT = (
    *("config", "control", "errors", "events", "findings", "info", "looks", "ram", "replay", "stats"),
    *("device_choice", "devices"),
    "shared_ledger",
    "units",
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
    for unit in ("mapping/ahead", "mapping/range"):  # two circles that are still there
        units[unit].remove("mapping/mapper")
    modules = {
        path.stem: {name.split(".")[0] for name in imported(trees[path], "benchmarks")}
        for path in OTHERS
        if path.parent.name == "benchmarks"
    }
    for graph in (units, modules):
        TopologicalSorter({name: used - {name} for name, used in graph.items()}).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({"peer": {"bandwidth"}, "bandwidth": {"peer"}}).prepare()


# Numbers that are facts, of a format, a driver, a file system or a machine, or that only name something. What decides
# lies in offload/policy/tuning.py and allocator/defaults.py.
FACTS = {
    "allocator/control.py": {"LONGEST", "LONGEST_ANSWER", "LONGEST_PATH"},
    "allocator/findings.py": {"FORMAT"},
    "allocator/preflight/measure.py": {"MIB"},
    "allocator/preflight/run.py": {"SAID"},
    "allocator/preflight/torch_probes.py": {"PAGES"},
    "allocator/replay.py": {"_ALLOC", "_FREE", "_LARGEST", "_WORD"},
    "offload/governor/kv_offers.py": {"_FIRST_SLICE"},
    "offload/governor/client.py": {"INDICES_PER_SPLIT", "KEYS_PER_CLIENT"},
    "offload/policy/geometry.py": {"ALIGNMENT", "INT32"},
    "offload/policy/layout.py": {"ALIGNMENT"},
    "offload/policy/coordinator.py": {"FIXED"},
    "offload/policy/planner/hardware.py": {"_GB", "_PCIE_3", "_PCIE_4", "_PCIE_5"},  # data sheets
    "offload/record/record.py": {"FORMAT"},
    "offload/residency/kv_slots.py": {"_TAKEN"},
    "offload/residency/prefix_file.py": {"PIECE", "_DIGEST"},  # of which the digest in the file is made
    "offload/residency/safetensors.py": {"LONGEST_HEADER"},
    "offload/residency/weights_file.py": {"TICK"},
    "hooks/device/marks.py": {"_RELAXED"},
    "hooks/kv/prefill.py": {"_ALIGNMENT"},
    "hooks/memory_snapshot.py": {"PROTOCOL"},
    "hooks/options.py": {"PREFIX_DIR_LIMIT"},  # an option
    "hooks/prefix/identity.py": {"SAMPLES"},
    "hooks/pieces/outlook.py": {"_PROMPT"},
    "hooks/pieces/batch.py": {"SMALLEST"},  # rows below which no other kernels are taken
    "hooks/pieces/plans.py": {"CHANGES", "PROOFS", "VARIANTS"},  # two lengths are what a proof is
    "hooks/pieces/recipe.py": {"OUTSIDE"},
    "hooks/plan/moments.py": {"_INDEX"},
    "hooks/programs/model_info.py": {"_UNLIMITED"},
    "hooks/replicas/held_layers.py": {"_BLOCKS", "_WORD"},  # of which checksums are made
    "hooks/batching/attention.py": {"TABLE", "_WIDEST"},  # of torch's kernel
    "hooks/replicas/link.py": {"HEADER_BYTES"},
    "hooks/replicas/on_ray.py": {"_FOREVER"},  # Ray's word
    "hooks/replicas/ray_node.py": {"_STORE"},  # Ray's minimum
    "hooks/replicas/pair.py": {"_ID"},  # bytes of a message of a fixed size
    "hooks/server/arrivals.py": {"BLOCK"},  # of Mooncake's hashes
    "hooks/batching/pages.py": {"RESERVED"},  # transformers has two
    "hooks/weights/mapped.py": {"_ENTRY"},
    "hooks/weights/capacity.py": {"_LOGITS"},
    "hooks/weights/storages.py": {"_WIDEST"},
}
_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.Constant, ast.operator, ast.unaryop)


def numbers(tree: ast.Module) -> Iterator[str]:
    """Names in capitals that a module gives to numbers."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        elif isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        else:
            continue
        parts = list(ast.walk(value))
        constants = [part.value for part in parts if isinstance(part, ast.Constant)]
        if not all(isinstance(part, _ARITHMETIC) for part in parts) or not {*map(type, constants)} <= {int, float}:
            continue
        if isinstance(target, ast.Name) and target.id.isupper():
            yield target.id


def test_numbers_that_decide_lie_in_one_place(trees: dict[Path, ast.Module]) -> None:
    facts = {
        str(path.relative_to(ROOT)): names
        for _, path in SOURCES
        if path.name not in ("tuning.py", "defaults.py") and (names := {*numbers(trees[path])})
    }
    assert facts == FACTS


def test_no_number_that_decides_is_patched() -> None:
    """Tests give such values as arguments, or through the fixture `tuned`. What they patch are facts and lists of
    names, and numbers of others."""
    known = {"COMPILERS", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "LIBCUDA", "PROBES", "ROOT", "TOOLKIT", "LEAST_SECONDS"}
    for path in OTHERS:
        for name in re.findall(r"""(?:setattr|object)\(\w+, ["'](_?[A-Z][A-Z0-9_]+)["']""", path.read_text()):
            assert name in known.union(*FACTS.values()), f"{path} patches {name}"


def includes_above(folder: str, text: str) -> list[str]:
    """What a C++ file includes from folders of the core that come after its own. torch/ is compiled apart and includes
    nothing of the core, standin/ only what the driver's functions are."""
    includes: list[str] = re.findall(r'^#include "(?:\.\./)?(\w+)/\w+\.h"', text, re.MULTILINE)
    allowed = {"torch": ("torch",), "standin": ("standin", "driver")}.get(folder) or CORE[: CORE.index(folder) + 1]
    return [include for include in includes if include not in allowed]


def test_folders_of_the_core_include_one_way() -> None:
    sources = [path for path in CSRC.rglob("*.*") if path.suffix in (".h", ".cpp") and path.parent.name != "crt"]
    assert {path.parent.name for path in sources} == {*CORE, "standin"}
    assert {path: above for path in sources if (above := includes_above(path.parent.name, path.read_text()))} == {}
    assert includes_above("pages", '#include "heap/heap.h"') == ["heap"]
    assert includes_above("standin", '#include "pages/pool.h"') == ["pages"]


def test_what_python_and_the_core_decide_by_agrees() -> None:
    match = re.search(r"kAheadBytes = ([\d']+);", (CSRC / "base" / "tuning.h").read_text())
    assert match is not None
    assert int(match[1].replace("'", "")) == DEFAULT.kv_growth.ahead


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
MEMBER = re.compile(r"\b([A-Z]\w+)(?:\.|::)(?!py\b|h\b|cpp\b)(\w+)")
FILE = re.compile(r"(?<![\w/.-])(?:[\w-]+/)*([\w-]+\.(?:py|h|cpp))\b")
NOTE = re.compile(r"^[ \t]*(?://|#)?[ \t]*Note \[([^\]]+)\](?:$|\. )", re.MULTILINE)
FOREIGN = {"cuda.h", "test_cuda.py", "bench_NAME.py"}  # of CUDA and torch; a pattern


def prose_and_classes(path: str, text: str) -> tuple[str, dict[str, tuple[set[str], set[str]]]]:
    """The docstrings and comments of a file, each on one line; and by name of a class the words in it (of C++ those of
    the file), and its bases."""
    classes: dict[str, tuple[set[str], set[str]]] = {}
    if path.endswith(".py"):
        blocks = re.findall(r"(?:^[ \t]*#(?!include).*\n)+|  # .*", text, re.MULTILINE)
        lines = text.split("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                blocks.append(ast.get_docstring(node) or "")
            if isinstance(node, ast.ClassDef):
                words = {*re.findall(r"\w+", "\n".join(lines[node.lineno : node.end_lineno]))}
                classes[node.name] = words, {*re.findall(r"\w+", " ".join(map(ast.unparse, node.bases)))}
    else:
        blocks = re.findall(r"(?:^[ \t]*//.*\n)+|//.*", text, re.MULTILINE)
        code = re.sub(r"//.*", "", text)
        classes = {name: ({*re.findall(r"\w+", code)}, set()) for name in re.findall(r"(?:class|struct) (\w+)", code)}
    return "\n".join(re.sub(r"\s*\n\s*(?:(?://|#) ?)?", " ", block) for block in blocks), classes


def broken_references(texts: dict[str, str]) -> list[str]:
    """References in docstrings and comments to files, Notes and members of classes that do not exist. `texts`: of
    files, by path."""
    notes = {path: {*NOTE.findall(text)} for path, text in texts.items()}
    files = {Path(path).name for path in texts} | FOREIGN
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    said: dict[str, str] = {}
    for path, text in texts.items():
        said[path], classes = prose_and_classes(path, text)
        for name, (words, above) in classes.items():
            members.setdefault(name, set()).update(words)
            bases.setdefault(name, set()).update(above)

    def has(name: str, member: str, seen: frozenset[str] = frozenset()) -> bool:
        above = (bases.get(name, set()) & {*members}) - seen - {name}
        return member in members[name] or any(has(base, member, seen | {name}) for base in above)

    wrong = []
    for path, text in said.items():
        for before, noted, alone, after in REFERENCE.findall(text):
            file, note = before or after, noted or alone
            where = [candidate for candidate in texts if file and f"/{candidate}".endswith(f"/{file}")]
            if not file:  # a source may mean its header's
                where = [candidate for candidate in texts if candidate.rsplit(".", 1)[0] == path.rsplit(".", 1)[0]]
            if not any(note in notes[candidate] for candidate in where):
                wrong.append(f"{path}: {file or 'here'}, Note [{note}]")
        wrong += [f"{path}: {file}" for file in FILE.findall(text) if file not in files]
        wrong += [f"{path}: {a}.{b}" for a, b in MEMBER.findall(text) if a in members and not has(a, b)]
    return wrong


def test_docstrings_and_comments_name_what_exists() -> None:
    """Files, Notes, and members of classes, in Python and C++."""
    paths = [*(path for _, path in SOURCES), *OTHERS, *CSRC.rglob("*.h"), *CSRC.rglob("*.cpp"), ROOT / "setup.py"]
    paths += [*(ROOT / "tests").rglob("*.h"), *(ROOT / "tests").rglob("*.cpp")]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths if path != Path(__file__)}
    texts["allocator/_native.py"] += (ROOT / "allocator" / "_native.pyi").read_text()
    texts["tests/test_house.py"] = ""
    assert broken_references(texts) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", '"""See b.h, Note [Lost]."""'),
        ("a.py", "x = 1  # as lost.py does\n"),
        ("a.py", '"""Waits, as `Kept.lost`."""\nclass Kept:\n    def wait(self) -> None: ...\n'),
        ("b.h", "// See Note\n// [Lost].\n"),
        ("b.cpp", "struct Kept { int wait; };  // see Kept::lost\n"),
    ],
)
def test_a_broken_reference_is_seen(path: str, text: str) -> None:
    whole = {"b.h": "// Note [Kept]\n// It is.\n", "b.cpp": "// See Note [Kept].\n", "a.py": '"""b.h, Note [Kept]."""'}
    assert broken_references(whole) == []
    assert broken_references(whole | {path: text}) != []


EDGES = {  # where nobody passes a tuning, as nobody has one yet
    "hooks/kv/range.py",  # a cache outside of managed models
    "hooks/device/shared_total.py",  # what a command asks of other processes
    *("hooks/programs/facts.py", "hooks/server/page_size.py"),
    *("src/ballonet/cli/plan.py", "src/ballonet/cli/serve_replicas.py", "src/ballonet/cli/top.py"),
    *(f"hooks/plan/{name}.py" for name in ("loops", "policies", "run", "step_measurement")),
    *(f"hooks/virtual_replicas/{name}.py" for name in ("fleet", "memory_policies")),
}


def reads_default(tree: ast.Module) -> bool:
    """Is `DEFAULT` read otherwise than for a parameter or a field that was not given?"""
    given: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            given += [*node.defaults, *node.kw_defaults]
        elif isinstance(node, ast.ClassDef):
            given += [field.value for field in node.body if isinstance(field, ast.AnnAssign)]
    known = {id(part) for value in given if value is not None for part in ast.walk(value)}
    return any(isinstance(node, ast.Name) and node.id == "DEFAULT" and id(node) not in known for node in ast.walk(tree))


def test_tunings_are_passed(trees: dict[Path, ast.Module]) -> None:
    readers = {path.relative_to(ROOT).as_posix() for _, path in SOURCES if reads_default(trees[path])}
    assert readers - {"offload/policy/tuning.py"} == EDGES
    assert not reads_default(ast.parse("def act(pause: float = DEFAULT.waiting.pause) -> None: ..."))
    assert reads_default(ast.parse("PARTS = DEFAULT.weights.link_parts"))


_NUMBERS = "numbers alone say what they are, and the last some hundred are kept"
# What is changed and belongs to no device and to no model: file -> names -> why it is the process's.
PROCESS = {
    "allocator/captures.py": {"_listeners": "torch's class of graphs is wrapped once"},
    "allocator/companion.py": {"_temporary_folder": "is deleted when the process ends"},
    "allocator/control.py": {"_control": "a process has one socket, named by its pid"},
    "allocator/install.py": {
        "_installed": "torch has one allocator",
        "_lock": "of the above",
        "_warned": "a warning is given once per process",
    },
    "allocator/interrupts.py": {"_watched": "Python calls back only as long as somebody keeps the reference"},
    "allocator/devices.py": {"_runtimes": "the registry of runtimes by number, where what users call looks"},
    "allocator/versions.py": {"_told": "a warning is given once per process"},
    "allocator/shared_ledger.py": {"_here": "locks of files are of a process, this one is between its threads"},
    "hooks/batching/seams.py": {
        "_attached": "names of transformers are replaced once",
        "_thread": "of one thread: the model whose loop it makes",
        "why_stock": "a process has one transformers",
    },
    "hooks/device/governors.py": {
        "_unless_said": "what a runtime is composed with that nobody composed",
        "_measuring": "devices share the link to the host: it is measured for one at a time",
    },
    "hooks/device/graphs.py": {"GRAPHS": "torch's class of graphs is one for all devices"},
    "hooks/device/shared.py": {"_joining": "joining opens the socket of the process"},
    "hooks/forward/local_layers.py": {"_known": "by model: what splices it and what streams it know only the model"},
    "hooks/forward/lease.py": {
        "on_this_thread": "of one thread: the leases that it has open",
        "_numbers": "no two leases have the same",
    },
    "hooks/kv/generation.py": {
        "_attached": "names of transformers are replaced once",
        "_followed": "`generate` of transformers is wrapped once",
        "_thread": "of one thread: who hears of its next cache",
    },
    "hooks/managed.py": {
        "models": "the registry of managed models, where what users call looks",
        "lock": "of the above",
    },
    "hooks/pieces/calls.py": {
        "_runners": "`forward` of a class is wrapped once",
        "_loops": "a loop is known by its cache",
    },
    "hooks/pieces/cudnn.py": {"_users": "torch's switch of cuDNN's attention is the process's"},
    "hooks/pieces/graph_pool.py": {"_without_collection": "Python collects for the whole process, or not"},
    "hooks/pieces/recipe.py": {
        "writes": "an operator of torch has one schema",
        "THE_CACHE": "a name in recipes",
        "UNREAD": "the same",
    },
    "hooks/pieces/recorder.py": {"_needs_host": "an operator of torch has one schema"},
    "hooks/pieces/seams.py": {
        "_recording": "names of transformers are replaced once",
        "_thread": "of one thread: who records it",
    },
    "hooks/plan/forward.py": {"seen": "a configuration has the same forwards whoever plans with it"},
    "hooks/plan/shape.py": {"_all_widths": "a configuration has the same widths"},
    "hooks/prefix/sessions.py": {
        "_stores": "`generate` of transformers is wrapped once",
        "_thread": "of one thread: may what it computes be stored?",
    },
    "hooks/programs/notebook.py": {
        "_installed": "a notebook loads the extension once",
        "_watching": "the same",
    },
    "hooks/replicas/http_frontend.py": {"_options": "of one request"},
    "hooks/replicas/pair.py": {
        "_device": "links share a thread of gloo, by the address of the machine",
        "local_address": "the machine's, on the way to a store",
    },
    "hooks/server/length.py": {"is_open": "of one request"},
    "hooks/server/tenants.py": {"asked_slo": "of one request", "asked_seed": "of one request"},
    "hooks/splice/elsewhere.py": {"_class_for": "a class for each class of cache layers, so that two are of one type"},
    "hooks/splice/proof.py": {"_known": "what was proven of a class of models, which no model changes"},
    "hooks/watch/registry.py": {"REGISTRY": "Prometheus asks a process"},
    "hooks/weights/follow.py": {"_followers": "torch's hooks on registrations are of all modules"},
    "offload/governor/situation.py": {"_kept": _NUMBERS, "_meeting": _NUMBERS},
    "offload/policy/coordinator.py": {"_valid_anywhere": _NUMBERS},
    "offload/policy/plan.py": {"_fewest": _NUMBERS},
    "offload/policy/layer_order.py": {"_least": _NUMBERS, "nested": _NUMBERS},
    "offload/policy/remap.py": {"cap": _NUMBERS},
    "offload/policy/replicas/spans.py": {"_cut": _NUMBERS},
    "offload/record/link.py": {"_gpu": "NVML is opened once, and stays open; by the name of the GPU"},
}
FIXED = {  # classes and functions of others whose results nobody changes
    *("Context", "Path", "Struct", "TypeVar", "attrgetter", "compile", "device", "frozenset", "getattr", "init_logger"),
    *(
        "Decoder",
        "Encoder",
        "join",
        "len",
        "methodcaller",
        "min",
        "object",
        "range",
        "slice",
        "split",
        "timedelta",
        "tuple",
    ),
    *("with_name", "_alone"),
}
_CHANGES = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft"}
_CHANGES |= {"remove", "setdefault", "update"}
_MADE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


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


def given_at_import(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """The names that a module gives to values, and these values, as far as they are made there."""
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from given_at_import([inner for inner in ast.walk(node) if isinstance(inner, ast.stmt)][1:])


def changed(tree: ast.Module, fixed: set[str]) -> set[str]:
    """Names that a module gives to what is changed later, or may be: a table of constants, with a name in capitals that
    nothing in the module changes, is none. `fixed`: what returns nothing that changes."""
    given = dict(given_at_import(tree.body))
    altered = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            altered.add(last_name(node.func.value))
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            altered.add(last_name(node.value))
    made = {name for name, value in given.items() if isinstance(value, _MADE) and not name.isupper()}
    called = {name for name, value in given.items() if isinstance(value, ast.Call) and last_name(value) not in fixed}
    return {name for name in (altered | made | called) & {*given} if name != "__all__"}


_REMEMBERS = {"cache", "lru_cache"}  # of functools


def remembered(tree: ast.Module) -> set[str]:
    """Functions of a module, and methods of its classes, whose results are kept for all of the process."""
    owners = [(tree, ""), *((node, f"{node.name}.") for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    cached = {name for name, value in given_at_import(tree.body) if last_name(value) in _REMEMBERS}
    for owner, prefix in owners:
        for node in owner.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                cached |= {prefix + node.name for mark in node.decorator_list if last_name(mark) in _REMEMBERS}
    return cached


def test_what_changes_belongs_to_a_device_or_a_model(trees: dict[Path, ast.Module]) -> None:
    """Two runtimes in one process know nothing of each other: what is the process's is listed, with the reason. Results
    that are kept of functions are so, too: they may keep alive what they were asked with."""
    fixed = {"lru_cache", *FIXED, *(name for _, path in SOURCES for name in frozen(trees[path]))}
    names = {path: changed(trees[path], fixed) | remembered(trees[path]) for _, path in SOURCES}
    owned = {path.relative_to(ROOT).as_posix(): changes for path, changes in names.items()}
    assert {path: names for path, names in owned.items() if names} == {path: {*whys} for path, whys in PROCESS.items()}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("_known: dict[int, str] = {}", {"_known"}),
        ("_lock = threading.Lock()", {"_lock"}),
        ("TABLE = {}\ndef note(name): TABLE[name] = 1", {"TABLE"}),
        ("TABLE: Final = {}\ndef note(name): TABLE.setdefault(name, []).append(1)", {"TABLE"}),
        ("_on = False\ndef turn():\n    global _on\n    _on = True", {"_on"}),
        ("if True:\n    _known = set()", {"_known"}),
        ("TABLE = {'a': 1}\nDEFAULT = Options()\n_NAME = re.compile('a')\ndef here(): found = {}; found[0] = 1", set()),
    ],
)
def test_what_changes_is_seen(code: str, names: set[str]) -> None:
    assert changed(ast.parse(code), {"Options", "compile"}) == names


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("@functools.cache\ndef _class_for(stock): ...", {"_class_for"}),
        ("@lru_cache(maxsize=8)\ndef _device(address): ...", {"_device"}),
        ("_least = lru_cache(maxsize=256)(smallest)", {"_least"}),
        ("class Planner:\n    @cache\n    def ask(self): ...", {"Planner.ask"}),
        ("class Planner:\n    def __init__(self): self.ask = cache(self._ask)", set()),
        ("def planner():\n    @cache\n    def ask(): ...", set()),
    ],
)
def test_what_is_remembered_is_seen(code: str, names: set[str]) -> None:
    assert remembered(ast.parse(code)) == names


DANGLING = re.compile(r"(Of|That|It|Its|Those|They|Their|And|This|These|Such|Again|So|Also)\b")


# beginnings that send the reader elsewhere, or say of how many and not of what
ELSEWHERE = re.compile(r"(See|As|All of|Both of|Within it)\b")
STILL_ELSEWHERE = ("hooks/replicas/", "hooks/virtual_replicas/", "hooks/batching/client.py", "allocator/", "offload/")


def dangling(tree: ast.AST, words: re.Pattern[str] = DANGLING) -> list[str]:
    """Docstrings that do not begin with what the thing is or does, but with a word for something that was not said."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [docstring for docstring in docstrings if docstring and words.match(docstring)]


def test_docstrings_begin_with_what_it_is_about(trees: dict[Path, ast.Module]) -> None:
    assert {path: wrong for path, tree in trees.items() if (wrong := dangling(tree))} == {}
    assert dangling(ast.parse('def pages():\n    """Of the device."""')) == ["Of the device."]


def test_docstrings_do_not_send_the_reader_elsewhere(trees: dict[Path, ast.Module]) -> None:
    inside = {path.relative_to(ROOT).as_posix(): path for room, path in SOURCES if room != "facade"}
    checked = {name: path for name, path in inside.items() if not name.startswith(STILL_ELSEWHERE)}
    assert {name: wrong for name, path in checked.items() if (wrong := dangling(trees[path], ELSEWHERE))} == {}
    for text in ("See Note [Turns].", "As `append`.", "All of these.", "Both of them."):
        assert dangling(ast.parse(f'def pages():\n    """{text}"""'), ELSEWHERE) == [text]


def test_every_client_runs_the_contract() -> None:
    """What adds a client to a governor: another such file is another case of tests/test_client_contract.py."""
    adding = {
        path.relative_to(ROOT).as_posix()
        for _, path in SOURCES
        if re.search(r"governor\.(add|add_client)\(", path.read_text())
    } - {"offload/governor/client.py"}  # whose Note says how
    # layers of a model; requests that are batched; a cache in use, a cached prefix and a kept state
    assert adding == {"hooks/streaming/model_residency.py", "hooks/batching/client.py", "offload/governor/kv_tier.py"}


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


def setup(tree: Path, *command: str) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", *command], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_sdist_holds_every_source(sdist: Path) -> None:
    wanted = {path.relative_to(ROOT).as_posix() for _, path in SOURCES}
    wanted |= {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "allocator" / "csrc").rglob("*.*") if path.is_file()
    }
    wanted |= {
        "LICENSE",
        "README.md",
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "setup.py",
        "src/ballonet/py.typed",
    }
    assert wanted - files(sdist) == set()
    assert [name for name in files(sdist) if name.endswith((".so", ".o", ".pyc"))] == []


def test_what_is_installed_is_the_package_and_the_companion_s_source(sdist: Path, tmp_path: Path) -> None:
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


def test_a_build_without_a_compiler_says_so_in_a_sentence(sdist: Path) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=sdist,
        env={"PATH": "/nowhere"},
        capture_output=True,
        text=True,
        check=False,
    )
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
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", f"--build-base={tmp_path}", f"--build-lib={built}"],
        cwd=sdist,
        env={"PATH": os.environ["PATH"], "CXX": "false"},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,  # what is said is not said on the terminal of whoever runs the tests
    )
    assert done.returncode == 0, done.stderr
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
