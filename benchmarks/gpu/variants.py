"""Attention by each of its kernels, and torch's allocator with and without expandable segments."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from autotune.predict.trace import traced_predictor
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.gpu.rows import as_row, beside, candidate, measure_spec, trial
from benchmarks.trials.ranks import opened

MODEL, SEQ_LEN = "smollm2-360m", 2048
ATTENTIONS = {"sdpa": None, "eager": None, "flash_attention_2": "flash_attn"}  # and the package that has it


def run(ground: Ground) -> Iterator[Row]:
    for attention, package in ATTENTIONS.items():
        if ground.rehearse and attention == "eager":  # as sdpa
            continue
        if package and importlib.util.find_spec(package) is None:
            yield {"what": "attention", "set to": attention, "outcome": f"not measured: {package} is not installed"}
            continue
        yield from measured(ground, attention, ("attention", attention), {})
    for on in ground.choose((False, True), (False,)):  # CPU ranks have no such allocator
        yield from measured(ground, None, ("expandable_segments", str(on)), {"expandable_segments": on})


def measured(ground: Ground, attention: str | None, of: tuple[str, str], knobs: dict[str, bool]) -> Iterator[Row]:
    """One job, with and without checkpointing."""
    job, hardware = ground.job(MODEL, SEQ_LEN, attention=attention), ground.hardware()
    both = ground.choose((False, True), (False,))
    tried = [candidate(ground, 2, 4, activation_checkpointing=on, **knobs) for on in both]
    predictor = traced_predictor(job, hardware)
    with opened(job, hardware, ground.folder / "-".join(of), tried) as executor:
        for one in tried:
            outcome = trial(executor, one, measure_spec(ground))
            row = {"what": of[0], "set to": of[1], "candidate": str(one), **as_row(outcome)}
            yield {**row, **beside(predictor.predict(one), outcome), EXPECTED: outcome.ok}
