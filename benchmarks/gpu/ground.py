"""Where a step runs: one GPU, or in rehearsal one CPU rank with a model of a million parameters. The path is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from autotune.problem.hardware import Hardware, detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from benchmarks.common import HERE

Row = dict[str, Any]
T = TypeVar("T")
EXPECTED = "as expected"  # the column of a row that says whether what should hold does
_RESULT = "RESULT "


@dataclass(frozen=True)
class Ground:
    folder: Path  # the step's own, gone when it has ended
    beside: Path  # the results' path without its suffix: a step may keep a file beside them
    rehearse: bool = False
    seconds: float = float("inf")  # until the step is ended

    @property
    def device(self) -> str:
        return self.choose("cuda", "cpu")

    def choose(self, real: T, rehearsed: T) -> T:
        return rehearsed if self.rehearse else real

    def hardware(self) -> Hardware:
        return detect(self.device, 1)

    def job(self, model: str, seq_len: int, **more: Any) -> Job:
        """In bf16 on one rank; in rehearsal of the smallest model and 32 tokens."""
        return Job(resolve_model(self.choose(model, "tiny-llama")), 1, self.choose(seq_len, 32), "bf16", **more)


@dataclass(frozen=True)
class Child:
    """How a process of its own ended."""

    code: int
    result: Any  # None where it did not come as far
    stderr: str


def start_child(module: str, arguments: dict[str, Any], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`gpu.MODULE.child(arguments)` in a process of its own: an error of CUDA's ruins whoever meets it."""
    command = [sys.executable, str(HERE / "gpu" / "child.py"), module, json.dumps(arguments)]
    environment = {**os.environ, **(env or {})}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def end_child(process: subprocess.Popen[str], seconds: float) -> Child:
    """Waits for a child, and kills it where that takes longer."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nended after {seconds:.0f} s"
    line = next((line for line in out.splitlines() if line.startswith(_RESULT)), None)
    return Child(process.returncode, json.loads(line.removeprefix(_RESULT)) if line else None, err[-4000:])


def run_child(module: str, arguments: dict[str, Any], env: dict[str, str] | None = None, seconds: float = 120) -> Child:
    return end_child(start_child(module, arguments, env), seconds)


def tell(result: Any) -> None:
    """A child's last word."""
    print(_RESULT + json.dumps(result), flush=True)
