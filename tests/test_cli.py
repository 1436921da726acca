"""The command line, as a user meets it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ballonet.__main__ import main
from ballonet.allocator import control, info, torch_parts
from ballonet.hooks.programs.run import NOTHING_MANAGED

from . import programs

STANDIN = {"BALLONET_DEVICE": "cpu", "BALLONET_BUDGET": "256MiB", "OMP_NUM_THREADS": "1"}
COMPANION = "companion for torch"
TRACE = "time_us,op,id,size,stream\n0,alloc,1,3145728,0\n1,free,1,3145728,0\n"


def variables(environ: dict[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BALLONET_")}
    clean["BALLONET_CACHE_DIR"] = os.environ["BALLONET_CACHE_DIR"]  # where the companion is
    return clean | STANDIN | environ


def python(*args: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=variables(environ), capture_output=True, text=True, check=False
    )


def ballonet(*args: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "ballonet", *args, cwd=cwd, **environ)


def warm(*args: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """As `ballonet`, in a process that has imported torch and transformers."""
    return programs.python("-m", "ballonet", *args, folder=cwd, variables=variables(environ))


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code of that command in this process, and what it prints."""
    try:
        code = main(list(arguments))
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        *((line, "") for line in ("fly", "replay", "info --yaml", "info llama --batch 0", "info a b")),
        *((line, "") for line in ("budget", "budget me", "budget 0", "budget 1 --timeout 0")),
        ("run", "arguments are required: PROGRAM\n"),
        ("run -m -c x", "a module (-m) or code (-c)\n"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = told(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert "usage: ballonet" in error
    assert error.endswith(says)


def test_without_a_command_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = told(capsys)
    assert (code, error) == (0, "")
    listed = re.findall(r"^  ([a-z]+)  ", out, re.MULTILINE)
    assert sorted(listed) == sorted(COMMANDS)
    assert max(map(len, out.splitlines())) < 80


# -- JSON and tables

SHOWN = {
    "budget": 2**23,
    "page_size": 65536,
    "pages": {"free": 28, "weights": 100, "activations": 0, "kv": 0, "pending_free": 0},
    "host_pages": 3,
    "peer": "second pool",
    "peer_budget": 2**20,
    "peer_pages": 2,
    "spilled": 1,
}
COMMANDS = [
    "run",
    "serve",
    "load",
    "whatif",
    "top",
    "budget",
    "sleep",
    "wake",
    "replay",
    "info",
    "preflight",
    "plan",
    "profile",
]
PRINTS = {  # command -> arguments, and lines of its table, spaces left out
    "budget": (["7"], ["budget8MiB in pages of 64KiB", "weights100 pages (6.25MiB)", "on the second pool2 pages"]),
    "replay": (
        ["trace.csv"],
        ["2 operations", "allocated3MiB", "none: no GPU", "With ballonet it needs 8MiB in pages"],
    ),
}


@pytest.mark.parametrize("command", ["", "run", *PRINTS, "info", "preflight", "profile"])
def test_every_command_has_help_and_those_that_print_take_json(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = told(capsys, *command.split(), "--help")
    assert code == 0
    assert out.startswith(f"usage: ballonet {command}".rstrip())
    assert "--json" in out or command in ("", "run")


def test_help_of_serve_tells_the_default_of_each_flag(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = told(capsys, "serve", "--help")
    flags = [entry for entry in re.split(r"\n  (?=--)", out)[1:] if re.match(r"\S+ [A-Z]", entry)]
    assert len(flags) > 20
    assert [entry.split()[0] for entry in flags if "default" not in entry] == []


@pytest.mark.parametrize("command", PRINTS)
def test_tables_are_for_people_and_json_for_programs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    monkeypatch.setattr(control, "ask", lambda pid, size, timeout: {"pid": pid, **SHOWN})
    arguments, lines = PRINTS[command]

    def printed(*more: str) -> str:
        assert main([command, *arguments, *more]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    piped = json.loads(printed())
    assert len(printed("--json").splitlines()) == 1
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert json.loads(printed("--json")).keys() == piped.keys()
    table = re.sub(" {2,}", "", printed())
    assert [line for line in lines if line not in table] == []


# -- replay


def test_replay_and_info_import_no_torch(tmp_path: Path) -> None:
    """Replay prints one line of JSON, info a table for people."""
    (tmp_path / "trace.csv").write_text(TRACE)
    code = (
        "import sys; from ballonet.__main__ import main\n"
        "code = main(['replay', 'trace.csv']) or main(['info', '--verbose'])\n"
        "sys.exit(code or ('torch' in sys.modules and 'torch was imported') or 0)"
    )
    done = python("-c", code, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    line, table = done.stdout.split("\n", 1)
    result = json.loads(line)
    assert {run["name"]: run["peak"] for run in result["allocators"]} == {
        "native": None,
        "expandable segments": None,
        "ballonet": result["needed"],
    }
    assert (result["peak_live"], result["ops"]) == (3145728, 2)
    assert re.search(r"device +\S+", table)
    assert re.search(r"(yes|no) +CUDA", table)


def test_replay_obeys_page_size_and_budget(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(TRACE)
    small = json.loads(warm("replay", "trace.csv", "--page-size", "64KiB", "--json", cwd=tmp_path).stdout)
    assert small["needed"] % 65536 == 0
    assert small["needed"] < 4 * 2**20
    done = warm("replay", "trace.csv", "--page-size", "64KiB", "--budget", "1MiB", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert (facts["fits"], facts["budget"], facts["needed"]) == (False, 2**20, small["needed"])


def test_replay_draws_one_picture_and_says_which_budget_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    trace, picture = tmp_path / "trace.csv", tmp_path / "memory.svg"
    trace.write_text(TRACE.replace("0,alloc", "0,segment_alloc,,20971520,0\n0,alloc"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    command = ["replay", str(trace), "--page-size", "64KiB"]
    code, out, _ = told(capsys, *command, "--budget", "1MiB", "--picture", str(picture))
    said = " ".join(out.split())
    assert code == 0
    assert "It does not fit into 1MiB: with ballonet it needs 3MiB in pages of 64KiB (--budget " in said
    assert "That is 17MiB less than native had." in said
    needed = re.search(r"--budget ([0-9]+)", said)
    assert needed is not None
    assert "fits into a budget of" in " ".join(told(capsys, *command, "--budget", needed[1])[1].split())
    assert all(f"<!-- {name} -->" in picture.read_text() for name in ("allocated", "native", "ballonet"))
    assert "expandable" not in picture.read_text()
    assert told(capsys, *command, "--picture", "memory.gif")[0] == 2


@pytest.mark.parametrize(
    ("command", "environ", "code", "says"),
    [
        ("replay damaged.csv", {}, 2, "damaged.csv:4: size is '-5'"),
        ("replay none.csv", {}, 2, "none.csv: cannot be read: No such file"),
        ("replay trace.csv --budget much", {}, 2, "budget is 'much'"),
        ("replay trace.csv --page-size 4097", {}, 2, "page size is 4097 bytes"),
        ("replay trace.csv", {"BALLONET_FAULT": "cuMemMap"}, 2, "BALLONET_FAULT has 'cuMemMap'"),
        ("replay trace.csv", {"BALLONET_DEVICE": "abacus"}, 2, "BALLONET_DEVICE is 'abacus'"),
        ("replay trace.csv", {"BALLONET_FAULT": "cuMemAddressReserve:1"}, 1, "cuMemAddressReserve"),
        ("info some/model", {}, 2, "'some/model' is no model whose configuration can be read"),
        ("run --budget much program.py", {}, 2, "budget is 'much'"),
        ("run --page-size 4097 program.py", {}, 2, "4097"),
        ("run --timeline t.gif program.py", {}, 2, "t.gif has none of the suffixes of a timeline: "),
        ("run program.py", {"BALLONET_CHAOS": "yes"}, 2, "BALLONET_CHAOS"),
        ("run program.py", {"BALLONET_FAULT": "cuDevicePrimaryCtxRetain:1"}, 1, "cuDevicePrimaryCtxRetain"),
    ],
)
def test_error_before_a_command_begins_is_one_line(
    tmp_path: Path, command: str, environ: dict[str, str], code: int, says: str
) -> None:
    """Before it does anything: no program has begun."""
    (tmp_path / "trace.csv").write_text(TRACE)
    (tmp_path / "damaged.csv").write_text(TRACE + "2,alloc,2,-5,0\n")
    (tmp_path / "program.py").write_text("print('it began')")
    done = warm(*command.split(), cwd=tmp_path, **environ)
    assert (done.returncode, done.stdout) == (code, "")
    assert re.match(rf"ballonet: .*{re.escape(says)}.*\n\Z", done.stderr)


# -- info


def test_info_as_json(tmp_path: Path) -> None:
    done = warm("info", "--json", cwd=tmp_path, BALLONET_PAGE_SIZE="64KiB")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert set(facts) == {"ballonet", "python", "versions", "device", "defaults", "memory", "checks"}
    assert facts["device"]["kind"] == "standin"
    assert facts["defaults"]["page_size"] == 65536
    assert facts["defaults"]["budget"] == 256 * 2**20
    assert facts["versions"]["torch"].startswith("2.")
    checks = {check["name"]: check for check in facts["checks"]}
    assert checks["pages on a device"]["works"] is True
    assert checks["torch"]["works"] is checks["transformers"]["works"] is True
    assert all(check["works"] or check["detail"] for check in facts["checks"]), "what does not work has a reason"


def test_info_says_what_does_not_work_and_why(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so").write_text("not a library")
    environ = {"BALLONET_DEVICE": "auto", "BALLONET_LIBCUDA": str(tmp_path / "libcuda.so"), "PATH": ""}
    done = warm("info", "--json", cwd=tmp_path, BALLONET_CACHE_DIR=str(tmp_path), **environ)
    assert done.returncode == 0
    facts = json.loads(done.stdout)
    assert facts["device"] is None
    refused = {check["name"]: check["detail"] for check in facts["checks"] if not check["works"]}
    assert "libcuda.so" in refused["pages on a device"]
    assert "libcuda.so" in refused["CUDA"]
    assert "activations" in refused[COMPANION]
    assert "RuntimeError" in refused[COMPANION]


def test_info_says_where_the_companion_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = torch_parts.installed_build()
    assert build is not None
    monkeypatch.setattr(info, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setenv("BALLONET_CACHE_DIR", str(tmp_path / "cache"))
    for folder, says in {"cache": f"compiled before, for torch {build.version}: ", "prebuilt": "came with "}.items():
        (tmp_path / folder).mkdir(0o700)
        (tmp_path / folder / torch_parts.file_name(torch_parts.COMPANION, build)).write_bytes(b"")
        main(["info", "--json"])
        (check,) = (check for check in json.loads(capsys.readouterr().out)["checks"] if check["name"] == COMPANION)
        assert check["works"]
        assert check["detail"].startswith(says)


def test_info_on_a_cpu_ends_in_what_works_and_lists_no_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"DEVICE": "cpu", "CACHE_DIR": f"{tmp_path}", "LIBCUDA": f"{tmp_path}/none.so"}.items():
        monkeypatch.setenv(f"BALLONET_{name}", value)
    code, out, _ = told(capsys, "info")
    assert code == 0
    assert not re.search("preflight|peer|yes|^no ", out, re.MULTILINE), "neither checks that went well, nor no defects"
    *_, last = out.strip().split("\n\n")
    assert last.startswith("ballonet works here, for models on the CPU; weights and KV ")
    assert "No GPU is used: the driver library" in " ".join(last.split())
    _, out, _ = told(capsys, "info", "--verbose")
    said = " ".join(out.split())
    assert re.search(r"peer for KV none is used \(BALLONET_PEER\); there could be (device 1|a second pool)", said)
    assert "a peer for KV could be used" not in said
    assert "- preflight not done, and not needed on a CPU" in said
    assert " ".join(last.split()) in said


def test_info_on_a_gpu_says_what_is_missing_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    there = [*info.NEEDED, "CUDA", info.HOST_PAGES, info.PEER, "pages that other processes can open"]
    checks = {name: {"name": name, "works": True, "detail": ""} for name in there}
    for name, why in {info.GRAPHS: "found wrong", "preflight": "not done", "companion for torch": "no c++"}.items():
        checks[name] = {"name": name, "works": False, "detail": why}
    gpu = {"kind": "cuda", "name": "H200", "total_memory": 2**37, "driver": "CUDA 13.0", "library": "libcuda.so.1"}
    defaults = {"page_size": 2**23, "budget": None, "peer": None, "peer_budget": 0}
    facts: dict[str, Any] = {"ballonet": "1", "python": "3", "versions": {}, "device": gpu, "defaults": defaults}
    facts |= {"memory": {"total": 2**38, "available": 2**37}, "checks": list(checks.values())}
    info.show(facts)
    said = " ".join(capsys.readouterr().out.split())
    assert "available no companion for torch no c++ ballonet works here, for models on the GPU; weights" in said
    assert said.endswith("No CUDA graphs: found wrong. " + info._TO_DO)
    checks["transformers"]["works"] = False
    assert info.conclusion(facts) == "ballonet does not work here: transformers: ."


def test_info_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "gemma2", "num_hidden_layers": 4, "hidden_size": 64, "head_dim": 16, "dtype": "bfloat16"}'
    )
    done = warm("info", ".", "--json", "--batch", "2", "--tokens", "1000", cwd=tmp_path, BALLONET_PAGE_SIZE="64KiB")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    facts = json.loads(line)
    assert (facts["batch"], facts["tokens"], facts["page_size"], facts["dtype"]) == (2, 1000, 65536, "bfloat16")
    assert {layer["layer"]: layer["indices"] for layer in facts["layers"]} == {
        "DynamicSlidingWindowLayer": [0, 2],
        "ElasticLayer": [1, 3],
    }
    done = warm("info", ".", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Gemma2ForCausalLM" in done.stdout
    assert re.search(r"DynamicSlidingWindowLayer +2 +no", done.stdout)
    assert re.search(r"ElasticLayer +2 +yes +\S+ +1 +4MiB +\d+", done.stdout)
    assert "ElasticLayer (1, 3) stores keys and values of every token" in " ".join(done.stdout.split())


# -- run

SCRIPT = """
import sys
if __name__ == "__main__":
    print(__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__file__)
    if sys.argv[1:] == ["exit"]:
        sys.exit(7)
    if sys.argv[1:] == ["interrupt"]:
        raise KeyboardInterrupt
    if sys.argv[1:] == ["fail"]:
        try:
            {}["a"]
        except KeyError:
            raise ValueError("no")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "program.py"
    path.write_text(SCRIPT)
    (tmp_path / "folder" / "broken.py").write_text("def f(:\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ["folder/program.py", "a", "--budget", "b", "-m"],
        ["folder/program.py", "exit"],
        ["folder/program.py", "interrupt"],
        ["folder/program.py", "fail"],
        ["folder/broken.py"],
        ["folder/none.py"],
        ["-m", "package", "a"],
        ["-m", "no.such.module"],
        ["{}/package", "a"],
    ],
    ids=" ".join,
)
def test_a_program_runs_as_python_would_run_it(tmp_path: Path, program: Path, arguments: list[str]) -> None:
    arguments = [argument.format(tmp_path) for argument in arguments]
    alone = python(*arguments, cwd=tmp_path)
    with_ballonet = warm("run", *arguments, cwd=tmp_path)
    assert with_ballonet.returncode == alone.returncode
    assert with_ballonet.stdout == alone.stdout
    ends_well = not {"interrupt", "fail", "folder/broken.py", "folder/none.py", "no.such.module"} & {*arguments}
    told = f"{NOTHING_MANAGED}\n"
    assert with_ballonet.stderr.count(told) == ends_well
    if "no.such.module" in arguments:  # Python names the package that it misses
        assert with_ballonet.stderr == f"{sys.executable}: No module named no.such.module\n"
    else:
        assert with_ballonet.stderr.replace(told, "") == alone.stderr


def test_code_runs_as_python_would_run_it(tmp_path: Path) -> None:
    code = "import sys; print(__name__, sys.argv, sys.path[0], '__file__' in globals()); {}['a']"
    alone = python("-c", code, "a", "-m", cwd=tmp_path)
    with_ballonet = warm("run", "-c", code, "a", "-m", cwd=tmp_path)
    assert (with_ballonet.returncode, with_ballonet.stdout) == (alone.returncode, alone.stdout)
    assert with_ballonet.stderr.splitlines()[-1] == alone.stderr.splitlines()[-1] == "KeyError: 'a'"


def test_a_program_s_own_exit_functions_and_threads_find_its_main(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import atexit, sys\nvalue = 3\natexit.register(lambda: print(value, sys.modules['__main__'].value))\n"
    )
    assert warm("run", "program.py", cwd=tmp_path).stdout == "3 3\n"


MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                     num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=False)
model = LlamaForCausalLM(config).eval()
tokens = model.generate(torch.arange(1, 9)[None], max_new_tokens=24, do_sample=False)
print(tokens[0].tolist())
devices = sys.modules.get("ballonet.allocator.devices")  # a fork of a process that has imported it knows it in any case
if devices is not None and devices.current() is not None:
    print(sys.modules["ballonet"].stats().pages["weights"], file=sys.stderr)
"""


def test_a_model_of_a_program_that_knows_nothing_is_managed_at_its_first_use(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(MODEL)
    alone = programs.python("program.py", folder=tmp_path)
    assert (alone.returncode, alone.stderr) == (0, "")
    with_ballonet = ballonet("run", "--page-size", "64KiB", "program.py", cwd=tmp_path)
    assert (with_ballonet.returncode, with_ballonet.stdout) == (0, alone.stdout)
    pages, said = with_ballonet.stderr.splitlines()
    assert said == "ballonet: managed LlamaForCausalLM"
    assert int(pages) >= 6  # pages of 64 KiB: at least the embedding, the head and the three layers


TIMELINE = """
import atexit, os, signal, sys
import ballonet, torch
from ballonet.allocator import devices
from ballonet.offload.timeline.recorder import recorders_of

def more():
    global late
    late = torch.ones(1 << 20)

with recorders_of(devices.of()).lock:  # as its thread may do it at any moment
    if os.fork() == 0:
        signal.alarm(600)
        with ballonet.timeline("child.json"):
            pass
        sys.exit()
os.wait()
print("written by the child:", os.path.exists("t.json"))
early = torch.ones(1 << 20)
atexit.register(more)
raise KeyboardInterrupt
"""


def test_a_timeline_is_drawn_of_a_program_up_to_its_very_end(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TIMELINE)
    done = warm("run", "--page-size", "64KiB", "--timeline", "t.json", "program.py", cwd=tmp_path)
    assert done.returncode != 0
    assert NOTHING_MANAGED not in done.stderr, "the child is not the program"
    *_, error, where = done.stderr.splitlines()
    assert (done.stdout, error) == ("written by the child: False\n", "KeyboardInterrupt")
    assert where.startswith(
        f"ballonet: the timeline is in {tmp_path / 't.json'} (open it at https://ui.perfetto.dev). "
    )
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert events[0]["args"]["name"] == "ballonet program.py"
    activations = [event["args"]["value"] for event in events if event["name"] == "activations, bytes"]
    assert max(activations) >= 128 * 65536, "what was allocated last, by a function that runs at exit, is in it"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child.json", "program.py", "t.json"]
