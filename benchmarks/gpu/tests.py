"""The tests that are skipped where there is no GPU, each a row as it ends."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.common import HERE
from benchmarks.gpu.ground import EXPECTED, Ground, Row

_LINE = re.compile(r"(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")
_TEXT = 12_000  # characters of pytest's last words


def run(ground: Ground) -> Iterator[Row]:
    words = ["-m", "pytest", "-v", "-m", "gpu", "-p", "no:randomly", "-p", "no:cacheprovider", "tests/gpu"]
    output, seen = "", 0
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, *words, f"--basetemp={ground.folder / 'tests'}"]
    with subprocess.Popen(
        command, cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            output = (output + line)[-_TEXT:]
            if found := _LINE.match(line):
                seen += 1
                yield {
                    "test": found[1].partition("::test_")[2],
                    "ended": found[2],
                    EXPECTED: found[2] == wanted(ground),
                }
    if process.returncode or not seen:
        yield {"test": "pytest itself", "ended": f"exit {process.returncode}", EXPECTED: False, "output": [output]}


def wanted(ground: Ground) -> str:
    """A rehearsal is where there is no GPU."""
    return ground.choose("PASSED", "SKIPPED")
