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


def errors(path: Path, slower: float) -> tuple[np.ndarray, np.ndarray]:
    """Of the logarithms of steps at stages 1 to 3, once three of stage 0 are measured on a machine that is so many times slower;
    and what is believed of these errors, as standard deviations."""
    landscape = load_landscape(path)
    job, rows = landscape.job(), landscape.rows.items()
    seconds = {c: slower * row.step_seconds for c, row in rows if row.step_seconds and not c.offloaded}
    own = sorted((c for c in seconds if c.stage == 0), key=lambda c: (c.micro_batch, str(c)))
    predictor = Predictor(job, landscape.hardware(), trace_job(job))
    for candidate in (own[0], own[len(own) // 2], own[-1]):
        predictor.observe(candidate, measured(landscape, seconds[candidate], candidate))
    others = [candidate for candidate in seconds if candidate.stage > 0]
    table = predictor.table(others)
    return np.log([seconds[c] for c in others]) - np.log(table.step), table.step_sigma


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_three_steps_of_stage_0_say_how_slow_the_other_stages_are(path: Path) -> None:
    off, sigma = errors(path, 1.0)
    assert abs(off.mean()) < 0.15
    assert (abs(off) < 1.96 * sigma).mean() >= 0.9


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("slower", [0.3, 5.0])
def test_so_they_do_on_faster_and_slower_machines(path: Path, slower: float) -> None:
    off, sigma = errors(path, slower)
    assert abs(off.mean()) < 0.25
    assert (abs(off) < 1.96 * sigma).mean() >= 0.8
