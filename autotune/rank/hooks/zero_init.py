"""`deepspeed.zero.Init`: a model made in parts, which no engine trains below stage 3, is made whole there.

transformers asks for it only where the config that it was given last is of stage 3, and that has the candidate's keys already.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.problem.ds_file import named_config
from autotune.rank.hooks.config import with_candidate
from autotune.rank.hooks.context import Context

_CONFIGS = ("config_dict_or_path", "config")  # its name, and its old one


def install(context: Context) -> None:
    """Calls of the script count until the engine that trains exists: engines beside it keep their own stage. What the script
    itself has switched off stays off, since an engine of stage 3 takes a whole model, too."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    inside = 0  # engines of stage 3 that are made, which part what is whole by the same class

    def make_engine(original: Callable[..., Any], engine: Any, /, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        inside += 1
        try:
            original(engine, *args, **kwargs)
        finally:
            inside -= 1

    def init(original: Callable[..., Any], made: Any, /, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(made, *args, **kwargs)
        named = given.arguments
        if inside or context.engine is not None or not named.get("enabled", True):
            return original(made, *args, **kwargs)
        name = next((one for one in _CONFIGS if named.get(one) is not None), None)
        config = named[name] if name is not None else None
        context.zero_init |= not _transformers_own(config)
        candidate = context.candidate
        if candidate is None or "zero_stage" not in candidate.as_dict:
            return original(made, *args, **kwargs)
        if candidate.stage < 3:
            return original(made, enabled=False)  # of all else it would check what it does not use
        if name is not None and not _transformers_own(config):
            named[name] = _merged(context, config)
        return original(*given.args, **given.kwargs)

    context.patches.wrap(DeepSpeedZeRoOffload, "__init__", make_engine)
    context.patches.wrap(Init, "__init__", init)


def _transformers_own(config: Any) -> bool:
    """Whether it is the config that transformers itself gives."""
    library = sys.modules.get("transformers.integrations.deepspeed")
    return config is not None and library is not None and config is library.deepspeed_config()


def _merged(context: Context, config: Any) -> Any:
    """The config with the candidate's keys, if it is the one of the engine that trains: by what it says of ZeRO, where the
    script's first run has shown that. A reference's stays."""
    read = named_config(config) if isinstance(config, str | Path) else config
    own = context.script.profile.get("config", read)
    section = "zero_optimization"
    return with_candidate(context, read) if isinstance(read, dict) and read.get(section) == own.get(section) else config
