"""What the tests give the pool back with: it finds what was frozen, and tells who holds what is left."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

import ballonet
from ballonet.allocator import runtime

from . import pool
from .models import build


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    ballonet.install(2**23, page_size=4096, host_budget=2**20, device="cpu")
    yield
    pool.take_out()


def told() -> str:
    """What is said of what is still in use."""
    with pytest.raises(pytest.fail.Exception, match="memory of the pool is still in use") as caught:
        pool.take_out(patience=0.1)
    return str(caught.value)


def test_a_cycle_that_was_frozen() -> None:
    model = build("llama")
    model.itself = [model]
    gc.freeze()
    del model
    gc.collect()
    ballonet.restore()
    assert runtime.current() is not None
    pool.take_out(patience=0.1)
    assert runtime.current() is None


def test_a_thread_that_holds_a_model() -> None:
    go = threading.Event()

    def hold() -> None:
        model = build("llama")
        begun.set()
        go.wait(60)
        del model

    begun = threading.Event()
    thread = threading.Thread(target=hold, name="one that holds a model")
    thread.start()
    assert begun.wait(60)
    try:
        said = told()
    finally:
        go.set()
        thread.join(60)
    assert "thread one that holds a model" in said
    assert "Parameter (199, 32) torch.float32" in said
    assert "Embedding at " in said


def test_a_traceback_that_holds_a_tensor() -> None:
    def fail() -> None:
        kept = torch.ones(1000)
        raise ValueError(len(kept))

    try:
        fail()
    except ValueError as error:
        kept = [error]
    said = told()
    assert "1 blocks are still in use" in said
    assert "fail at " in said, "the frame that has it is named"
    kept.clear()


def test_a_cache_that_somebody_keeps() -> None:
    model = build("llama")
    with ballonet.manage(model), torch.no_grad():
        kept = model(torch.ones(1, 9, dtype=torch.int64), use_cache=True).past_key_values
    del model
    said = told()
    assert "ranges are still open" in said or "blocks are still in use" in said
    assert "hooks.kv.range.KVRange" in said
    del kept
