"""Hook transformers' tokenizers: record the maximum sequence length of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autotune.rank.hooks.context import Context
from autotune.rank.versions import imported

_UNLIMITED_TOKENS = 10**6  # a tokenizer without a limit names a far larger number


def install(context: Context) -> None:
    """Add the limit of every new tokenizer to `context.allowed_tokens`. Do nothing without transformers."""
    base = imported("transformers", "PreTrainedTokenizerBase")
    if base is None:
        return

    def init(original: Callable[..., Any], tokenizer: Any, /, *args: Any, **kwargs: Any) -> None:
        original(tokenizer, *args, **kwargs)
        if (longest := getattr(tokenizer, "model_max_length", None) or 0) < _UNLIMITED_TOKENS:
            context.allowed_tokens.append(int(longest))

    context.patches.wrap(base, "__init__", init)
