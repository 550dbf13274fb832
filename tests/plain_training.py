"""Trainings that know nothing of autotune, as their users start them."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.problem.training_trace import TrainingTrace
from autotune.workers.jit_ops import FOLDER, own_folder

AT_THEIR_END = Path(__file__).parent / "plainly"  # a `sitecustomize` of their ranks


def train(
    words: Sequence[str],
    folder: Path,
    variables: Mapping[str, str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """What a training on CPU ranks has printed by its end. DeepSpeed's ops are those that trials have built: torch's own
    folder is built anew for minutes whenever another environment has used it.

    Args:
        variables: what stands before the command, beside the `environment` of whoever types it.

    Raises:
        AssertionError: it failed; what it said last.
    """
    path = os.pathsep.join(filter(None, [str(AT_THEIR_END), environment.get("PYTHONPATH")]))
    ops = {FOLDER: str(own_folder("cpu"))}
    env = {**ops, **environment, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, **(variables or {})}
    program = Path(sys.executable).parent / words[0]
    if program.is_file() and not program.samefile(
        sys.executable
    ):  # the first line of a program below a folder with a space names no file
        words = [sys.executable, str(program), *words[1:]]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def traced(words: Sequence[str], folder: Path, variables: Mapping[str, str] | None = None) -> TrainingTrace:
    """Train with a command and return the trace of its ranks.

    Raises:
        AssertionError: it failed, or it has stepped too few times.
    """
    below = folder / "plain_trace"
    below.mkdir(exist_ok=True)
    for old in below.iterdir():
        old.unlink()
    train(words, folder, {**(variables or {}), "PLAIN_TRACE": str(below)})
    found = TrainingTrace.merged([json.loads(one.read_text()) for one in sorted(below.iterdir())])
    assert found is not None
    return found
