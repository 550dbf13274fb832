"""A folder that says it lies on a network's file system: there is none on a machine of tests."""

from __future__ import annotations

import types
from pathlib import Path

import psutil
import pytest


def mount(monkeypatch: pytest.MonkeyPatch, *parts: tuple[str, Path | str]) -> None:
    """Has the machine's table of mounts say (kind, place) of each, in that order, beside what is really mounted."""
    real = psutil.disk_partitions(all=True)
    added = [types.SimpleNamespace(fstype=kind, mountpoint=str(place), device="x", opts="rw") for kind, place in parts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all=False: [*real, *added])
