"""transformers' tokenizers: how long each lets a sequence be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.rank.hooks.context import Context
from autotune.rank.versions import imported

_UNLIMITED_TOKENS = 10**6  # a tokenizer without a limit names a far larger one


def install(context: Context) -> None:
    """The limit of every tokenizer that is made goes to `context.allowed_tokens`. Does nothing without transformers."""
    base = imported("transformers", "PreTrainedTokenizerBase")
    if base is None:
        return

    def init(original: Callable[..., Any], tokenizer: Any, /, *args: Any, **kwargs: Any) -> None:
        original(tokenizer, *args, **kwargs)
        if (longest := getattr(tokenizer, "model_max_length", None) or 0) < _UNLIMITED_TOKENS:
            context.allowed_tokens.append(int(longest))

    context.patches.wrap(base, "__init__", init)
