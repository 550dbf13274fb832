"""Writes `autotune/data/traces.json`: the traces of the shipped models, so that `autotune plan` answers without torch.

    python benchmarks/predict/shipped_traces.py [--models NAME,NAME] [--write FILE]
    python benchmarks/predict/shipped_traces.py --time 5

Each model is traced as `plan` would without options: its default task and sequence length, bf16, all parameters trained;
causal models also with a loss in chunks. Traces come from the cache where it has them. A model that cannot be traced in time
is left out, and with `--models` those in the file stay. `--time` writes nothing: it prints the seconds of `autotune plan` in
fresh processes with an empty cache, in this environment and in one without torch, transformers and deepspeed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.commands.request import Request
from autotune.commands.setup import plan_setups
from autotune.errors import UserError
from autotune.predict.trace_cache import RUNS_IT, VERSION, cache_path, cached, shipped_key, with_runnable_attention
from autotune.predict.trace_data import Trace
from autotune.predict.zero_memory import muon_sizes
from autotune.problem.job import CHUNKED, Job
from autotune.problem.models import CAUSAL, shipped_models
from autotune.util.interpreter import OWN
from benchmarks.common import print_table
from benchmarks.predict.many_traces import trace_jobs

SHIPPED = Path(__file__).parents[2] / "autotune" / "data" / "traces.json"
CARD = "h100"  # any card with bf16: a trace does not depend on it


def jobs(names: Sequence[str]) -> Iterator[Job]:
    """The job of every shipped trace of these models."""
    for name in names:
        try:
            job = with_runnable_attention(plan_setups(Request(model=name, space="zero2"), [CARD])[0].job)
        except UserError:
            continue  # a model that needs an option, like --image-size
        yield job
        if job.task == CAUSAL:  # space `default` tries both losses
            yield dataclasses.replace(job, loss=CHUNKED)


def shipped(names: Sequence[str], kept: dict[str, Any]) -> dict[str, Any]:
    """The content of the file: `kept`, and the traces of these models from the cache or made now."""
    versions = {name: OWN.version(name) or "" for name in RUNS_IT}
    asked = list(jobs(names))
    trace_jobs([(job, "own") for job in asked], _told)
    traces = dict(kept["traces"]) if kept["versions"] == versions and kept["version"] == VERSION else {}
    for job in asked:
        if (trace := cached(cache_path(job, "own"))) is not None:
            traces[shipped_key(job, "own", "cuda", versions)] = compact(job, trace)
    return {"version": VERSION, "versions": versions, "traces": dict(sorted(traces.items()))}


def compact(job: Job, trace: Trace) -> dict[str, Any]:
    """Return a trace as the file holds it: without Muon's matrices if their sizes tell them, and with rounded numbers."""
    muon = dataclasses.replace(job, base_config={"optimizer": {"type": "Muon"}})
    by_size = dataclasses.replace(trace, matrices=None)
    sizes_suffice = muon_sizes(muon, by_size) == trace.matrices
    found: dict[str, Any] = _rounded((by_size if sizes_suffice else trace).to_json())
    return found


def _rounded(data: Any) -> Any:
    """Whole numbers without a fraction, others in 8 digits: half the size."""
    if isinstance(data, dict):
        return {key: _rounded(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_rounded(value) for value in data]
    if isinstance(data, float):
        return int(data) if data.is_integer() else float(f"{data:.8g}")
    return data


PLAN = ("-m", "autotune", "plan", "--model", "llama-3.1-8b", "--gpu", CARD, "--gpus", "8")
RANKS_ONLY = ("torch", "transformers", "deepspeed")


def cold_plans(rounds: int) -> list[dict[str, Any]]:
    """Wall and CPU seconds of a plan in fresh processes with an empty cache, with torch and without it, in turns."""
    repository = Path(__file__).parents[2]
    found: dict[str, list[tuple[float, float]]] = {"with torch": [], "without torch": []}
    with tempfile.TemporaryDirectory() as folder:
        for package in Path(sysconfig.get_path("purelib")).iterdir():
            if package.name.partition("-")[0] not in RANKS_ONLY and package.suffix != ".pth":
                Path(folder, package.name).symlink_to(package)
        # -S leaves out this environment's packages
        none: list[str] = []
        ways = {"with torch": (none, str(repository)), "without torch": (["-S"], f"{repository}{os.pathsep}{folder}")}
        for _ in range(rounds):
            for name, (options, path) in ways.items():
                with tempfile.TemporaryDirectory() as cache:
                    variables = {**os.environ, "AUTOTUNE_CACHE": cache, "PYTHONPATH": path}
                    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
                    command = [sys.executable, *options, *PLAN]
                    subprocess.run(command, env=variables, cwd=cache, check=True, stdout=subprocess.DEVNULL)
                    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
                used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                found[name].append((wall, used))
    rows = []
    for name, times in found.items():
        walls, uses = zip(*times, strict=True)
        row = {"plan": name, "wall s, median": statistics.median(walls), "least": min(walls), "most": max(walls)}
        rows.append({**row, "CPU s, median": statistics.median(uses)})
    return [{key: f"{one:.2f}" if isinstance(one, float) else one for key, one in row.items()} for row in rows]


def _told(made: int, of: int) -> None:
    print(f"traced {made} of {of}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(shipped_models()), metavar="NAME,NAME", help="default: all")
    parser.add_argument("--write", type=Path, default=SHIPPED, metavar="FILE", help="where it goes")
    parser.add_argument("--time", type=int, default=0, metavar="N", help="only time N plans of each kind")
    arguments = parser.parse_args()
    if arguments.time:
        print_table(f"seconds of `autotune {' '.join(PLAN[2:])}`", cold_plans(arguments.time))
        return
    kept = json.loads(SHIPPED.read_text())
    made = shipped(arguments.models.split(","), kept)
    head = f'{{"version": {made["version"]}, "versions": {json.dumps(made["versions"])}, "traces": {{\n'
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(trace)}" for key, trace in made["traces"].items())
    arguments.write.write_text(f"{head}{lines}\n}}}}\n")
    print(f"{len(made['traces'])} traces, {arguments.write.stat().st_size} bytes")


if __name__ == "__main__":
    main()
