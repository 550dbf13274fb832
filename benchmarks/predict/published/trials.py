"""Steps of our own trials on GPUs as cases, from `benchmarks/results/gpu-*.json`: each card's file is a source of its own.

Trials that run while DeepSpeed's ops are built (`gpu_first.py`, step `trials`) time nothing, and are left out. A median stands
for a candidate that was measured more than once.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.knobs import KNOBS
from autotune.problem.models import resolve_model
from benchmarks.common import RESULTS
from benchmarks.gpu.study import MODEL
from benchmarks.predict.published.readers import Case
from benchmarks.predict.published.rows import Row

TIMED = ("predictions", "held_back", "study")
FILES = "gpu-*.json"
OWN = "own trials on"  # begins the name of such a source
_BY_SHORT = {knob.short: name for name, knob in KNOBS.items() if knob.short}
_WORD = re.compile(r"(?P<off>no-)?(?P<short>.+?)(?:=(?P<value>.+)|(?P<number>\d+))?")  # no-overlap, rbs=5e+08, mb4


def own_trials(folder: Path = RESULTS) -> list[Case]:
    """The measured steps of every card, one case for each job and candidate."""
    return [case for path in sorted(folder.glob(FILES)) for case in _cases(path)]


def _cases(path: Path) -> Iterator[Case]:
    found = json.loads(path.read_text(encoding="utf-8"))
    described = next(row for row in found["steps"]["facts"]["rows"] if row["what"] == "detected")["hardware"]
    hardware = Hardware.from_json({**described, "threads": found["hardware"]["cpus"]})
    seconds: dict[tuple[str, int, str], list[float]] = {}
    for key, one in _steps(found["steps"]):
        seconds.setdefault(key, []).append(one)
    for number, ((model, tokens, knobs), measured) in enumerate(seconds.items(), start=1):
        cells = {"id": f"{path.stem} {number}", "source_repo_or_url": f"{OWN} {found['hardware']['name']}"}
        job = Job(resolve_model(model), 1, tokens, "bf16")
        row = Row(number, cells, path.name)
        yield Case(row, job, hardware, candidate_of(knobs), "own", "step", statistics.median(measured))


def _steps(steps: dict[str, Any]) -> Iterator[tuple[tuple[str, int, str], float]]:
    for row in (row for name in TIMED for row in steps.get(name, {"rows": ()})["rows"]):
        whole = [(row["candidate"], row["whole"])] if "whole" in row else row.get("all trials", ())
        for knobs, outcome in whole:
            if found := outcome.get("measurement"):
                tokens = round(found["tokens_per_second"] / found["samples_per_second"])
                yield (row.get("job", MODEL), tokens, knobs), found["step_seconds"]


def candidate_of(text: str) -> Candidate:
    """The candidate that `str` describes like this.

    Raises:
        ValueError: a word names no knob.
    """
    knobs: dict[str, Any] = {}
    for word in text.split():
        found = _WORD.fullmatch(word)
        name = found and _BY_SHORT.get(found["short"])
        if not found or name is None:
            raise ValueError(f"{word!r} of {text!r} names no knob")
        value: Any = found["value"] or found["number"]
        if value is None:
            value = not found["off"]
        knobs[name] = int(float(value)) if KNOBS[name].kind is int else value
    return Candidate.of(knobs)
