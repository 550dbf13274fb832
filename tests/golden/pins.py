"""Behaviour that is pinned, without naming modules of the package: commands, stored studies, replayed searches, processes.

Each group is a function of an empty folder. It returns texts by file name, and `expected/GROUP/` holds what they must be.
`python -m tests.golden.make` writes `expected/` again: look at the diff before it is committed.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import inspect
import io
import json
import os
import re
import runpy
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import autotune
from autotune.util import entry_points
from benchmarks.search.replay import replayed

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PACKAGE = Path(autotune.__file__).parent
EXPECTED = HERE / "expected"
TABLES = ROOT / "benchmarks" / "data"
SEARCH_BENCHMARK = ROOT / "benchmarks" / "search" / "search.py"
FORMATS = ("deepspeed", "accelerate", "hf", "sbatch")

Texts = dict[str, str]


# -- commands ------------------------------------------------------------------------------------------------------------


def call(*words: str, columns: int = 80) -> str:
    """Standard output of `autotune words…`, run in this process; an exit code other than 0 stands in front of it.

    Output to standard error is left out: it tells of the machine.
    """
    out, code = io.StringIO(), 0
    env = {"COLUMNS": str(columns), "NO_COLOR": "1", "TERM": "dumb", "AUTOTUNE_STORAGE": ""}
    env["AUTOTUNE_CACHE"] = str(Path.cwd() / ".cache")  # a report depends on the traces that it holds
    with (
        mock.patch.dict(os.environ, env),
        mock.patch.object(sys, "argv", ["autotune", *words]),
        mock.patch.object(sys.modules["__main__"], "__package__", None, create=True),  # click shows how it was started
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        os.environ.pop("AUTOTUNE_STORAGE")
        try:
            runpy.run_module("autotune", run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else bool(end.code)
    return (f"exit code {code}\n" if code else "") + out.getvalue()


def commands(*above: str) -> Iterator[tuple[str, ...]]:
    """Every command that `--help` lists, with the commands below it."""
    yield above
    listed = call(*above, "--help").partition("─ Commands ─")[2]
    for name in re.findall(r"^│ ([a-z]+)  ", listed, re.MULTILINE):
        yield from commands(*above, name)


def helps(folder: Path) -> Texts:
    """`--help` of every command; `agent` is hidden."""
    shown = {"-".join(("autotune", *words)): call(*words, "--help") for words in [*commands(), ("agent",)]}
    return {f"{name}.txt": re.sub(r" +$", "", text, flags=re.MULTILINE) for name, text in shown.items()}


def python_calls(folder: Path) -> Texts:
    """Names that the package offers, with the parameters and defaults of its functions."""
    lines = []
    for name in sorted(autotune.__all__):
        found = getattr(autotune, name)
        if inspect.isfunction(found):
            shown = ", ".join(
                parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
                for parameter in inspect.signature(found).parameters.values()
            )
            lines.append(f"{name}({shown})\n")
        else:
            lines.append(f"{name}\n")
    return {"names.txt": "".join(lines)}


# -- studies -------------------------------------------------------------------------------------------------------------


def normal(text: str, folder: Path) -> str:
    """Replace what differs between machines, versions and moments."""
    for path in (str(folder.resolve()), str(folder)):
        text = text.replace(path, "FOLDER")
    text = text.replace(autotune.__version__, "VERSION")
    text = re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\+00:00| UTC|Z)?", "TIME", text)
    return re.sub(r"<(style|script)([^>]*)>(.*?)</\1>", _digest, text, flags=re.DOTALL)


def _digest(found: re.Match[str]) -> str:
    name, attributes, body = found.groups()
    return f"<{name}{attributes}>{hashlib.sha256(body.encode()).hexdigest()}</{name}>"


def attributes(database: Path) -> str:
    """Names of all attributes in a study's database, with the keys of their JSON values."""
    names: set[str] = set()
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as opened:
        for owner in ("study", "trial"):
            for kind in ("user", "system"):
                for key, value in opened.execute(f"SELECT key, value_json FROM {owner}_{kind}_attributes"):
                    name = (
                        f"{owner} {kind} {re.sub(r' .*', ' …', key)}"  # calls and heartbeats have a tuner's name, too
                    )
                    names |= {name, *(f"{name}: {path}" for path in _keys(json.loads(value)))}
    return "".join(f"{name}\n" for name in sorted(names))


def _keys(value: Any, above: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield f"{above}{key}"
            yield from _keys(inner, f"{above}{key}.")
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner, f"{above}[].")


def files(folder: Path) -> str:
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return "".join(f"{name}\n" for name in found)


STUDY = "s"  # the studies' name in their databases


def stored_study(name: str) -> Callable[[Path], Texts]:
    """Everything that is read from a database in `studies/`."""

    def texts(folder: Path) -> Texts:
        home = folder / "runs" / STUDY
        home.mkdir(parents=True)
        database = home / "study.db"
        database.write_bytes(gzip.decompress((HERE / "studies" / f"{name}.db.gz").read_bytes()))
        found = {"attributes.txt": attributes(database)}
        with _chdir(folder):
            found["show.json"] = call("show", STUDY, "--json")
            found["show.txt"] = call("show", STUDY, columns=120)
            for style in FORMATS:
                found[f"export-{style}.txt"] = call("export", STUDY, "--format", style)
            found["report.txt"] = call("report", STUDY)
        found["files.txt"] = files(home)
        for path in sorted(home.iterdir()):
            if path.suffix in (".json", ".html", ".yaml", ".py", ".sh", ".sbatch"):
                found[f"files/{path.name}"] = path.read_text()
            elif path.name.endswith(".csv.gz"):
                found[f"files/{path.name.removesuffix('.gz')}"] = gzip.decompress(path.read_bytes()).decode()
        return {file: normal(text, folder) for file, text in found.items()}

    return texts


@contextlib.contextmanager
def _chdir(folder: Path) -> Iterator[None]:
    """`contextlib.chdir` of Python 3.11."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# -- searches ------------------------------------------------------------------------------------------------------------

PREDICTORS = "autotune,no-predictor,adversarial,inverted,constant,drawn,wrong-time,wrong-memory"
FIRST = 20  # candidates that are shown; all are hashed


def searches(tables: str, budget: str, seeds: int, strategies: str) -> Callable[[Path], Texts]:
    """Trial sequences of searches on a folder of tables, one simulated machine each, one worker."""

    def texts(folder: Path) -> Texts:
        words = ["--landscapes", TABLES / tables, "--strategies", strategies, "--seeds", seeds, "--budget", budget]
        words += ["--jobs", 1, "--traces", HERE / "traces.json", "--trials", folder / "trials.json"]
        subprocess.run(
            [sys.executable, SEARCH_BENCHMARK, *map(str, words)],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            timeout=600,
        )
        found: Texts = {}
        for run in json.loads((folder / "trials.json").read_text()):
            trials = run["trials"]
            digest = hashlib.sha256(json.dumps(trials).encode()).hexdigest()
            lines = [f"{run['table']}, seed {run['seed']}: {len(trials)} trials, sha256 {digest}"]
            lines += [f"  {seconds:.6f} {candidate} {outcome}" for seconds, candidate, outcome in trials[:FIRST]]
            file = f"{run['strategy']}.txt"
            found[file] = found.get(file, "") + "\n".join(lines) + "\n"
        return found

    return texts


def resumed_study(folder: Path) -> Texts:
    """A study of `run` that searches a recorded table, stopped after some trials and resumed: what is written of it."""
    table = folder / "table.csv.gz"
    for end in (".csv.gz", ".json"):
        shutil.copy(TABLES / "landscapes_own" / f"tiny-llama_2xcpu{end}", folder / f"table{end}")
    run = ("run", "--study", "s", "--seed", "3", "--budget", "5m", "--json")
    with _chdir(folder), replayed(table):
        call(*run, "--max-trials", "5")
        call(*run, "--max-trials", "12")
        trials = json.loads(call("show", "s", "--json"))["trials"]
    shown = [json.dumps([one["role"], one["candidate"], one["outcome"]["kind"]], sort_keys=True) for one in trials]
    home = folder / "runs" / "s"
    return {
        "attributes.txt": attributes(home / "study.db"),
        "files.txt": files(home),
        "trials.txt": "\n".join(shown) + "\n",
    }


# -- processes -----------------------------------------------------------------------------------------------------------


SPACE = """\
knobs:
  zero_stage: [0]
  train_micro_batch_size_per_gpu: [1]
"""
# Sent while something takes long, and as often as it takes: how often and whether depends on the machine.
TIMED = ("op", "progress", "pulse", "show")


def run_on_two_nodes(folder: Path) -> Texts:
    """A tuned model on two nodes of this machine: tuner, agents, fork servers and ranks, with every message noted."""
    noted = folder / "noted"
    noted.mkdir()
    (folder / "s.yaml").write_text(SPACE)
    (folder / "hostfile").write_text("n1 slots=1\nn2 slots=1\n")
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')  # the node is this machine
    ssh.chmod(0o755)
    options = "--model tiny-llama --device cpu --seq-len 32 --space s.yaml --hostfile hostfile --max-trials 1 --study s"
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "run", *options.split(), "--budget", "20m"],
        cwd=folder,
        env={
            **os.environ,
            "GOLDEN_WIRE": str(noted),
            "PATH": os.pathsep.join([str(ssh.parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(HERE / "hook"), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    messages = [json.loads(line) for path in noted.iterdir() for line in path.read_text().splitlines()]
    kinds = {module: kind for kind, module in vars(entry_points).items() if kind.isupper()}
    started = {kinds[message["entry"]] for message in messages if message["entry"] in kinds}
    sent = {f"{message['verb']} {' '.join(message['fields'])}" for message in messages}
    return {
        "attributes.txt": attributes(folder / "runs" / "s" / "study.db"),
        "files.txt": files(folder / "runs" / "s"),
        "ranks.txt": "".join(f"{kind}\n" for kind in sorted(started)),
        "messages.txt": "".join(f"{line}\n" for line in sorted(sent) if line.split()[0] not in TIMED),
    }


GROUPS: dict[str, Callable[[Path], Texts]] = {
    "help": helps,
    "python": python_calls,
    "study-measured": stored_study("measured"),
    "study-every-outcome": stored_study("every_outcome"),
    "study-resumed": resumed_study,
    "search-simulated": searches("landscapes", "8m", 2, PREDICTORS),
    "search-own": searches("landscapes_own", "1m", 2, PREDICTORS),
    "search-recorded": searches("landscapes_real", "30m", 1, "autotune,no-predictor"),
    "two-nodes": run_on_two_nodes,
}
SLOW = ("two-nodes", "study-resumed", "search-simulated", "search-own", "search-recorded")


def expected(group: str) -> Texts:
    folder = EXPECTED / group
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()
    }
