"""`autotune run` from end to end: no cap, the default space, a verified winner. Its folder is read by `fidelity`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from autotune.search.study import StudyStore
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.trials.ranks import autotune_run

MODEL, STUDY = "smollm2-360m", "first"
# measured with a batch of 64 sequences: otherwise accumulation grows until a verified step takes the time of five trials
_MEASURED = ("--model", MODEL, "--seq-len", "1024", "--global-batch-size", "64", "--budget", "110s")
REHEARSED = (
    *("--model", "tiny-llama", "--device", "cpu", "--seq-len", "32"),
    *("--space", "small.yaml", "--no-references", "--budget", "180s"),
)
_SPACE = "knobs: {zero_stage: [0], train_micro_batch_size_per_gpu: [1], gradient_accumulation_steps: [1]}\n"


def run(ground: Ground) -> Iterator[Row]:
    os.chdir(ground.folder)  # the study's runs/
    row = tuned(words_of(ground, _MEASURED), STUDY)
    yield {**row, EXPECTED: bool(row["verified"])}


def words_of(ground: Ground, measured: tuple[str, ...]) -> tuple[str, ...]:
    Path("small.yaml").write_text(_SPACE, encoding="utf-8")
    return (*ground.choose(measured, REHEARSED), "--gpus", "1")


def tuned(words: Sequence[str], study: str, script: Sequence[str] = ()) -> Row:
    """Call `autotune run` in the present folder; return its row."""
    began = time.monotonic()
    done = autotune_run(*words, "--study", study, script=script)
    row: Row = {"what": f"autotune run {' '.join(words)}", "exit": done.code, "wall s": time.monotonic() - began}
    row |= {"verified": done.report.get("verified"), "report": done.report, "stderr": [done.stderr[-6000:]]}
    if done.code:
        return {**row, "why": done.stderr.strip()[-300:]}
    store = StudyStore.load(study)
    assert store.winner is not None
    records = store.records()
    row |= {"trials": len(records), "trials a minute": 60 * len(records) / row["wall s"]}
    row["candidate"] = str(store.winner.candidate)
    if store.winner.outcome and (found := store.winner.outcome.measurement):
        row |= {"samples/s": found.samples_per_second, "peak GiB": found.peak_bytes / 2**30}
    return {**row, "all trials": [[str(one.candidate), one.outcome.to_json()] for one in records if one.outcome]}
