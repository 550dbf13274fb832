"""What only a GPU can prove: `make gpu-acceptance`, or a few steps of it by `--only`, from most to least worth.

Each step is a process of its own, ended after 8 minutes, and prints one table. Results are gathered in one JSON file
(benchmarks/results/gpu-NAME.json): a row is written as soon as it is measured, a step that fails is written with its error
and the others go on, a later call puts its steps in place of the same. `--rehearse` takes the same path on one CPU rank
with a tiny model: it shows that every step runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from acceptance.ground import EXPECTED, Ground, run_child
from common import HERE, RESULTS, print_table

from autotune.errors import UserError
from autotune.files import write_atomically
from autotune.linux import die_with_parent
from autotune.problem.hardware import detect

LIMIT_SECONDS = 480.0  # of a step: a lent machine runs one command for ten minutes
EXIT_FAILED, EXIT_REFUSED = 1, 2
UNFINISHED = "the call was ended while this step ran"


@dataclass(frozen=True)
class Step:
    """A module of `acceptance`; minutes are expected, of one GPU, and measured on none yet."""

    name: str
    minutes: float
    purpose: str
    keys: int = 1  # columns that say what a row is about


STEPS = (
    Step("tests", 4, "tests/gpu under pytest; fork isolation kept, with FusedAdam and its build too (finding 8)"),
    Step(
        "overhead", 1.5, "a process's bytes outside the allocator, by CUDA, NVML v1, v2 and per process (12, 20, 21)", 4
    ),
    Step("ooms", 3, "true out-of-memory errors: their texts and numbers, and our verdict (4, 22)"),
    Step("predictions", 8, "peak and step time against prediction, by model, stage and offload", 2),
    Step(
        "product", 8, "autotune run of gemma-2-2b under 24 GiB, five minutes, and its winner trained by plain torchrun"
    ),
    Step("costs", 6, "what the gauge costs (23), foreach and FusedAdam peaks (18, 16), offload by threads (9)", 2),
    Step("launch", 2, "launch goes on after a true out-of-memory of the GPU"),
    Step("resume", 3, "a checkpoint is resumed in fresh ranks, and its peak"),
    Step("variants", 4, "sdpa, eager and flash attention; expandable_segments on and off", 2),
    Step("gain", 8, "the whole space against DeepSpeed's defaults, qwen2.5-0.5b under 24 GiB"),
    Step("doctor", 0.5, "what autotune doctor says of the machine"),
)
BY_NAME = {step.name: step for step in STEPS}

Results = dict[str, Any]  # hardware, rehearsal, steps by name


# -- one step, in its own process ----------------------------------------------------------------------------------------


def run_step(step: Step, path: Path, beside: Path, rehearse: bool) -> int:
    """Writes `rows` to the file as they come, and `error` where the step fails."""
    die_with_parent(os.getppid())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        try:
            for row in importlib.import_module(f"acceptance.{step.name}").run(Ground(Path(name), beside, rehearse)):
                rows.append(row)
                write_atomically(path, json.dumps({"rows": rows}))
                print(step.name, {key: value for key, value in row.items() if is_plain(value)}, file=sys.stderr)
        except BaseException as error:
            traceback.print_exc()
            write_atomically(path, json.dumps({"rows": rows, "error": "".join(traceback.format_exception(error))}))
            return EXIT_FAILED
    return 0


def is_plain(value: Any) -> bool:
    """Whether a table can show it; the rest stands in the file alone."""
    return not isinstance(value, dict | list)


# -- all of them ---------------------------------------------------------------------------------------------------------


def gather(step: Step, results: Path, arguments: argparse.Namespace, keep: Callable[[Results], None]) -> Results:
    """What a step has measured, however it ended. What it has so far is kept as it comes: whoever ends a command on a lent
    machine ends this process, too."""
    began = time.monotonic()
    found: Results = {"purpose": step.purpose, "began": time.strftime("%Y-%m-%d %H:%M:%S %z"), "rows": []}
    code: int | None = None
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "step.json"
        words = [__file__, "--step", step.name, "--json", str(path), "--beside", str(results.with_suffix(""))]
        process = subprocess.Popen([sys.executable, *words, *(["--rehearse"] if arguments.rehearse else [])])
        try:
            while code is None and time.monotonic() - began < arguments.limit:
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=min(1.0, arguments.limit))
                said = json.loads(path.read_text()) if path.exists() else {}
                if len(said.get("rows", ())) > len(found["rows"]):
                    keep({**found, **said, "error": UNFINISHED})
                found |= said
        finally:
            end(process)
    if code is None:
        found["error"] = f"ended after {arguments.limit:.0f} s; its rows until then are kept"
    elif code and "error" not in found:
        found["error"] = f"its process ended with {code}"
    return {"error": None, **found, "seconds": time.monotonic() - began}


def end(process: subprocess.Popen[Any]) -> None:
    """The step and all that it has started."""
    try:
        tree = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return
    for one in tree:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def verdict(found: Results) -> str:
    judged = [row[EXPECTED] for row in found["rows"] if row.get(EXPECTED) is not None]
    text = f"{sum(judged)} of {len(judged)} as expected" if judged else f"{len(found['rows'])} rows"
    last = found["error"].strip().splitlines()[-1] if found["error"] else ""
    return f"{text}; {last}" if last else text


def failed(found: Results) -> bool:
    return bool(found["error"]) or any(row.get(EXPECTED) is False for row in found["rows"])


def show(step: Step, found: Results) -> None:
    title = f"{step.name}: {step.purpose} ({found['seconds']:.0f} s; {verdict(found)})"
    rows = found["rows"] or [{"step": step.name, "error": verdict(found)}]
    names = list(dict.fromkeys(name for row in rows for name in row if is_plain(row.get(name))))
    keys = names[: step.keys]
    shown = [name for name in (*keys, EXPECTED, *names) if any(row.get(name) is not None for row in rows)]
    print_table(title, [{name: row.get(name) for name in dict.fromkeys(shown)} for row in rows], keys=len(keys))


def result_name(hardware: dict[str, Any]) -> str:
    return "gpu-" + re.sub(r"[^a-z0-9]+", "-", str(hardware["name"]).lower()).strip("-")


def opened_results(path: Path, hardware: dict[str, Any], rehearse: bool) -> Results:
    """An earlier call's file, to be added to.

    Raises:
        UserError: it is of another GPU, of a rehearsal where this is none, or no result at all.
    """
    if not path.exists():
        return {"rehearsal": rehearse, "hardware": hardware, "steps": {}}
    try:
        earlier: Results = json.loads(path.read_text(encoding="utf-8"))
        of, kind = earlier["hardware"]["name"], earlier["rehearsal"]
        earlier["steps"].keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path} holds no result of gpu_acceptance.py: name another file with --json") from None
    if (of, kind) != (hardware["name"], rehearse):
        what = "a rehearsal on " if kind else ""
        raise UserError(f"{path} holds {what}{of}, and this is {hardware['name']}: name another file with --json")
    return earlier


def chosen(text: str | None) -> list[Step]:
    """In the order of worth.

    Raises:
        UserError: there is no such step.
    """
    names = [name.strip() for name in text.split(",")] if text is not None else list(BY_NAME)
    if unknown := [name for name in names if name not in BY_NAME]:
        raise UserError(
            f"--only {text}: no step {', '.join(unknown) or '(empty)'}; expected some of {','.join(BY_NAME)}"
        )
    return [step for step in STEPS if step.name in names]


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--list", action="store_true", help="the steps, what for, and how many minutes they should take"
    )
    parser.add_argument("--only", metavar="STEP[,STEP]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/gpu-NAME.json")
    parser.add_argument("--rehearse", action="store_true", help="on one CPU rank with a tiny model: measures nothing")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, metavar="SECONDS", help="of one step")
    parser.add_argument("--step", choices=BY_NAME, help=argparse.SUPPRESS)  # this is the step's own process
    parser.add_argument("--beside", type=Path, help=argparse.SUPPRESS)
    return parser


def accept(arguments: argparse.Namespace) -> int:
    steps = chosen(arguments.only)
    if arguments.rehearse and (arguments.json is None or arguments.json.resolve().parent == RESULTS.resolve()):
        raise UserError(f"--rehearse measures nothing: give --json FILE outside of {RESULTS}")
    if not arguments.rehearse:
        detect("cuda", 1)
    # steps and what they start find this checkout's autotune where none is installed
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    machine = run_child("machine", {"device": "cpu" if arguments.rehearse else "cuda"})
    if machine.result is None:
        raise UserError(f"torch does not come up here: {machine.stderr.strip().splitlines()[-1]}")
    path = arguments.json or RESULTS / f"{result_name(machine.result)}.json"
    results = opened_results(path, machine.result, arguments.rehearse)
    results["hardware"] = machine.result
    path.parent.mkdir(parents=True, exist_ok=True)

    def keep(step: Step, found: Results) -> None:
        results["steps"][step.name] = {**found, "hardware": machine.result}  # other calls may have other versions
        results["steps"] = {name: results["steps"][name] for name in BY_NAME if name in results["steps"]}
        write_atomically(path, json.dumps(results, indent=1) + "\n")

    for step in steps:
        found = gather(step, path, arguments, partial(keep, step))
        keep(step, found)
        show(step, found)
    bad = [step.name for step in steps if failed(results["steps"][step.name])]
    print(f"{path}: " + (f"not as expected: {', '.join(bad)}" if bad else "all as expected"))
    return EXIT_FAILED if bad else 0


def main() -> None:
    arguments = command_line().parse_args()
    if arguments.step:
        raise SystemExit(run_step(BY_NAME[arguments.step], arguments.json, arguments.beside, arguments.rehearse))
    if arguments.list:
        rows = [{"step": step.name, "minutes": step.minutes, "purpose": step.purpose} for step in STEPS]
        print_table("from most to least worth; minutes are expected, not measured", rows)
        return
    try:
        raise SystemExit(accept(arguments))
    except UserError as error:
        print(f"gpu_acceptance.py: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None


if __name__ == "__main__":
    main()
