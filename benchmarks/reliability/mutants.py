"""Mutation testing with mutmut: `python benchmarks/reliability/mutants.py --json FILE`, or `make mutants`.

mutmut changes one operator, number, word or argument at a time and runs the tests that reach the changed function. A mutant
that no test notices has survived. What is mutated, and by which tests it is tried, stands under `[tool.mutmut]` in
pyproject.toml: code that decides, and tests of it that start no rank.

Exits with 1 where fewer than 80 % are killed. `--small` tries one method of one small file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from mutmut.stats import status_by_exit_code

from benchmarks.common import print_table, tree, write_json

ROOT = Path(__file__).resolve().parents[2]
LEAST_SHARE = 0.80
SMALL_FILE, SMALL_TESTS, SMALL_MUTANTS = (
    "autotune/search/pruning.py",
    "tests/search/test_pruning.py",
    "autotune.search.pruning.xǁCandidatePoolǁ_exclude_larger*",
)
# A test run that ends in none of these was no test run of the mutant.
# One that crashes the interpreter (a null handle to a C library) was noticed.
KILLED, SURVIVED = ("killed", "timeout", "segfault"), ("survived", "no tests")


def small_copy(folder: Path) -> None:
    """Copies what the tests of one file need, with a configuration that mutates that file alone."""
    for name in ("autotune", "tests", "search_spaces", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    import tomllib  # of Python 3.11 and later: mutants are of one environment

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    settings |= {"only_mutate": [SMALL_FILE], "pytest_add_cli_args_test_selection": [SMALL_TESTS]}
    lines = (f"{key} = {json.dumps(value)}" for key, value in settings.items())
    (folder / "pyproject.toml").write_text("\n".join(["[tool.mutmut]", *lines]) + "\n")


def run(folder: Path, mutants: list[str], children: int) -> None:
    """Makes and tries the mutants in `folder`; what mutmut prints goes to `mutants/run.log`.

    Raises:
        SystemExit: mutmut failed, for instance since the tests fail without any mutation.
    """
    shutil.rmtree(folder / "mutants", ignore_errors=True)
    (folder / "mutants").mkdir()
    log = folder / "mutants" / "run.log"
    with log.open("w") as out:
        command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(children), *mutants]
        done = subprocess.run(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(f"mutmut ended with {done.returncode}:\n{log.read_text()[-4000:]}")


def results(folder: Path) -> dict[str, dict[str, str]]:
    """Of every mutated file the status of each mutant that was tried, as mutmut names it."""
    found = {}
    for meta in sorted((folder / "mutants").rglob("*.meta")):
        codes = json.loads(meta.read_text())["exit_code_by_key"]
        statuses = {name: status_by_exit_code[code] for name, code in codes.items()}
        tried = {name: status for name, status in statuses.items() if status != "not checked"}
        if tried:
            found[str(meta.relative_to(folder / "mutants").with_suffix(""))] = tried
    return found


def summary(found: dict[str, dict[str, str]]) -> dict[str, Any]:
    """Counts of each file and of all, and the survivors' names."""

    def counts(statuses: list[str]) -> dict[str, Any]:
        number = Counter(statuses)
        killed = sum(number[status] for status in KILLED)
        return {
            "total": len(statuses),
            "killed": killed,
            "survived": sum(number[status] for status in SURVIVED),
            "share": round(killed / len(statuses), 4),
        }

    every = [status for statuses in found.values() for status in statuses.values()]
    return {
        **counts(every),
        "files": {file: counts(list(statuses.values())) for file, statuses in found.items()},
        "survivors": [name for statuses in found.values() for name, status in statuses.items() if status not in KILLED],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="one method of one file, in less than half a minute")
    parser.add_argument("--children", type=int, default=2, help="mutants that are tried at a time")
    arguments = parser.parse_args()
    of = tree("autotune", "tests")  # an hour before the end
    if arguments.small:
        with tempfile.TemporaryDirectory() as name:
            small_copy(Path(name))
            run(Path(name), [SMALL_MUTANTS], arguments.children)
            found = results(Path(name))
    else:
        run(ROOT, [], arguments.children)
        found = results(ROOT)
    told = {"tree": of, **summary(found)}
    rows = [{"file": file, **counts} for file, counts in told["files"].items()]
    print_table("Mutants", [*rows, {"file": "all", **{key: told[key] for key in rows[0] if key != "file"}}])
    if not arguments.small:
        print("a survivor's change: mutmut show NAME; all that survived: mutmut results")
    write_json(arguments.json, told)
    print(f"{told['killed']} of {told['total']} mutants killed: {told['share']:.1%} (at least {LEAST_SHARE:.0%})")
    if told["killed"] + told["survived"] < told["total"]:
        raise SystemExit("some mutants' tests ended in an unknown way: mutmut results")
    if told["share"] < LEAST_SHARE:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
