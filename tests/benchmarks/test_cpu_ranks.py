"""What is believed of CPU ranks, against tables of real ones: how slow other stages are once three steps of stage 0 are known."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.predict.cpu_ranks import INTERVAL, TABLES, errors

OUTSIDE = "recorded after the priors were set: its later stages take longer than they say, 4 of 6 rows are inside; why is not known"
EACH = [
    pytest.param(
        path, id=path.stem, marks=pytest.mark.xfail(strict=True, reason=OUTSIDE) if "mixtral" in path.stem else ()
    )
    for path in TABLES
]
pytestmark = pytest.mark.slow  # 14 models are traced


@pytest.mark.parametrize("path", EACH)
def test_three_steps_of_stage_0_say_how_slow_the_other_stages_are(path: Path) -> None:
    _, off, sigma = errors(path)
    assert abs(off.mean()) < 0.15
    assert (abs(off) < INTERVAL * sigma).mean() >= 0.9


@pytest.mark.parametrize("slower", [1.0, 0.3, 5.0])
def test_of_all_tables_together_with_narrow_intervals(slower: float) -> None:
    assert len(TABLES) >= 14
    found = [errors(path, slower) for path in TABLES]
    off, sigma = (np.concatenate([one[at] for one in found]) for at in (1, 2))
    assert (abs(off) < INTERVAL * sigma).mean() >= 0.95
    assert np.median(sigma) < 0.25, "and say something"
