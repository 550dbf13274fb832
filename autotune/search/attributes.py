"""Study attributes of any length. A database may limit an attribute to 64 KiB, as MySQL's TEXT does.

The JSON text of a longer value is split into pieces, each stored as an attribute that is named by a digest of the
value. A concurrent reader therefore gets the complete old value or the complete new one.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import optuna

from autotune.masking import masked_data

MOST_BYTES = 60_000  # bytes in one attribute; MySQL's TEXT holds 65,535 (Optuna's tables have no larger type)
# characters; a piece is encoded as JSON again, and a backslash before each quote doubles it at worst
_PIECE_CHARACTERS = MOST_BYTES // 2 - 1
_AS_THEY_ARE = ("fingerprint", "space")  # stored without masking: a resumed study runs its command with these values
_PIECES = "autotune pieces"  # the only key of a value that refers to pieces


def set_attribute(study: optuna.Study, key: str, value: Any) -> None:
    """Store an attribute. Secrets are masked unless the study needs them to resume."""
    if key not in _AS_THEY_ARE:
        value = masked_data(value)
    text = json.dumps(value)
    if len(text) <= MOST_BYTES:
        study.set_user_attr(key, value)
        return
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    starts = range(0, len(text), _PIECE_CHARACTERS)
    names = [f"{key} {digest} {number}" for number in range(len(starts))]
    for name, start in zip(names, starts, strict=True):
        study.set_user_attr(name, text[start : start + _PIECE_CHARACTERS])
    study.set_user_attr(key, {_PIECES: names})


def attributes(study: optuna.Study) -> dict[str, Any]:
    """Return all attributes, with split values joined."""
    stored = study.user_attrs
    return {key: _whole(stored, value) for key, value in stored.items()}


def _whole(stored: dict[str, Any], value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {_PIECES}:
        return json.loads("".join(stored[name] for name in value[_PIECES]))
    return value
