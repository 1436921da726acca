"""lm-eval's `local-completions` against a server gives what its `hf` gives of the same folder; and a client that makes
its requests, where lm-eval is not installed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .. import programs
from ..models import build
from .scripted import saved_tokenizer
from .test_server import ENVIRONMENT, KEY, Serving

LONGEST = 128  # tokens of a sequence
NEEDED = "lm_eval", "datasets", "accelerate", "aiohttp", "tenacity"  # of `lm_eval[api,hf]`
MISSING = [name for name in NEEDED if find_spec(name) is None]
TEXTS = ["a cat", "no dog was seen there", "é€🙂 and more", "y", "xyz " * 20]
COMMON = "dataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\n"
TASKS = {
    "chosen": "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\n"
    "doc_to_target: '{{answer}}'\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "continued": "output_type: loglikelihood\ndoc_to_text: '{{text}}'\ndoc_to_target: ' {{choices[0]}}'\n"
    "metric_list: [{metric: perplexity}, {metric: acc}]\n",
    "rolled": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text * 3}}'\n"
    "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n",
    "generated": "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: '{{choices[0]}}'\n"
    "generation_kwargs: {until: ['e', 'zz'], max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokens are bytes, and parts of characters have the same text. It says whole characters only: of
    half a one transformers tells U+FFFD, a server nothing."""
    made = saved_tokenizer(tmp_path_factory.mktemp("model"))
    model = build("llama", vocab_size=258, max_position_embeddings=LONGEST)
    with torch.no_grad():
        model.lm_head.weight[94:] = 0  # bytes that are no ASCII characters
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def serving(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    server = Serving(tmp_path_factory.mktemp("served"), "--batch-tokens", "64", models=[folder])
    try:
        yield server
    finally:
        server.process.kill()


@pytest.mark.parametrize("at_once", [1, 4])
def test_prompts_have_the_logprobs_of_a_forward(at_once: int, folder: str, serving: Serving) -> None:
    """What local-completions asks for: lists of token ids, an echo with logprobs, one more token. Asked again, when the
    beginnings of the prompts are stored, the same comes."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompts = [tokenizer.encode(text)[: LONGEST - 1] for text in TEXTS * 2]
    prompts.append([1 + 7 * place % 255 for place in range(LONGEST - 1)])  # not 0: all are as likely behind it
    batches = [prompts[begin : begin + 4] for begin in range(0, len(prompts), 4)] * 2
    expected = [logprobs_of(model, prompt) for prompt in prompts]

    def choices(batch: list[list[int]]) -> Any:
        body = {"prompt": batch, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        status, text = serving.get("/v1/completions", body=json.dumps({"model": folder, **body}).encode())
        assert status == 200, text
        return sorted(json.loads(text)["choices"], key=lambda choice: choice["index"])

    with ThreadPoolExecutor(at_once) as threads:
        answers = [choice for made in threads.map(choices, batches) for choice in made]
    assert len(answers) == 2 * len(prompts)
    for prompt, logprobs, choice in zip(prompts * 2, expected * 2, answers, strict=True):
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(told["tokens"]) == len(prompt) + 1
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        chosen = torch.tensor([*prompt[1:], int(logprobs[-1].argmax())])
        right = logprobs.gather(1, chosen[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(told["token_logprobs"][1:]), right, rtol=0, atol=1e-4)
        best = [max(top.values()) for top in told["top_logprobs"][1:]]
        torch.testing.assert_close(torch.tensor(best), logprobs.amax(-1), rtol=0, atol=1e-4)
        is_greedy = [logprob == most for logprob, most in zip(told["token_logprobs"][1:], best, strict=True)]
        assert is_greedy == (chosen == logprobs.argmax(-1)).tolist()


@torch.no_grad()
def logprobs_of(model: Any, prompt: list[int]) -> torch.Tensor:
    """Logprobs behind each token of a prompt, float32[tokens, vocabulary], of transformers alone."""
    logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits.log_softmax(-1)


@pytest.mark.skipif(bool(MISSING), reason=f"lm-eval's needs {', '.join(MISSING)}: pip install 'lm_eval[api,hf]'")
def test_lm_eval_finds_what_it_finds_of_the_model_itself(folder: str, serving: Serving, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    length = LONGEST - 2  # where local-completions cuts: it leaves one token for the answer, and one for the context
    remote = f"base_url={serving.url}/v1/completions,model={folder},max_length={LONGEST},num_concurrent=4,seed=7"
    runs = [
        evaluated(tmp_path, "hf", f"pretrained={folder},dtype=float32,max_length={length}", "--device", "cpu"),
        evaluated(tmp_path, "local-completions", remote, "--batch_size", "3"),
    ]
    assert all({*samples} == {*TASKS} for samples in runs)
    for name in TASKS:
        rows = [samples[name] for samples in runs]
        assert len(rows[0]) == len(rows[1]) == len(TEXTS)
        for alone, served in zip(*rows, strict=True):
            assert served["target_hash"] == alone["target_hash"]
            same(served["filtered_resps"], alone["filtered_resps"])


def same(served: Any, alone: Any) -> None:
    """Checks that two trees of answers are equal, logprobs but for another order of additions."""
    if isinstance(alone, list):
        assert len(served) == len(alone)
        for one, other in zip(served, alone, strict=True):
            same(one, other)
    elif re.fullmatch(r"-[0-9.]+", alone):  # it writes numbers as texts
        assert float(served) == pytest.approx(float(alone), abs=1e-3)
    else:
        assert served == alone


def write_tasks(folder: Path) -> None:
    """Writes tasks of a user's own, each of the same rows."""
    choices = [["red", "blue", "é"], ["0", "10", "100"], ["a b", "c", "dd"], ["no", "yes", "or"], ["x", "xx", "xyz"]]
    rows = [
        {"text": text, "choices": given, "answer": number % 3}
        for number, (text, given) in enumerate(zip(TEXTS, choices, strict=True))
    ]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, kind in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{COMMON.format(rows=folder / 'rows.jsonl')}{kind}")


def evaluated(folder: Path, kind: str, model: str, *options: str) -> dict[str, list[Any]]:
    """What `lm_eval` writes of each document, by task."""
    tasks = "--tasks", ",".join(TASKS), "--include_path", str(folder), "--output_path", str(folder / kind)
    command = ["-m", "lm_eval", "run", "--model", kind, "--model_args", model, *tasks, "--log_samples", *options]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "OPENAI_API_KEY": KEY}
    done = programs.python(*command, variables=ENVIRONMENT | offline)
    assert done.returncode == 0, done.stderr
    files = {path.stem.split("_")[1]: path for path in folder.glob(f"{kind}/**/samples_*.jsonl")}
    return {
        name: sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["doc_id"])
        for name, path in files.items()
    }
