"""`autotune run` of a Trainer script in the sandbox: a user's own command on a GPU, and its folder as before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

from benchmarks.common import HERE
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.gpu.study import tuned

SCRIPT = (
    *("user/train.py", "--deepspeed", "user/ds.json", "--per_device_train_batch_size", "4", "--max_steps", "100"),
    *("--output_dir", "user/out", "--report_to", "none"),
)


def run(ground: Ground) -> Iterator[Row]:
    os.chdir(ground.folder)
    shutil.copytree(HERE.parent / "examples" / "trainer", "user")
    before = _files()
    words = ("--device", ground.device, "--gpus", "1", "--budget", ground.choose("100s", "40s"))
    row = tuned(words, "script", SCRIPT)
    kept = _files() == before
    yield {**row, "files as before": kept, EXPECTED: kept and bool(ground.rehearse or row["verified"])}


def _files() -> dict[str, bytes]:
    return {entry.name: b"" if entry.is_dir() else open(entry, "rb").read() for entry in os.scandir("user")}
