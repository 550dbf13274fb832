"""What is believed of CPU ranks, against tables of real ones."""

from pathlib import Path

import numpy as np
import pytest
from cpu_ranks import INTERVAL, TABLES, errors


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_three_steps_of_stage_0_say_how_slow_the_other_stages_are(path: Path) -> None:
    _, off, sigma = errors(path)
    assert abs(off.mean()) < 0.15
    assert (abs(off) < INTERVAL * sigma).mean() >= 0.9
    assert np.median(sigma) < 0.3, "and say something"


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("slower", [0.3, 5.0])
def test_so_they_do_on_faster_and_slower_machines(path: Path, slower: float) -> None:
    _, off, sigma = errors(path, slower)
    assert abs(off.mean()) < 0.25
    assert (abs(off) < INTERVAL * sigma).mean() >= 0.8


def test_there_are_tables() -> None:
    assert len(TABLES) > 7
