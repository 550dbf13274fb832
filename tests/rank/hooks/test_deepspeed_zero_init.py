"""A model made under `deepspeed.zero.Init`, under candidates of every stage."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.candidate import Candidate
from autotune.problem.job import ScriptProfile
from autotune.rank.hooks import accelerate, deepspeed
from tests.conftest import make_candidate
from tests.rank.hooks.conftest import make_context

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 3},
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
}
REFERENCE = {**CONFIG, "zero_optimization": {"stage": 3, "max_live_parameters": 7}}


def set_up(folder: str, candidate: dict[str, Any] | None, **script: Any) -> tuple[Any, Any]:
    context, watcher = make_context(folder, Candidate.of(candidate) if candidate else None, **script)
    context.job = dataclasses.replace(context.job, precision="bf16")
    deepspeed.install(context)
    return context, watcher


def train(folder: str, candidate: dict[str, Any] | None, enabled: bool) -> dict[str, Any]:
    """A step of a model that the script makes under `deepspeed.zero.Init`, after an engine of stage 3 that trains nothing."""
    import deepspeed as library
    import torch
    from deepspeed.runtime.zero.partition_parameters import is_zero_param

    context, watcher = set_up(folder, candidate, profile=ScriptProfile(config=CONFIG))
    deepspeed.install_zero_init(context)
    library.init_distributed()
    reference, *_ = library.initialize(model=torch.nn.Linear(4, 4), config=copy.deepcopy(REFERENCE))
    with library.zero.Init(config_dict_or_path=copy.deepcopy(CONFIG), enabled=enabled):
        net = torch.nn.Linear(4, 4)
    parted = is_zero_param(net.weight)
    engine, *_ = library.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=CONFIG)
    with library.zero.Init(config_dict_or_path=CONFIG):
        later = torch.nn.Linear(4, 4)
    engine.backward(engine(torch.ones(2, 4, dtype=torch.bfloat16)).float().sum())
    engine.step()
    return {
        "parted": parted,
        "stage": engine.zero_optimization_stage(),
        "beside": [is_zero_param(next(one.parameters())) for one in (reference.module, later)],
        "facts": watcher.of("built")[0][0]["zero_init"],
    }


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_is_made_as_the_candidates_stage_trains_it(
    in_rank: Callable[..., Any], tmp_path: Path, stage: int
) -> None:
    found = in_rank(train, str(tmp_path), make_candidate(stage, 2).as_dict, True)
    assert (found["stage"], found["parted"]) == (stage, stage == 3)
    assert found["beside"] == [True, True], "engines beside the one that trains keep their own stage"
    assert found["facts"]


def test_a_script_as_it_is_keeps_its_own(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    found = in_rank(train, str(tmp_path), None, True)
    assert (found["stage"], found["parted"], found["facts"]) == (3, True, True)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_what_is_switched_off_stays_off(in_rank: Callable[..., Any], tmp_path: Path, stage: int) -> None:
    """As `enabled=args.zero_stage == 3` has it; an engine of stage 3 parts a whole model itself."""
    found = in_rank(train, str(tmp_path), make_candidate(stage, 2).as_dict, False)
    assert (found["stage"], found["parted"], found["facts"]) == (stage, False, False)


def offload(folder: str, candidate: dict[str, Any]) -> dict[str, Any]:
    """Whether parameters are offloaded, by what `Init` is given."""
    import deepspeed as library
    import torch

    context, watcher = set_up(folder, candidate, profile=ScriptProfile(config=CONFIG))
    deepspeed.install_zero_init(context)
    Path(folder, "ds.json").write_text(json.dumps(CONFIG))
    library.init_distributed()
    whole = torch.nn.Linear(4, 4)
    ways: dict[str, dict[str, Any]] = {
        "dict": {"config_dict_or_path": CONFIG},
        "file": {"config_dict_or_path": f"{folder}/ds.json"},
        "old name": {"config": CONFIG},
        "module": {"module": whole, "config_dict_or_path": CONFIG},
        "of a reference": {"config_dict_or_path": REFERENCE},
        "without": {},
    }
    made = {way: library.zero.Init(**given) for way, given in ways.items()}
    return {
        "offloaded": [way for way, one in made.items() if not isinstance(one.remote_device, torch.device)],
        "module": hasattr(whole.weight, "ds_id"),
        "names": watcher.names(),
    }


@pytest.mark.slow
def test_the_trainings_config_has_the_candidates_keys_in_it(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    found = in_rank(offload, str(tmp_path), make_candidate(3, 2, offload_param="cpu").as_dict)
    assert found["offloaded"] == ["dict", "file", "old name", "module"]
    assert found["module"]
    assert found["names"] == [], "what the script's own config is, its engine says"
    assert not in_rank(offload, str(tmp_path), make_candidate(2, 2).as_dict)["module"]


def let_go(folder: str) -> bool:
    """Whether transformers makes models in parts after a config that nobody has kept: axolotl announces one for a moment."""
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    context, _ = set_up(folder, make_candidate(3, 2).as_dict)
    accelerate.install(context)
    HfDeepSpeedConfig(copy.deepcopy(CONFIG))
    return bool(is_deepspeed_zero3_enabled())


@pytest.mark.slow
def test_a_config_that_the_script_lets_go_is_gone(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    assert not in_rank(let_go, str(tmp_path))


def from_transformers(folder: str, stage: int) -> list[bool]:
    """A model that transformers makes, where the script has announced a config of stage 3."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.integrations import HfDeepSpeedConfig

    context, _ = set_up(folder, make_candidate(stage, 2).as_dict)
    deepspeed.install_zero_init(context)
    accelerate.install(context)
    announced = HfDeepSpeedConfig(copy.deepcopy(CONFIG))
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    net = AutoModelForCausalLM.from_config(config)
    return [announced.is_zero3(), hasattr(net.lm_head.weight, "ds_id"), context.zero_init]


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [2, 3])
def test_what_transformers_makes_follows_the_config(in_rank: Callable[..., Any], tmp_path: Path, stage: int) -> None:
    parted = stage == 3
    assert in_rank(from_transformers, str(tmp_path), stage) == [parted, parted, False], "nothing to take out"
