"""The gate's checks of test results (`.ci/junit.py`), and the comparison of two nightly runs (`.ci/nightly.py`)."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = """<testsuites><testsuite>
<testcase file="tests/a.py" name="test_fast" time="0.1" />
<testcase file="tests/a.py" name="test_long[x y]" time="6.5" />
<testcase file="tests/a.py" name="test_marked" time="60"><properties><property name="slow" value="" /></properties></testcase>
<testcase file="tests/a.py" name="test_gpu" time="0"><skipped message="no GPU on this machine" /></testcase>
<testcase file="tests/a.py" name="test_sleepy" time="0"><skipped message="not today" /></testcase>
<testcase file="tests/a.py" name="test_broken" time="0"><failure message="assert False" /></testcase>
</testsuite></testsuites>"""


def script(name: str) -> Any:
    """Return a script of `.ci` as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / ".ci"), *sys.path])
        return importlib.import_module(name)


def results(folder: Path) -> list[Any]:
    """Return the tests of `RESULTS`."""
    (folder / "tests.xml").write_text(RESULTS)
    return list(script("junit").tests_in(folder / "tests.xml"))


def test_a_skip_fails_unless_its_reason_is_listed(tmp_path: Path) -> None:
    found = script("junit").forbidden_skips(results(tmp_path), ["^no GPU"])
    assert found == ["tests/a.py::test_sleepy was skipped: not today"]


def test_listed_reasons_are_patterns() -> None:
    lines = [line for line in (ROOT / ".ci" / "skips.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.compile(line) for line in lines)
    assert not any(re.search(line, "not today") for line in lines)


@pytest.mark.parametrize(("seconds", "complaints"), [(1.0, 0), (6.0, 1)])
def test_a_fast_test_over_the_limit_fails_only_if_it_is_slow_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, complaints: int
) -> None:
    junit, before = script("junit"), results(tmp_path)
    ran: list[str] = []

    def run(command: list[str], **_: Any) -> None:
        ran.extend(command)
        (path,) = [word.partition("=")[2] for word in command if word.startswith("--junitxml=")]
        case = f'<testcase file="tests/a.py" name="test_long[x y]" time="{seconds}" />'
        Path(path).write_text(f"<testsuite>{case}</testsuite>")

    monkeypatch.setattr(junit.subprocess, "run", run)
    assert len(junit.slow_alone(before)) == complaints
    assert [word for word in ran if "::" in word] == ["tests/a.py::test_long[x y]"]


def test_a_nightly_run_reports_new_failures_and_tests_twice_as_slow() -> None:
    before = {"test-all": {"code": 1, "failed": ["a"], "test_seconds": {"c": 10.0, "d": 10.0}}}
    after = {
        "test-all": {"code": 1, "failed": ["a", "b"], "test_seconds": {"c": 19.0, "d": 21.0, "e": 50.0}},
        "flakes": {"code": 1, "failed": [], "test_seconds": {}},
    }
    assert script("nightly").differences(before, after) == [
        "b fails, and did not before",
        "d takes 21.0 s, and took 10.0 s before",
        "flakes fails, and did not before",
    ]


def test_the_modules_and_tests_of_the_mutants_exist() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    for name in (*options["only_mutate"], *options["pytest_add_cli_args_test_selection"]):
        assert list(ROOT.glob(name)), name
