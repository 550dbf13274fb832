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
