"""Run the long set, part by part: `python .ci/nightly.py [PART…]`, or `make nightly`. It takes hours.

A part that fails does not stop the others. The end lists what failed. `.ci/nightly.json` stores date, commit,
the result of each part and the seconds of each test that takes over `STORED_SECONDS`. The next run reports the parts and tests
that did not fail before, and the tests that became `SLOWER` times slower. Outputs are in `build/nightly`.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from junit import tests_in

ROOT = Path(__file__).parents[1]
RESULT = ROOT / ".ci" / "nightly.json"
OUTPUT = ROOT / "build" / "nightly"
STORED_SECONDS = 2.0
SLOWER = 2.0

# `test-all` runs the small form of every benchmark, and tests of a cluster with the programs that `cluster-tests` installs.
PARTS = {
    "cluster-tests": ["make", "cluster-tests"],
    "test-all": ["make", "test-all"],
    "test-oldest": ["make", "test-oldest", "OLD_TORCH=2.6.0"],
    "rehearsal": ["bash", "benchmarks/gpu/rehearse.sh", ".venv/bin/python"],
    "flakes": [
        ".venv/bin/python",
        "benchmarks/reliability/flakes.py",
        "--runs",
        "3",
        "--json",
        "build/nightly/flakes.json",
    ],
}


def run_part(name: str) -> dict[str, Any]:
    """Run one part, and return its exit code, seconds, failed tests and the seconds of its longer tests."""
    junit = OUTPUT / f"{name}.xml"
    junit.unlink(missing_ok=True)
    began = time.monotonic()
    with (OUTPUT / f"{name}.log").open("w") as log:
        environment = {**os.environ, "JUNIT": str(junit)}
        code = subprocess.run(PARTS[name], cwd=ROOT, env=environment, stdout=log, stderr=log, check=False).returncode
    tests = list(tests_in(junit)) if junit.exists() else []
    return {
        "code": code,
        "seconds": round(time.monotonic() - began),
        "tests": len(tests),
        "failed": sorted(test.name for test in tests if test.failed),
        "test_seconds": {test.name: round(test.seconds, 1) for test in tests if test.seconds > STORED_SECONDS},
    }


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return one line for each new failure and each test that became slower, between two values of "parts"."""
    lines = []
    for name, part in after.items():
        old = before.get(name, {"code": 0, "failed": [], "test_seconds": {}})
        if part["code"] and not old["code"]:
            lines.append(f"{name} fails, and did not before")
        lines += [f"{test} fails, and did not before" for test in part["failed"] if test not in old["failed"]]
        for test, seconds in part["test_seconds"].items():
            earlier = old["test_seconds"].get(test)
            if earlier and seconds > SLOWER * earlier:
                lines.append(f"{test} takes {seconds} s, and took {earlier} s before")
    return lines


def git(*words: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Run the named parts or all. The exit code is 1 if one fails."""
    names = sys.argv[1:] or list(PARTS)
    unknown = set(names) - set(PARTS)
    if unknown:
        sys.exit(f"unknown part {', '.join(sorted(unknown))}: expected some of {', '.join(PARTS)}")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    stored = json.loads(RESULT.read_text()) if RESULT.exists() else {"parts": {}}
    before = stored["parts"]
    parts = dict(before)
    for name in names:
        print(f"{name}: {' '.join(PARTS[name])}", flush=True)
        part = run_part(name)
        print(f"{name}: exit {part['code']} after {part['seconds']} s, {len(part['failed'])} tests failed", flush=True)
        part |= {"date": datetime.date.today().isoformat(), "commit": git("rev-parse", "--short", "HEAD")}
        parts[name] = part
        result = {"python": platform.python_version(), "cores": os.cpu_count(), "parts": parts}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")  # after each part: a killed run keeps what it has
    ran = {name: parts[name] for name in names}
    for line in differences(before, ran):
        print(line)
    for name, part in ran.items():
        for test in part["failed"]:
            print(f"{name}: {test} failed")
    failed = [name for name, part in ran.items() if part["code"]]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
