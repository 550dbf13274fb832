"""Differences between library versions for ranks and the tracer. Each names the version and the reason."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from importlib import metadata
from typing import Any

from autotune.versions import release


@functools.cache
def _release_of(package: str) -> tuple[int, ...]:
    return release(metadata.version(package))


def import_or_none(module: str, name: str) -> Any:
    """Import a name from a library, or return None if the library is missing or fails to import.

    A script that imports the library sees the error itself, and any other script must not fail. Before 5.0,
    transformers' lazy imports raise RuntimeError for any error (seen with datasets next to an incompatible numpy).
    """
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:
        return None


def no_init_weights() -> contextlib.AbstractContextManager[Any]:
    """Skip the initialization of weights in models that transformers builds inside this context.

    transformers 5.0 has a separate module for it; earlier versions have it in `modeling_utils`.
    """
    name = "transformers.initialization" if _release_of("transformers") >= (5, 0) else "transformers.modeling_utils"
    without: contextlib.AbstractContextManager[Any] = importlib.import_module(name).no_init_weights()
    return without


def in_dtype(dtype: Any) -> dict[str, Any]:
    """Return the argument of `from_config` for the dtype of weights.

    transformers calls it `dtype` since 4.56 and `torch_dtype` before. Earlier versions pass a `dtype` on to the model's
    own `__init__`, which refuses it.
    """
    return {"dtype" if _release_of("transformers") >= (4, 56) else "torch_dtype": dtype}


def refusals() -> tuple[type[BaseException], ...]:
    """Return the exceptions that transformers raises for an impossible configuration.

    transformers checks configurations since version 5, with the strict data classes of huggingface_hub 0.31 and later.
    """
    from huggingface_hub import errors

    found = getattr(errors, "StrictDataclassError", None)
    return (ValueError, KeyError, TypeError, *([found] if found is not None else []))


def masks_module() -> Any:
    """Return transformers' module for attention masks, or None before 4.53.

    Earlier models make their own masks and do not read position ids.
    """
    return importlib.import_module("transformers.masking_utils") if _release_of("transformers") >= (4, 53) else None


def experts_module() -> Any:
    """Return transformers' module for grouped matrix products of experts, or None before 5.0.

    Earlier models loop over their experts.
    """
    return importlib.import_module("transformers.integrations.moe") if _release_of("transformers") >= (5, 0) else None


def looks_inside() -> bool:
    """Return True if models read values of masks and positions that they made themselves.

    BERT, BART and PaliGemma did so before transformers 5.0.
    """
    return _release_of("transformers") < (5, 0)


def takes_image_types() -> bool:
    """Return True if Qwen2-VL and its successors take `mm_token_type_ids` (transformers 5.3 and later)."""
    return _release_of("transformers") >= (5, 3)


def packed_mask(position_ids: Any, attention: str | None, dtype: Any) -> Any:
    """Return the attention mask that separates a packed batch's sequences, or None if position ids suffice.

    transformers derives masks from position ids since 4.53. Before, only FlashAttention's integration reads position
    ids. flex_attention takes the sequence number of each token, and other implementations take addends to the scores of
    each pair of tokens.

    Args:
        position_ids: (rows, tokens), 0 at the beginning of each sequence.
        attention: transformers' name of the attention; None for its default.
        dtype: dtype of the model's weights.
    """
    if masks_module() is not None or (attention or "").startswith("flash_attention"):
        return None
    numbers = (position_ids == 0).cumsum(-1)
    if attention == "flex_attention":
        return numbers
    import torch

    seen = (numbers[:, None, :, None] == numbers[:, None, None, :]).tril()
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def backward_prologue(engine: type[Any]) -> str | None:
    """Return the name of DeepSpeed's method that runs first in every backward, or None if it is not usable.

    The method also runs for a backward that a script starts by `loss.backward()`. Engines before 0.18.3 do not notice
    such a backward. Since 0.16.5 they have a method of this name with a loss argument, which only `engine.backward`
    calls.
    """
    name = "_backward_prologue"
    method = getattr(engine, name, None)
    return name if method is not None and len(inspect.signature(method).parameters) == 1 else None


def image_token(config: Any) -> Any:
    """Return the id of the token that stands for a piece of an image.

    Before transformers 4.52 some models (LLaVA) called it `image_token_index`.

    Raises:
        AttributeError: the configuration has neither name.
    """
    return config.image_token_id if hasattr(config, "image_token_id") else config.image_token_index


def deepspeed_release() -> tuple[int, ...]:
    """Return the release of the installed DeepSpeed."""
    return _release_of("deepspeed")


def takes_states_in_dicts() -> bool:
    """Return True if stage 3 loads a universal checkpoint of stages 1 and 2 with each tensor in a dict.

    The converter writes such dicts. Before DeepSpeed 0.19.5, stage 3 takes only bare tensors, which the conversion of
    stage 3 writes.
    """
    return deepspeed_release() >= (0, 19, 5)
