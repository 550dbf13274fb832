"""What is believed of CPU ranks, against tables of real ones."""

from pathlib import Path

import numpy as np
import pytest

from autotune.executors.replay import Landscape, load_landscape
from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Kind, Measurement, Outcome

TABLES = sorted((Path(__file__).parents[2] / "benchmarks/data/landscapes_real").glob("*.json"))


def measured(landscape: Landscape, seconds: float, candidate: Candidate) -> Outcome:
    samples = landscape.job().global_batch_size / seconds
    return Outcome(Kind.OK, measurement=Measurement(seconds, 0.0, 5, samples, samples, 2**30))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_three_steps_of_stage_0_say_how_slow_the_other_stages_are(path: Path) -> None:
    landscape = load_landscape(path)
    job = landscape.job()
    seconds = {c: row.step_seconds for c, row in landscape.rows.items() if row.step_seconds and not c.offloaded}
    own = sorted((c for c in seconds if c.stage == 0), key=lambda c: (c.micro_batch, str(c)))
    predictor = Predictor(job, landscape.hardware(), trace_job(job))
    for candidate in (own[0], own[len(own) // 2], own[-1]):
        predictor.observe(candidate, measured(landscape, seconds[candidate], candidate))
    others = [candidate for candidate in seconds if candidate.stage > 0]
    table = predictor.table(others)
    off = np.log([seconds[c] for c in others]) - np.log(table.step)
    assert abs(off.mean()) < 0.15
    assert (abs(off) < 1.96 * table.step_sigma).mean() >= 0.9
