"""Requests by schemathesis: what a server's OpenAPI description allows, and what it does not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, reject, settings, strategies

from ballonet.hooks.server.openapi import description

PATIENCE = 600.0  # seconds: only a request that hangs takes them


def fuzz(url: str, key: str, model: str, examples: int, seed: int | None = None) -> Counter[int]:
    """Asks each endpoint so often, well and badly. Every other request names the model. `seed`: None: the same requests
    in each run. Returns how often there was each status. AssertionError: an answer was a fault of the server."""
    import schemathesis

    statuses = Counter[int]()
    schema = schemathesis.openapi.from_dict(description())
    for operation in [result.ok() for result in schema.get_all_operations()]:
        for mode in schemathesis.GenerationMode if operation.method == "post" else [None]:
            asks = _asking(operation, mode, statuses, url, key, model)
            asks = settings(
                max_examples=examples,
                derandomize=seed is None,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )(asks)
            (asks if seed is None else hypothesis.seed(seed)(asks))()
    return statuses


def _asking(operation: Any, mode: Any, statuses: Counter[int], url: str, key: str, model: str) -> Any:
    more = {} if mode is None else {"generation_mode": mode}

    @given(case=operation.as_strategy(**more), names=strategies.booleans())
    def asks(case: Any, names: bool) -> None:
        if names and isinstance(case.body, dict):
            case.body["model"] = model
        headers = {"authorization": f"Bearer {key}"}
        try:
            answer = case.call(base_url=url, headers=headers, timeout=PATIENCE)
        except ValueError:  # the client does not send such a header
            reject()
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, f"{answer.status_code} {answer.text}: {case.as_curl_command()}"
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    return asks
