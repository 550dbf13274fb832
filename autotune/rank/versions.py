"""What a rank, or the tracer, does differently under older libraries. Each difference names the version and the reason."""

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


def imported(module: str, name: str) -> Any:
    """What a library of the environment calls `name`; None where the library is not there or does not import.

    A script that imports it gets to see the error itself; one that does not must not end by it. What transformers imports
    late raises RuntimeError, whatever was wrong, before 5.0 (with datasets beside a numpy that it does not take).
    """
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:
        return None


def no_init_weights() -> contextlib.AbstractContextManager[Any]:
    """Weights of the models that transformers builds inside are not initialized.

    transformers 5.0 has it in a module of its own; before, it stood in `modeling_utils`.
    """
    name = "transformers.initialization" if _release_of("transformers") >= (5, 0) else "transformers.modeling_utils"
    without: contextlib.AbstractContextManager[Any] = importlib.import_module(name).no_init_weights()
    return without


def in_dtype(dtype: Any) -> dict[str, Any]:
    """The argument of `from_config` that says in which dtype weights are made.

    transformers 4.56 calls it `dtype`; before, it was `torch_dtype`, and a `dtype` went on to the model's own `__init__`,
    which refuses it.
    """
    return {"dtype" if _release_of("transformers") >= (4, 56) else "torch_dtype": dtype}


def refusals() -> tuple[type[BaseException], ...]:
    """What transformers raises for a configuration that cannot be.

    Configurations are checked since transformers 5, by the strict data classes of huggingface_hub 0.31 and later.
    """
    from huggingface_hub import errors

    found = getattr(errors, "StrictDataclassError", None)
    return (ValueError, KeyError, TypeError, *([found] if found is not None else []))


def masks_module() -> Any:
    """Where transformers makes attention masks; None before 4.53, whose models make their own and look at no position ids."""
    return importlib.import_module("transformers.masking_utils") if _release_of("transformers") >= (4, 53) else None


def experts_module() -> Any:
    """Where transformers multiplies the tokens of a mixture's experts group by group; None before 5.0, whose models loop over
    their experts."""
    return importlib.import_module("transformers.integrations.moe") if _release_of("transformers") >= (5, 0) else None


def looks_inside() -> bool:
    """Whether models look at values of masks and positions that they made themselves, as BERT, BART and PaliGemma did before
    transformers 5.0."""
    return _release_of("transformers") < (5, 0)


def takes_image_types() -> bool:
    """Whether Qwen2-VL and its heirs are told which tokens are of images (`mm_token_type_ids`): from transformers 5.3 on."""
    return _release_of("transformers") >= (5, 3)


def packed_mask(position_ids: Any, attention: str | None, dtype: Any) -> Any:
    """The attention mask with which a packed batch's sequences do not see each other; None where position ids are enough.

    Before transformers 4.53, which makes masks of them, FlashAttention's integration alone looks at position ids. Others
    take scores' addends of each pair of tokens, flex_attention the number of each token's sequence.

    Args:
        position_ids: (rows, tokens), 0 where a sequence begins.
        attention: transformers' name of the attention; None for its default.
        dtype: of the model's weights.
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
    """The method of DeepSpeed's engine that runs first in a backward, also in one that a script begins by `loss.backward()`.

    Before 0.18.3 an engine does not see such a backward. A method of this name was there since 0.16.5, which `engine.backward`
    alone calls, with the loss.
    """
    name = "_backward_prologue"
    method = getattr(engine, name, None)
    return name if method is not None and len(inspect.signature(method).parameters) == 1 else None


def image_token(config: Any) -> Any:
    """The id of the token that stands for a piece of an image. Before transformers 4.52 some models (LLaVA) called it
    `image_token_index`; a configuration that has neither raises AttributeError."""
    return config.image_token_id if hasattr(config, "image_token_id") else config.image_token_index


def deepspeed_release() -> tuple[int, ...]:
    """Of the DeepSpeed in this environment."""
    return _release_of("deepspeed")


def takes_states_in_dicts(deepspeed: tuple[int, ...]) -> bool:
    """Whether stage 3 loads a universal checkpoint of stages 1 and 2 as the converter writes it, each tensor in a dict.

    Before DeepSpeed 0.19.5 it takes bare tensors alone, as converting stage 3 writes them.
    """
    return deepspeed >= (0, 19, 5)


def knows_every_sub_group(deepspeed: tuple[int, ...]) -> bool:
    """Whether DeepSpeed converts, and loads from a universal checkpoint, all sub-groups of stage 3: before 0.18.0 the first
    alone."""
    return deepspeed >= (0, 18)
