"""Clients of a server with replicas, between their handlers and the supervisor."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException
from msgspec.structs import replace
from transformers import GenerationConfig, LlamaConfig

from ballonet.hooks.replicas.http_frontend import FrontendLoop, FrontendManager
from ballonet.hooks.replicas.microbatch_plan import Request

from .test_asked_slos import Takes

MODEL: Any = SimpleNamespace(config=LlamaConfig())
READER: Any = SimpleNamespace(decode=lambda ids, **_: f"{ids}")
OPTIONS = GenerationConfig(max_new_tokens=1, do_sample=False)


def test_a_second_request_of_a_name_is_refused_until_the_first_has_ended() -> None:
    """Clients choose names: a proxy that sends a request again does so with the same one."""
    taking = Takes()
    front = FrontendManager(taking)
    loop = FrontendLoop(front, taking, 8)
    loop.init_cb(MODEL, OPTIONS)

    async def scene() -> None:
        def asked(name: str = "a") -> Any:
            return loop.generate_non_streaming(MODEL, READER, {"input_ids": [1, 2]}, OPTIONS, name)

        first = asyncio.ensure_future(asked())
        await asyncio.sleep(0)
        second = asyncio.ensure_future(asked())
        await asyncio.sleep(0)
        assert second.done()
        with pytest.raises(HTTPException, match="has not ended") as caught:
            second.result()
        assert caught.value.status_code == 409
        other = asyncio.ensure_future(asked("b"))
        await asyncio.sleep(0)
        for number, each in enumerate(taking.asked):
            front.deliver(each.with_token(7 + number))
        assert [(await each)[0] for each in (first, other)] == ["[7]", "[8]"]
        again = asyncio.ensure_future(asked())
        await asyncio.sleep(0)
        front.deliver(taking.asked[-1].with_token(9))
        assert (await again)[0] == "[9]"

    asyncio.run(scene())
    assert [each.name for each in taking.asked] == ["a", "b", "a"]


def test_who_is_told_after_its_event_loop_has_ended_is_no_error() -> None:
    """The loop ends just when it is asked whether it has."""
    front, loop = FrontendManager(Takes()), asyncio.new_event_loop()
    loop.close()
    ending: Any = SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=loop.call_soon_threadsafe)
    front._handlers["a"] = print, ending
    front.deliver(replace(Request("a", (1,), 1), delivered=(7,)))
    assert not front.has("a")
