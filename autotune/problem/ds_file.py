"""A DeepSpeed config's text, read as DeepSpeed reads it: JSON, or HJSON, which is JSON with comments and commas to spare; and
what it says under names of before."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20  # a larger file holds data

# Of `zero_optimization`, what DeepSpeed still takes and what stands for it (0.19.8, runtime/zero/config.py). It refuses a config
# that has both, so that a knob could not be set beside its old name.
_OLD_SECTIONS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_OLD_KEYS = {"stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}
_UNHEEDED = "cpu_offload_use_pin_memory"  # taken, and read by nothing
_YES = ("true", "1", "yes", "on", "t", "y")  # as pydantic reads a bool


def parsed_config(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """What a config's text says.

    Args:
        pairs: makes an object of its keys and values.

    Raises:
        json.JSONDecodeError: it is neither; of the text as JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError:
        if len(text) > MOST_BYTES:
            raise
        import hjson  # for few texts only, and in a rank DeepSpeed's own

        try:
            return hjson.loads(text, object_pairs_hook=pairs)
        except hjson.HjsonDecodeError:
            pass
        raise


def read_config(path: Path) -> Any:
    """What a config's file says.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        json.JSONDecodeError: it does not parse.
    """
    return parsed_config(path.read_text(encoding="utf-8"))


def in_new_names(config: dict[str, Any]) -> dict[str, Any]:
    """The config with the names of today for those that DeepSpeed calls deprecated; itself where it has none."""
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        size = {"allgather_bucket_size": config["allgather_size"]} if zero and "allgather_size" in config else {}
        return {**config, "zero_optimization": {"stage": int(zero), **size}}
    if not isinstance(zero, dict) or not zero.keys() & {*_OLD_SECTIONS, *_OLD_KEYS, _UNHEEDED}:
        return config
    found = {key: value for key, value in zero.items() if key not in (*_OLD_SECTIONS, *_OLD_KEYS, _UNHEEDED)}
    for old, new in _OLD_SECTIONS.items():
        if str(zero.get(old)).lower() in _YES and not isinstance(found.get(new), dict):
            found[new] = {"device": "cpu"}
    for old, new in _OLD_KEYS.items():
        if old in zero:
            found.setdefault(new, zero[old])
    return {**config, "zero_optimization": found}


def named_config(name: str | Path) -> Any:
    """A config as `deepspeed.initialize` is given it: the name of its file, or all of it in base64 (deepspeed 0.19.8,
    runtime/config.py).

    Raises:
        OSError, ValueError: it is neither, or does not parse.
    """
    if not os.path.exists(name):
        try:
            data = parsed_config(base64.urlsafe_b64decode(str(name)).decode())
        except ValueError:
            data = None
        if isinstance(data, dict):
            return data
    return read_config(Path(name))
