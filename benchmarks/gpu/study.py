"""`autotune run` from end to end: no cap, the default space, a verified winner. Its folder is read by `fidelity`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from autotune.search.study import StudyStore
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.trials.ranks import Tuned, autotune_run

MODEL, STUDY, BUDGET = "smollm2-360m", "first", "150s"
_REHEARSED = (
    *("--model", "tiny-llama", "--device", "cpu", "--gpus", "1", "--seq-len", "32"),
    *("--space", "small.yaml", "--no-references"),
)
_SPACE = "knobs: {zero_stage: [0], train_micro_batch_size_per_gpu: [1], gradient_accumulation_steps: [1]}\n"


def run(ground: Ground) -> Iterator[Row]:
    os.chdir(ground.folder)  # the study's runs/
    row, done = tuned(ground)
    yield {**row, "stderr": [done.stderr[-6000:]], EXPECTED: done.code == 0 and bool(done.report.get("verified"))}


def tuned(ground: Ground) -> tuple[Row, Tuned]:
    """Call `autotune run` in the present folder; return its row and its result."""
    began = time.monotonic()
    words: tuple[str, ...] = ("--model", MODEL, "--gpus", "1", "--seq-len", "1024")
    if ground.rehearse:
        Path("small.yaml").write_text(_SPACE, encoding="utf-8")
        words = _REHEARSED
    budget = ground.choose(BUDGET, "180s")
    done = autotune_run(*words, "--budget", budget, "--study", STUDY)
    row: Row = {"what": f"autotune run --budget {budget}", "study": STUDY, "exit": done.code}
    row["wall s"] = time.monotonic() - began
    if done.code:
        sys.stderr.write(done.stderr[-4000:])
        return {**row, "why": done.stderr.strip()[-300:]}, done
    store = StudyStore.load(STUDY)
    assert store.winner is not None
    records = store.records()
    trials = len(records)
    row |= {"trials": trials, "trials a minute": 60 * trials / row["wall s"], "verified": done.report["verified"]}
    row |= {"candidate": str(store.winner.candidate), "report": done.report}
    if store.winner.outcome and (found := store.winner.outcome.measurement):
        row |= {"samples/s": found.samples_per_second, "peak GiB": found.peak_bytes / 2**30}
    row["all trials"] = [[str(one.candidate), one.outcome.to_json()] for one in records if one.outcome]
    return row, done
