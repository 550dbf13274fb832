"""DeepSpeed's ops that a script loads: built behind the lock of ours, so that a rank that is ended meanwhile leaves none of
torch's, for which whoever comes next would wait without end."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from autotune.group import extensions
from autotune.group.ops import LIVELY_SECONDS, held
from autotune.rank.hooks.context import Context

_MODULES = ("deepspeed.ops.op_builder.builder", "op_builder.builder")  # the second: of DeepSpeed in a checkout


def install(context: Context) -> None:
    """Hooks what builds an op, or loads one that was built at run time; one that DeepSpeed was installed with is left alone."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().get_op_builder("CPUAdamBuilder")  # imports the modules that its ops come from
    for module in map(sys.modules.get, _MODULES):
        if module is not None:
            context.patches.wrap(module.OpBuilder, "jit_load", functools.partial(_load, context))


def _load(context: Context, original: Callable[..., Any], /, builder: Any, *args: Any, **kwargs: Any) -> Any:
    from deepspeed.accelerator import get_accelerator

    folder, name = extensions.use_own_folder(), type(builder).__name__
    place = folder / builder.name
    is_built = extensions.is_whole(place / f"{builder.name}.so")
    if not is_built and get_accelerator().get_op_builder(name) is type(builder):  # and not the script's own
        context.watcher.unbuilt(name)
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"  # machines, whose homes may be one, and locks may not
    if several:
        extensions.drop_torn(place, LIVELY_SECONDS)
    if several or (is_built and not (place / "lock").exists()):  # ranks load what is built side by side
        return original(builder, *args, **kwargs)
    with held(folder, builder.name):
        return original(builder, *args, **kwargs)
