from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.candidate import MICRO_BATCH, Candidate
from autotune.problem.job import ScriptProfile
from autotune.rank.hooks import accelerate, config, deepspeed
from tests.conftest import make_candidate
from tests.rank.hooks.conftest import make_context

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}


def train(folder: str, candidate: dict[str, Any] | None) -> dict[str, Any]:
    """A loop of accelerate's, its plugin made of a config. That CPU ranks find each other needs two of them:
    tests/test_scripts.py."""
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader, TensorDataset

    context, watcher = make_context(folder, Candidate.of(candidate) if candidate else None)
    accelerate.install(context)
    deepspeed.install(context)
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    accelerator = Accelerator(deepspeed_plugin=plugin)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = TensorDataset(torch.arange(256.0).view(64, 4))
    loader = DataLoader(
        data, batch_size=2, shuffle=True, drop_last=True, collate_fn=lambda rows: torch.stack([x for (x,) in rows])
    )
    evaluation = DataLoader(data, batch_size=16)
    net, optimizer, loader, evaluation = accelerator.prepare(net, optimizer, loader, evaluation)
    first, *_ = rows = list(loader)
    accelerator.backward(net(first).sum())
    optimizer.step()
    engine = accelerator.deepspeed_engine_wrapped.engine
    return {
        "stage": engine.zero_optimization_stage(),
        "plugin_stage": plugin.zero_stage,
        "micro_batch": engine.train_micro_batch_size_per_gpu(),
        "rows": len(first),
        "samples": sorted(float(row[0]) for batch in rows for row in batch),
        "shuffled": [float(row[0]) for row in first] != [4.0 * at for at in range(len(first))],
        "evaluation_rows": len(next(iter(evaluation))[0]),
        "seen": watcher.seen,
        "prepared": context.loader_prepared,
        "facts": watcher.of("built")[0][0]["loader_prepared"],
    }


def test_the_config_and_the_trainings_loader_are_the_candidates(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    found = in_rank(train, str(tmp_path), make_candidate(2, 8).as_dict)
    assert (found["stage"], found["plugin_stage"], found["micro_batch"], found["rows"]) == (2, 2, 8, 8)
    assert found["samples"] == [16.0 * at / 4 for at in range(64)], "every sample once"
    assert found["shuffled"]
    assert found["evaluation_rows"] == 16, "only the first loader is the training's"
    assert found["prepared"]
    assert found["facts"], "known before the engine is built"
    configured = [told for name, *told in found["seen"] if name == "configured"]
    assert len(configured) == 1
    assert configured[0][0]["zero_optimization"]["stage"] == 1


def test_a_script_as_it_is_keeps_its_loader(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    found = in_rank(train, str(tmp_path), None)
    assert (found["stage"], found["rows"], found["prepared"]) == (1, 2, True)


def in_several_calls(folder: str, way: str, micro_batch: int) -> dict[str, Any]:
    """The rows that a script gets of its training's loader and of another, which it prepares in several calls."""
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

    context, _ = make_context(folder, make_candidate(1, micro_batch))
    accelerate.install(context)
    deepspeed.install(context)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = TensorDataset(torch.ones(64, 4))
    loader, other = DataLoader(data, batch_size=2), DataLoader(data, batch_size=16)
    if way == "sampling_before":  # as diffusers' DreamBooth makes the images of its class
        other = accelerator.prepare(other)
        list(other)
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    elif way == "sampling_before_all":
        other = accelerator.prepare(other)
        list(other)
        net, optimizer = accelerator.prepare(net, optimizer)
        loader = accelerator.prepare(loader)
    elif way == "loaders_first":
        loader, other = accelerator.prepare(loader, other)
        net, optimizer = accelerator.prepare(net, optimizer)
    elif way == "model_first":
        net, optimizer = accelerator.prepare(net, optimizer)
        loader, other = accelerator.prepare(loader, other)
    elif way == "own_sampler":
        loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, False))
        net, optimizer, loader, other = accelerator.prepare(net, optimizer, loader, other)
    return {
        "rows": {len(batch) for (batch,) in loader}.pop(),
        "others": {len(batch) for (batch,) in other}.pop(),
        "said": context.said.get(MICRO_BATCH),
        "prepared": deepspeed.late_facts(context)["loader_prepared"],
        "known": len(accelerator._dataloaders),
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["sampling_before", "sampling_before_all", "loaders_first", "model_first"])
@pytest.mark.parametrize("micro_batch", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_the_trainings_loader_is_found_in_whichever_call(
    in_rank: Callable[..., Any], tmp_path: Path, way: str, micro_batch: int
) -> None:
    found = in_rank(in_several_calls, str(tmp_path), way, micro_batch)
    assert (found["rows"], found["others"]) == (micro_batch, 16)
    assert found["said"] == [2]
    assert found["prepared"]
    assert found["known"] == 2


@pytest.mark.slow
def test_a_batch_sampler_stays_and_so_does_the_loader_behind_it(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    found = in_rank(in_several_calls, str(tmp_path), "own_sampler", 8)
    assert (found["rows"], found["others"], found["said"], found["prepared"]) == (2, 16, None, False)


def told_by_the_environment(folder: str) -> dict[str, Any]:
    """A script that leaves DeepSpeed to `accelerate launch`."""
    from accelerate import Accelerator

    context, _ = make_context(folder, make_candidate(2, 4), ds_config=f"{folder}/ds.json")
    config.announce_to_accelerate(context)
    accelerate.install(context)
    plugin: Any = Accelerator().state.deepspeed_plugin
    return plugin.deepspeed_config


@pytest.mark.slow
def test_a_config_that_is_given_beside_the_script(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 1}}')
    found = in_rank(told_by_the_environment, str(tmp_path))
    assert found["zero_optimization"]["stage"] == 2
    assert found["train_micro_batch_size_per_gpu"] == 4


TEACHERS = {**CONFIG, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10}}


def distil(folder: str, candidate: dict[str, Any] | None, kept: list[Any]) -> dict[str, Any]:
    """A student and its teacher, whose plugin is made first."""
    import torch
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader, TensorDataset

    profile = {"kept_configs": kept} if kept else {}
    context, watcher = make_context(
        folder, Candidate.of(candidate) if candidate else None, profile=ScriptProfile.from_json(profile)
    )
    accelerate.install(context)
    deepspeed.install(context)
    teachers, own = (DeepSpeedPlugin(hf_ds_config=one) for one in (TEACHERS, CONFIG))
    accelerator = Accelerator(deepspeed_plugin={"student": own, "teacher": teachers})
    student, teacher = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1).eval()
    loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=2)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    accelerator.prepare(student, optimizer, loader)
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = accelerator.prepare(teacher)
    return {
        "stages": [context.engine.zero_optimization_stage(), teacher.zero_optimization_stage()],
        "accumulation": accelerator.gradient_accumulation_steps,
        # accelerate 1.3 leaves it to DeepSpeed alone
        "adopts": "deepspeed_gradient_accumulation_steps" in Accelerator._prepare_deepspeed.__code__.co_varnames,
        "plugins": [own.zero_stage, teachers.zero_stage],
        "configured": watcher.of("configured")[-1][0],
        "kept": watcher.of("built")[0][0]["kept_configs"],
    }


@pytest.mark.slow
def test_the_plugin_of_a_teacher_keeps_its_own_config(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    probed = in_rank(distil, str(tmp_path), None, [])
    assert probed["configured"] == CONFIG, "of the engine that trains, though the teacher's was read first"
    assert probed["kept"] == [TEACHERS["zero_optimization"]]
    found = in_rank(distil, str(tmp_path), make_candidate(2, 8, 4).as_dict, probed["kept"])
    took = 4 if found["adopts"] else 1
    assert found["accumulation"] == took, "accelerate has one for all plugins, of the last that is prepared"
    assert (found["stages"], found["plugins"]) == ([2, 3], [2, 3])
