"""What `autotune doctor` says of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.gpu.ground import EXPECTED, Ground, Row


def run(ground: Ground) -> Iterator[Row]:
    done = subprocess.run([sys.executable, "-m", "autotune", "doctor", "--json"], capture_output=True, text=True)
    if not done.stdout.startswith("["):
        raise RuntimeError(f"doctor gave no JSON, exit {done.returncode}: {done.stderr[-2000:]}")
    for finding in json.loads(done.stdout):
        fine = finding["level"] == "good" or finding["what"] != "GPU"  # a machine may lack an op; not the GPU
        yield {**{key: value for key, value in finding.items() if value}, EXPECTED: ground.choose(fine, True)}
