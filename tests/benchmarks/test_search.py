import math

import pytest

from autotune.predict.predictor import Predictor
from autotune.search.proposer import Proposer
from benchmarks.search.parts import ABLATIONS, MISLED, WRONG
from benchmarks.search.search import DATA, one


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_overrides_what_there_is(name: str) -> None:
    for part, base in zip(ABLATIONS[name], (Predictor, Proposer), strict=True):
        changed = {method for cls in part.__mro__[: part.__mro__.index(base)] for method in vars(cls)}
        methods = {method for method in changed if callable(getattr(part, method)) and not method.startswith("__")}
        assert methods - {"bend"} <= set(dir(base))
        assert methods or part in (base, *MISLED.values())


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
