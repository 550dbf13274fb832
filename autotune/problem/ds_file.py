"""A DeepSpeed config's text, read as DeepSpeed reads it: JSON, or HJSON, which is JSON with comments and commas to spare."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 20  # a larger file that is no JSON holds data


def parsed_config(text: str) -> Any:
    """What a config's text says.

    Raises:
        json.JSONDecodeError: it is neither; of the text as JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        if len(text) > _MOST_BYTES:
            raise
        import hjson  # for few texts only, and in a rank DeepSpeed's own

        try:
            return hjson.loads(text, object_pairs_hook=dict)
        except hjson.HjsonDecodeError:
            pass
        raise


def read_config(path: Path) -> Any:
    """What a config's file says.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        json.JSONDecodeError: it does not parse.
    """
    return parsed_config(path.read_text())


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
