"""What tuning the whole space gains over DeepSpeed's defaults at the largest micro-batch that fits."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from autotune.search.study import StudyStore
from benchmarks.common import HERE
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.trials.ranks import Tuned, autotune_run

MODEL, BUDGET = "qwen2.5-0.5b", "200s"  # one that DeepSpeed's defaults fit, too
DEFAULTS = ("--space", str(HERE / "gpu" / "deepspeed_defaults.yaml"))
_CAPPED = ("--gpus", "1", "--memory-cap", "24GiB", "--seq-len", "768")
_UNCAPPED = ("--gpus", "1", "--seq-len", "1024")
_REHEARSED = (
    *("--model", "tiny-llama", "--device", "cpu", "--gpus", "1", "--seq-len", "32"),
    *("--space", "small.yaml", "--no-references"),
)
_SPACE = "knobs: {zero_stage: [0], train_micro_batch_size_per_gpu: [1], gradient_accumulation_steps: [1]}\n"


def tuned(ground: Ground, model: str, study: str, budget: str, *more: str, uncapped: bool = False) -> tuple[Row, Tuned]:
    """Call `autotune run` in the present folder; return its row and its result."""
    began = time.monotonic()
    words: tuple[str, ...] = ("--model", model, *(_UNCAPPED if uncapped else _CAPPED))
    if ground.rehearse:
        Path("small.yaml").write_text(_SPACE, encoding="utf-8")
        words, more = _REHEARSED, ()
    done = autotune_run(*words, "--budget", budget, "--study", study, *more)
    row: Row = {"what": f"autotune run --budget {budget}", "study": study, "exit": done.code}
    row["wall s"] = time.monotonic() - began
    if done.code:
        sys.stderr.write(done.stderr[-4000:])
        return {**row, "why": done.stderr.strip()[-300:]}, done
    store = StudyStore.load(study)
    assert store.winner is not None
    records = store.records()
    trials = len(records)
    row |= {"trials": trials, "trials a minute": 60 * trials / row["wall s"], "verified": done.report["verified"]}
    row |= {"candidate": str(store.winner.candidate), "report": done.report}
    if store.winner.outcome and (found := store.winner.outcome.measurement):
        row |= {"samples/s": found.samples_per_second, "peak GiB": found.peak_bytes / 2**30}
    row["all trials"] = [[str(one.candidate), one.outcome.to_json()] for one in records if one.outcome]
    return row, done


def run(ground: Ground) -> Iterator[Row]:
    os.chdir(ground.folder)
    budget = ground.choose(BUDGET, "90s")  # one candidate ends sooner
    ours, _ = tuned(ground, MODEL, "whole", budget)
    yield {**ours, EXPECTED: ours["exit"] == 0}
    theirs, _ = tuned(ground, MODEL, "defaults", budget, *DEFAULTS)
    if ours.get("samples/s") and theirs.get("samples/s"):
        theirs["whole space / DeepSpeed's defaults"] = ours["samples/s"] / theirs["samples/s"]
    yield {**theirs, "what": "DeepSpeed's defaults", EXPECTED: ground.choose(theirs["exit"] in (0, 3), None)}
