"""Build DeepSpeed's ops for a script behind autotune's lock.

A rank that is killed during a build would otherwise leave torch's lock, for which later processes wait for ever.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from autotune.group import extensions
from autotune.group.ops import LIVELY_SECONDS, held
from autotune.rank.hooks.context import Context

_MODULES = ("deepspeed.ops.op_builder.builder", "op_builder.builder")  # the second is DeepSpeed from a checkout


def install(context: Context) -> None:
    """Hook the builds and loads of ops at run time. Ops built at DeepSpeed's installation are left alone."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().get_op_builder("CPUAdamBuilder")  # imports the modules that define the ops
    for module in map(sys.modules.get, _MODULES):
        if module is not None:
            context.patches.wrap(module.OpBuilder, "jit_load", functools.partial(_load, context))


def _load(context: Context, original: Callable[..., Any], /, builder: Any, *args: Any, **kwargs: Any) -> Any:
    from deepspeed.accelerator import get_accelerator

    folder, name = extensions.use_own_folder(), type(builder).__name__
    place = folder / builder.name
    is_built = extensions.is_whole(place / f"{builder.name}.so")
    if not is_built and get_accelerator().get_op_builder(name) is type(builder):  # excludes the script's own builder
        context.watcher.unbuilt(name)
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"  # machines may share a home, but not its locks
    if several:
        extensions.drop_torn(place, LIVELY_SECONDS)
    if several or (is_built and not (place / "lock").exists()):  # ranks load a built op in parallel
        return original(builder, *args, **kwargs)
    with held(folder, builder.name):
        return original(builder, *args, **kwargs)
