"""DeepSpeed's ops that a script loads: built behind the lock of ours, so that a rank that is ended meanwhile leaves none of
torch's, for which whoever comes next would wait without end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from autotune.group import extensions
from autotune.group.ops import held
from autotune.rank.hooks.context import Context


def install(context: Context) -> None:
    """Hooks what builds an op, or loads one that was built at run time; one that DeepSpeed was installed with is left alone."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    context.patches.wrap(OpBuilder, "jit_load", functools.partial(_load, context))


def _load(context: Context, original: Callable[..., Any], /, builder: Any, *args: Any, **kwargs: Any) -> Any:
    folder, name = extensions.use_own_folder(), type(builder).__name__
    if not extensions.is_built(name, folder):
        context.watcher.unbuilt(name)
    with held(folder, builder.name):
        return original(builder, *args, **kwargs)
