"""Hook `deepspeed.zero.Init`: build a model whole below stage 3, because no such engine trains a partitioned one.

transformers uses it only if its latest config has stage 3, and that config already has the candidate's keys.
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

_CONFIGS = ("config_dict_or_path", "config")  # its current and its old name


def install(context: Context) -> None:
    """Change the script's calls until the engine that trains exists; later engines keep their own stage.

    If the script has turned partitioning off, it stays off, because an engine of stage 3 also takes a whole model.
    """
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    inside = 0  # engines of stage 3 under construction, which partition whole parameters by this class

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
            return original(made, enabled=False)  # other arguments would be checked although they have no effect
        if name is not None and not _transformers_own(config):
            named[name] = _merged(context, config)
        return original(*given.args, **given.kwargs)

    context.patches.wrap(DeepSpeedZeRoOffload, "__init__", make_engine)
    context.patches.wrap(Init, "__init__", init)


def _transformers_own(config: Any) -> bool:
    """Return True if transformers itself passed the config."""
    library = sys.modules.get("transformers.integrations.deepspeed")
    return config is not None and library is not None and config is library.deepspeed_config()


def _merged(context: Context, config: Any) -> Any:
    """Return the config with the candidate's keys if it belongs to the engine that trains.

    The ZeRO section decides, compared with that of the probe run. A reference model's config stays unchanged.
    """
    read = named_config(config) if isinstance(config, str | Path) else config
    own = context.script.profile.get("config", read)
    section = "zero_optimization"
    return with_candidate(context, read) if isinstance(read, dict) and read.get(section) == own.get(section) else config
