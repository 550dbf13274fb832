"""Every benchmark still runs, end to end, in its small form; what it says then is no figure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import CANNOT_RUN, HERE, WIDTH
from benchmarks.run_all import EXEMPT, FULL, OF_THE_TESTS, SMALL, result_path

BORDERS = "┏┃┡│└"


def columns(data: object) -> dict[str, set[str]]:
    """Names in a result: its own, and of each table the columns."""
    if isinstance(data, list):
        return {"": {name for row in data for name in row}}
    assert isinstance(data, dict)
    tables = {name: value for name, value in data.items() if isinstance(value, list) and isinstance(value[0], dict)}
    return {"": set(data), **{name: {column for row in rows for column in row} for name, rows in tables.items()}}


def run_small(command: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(HERE / command), *options], cwd=HERE.parent, capture_output=True, text=True, timeout=840
    )
    if done.returncode == CANNOT_RUN:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


WHOLE = "reliability/faults.py"  # tests/benchmarks/test_faults.py runs it with a dozen faults


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_small_form_gives_a_table_and_the_full_result_s_columns(name: str, tmp_path: Path) -> None:
    command, *options = SMALL[name]
    path = tmp_path / "result.json"
    out = run_small(command, *options, "--json", str(path))
    table = [line for line in out.splitlines() if line.startswith(tuple(BORDERS))]
    assert table
    assert max(map(len, table)) <= WIDTH
    small = columns(json.loads(path.read_text()))
    for part, names in columns(json.loads(result_path(name).read_text())).items():
        assert names <= small[part], part


@pytest.mark.slow
@pytest.mark.parametrize("command", [name for name in OF_THE_TESTS if name != WHOLE])
def test_the_commands_with_a_target_of_their_own_have_a_small_form(command: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    run_small(command, "--small", "--json", str(path))
    assert json.loads(path.read_text())


def test_every_file_is_a_command_with_a_result_or_exempt_with_a_reason() -> None:
    commands = {options[0] for options in FULL.values()}
    started = ("gpu", "contest", "steplog")  # steps of gpu/steps.py, and scripts that others start
    files = {path.relative_to(HERE) for path in HERE.rglob("*.py") if path.name != "__init__.py"}
    files = {str(path) for path in files if not set(started) & set(path.parts)}
    assert not commands & set(EXEMPT)
    assert files <= commands | set(EXEMPT) | set(OF_THE_TESTS)
    assert commands <= files


def test_every_result_is_written_by_a_command() -> None:
    elsewhere = {
        "gpu",
        "fidelity",
        "flakes",
        "mutants",
        "faults",
        "planted",
        "winners",
    }  # of a GPU's name, or of OF_THE_TESTS
    for path in (HERE / "results").glob("*.json"):
        assert path.stem in FULL or path.stem.split("-")[0] in elsewhere, path.name
