"""`.ci/size.py`: what it counts, and when it fails."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULE = '''"""Docstring."""  # comments are free
LIMIT_BYTES = 3
NAMES = (1, 2)


def f(x: int) -> int:
    for y in range(x):
        if y and x:
            return 1 if y > 2 else 0
    return LIMIT_BYTES
'''
COUNTS = (44, 4, 1, 1)  # of MODULE: tokens, branches, conditional expressions, numeric constants


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Folder with one package, whose ceilings are its counts."""
    for folder in ("autotune/rank", "tests", "benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "module.py").write_text(MODULE)
    rows = "".join(f'"{row}" = {list(COUNTS)}\n' for row in ("autotune", "autotune/rank", "benchmarks", "tests"))
    (tmp_path / "pyproject.toml").write_text(f"[tool.autotune.size]  # ceilings\n{rows}\n[tool.other]\nkey = 1\n")
    return tmp_path


def checked(root: Path, *options: str) -> tuple[int, list[str]]:
    """Return the exit code and the complaints of the script."""
    command = [sys.executable, str(ROOT / ".ci" / "size.py"), *options, str(root)]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.returncode, ended.stderr.splitlines()


def test_counts_at_the_ceilings_pass(checkout: Path) -> None:
    assert checked(checkout) == (0, [])


def test_growth_of_one_package_fails_for_it_and_for_the_total(checkout: Path) -> None:
    with (checkout / "autotune" / "rank" / "module.py").open("a") as file:
        file.write("MORE_BYTES = 4\n")
    code, lines = checked(checkout)
    assert code == 1
    assert lines == [
        "autotune has 2 numeric constants, 1 more than its ceiling",
        "autotune has 47 tokens, 3 more than its ceiling",
        "autotune/rank has 2 numeric constants, 1 more than its ceiling",
        "autotune/rank has 47 tokens, 3 more than its ceiling",
    ]
    before = (checkout / "pyproject.toml").read_text()
    assert checked(checkout, "--lower") == (0, [])
    assert (checkout / "pyproject.toml").read_text() == before, "a ceiling only goes down"


def test_lower_writes_smaller_counts_and_the_rows_that_exist(checkout: Path) -> None:
    (checkout / "tests" / "module.py").write_text("x = 1\n")
    (checkout / "autotune" / "rank").rename(checkout / "autotune" / "ranks")
    code, lines = checked(checkout)
    assert code == 1
    assert lines[0].startswith("autotune/rank is gone")
    assert lines[1].startswith("autotune/ranks has no ceiling")
    assert checked(checkout, "--lower") == (0, [])
    text = (checkout / "pyproject.toml").read_text()
    assert '"tests" = [3, 0, 0, 1]\n\n[tool.other]\nkey = 1\n' in text
    assert "autotune/ranks" in text
    assert checked(checkout) == (0, [])
