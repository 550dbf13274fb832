"""Check test results of the gate: `python .ci/junit.py FILE`, the JUnit XML that `make test` and `make test-gate` write.

A skip fails if its reason matches no line of `.ci/skips.txt`. A fast test whose call takes over `LIMIT_SECONDS` fails. Other
processes may have slowed it down, so it is run again alone before it counts.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 5.0


@dataclass(frozen=True)
class Test:
    """One test of a JUnit file."""

    name: str  # id that pytest takes
    seconds: float  # the call alone, without fixtures
    slow: bool
    failed: bool
    skipped: str | None  # reason


def tests_in(path: Path) -> Iterator[Test]:
    """Yield the tests of a JUnit file."""
    for case in ElementTree.parse(path).iter("testcase"):
        skip = case.find("skipped")
        yield Test(
            f"{case.get('file')}::{case.get('name')}",
            float(case.get("time", 0.0)),
            any(one.get("name") == "slow" for one in case.iter("property")),
            case.find("failure") is not None or case.find("error") is not None,
            None if skip is None else skip.get("message", ""),
        )


def forbidden_skips(tests: list[Test], permitted: list[str]) -> list[str]:
    """Return one line for each skipped test whose reason matches none of the patterns."""
    lines = []
    for test in tests:
        if test.skipped is not None and not any(re.search(pattern, test.skipped) for pattern in permitted):
            lines.append(f"{test.name} was skipped: {test.skipped}")
    return lines


def slow_alone(tests: list[Test]) -> list[str]:
    """Return one line for each fast test that takes over the limit, in this run and again alone."""
    names = [test.name for test in tests if not test.slow and test.seconds > LIMIT_SECONDS]
    if not names:
        return []
    print(f"over {LIMIT_SECONDS:.0f} s, run again alone: {' '.join(names)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "again.xml"
        command = [sys.executable, "-m", "pytest", "-n", "0", "-q", f"--junitxml={path}", *names]
        subprocess.run(command, cwd=ROOT, check=False)
        again = list(tests_in(path))
    slow = [test for test in again if test.seconds > LIMIT_SECONDS]
    return [f"{test.name} takes {test.seconds:.1f} s alone: make it faster or mark it slow" for test in slow]


def main() -> None:
    """Print the complaints. The exit code is 1 if there are any."""
    tests = list(tests_in(Path(sys.argv[1])))
    lines = (ROOT / ".ci" / "skips.txt").read_text(encoding="utf-8").splitlines()
    permitted = [line for line in lines if line and not line.startswith("#")]
    found = forbidden_skips(tests, permitted) + slow_alone(tests)
    print(f"{len(tests)} tests, {sum(test.skipped is not None for test in tests)} skipped, {len(found)} complaints")
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
