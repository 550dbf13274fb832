"""Trainings that know nothing of autotune, as their users start them."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_AT_THEIR_END = Path(__file__).parent / "plainly"  # a `sitecustomize` of their ranks


def train(words: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """What a training on CPU ranks has printed by its end.

    Raises:
        AssertionError: it failed; what it said last.
    """
    path = os.pathsep.join(filter(None, [str(_AT_THEIR_END), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **(variables or {})}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
