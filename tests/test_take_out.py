"""What the tests give the pool back with: it finds what was frozen, and tells who holds what is left."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch

import ballonet
from ballonet.allocator import devices

from . import pool
from .models import build


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    ballonet.install(2**23, page_size=4096, host_budget=2**20, device="cpu")
    yield
    pool.take_out()


def test_a_cycle_that_was_frozen() -> None:
    model = build("llama")
    model.itself = [model]
    gc.freeze()
    del model
    gc.collect()
    ballonet.restore()
    assert devices.current() is not None
    pool.take_out(patience=0.1)
    assert devices.current() is None


def test_who_holds_what_is_left() -> None:
    """A thread, a traceback, and somebody who keeps a cache. All objects that there are are looked through once."""
    go, begun = threading.Event(), threading.Event()

    def hold() -> None:
        model = build("llama")
        begun.set()
        go.wait(600)
        del model

    def fail() -> None:
        tensor = torch.ones(1000)
        raise ValueError(len(tensor))

    kept = list[object]()
    try:
        fail()
    except ValueError as error:
        kept.append(error)
    thread = threading.Thread(target=hold, name="one that holds a model")
    thread.start()
    assert begun.wait(600)
    try:
        model = build("llama")
        with ballonet.manage(model), torch.no_grad():
            kept.append(model(torch.ones(1, 9, dtype=torch.int64), use_cache=True).past_key_values)
        del model
        with pytest.raises(pytest.fail.Exception, match="memory of the pool is still in use") as caught:
            pool.take_out(patience=0.1)
    finally:
        go.set()
        thread.join(600)
    said = str(caught.value)
    assert "blocks are still in use" in said
    assert "thread one that holds a model" in said
    assert "Parameter (199, 32) torch.float32" in said
    assert "fail at " in said, "the frame that has it is named"
    assert "hooks.kv.ranges.KVRange" in said
    kept.clear()
