import math

import numpy as np
import pytest

from autotune.predict.predictor import Predictor
from autotune.predict.trace_cache import closed_form_trace
from autotune.search.proposer import Proposer
from benchmarks.search.parts import ABLATIONS, MISLED, WRONG, Biased
from benchmarks.search.replay import load_replay_table
from benchmarks.search.search import DATA, one, times_fewer

LANDSCAPE = load_replay_table(DATA / "landscapes" / "gemma-2-2b_4xrtx3090.csv.gz")


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_overrides_what_there_is(name: str) -> None:
    for part, base in zip(ABLATIONS[name], (Predictor, Proposer), strict=True):
        changed = {method for cls in part.__mro__[: part.__mro__.index(base)] for method in vars(cls)}
        methods = {method for method in changed if callable(getattr(part, method)) and not method.startswith("__")}
        assert methods - {"bend"} <= set(dir(base))
        assert methods or part in (base, *MISLED.values())


@pytest.mark.parametrize("wrong", [Biased, *MISLED.values()])
def test_a_biased_predictor_is_wrong_by_what_it_says_both_ways(wrong: type[Biased]) -> None:
    job, hardware = LANDSCAPE.job(), LANDSCAPE.hardware()
    trace, candidates = closed_form_trace(job, "a test"), list(LANDSCAPE.rows)
    honest, biased = (kind(job, hardware, trace).table(candidates) for kind in (Predictor, wrong))
    memory, time = biased.needed / honest.needed, biased.step / honest.step  # what is shown ends at the card
    assert {round(float(ratio), 6) for ratio in np.unique(time)} == {round(2 / 3, 6), 1.5}
    assert {round(float(ratio), 6) for ratio in np.unique(memory)} == {0.7, 1.3}


def test_times_fewer_compares_with_the_best_baseline_of_each_landscape() -> None:
    def row(replay_table: str, strategy: str, minutes: float | None) -> dict[str, object]:
        return {"landscape": replay_table, "strategy": strategy, "minutes95": minutes}

    rows = [
        row("a", "autotune", 1.0),
        row("a", "tpe", 9.0),
        row("a", "random", 4.0),
        row("a", "adversarial", 0.5),
        row("b", "autotune", 2.0),
        row("b", "random", 18.0),
        row("c", "autotune", 1.0),
        row("c", "tpe", None),
    ]
    assert times_fewer(rows) == pytest.approx(6.0)
    assert times_fewer(rows[:1]) is None


OWN = DATA / "landscapes_own" / "tiny-llama_2xcpu.csv.gz"
TWICE_TPE = 24  # rungs; TPE needs 12 in the median (docs/search.md)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*WRONG, "adversarial"])
def test_a_wrong_predictor_costs_at_most_twice_the_trials_of_tpe(name: str) -> None:
    needed = sorted(one((OWN, name, seed, 1800.0, True)).get("trials95", math.inf) for seed in range(3))
    assert needed[1] <= TWICE_TPE
    assert needed[-1] < math.inf, "no seed is kept from the optimum"


def test_a_right_predictor_needs_few_trials() -> None:
    assert one((OWN, "autotune", 0, 1800.0, True))["trials98"] <= 7
