"""What is believed of CPU ranks, against tables of real ones: how slow other stages are once three steps of stage 0 are known."""

import numpy as np
import pytest
from cpu_ranks import INTERVAL, TABLES, errors


@pytest.mark.slow  # 14 models are traced
@pytest.mark.parametrize("slower", [1.0, 0.3, 5.0])
def test_three_steps_of_stage_0_say_how_slow_the_other_stages_are(slower: float) -> None:
    assert len(TABLES) >= 14
    found = {path.stem: errors(path, slower) for path in TABLES}
    assert {name: off for name, (_, off, _) in found.items() if abs(off.mean()) > 0.25} == {}
    off, sigma = (np.concatenate([one[at] for one in found.values()]) for at in (1, 2))
    assert (abs(off) < INTERVAL * sigma).mean() >= 0.95
    assert np.median(sigma) < 0.25, "and say something"
