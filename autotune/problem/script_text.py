"""Facts from a script's own text, available before its first run."""

from __future__ import annotations

import re

from autotune.problem.job import Script

_LIGHTNING = re.compile(r"^\s*(?:from|import)\s+(?:pytorch_)?lightning\b", re.MULTILINE)


def script_text(script: Script) -> str | None:
    """Return the script's text, or None if it cannot be read."""
    if script.path is None or not script.path.is_file():
        return None
    return script.path.read_text(errors="replace", encoding="utf-8")


def under_lightning(script: Script) -> bool:
    """Check that Lightning trains: the probe run showed it, or the script's text imports it."""
    return bool(script.profile.get("lightning")) or _LIGHTNING.search(script_text(script) or "") is not None
