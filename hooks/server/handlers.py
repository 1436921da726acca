"""Transformers' handlers of requests for text, which refuse bodies that they cannot use with HTTP 400."""

from __future__ import annotations

from typing import Any

from fastapi import HTTPException
from transformers import GenerationConfig
from transformers.cli.serving import chat_completion, completion, response
from transformers.cli.serving.utils import BaseHandler


class _Told(BaseHandler):
    """A handler that refuses invalid settings."""

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> GenerationConfig:
        """Reads the settings of a body. HTTPException where they are invalid."""
        try:
            settings: GenerationConfig = super()._build_generation_config(body, *args, **kwargs)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise HTTPException(400, f"the settings of the request cannot be used: {error}") from None
        new = settings.max_new_tokens
        if new is not None and (not isinstance(new, int) or new < 1):
            raise HTTPException(400, f"max_new_tokens is {new!r}: give a whole number from 1 on")
        return settings


class _Templated(_Told):
    """A handler that makes a prompt of messages by the model's chat template."""

    def _resolve_model(self, body: dict[str, Any]) -> Any:
        """Finds the model. HTTPException where it has no chat template."""
        name, model, processor = super()._resolve_model(body)
        if getattr(processor, "chat_template", None) is None:
            shown = name.removesuffix("@main")
            raise HTTPException(400, f"{shown} has no chat template, which messages need: ask /v1/completions")
        return name, model, processor


class Completions(_Told, completion.CompletionHandler):
    """Handles `/v1/completions`."""


class ChatCompletions(_Templated, chat_completion.ChatCompletionHandler):
    """Handles `/v1/chat/completions`."""


class Responses(_Templated, response.ResponseHandler):
    """Handles `/v1/responses`."""
