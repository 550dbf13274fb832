"""Runs steps, each in a process of its own and within the time of the whole call, and writes each row at once.

A step that fails, or is ended, leaves its rows and an error, and the next one begins. A call that is killed loses only the
row that was being measured.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.util.files import write_atomically
from autotune.util.linux import die_with_parent
from benchmarks.common import HERE, print_table
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.gpu.machine import describe
from benchmarks.gpu.steps import BY_NAME, Step
from benchmarks.trials.ranks import end_tree

EXIT_FAILED, EXIT_REFUSED = 1, 2
UNFINISHED = "the call was ended while this step ran"

Results = dict[str, Any]  # rehearsal, hardware, steps by name


@dataclass(frozen=True)
class Call:
    """Files and limits of a call.

    Args:
        path: the file of results; an earlier call's is added to.
        work: folders of steps, which later steps and calls may read: `fidelity` that of `study`.
        seconds: of the whole call.
        step_seconds: of a step, at most.
        await_builds: waits until no op is being built, for so many seconds at most.
    """

    path: Path
    work: Path
    seconds: float
    step_seconds: float = float("inf")
    rehearse: bool = False
    await_builds: Callable[[float], None] = lambda seconds: None
    began: float = field(default_factory=time.monotonic)

    @property
    def left_seconds(self) -> float:
        return self.seconds - (time.monotonic() - self.began)


def run_steps(steps: list[Step], call: Call, after: Callable[[Step, Row], None]) -> Results:
    """Run the steps in order, as far as time allows. `after` is called with each step and its results.

    Raises:
        UserError: the file of results is another machine's.
    """
    # steps and what they start find this checkout's autotune if none is installed
    path = [str(HERE.parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    hardware = describe("cpu" if call.rehearse else "cuda")
    results = opened_results(call.path, hardware, call.rehearse)
    results["hardware"] = hardware
    call.path.parent.mkdir(parents=True, exist_ok=True)
    call.work.mkdir(parents=True, exist_ok=True)

    def keep(step: Step, found: Row) -> None:
        results["steps"][step.name] = {**found, "hardware": hardware}  # other calls may have other versions
        listed = {name: results["steps"][name] for name in BY_NAME if name in results["steps"]}
        results["steps"] = listed | results["steps"]  # steps that left the list keep their rows
        write_atomically(call.path, json.dumps(results, indent=1, default=str) + "\n")

    for step in steps:
        if step.timed:
            call.await_builds(call.left_seconds - step.least_seconds)
        if call.left_seconds < step.least_seconds:
            left = f"{max(0.0, call.left_seconds):.0f} s of the call are left, it needs {step.least_seconds:.0f} s"
            found: Row = {"purpose": step.purpose, "rows": [], "error": f"not begun: {left}"}
        else:
            found = gather(step, call, lambda found, step=step: keep(step, found))  # type: ignore[misc]
        found = {"seconds": 0.0, **found}
        keep(step, found)
        after(step, found)
    return results


def gather(step: Step, call: Call, keep: Callable[[Row], None]) -> Row:
    """Return what a step has measured, however it ended. `keep` is called whenever there are new rows."""
    began, limit = time.monotonic(), min(step.limit_seconds, call.step_seconds, call.left_seconds)
    found: Row = {"purpose": step.purpose, "began": time.strftime("%Y-%m-%d %H:%M:%S %z"), "rows": []}
    code: int | None = None
    path, folder = call.work / f"{step.name}.json", call.work / step.name
    path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    beside = call.path.with_suffix("").resolve()
    spec = {"step": step.name, "path": str(path), "folder": str(folder), "beside": str(beside), "seconds": limit}
    words = [str(HERE / "gpu" / "step.py"), json.dumps({**spec, "rehearse": call.rehearse})]
    process = subprocess.Popen([sys.executable, *words])
    try:
        while code is None and time.monotonic() - began < limit:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=min(0.5, limit))
            written = json.loads(path.read_text()) if path.exists() else {}
            if len(written.get("rows", ())) > len(found["rows"]):
                keep({**found, **written, "error": UNFINISHED, "seconds": time.monotonic() - began})
            found |= written
    finally:
        end_tree(process)
    if code is None:
        found["error"] = f"ended after {limit:.0f} s; its rows until then are kept"
    elif code and "error" not in found:
        found["error"] = f"its process ended with {code}"
    return {"error": None, **found, "seconds": round(time.monotonic() - began, 1)}


def run_step(spec: dict[str, Any]) -> int:
    """Run a step in this process. Write `rows` to its file as they come, and `error` if it fails."""
    die_with_parent(os.getppid())
    rows: list[Row] = []
    path, folder = Path(spec["path"]), Path(spec["folder"])
    folder.mkdir(parents=True)
    try:
        for row in importlib.import_module(f"benchmarks.gpu.{spec['step']}").run(
            Ground(folder, Path(spec["beside"]), spec["rehearse"], spec["seconds"])
        ):
            rows.append(row)
            write_atomically(path, json.dumps({"rows": rows}, default=str))
            plain = {key: value for key, value in row.items() if is_plain(value)}
            print(f"[{spec['step']}]", json.dumps(plain, default=str), file=sys.stderr, flush=True)
    except BaseException as error:
        traceback.print_exc()
        text = "".join(traceback.format_exception(error))
        write_atomically(path, json.dumps({"rows": rows, "error": text}, default=str))
        return EXIT_FAILED
    return 0


def opened_results(path: Path, hardware: dict[str, Any], rehearse: bool) -> Results:
    """Return an earlier call's results, to be added to, or empty ones.

    Raises:
        UserError: they are another GPU's, a rehearsal's or a measurement's if this is none, or no results.
    """
    if not path.exists():
        return {"rehearsal": rehearse, "hardware": hardware, "steps": {}}
    try:
        earlier: Results = json.loads(path.read_text(encoding="utf-8"))
        of, kind = earlier["hardware"]["name"], earlier["rehearsal"]
        earlier["steps"].keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} holds no results of these steps: name another file") from None
    if (of, kind) != (hardware["name"], rehearse):
        what = "a rehearsal on " if kind else ""
        raise UserError(f"{path} holds {what}{of}, and this is {hardware['name']}: name another file")
    return earlier


# -- for people ----------------------------------------------------------------------------------------------------------


def is_plain(value: Any) -> bool:
    """Whether a table can show it; the rest stands in the file alone."""
    return not isinstance(value, dict | list)


def verdict(found: Row) -> str:
    judged = [row[EXPECTED] for row in found["rows"] if row.get(EXPECTED) is not None]
    text = f"{sum(judged)} of {len(judged)} as expected" if judged else f"{len(found['rows'])} rows"
    last = found["error"].strip().splitlines()[-1] if found["error"] else ""
    return f"{text}; {last}" if last else text


def failed(found: Row) -> bool:
    return bool(found["error"]) or any(row.get(EXPECTED) is False for row in found["rows"])


def show(step: Step, found: Row) -> None:
    """Print a step's rows as a table."""
    title = f"{step.name}: {step.purpose} ({found['seconds']:.0f} s; {verdict(found)})"
    rows = found["rows"] or [{"step": step.name, "error": verdict(found)}]
    names = list(dict.fromkeys(name for row in rows for name in row if is_plain(row.get(name))))
    keys = names[: step.keys]
    shown = [name for name in (*keys, EXPECTED, *names) if any(row.get(name) is not None for row in rows)]
    print_table(title, [{name: row.get(name) for name in dict.fromkeys(shown)} for row in rows], keys=len(keys))


def summary(steps: list[Step], results: Results, path: Path) -> int:
    """Print which steps are not as expected; return the exit code."""
    bad = [step.name for step in steps if failed(results["steps"][step.name])]
    print(f"{path}: " + (f"not as expected: {', '.join(bad)}" if bad else "all as expected"), flush=True)
    return EXIT_FAILED if bad else 0
