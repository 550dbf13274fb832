"""Reader of DeepSpeed configs: JSON or HJSON (JSON with comments and trailing commas), and deprecated names of keys."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20  # bytes; a larger file holds data

# Deprecated keys of `zero_optimization` and their replacements (0.19.8, runtime/zero/config.py). DeepSpeed refuses a config with
# both, so that a knob could not be set next to its old name.
_OLD_SECTIONS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_OLD_KEYS = {"stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}
_UNHEEDED = "cpu_offload_use_pin_memory"  # accepted by DeepSpeed, but never read
_YES = ("true", "1", "yes", "on", "t", "y")  # spellings of true that pydantic accepts


def parsed_config(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """Return the parsed text of a config.

    Args:
        pairs: builds an object from its keys and values.

    Raises:
        json.JSONDecodeError: the text is neither JSON nor HJSON; the error is JSON's.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError:
        if len(text) > MOST_BYTES:
            raise
        import hjson  # imported late: few texts need it, and in a rank the package is DeepSpeed's dependency

        try:
            return hjson.loads(text, object_pairs_hook=pairs)
        except hjson.HjsonDecodeError:
            pass
        raise


def read_config(path: Path) -> Any:
    """Return the parsed contents of a config's file.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        json.JSONDecodeError: it does not parse.
    """
    return parsed_config(path.read_text(encoding="utf-8"))


def in_new_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with DeepSpeed's deprecated names replaced by current ones; the same object if it has none."""
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
    """Return a config in either form that `deepspeed.initialize` accepts: the name of its file, or its text in base64.

    Source: deepspeed 0.19.8, runtime/config.py.

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
