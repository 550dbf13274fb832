"""Real engines of one CPU rank, made after the first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.candidate import Candidate
from autotune.problem.job import ScriptProfile
from autotune.rank.hooks import deepspeed
from tests.conftest import make_candidate
from tests.rank.hooks.conftest import make_context

MICRO, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
CONFIG = {
    MICRO: 4,
    STEPS: 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}


def train(folder: str, candidate: dict[str, Any]) -> dict[str, Any]:
    """An actor and its critic, whose configs are dicts in the code."""
    import torch

    context, watcher = make_context(folder, Candidate.of(candidate))
    deepspeed.install(context)
    import deepspeed as library

    def engine() -> Any:
        net = torch.nn.Linear(4, 1)
        return library.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)[0]

    actor, critic = engine(), engine()
    for _ in range(2 * critic.gradient_accumulation_steps()):
        critic.backward(critic(torch.rand(3, 4)).sum())
        critic.step()
        with torch.no_grad():
            critic(torch.rand(50, 4))
    return {
        "stages": [actor.zero_optimization_stage(), critic.zero_optimization_stage()],
        "batch": [critic.train_micro_batch_size_per_gpu(), critic.gradient_accumulation_steps()],
        "beside": watcher.of("beside"),
        "built": len(watcher.of("built")),
    }


def test_a_critic_has_the_candidates_batch_and_is_counted(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    found = in_rank(train, str(tmp_path), make_candidate(2, 2, 4).as_dict)
    assert found["stages"] == [2, 1], "all else is its own"
    assert found["batch"] == [2, 4]
    assert found["beside"] == [[0, 12], [0, 12]], "rows that gradients are taken of"
    assert found["built"] == 1


@pytest.mark.parametrize(
    ("config", "profile", "files", "changed"),
    [
        (CONFIG, {}, [], True),
        ({**CONFIG, STEPS: 4}, {}, [], False),
        ({STEPS: 2}, {}, [], False),
        (CONFIG, {"batch_note": "it has its own"}, [], False),
        (CONFIG, {}, ["a.json", "b.json"], False),  # the printed command would name a file that says another
        (CONFIG, {}, ["a.json", "a.json"], True),
    ],
)
def test_whose_batch_is_the_first_engines(
    context: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    profile: dict[str, Any],
    files: list[str],
    changed: bool,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    for name in files:
        (tmp_path / name).write_text(json.dumps(CONFIG))
    made, _ = context(
        make_candidate(2, 2, 4), argv=("train.py", *files), cwd=str(tmp_path), profile=ScriptProfile.from_json(profile)
    )
    made.own_config = CONFIG
    found = deepspeed.with_batch(made, config)
    assert (found is not config) is changed
    if changed:
        assert found == {
            **{key: value for key, value in config.items() if key != "train_batch_size"},
            MICRO: 2,
            STEPS: 4,
        }
