"""Which of a script's engines is the one that trains, of real engines of one CPU rank."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.candidate import Candidate
from autotune.problem.job import ScriptProfile
from autotune.rank.hooks import deepspeed
from tests.conftest import make_candidate
from tests.rank.hooks.conftest import make_context

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
FIRST = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}, "optimizer": OPTIMIZER}
SECOND = {**FIRST, "gradient_clipping": 1.0}  # so that each is known by its own


def play(folder: str, way: str, candidate: dict[str, Any] | None, earlier: int) -> dict[str, Any]:
    """A script of two engines."""
    import torch

    profile = {"earlier": earlier} if earlier else {}
    context, watcher = make_context(
        folder, Candidate.of(candidate) if candidate else None, profile=ScriptProfile.from_json(profile)
    )
    deepspeed.install(context)
    import deepspeed as library

    def engine(config: dict[str, Any]) -> Any:
        net = torch.nn.Linear(4, 1)
        return library.initialize(model=net, model_parameters=net.parameters(), config=config)[0]

    def train(one: Any, steps: int = 1) -> None:
        for _ in range(steps):
            one.backward(one(torch.ones(one.train_micro_batch_size_per_gpu(), 4)).sum())
            one.step()

    first = engine(FIRST)
    if way == "phases":
        train(first, 3)
    second = engine(SECOND)
    if way == "reference":
        first.eval()
    for _ in range(8):
        if way in ("reference", "turns"):
            with torch.no_grad():
                first(torch.ones(2, 4))
        train(second, 5 if way == "turns" else 1)
        if way == "turns":
            train(first)
    built = watcher.of("built")
    at = max(at for at, name in enumerate(watcher.names()) if name == "built")
    return {
        "second": context.engine is second,
        "configured": watcher.of("configured")[-1][0].get("gradient_clipping"),
        "earlier": [facts["earlier"] for (facts,) in built],
        "stages": [first.zero_optimization_stage(), second.zero_optimization_stage()],
        "rows": [second.train_micro_batch_size_per_gpu(), first.train_micro_batch_size_per_gpu()],
        "after": watcher.names()[at + 1 :],
    }


@pytest.mark.few(1)
@pytest.mark.parametrize(("way", "steps"), [("reference", 8 - 3), ("phases", 8 - 2)])
def test_the_second_engine_is_elected_where_the_first_only_refers_or_has_ended(
    in_rank: Callable[..., Any], tmp_path: Path, way: str, steps: int
) -> None:
    found = in_rank(play, str(tmp_path), way, None, 0)
    assert found["second"]
    assert found["configured"] == 1.0, "its own config is told"
    assert found["earlier"] == [0, 1]
    micro = ["rows and tokens", "forward", "backward", "step", "stepped"]
    assert found["after"] == steps * micro, "each step from its first forward on, and none of them as one beside"


@pytest.mark.slow
def test_engines_that_take_turns_leave_the_first_as_it_is(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    found = in_rank(play, str(tmp_path), "turns", None, 0)
    assert not found["second"], "a generator, whose critic makes five steps for each of its own"
    assert (found["earlier"], found["after"].count("stepped"), found["after"].count("beside")) == ([0], 8, 40)


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["reference", "phases"])
def test_the_candidate_is_of_the_engine_that_the_first_run_has_shown(
    in_rank: Callable[..., Any], tmp_path: Path, way: str
) -> None:
    found = in_rank(play, str(tmp_path), way, make_candidate(2, 4, 1).as_dict, 1)
    assert found["second"]
    assert (found["stages"], found["rows"]) == ([0, 2], [4, 2]), "what is made before it keeps all of its own"
    assert (found["earlier"], found["after"].count("stepped"), found["after"].count("beside")) == ([1], 8, 0)
