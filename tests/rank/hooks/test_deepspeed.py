"""Real engines of one CPU rank, under the hooks and without."""

import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import Unusable
from autotune.problem.candidate import Candidate
from autotune.rank.hooks import deepspeed
from autotune.rank.hooks.transformers import install_silence
from tests.conftest import make_candidate
from tests.rank.hooks.conftest import Recorder, make_context

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "wandb": {"enabled": False},
}


def make_net() -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
            self.checkpointed = False

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, bool]) -> None:
            assert gradient_checkpointing_kwargs == {"use_reentrant": False}
            self.checkpointed = True

        def forward(self, x: Any, original: Any = None, context: Any = None) -> Any:
            if x.isnan().any():
                raise MemoryError("planted")
            return self.layer(x).sum()

    return Net()


def initialize(way: str, net: Any, folder: str) -> Any:
    """`deepspeed.initialize` with the config given in one of the ways there are."""
    import deepspeed

    path = Path(folder) / "ds.json"
    path.write_text(json.dumps(CONFIG))
    path.with_name("commented.json").write_text(f"# ours\n{json.dumps(CONFIG)[:-1]},}} // commas to spare")
    args = SimpleNamespace(deepspeed_config=str(path), local_rank=0)
    given: dict[str, Any] = {
        "dict": {"config": CONFIG},
        "file": {"config": str(path)},
        "commented": {"config": path.with_name("commented.json")},
        "base64": {"config": base64.urlsafe_b64encode(path.read_bytes()).decode()},
        "config_params": {"config_params": CONFIG},
        "args": {"args": args},
    }[way]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), **given)
    assert args.deepspeed_config == str(path), "the script's own arguments stay"
    return engine


def set_up(folder: str, candidate: dict[str, Any] | None, **script: Any) -> tuple[Any, Recorder]:
    context, watcher = make_context(folder, Candidate.of(candidate) if candidate else None, **script)
    deepspeed.install(context)
    return context, watcher


def train(folder: str, way: str, candidate: dict[str, Any] | None) -> dict[str, Any]:
    """Two optimizer steps."""
    import torch

    _context, watcher = set_up(folder, candidate)
    net = make_net()
    engine = initialize(way, net, folder)
    for _ in range(2 * engine.gradient_accumulation_steps()):
        loss = engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 4), original=1, context=2)
        engine.backward(loss)
        engine.step()
    engine.eval()
    engine(torch.ones(1, 4))
    return {
        "stage": engine.zero_optimization_stage(),
        "batch": [engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()],
        "checkpointed": net.checkpointed,
        "seen": watcher.seen,
        "wandb": "wandb" in engine.config,
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ["dict", "file", "commented", "base64", "config_params", "args"])
def test_the_engine_is_the_candidates(in_rank: Callable[..., Any], tmp_path: Path, way: str) -> None:
    candidate = make_candidate(2, 4, 3, activation_checkpointing=True)
    found = in_rank(train, str(tmp_path), way, candidate.as_dict)
    assert (found["stage"], found["batch"], found["checkpointed"], found["wandb"]) == (2, [4, 3], True, False)
    told = {name: rest for name, *rest in found["seen"]}
    assert told["configured"] == [CONFIG], "its own, before the candidate"
    assert told["planned"] == [4, 3]


def test_a_script_as_it_is(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    found = in_rank(train, str(tmp_path), "dict", None)
    assert (found["stage"], found["batch"], found["checkpointed"]) == (0, [2, 2], False)
    names = [name for name, *_ in found["seen"]]
    assert names[:4] == ["init", "configured", "planned", "built"]
    micro = ["rows and tokens", "forward", "backward", "step"]
    assert names[4:] == [*2 * [*micro, *micro, "stepped"], "forward"], (
        "no backward follows the evaluation: it counts nothing"
    )
    facts = dict(next(rest for name, *rest in found["seen"] if name == "built")[0])
    assert (facts["micro_batch"], facts["accumulation"], facts["precision"]) == (2, 2, "fp32")
    assert (facts["trained"], facts["frozen"], facts["model"]) == ([4, 1], 0, "Net")
    assert facts["checkpointing"]
    assert not (facts["client_optimizer"])
    assert not (facts["untested_optimizer"])
    assert not (facts["causal"])
    assert ["rows and tokens", 2, 2] in found["seen"]


def reference(folder: str) -> list[Any]:
    """A reference model, as TRL's trainers prepare it, and a second engine after the one that trains."""
    import torch
    from deepspeed import initialize as original

    context, watcher = set_up(folder, make_candidate(2, 4, 1).as_dict)
    frozen, *_ = deepspeed_initialize(model=make_net().eval(), config={"train_batch_size": 1})
    frozen(torch.ones(1, 4))
    seen_of_reference = list(watcher.seen)
    trained = initialize("dict", make_net(), folder)
    second, *_ = deepspeed_initialize(model=make_net(), config=CONFIG)
    frozen.train()
    frozen(torch.ones(1, 4))
    assert original is not deepspeed_initialize
    return [
        seen_of_reference,
        context.engine is trained,
        [engine.zero_optimization_stage() for engine in (frozen, trained, second)],
        watcher.names().count("built"),
        watcher.names().count("forward"),
        watcher.engines,
    ]


def which_trains(folder: str) -> list[bool]:
    found = []
    for frozen, evaluating, accelerated in ((0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0), (0, 0, 1), (0, 1, 1)):
        context, _ = make_context(folder)
        context.accelerated = bool(accelerated)
        net = make_net().train(not evaluating).requires_grad_(not frozen)
        found.append(deepspeed._trains(context, {"model": net}, CONFIG))
    return found


@pytest.mark.slow
def test_an_engine_that_makes_its_own_optimizer_trains_unless_it_is_a_references(
    in_rank: Callable[..., Any], tmp_path: Path
) -> None:
    assert in_rank(which_trains, str(tmp_path)) == [True, True, False, False, True, False]


def deepspeed_initialize(**given: Any) -> Any:
    import deepspeed

    return deepspeed.initialize(**given)


def test_only_the_engine_that_trains_is_changed_and_watched(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    assert in_rank(reference, str(tmp_path)) == [[], True, [0, 2, 0], 1, 0, 3]


def fail(folder: str) -> list[Any]:
    import torch

    _, watcher = set_up(folder, None)
    engine = initialize("dict", make_net(), folder)
    with pytest.raises(MemoryError, match="planted"):
        engine(torch.full((2, 4), float("nan")))
    return watcher.seen[-2:]


def test_a_failure_is_seen_before_the_script_can_catch_it(in_rank: Callable[..., Any], tmp_path: Path) -> None:
    assert in_rank(fail, str(tmp_path)) == [["forward"], ["failed", "MemoryError"]]


def share(folder: str, ranks: int, how: str) -> list[str]:
    """Says that there are so many ranks, of which this one is the only that trains on samples of its own."""
    import deepspeed as library

    context, watcher = set_up(folder, None)
    context.job = replace(context.job, ranks=ranks)
    mpu = SimpleNamespace(
        get_data_parallel_world_size=lambda: 1 if how == "mpu" else ranks,
        get_model_parallel_world_size=lambda: 1 if how == "mpu" else ranks,
        get_data_parallel_group=library.comm.get_world_group,
        get_model_parallel_group=library.comm.get_world_group,
        get_data_parallel_rank=lambda: 0,
        get_model_parallel_rank=lambda: 0,
    )
    net = make_net()
    given = {"model": net, "model_parameters": net.parameters(), "config": CONFIG, "mpu": mpu}
    library.init_distributed()
    if ranks == 1:
        library.initialize(**given)
    else:
        with pytest.raises(Unusable, match=f"{ranks} ranks train on 1 micro-batches at a time"):
            library.initialize(**given)
    return watcher.names()


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "how"), [(1, "mpu"), (2, "mpu"), (4, "tensor")])
def test_ranks_that_share_their_samples_are_refused(
    in_rank: Callable[..., Any], tmp_path: Path, ranks: int, how: str
) -> None:
    assert ("built" in in_rank(share, str(tmp_path), ranks, how)) == (ranks == 1)


def save(folder: str, quiet: bool) -> dict[str, Any]:
    """In the trial's folder and in one of the user's."""
    context, _ = make_context(f"{folder}/trial", quiet=quiet)
    install_silence(context)
    engine = initialize("dict", make_net(), folder)
    context.engine = engine
    places = [Path(folder, "trial"), Path(folder, "theirs")]
    saves = [(save, place) for place in places for save in (engine.save_16bit_model, engine.save_checkpoint)]
    found = {"answers": [bool(save(str(place / save.__name__))) for save, place in saves]}
    found["answers"].append(bool(engine.save_checkpoint(str(places[0] / "named"), "tag")))
    below = [path for place in places for path in sorted(place.rglob("*"))]
    found["files"] = [path.name for path in below if path.is_file()]
    found["folders"] = [str(path.relative_to(folder)) for path in below if path.is_dir()]
    deepspeed.unhooked(context, "save_16bit_model", f"{folder}/ours", "weights.bin")
    deepspeed.unhooked(context, "save_checkpoint", f"{folder}/ours")
    found["ours"] = sorted(path.name for path in Path(folder, "ours").iterdir())
    context.patches.close()
    engine.save_16bit_model(f"{folder}/after")
    found["after"] = Path(folder, "after").exists()
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("quiet", [True, False])
def test_saves_of_the_script_leave_nothing_where_it_is_quiet(
    in_rank: Callable[..., Any], tmp_path: Path, quiet: bool
) -> None:
    (tmp_path / "trial").mkdir()
    found = in_rank(save, str(tmp_path), quiet)
    assert all(found["answers"]), "the script goes on either way"
    assert (not found["files"]) is quiet
    trials = ["named", "named/tag", "save_16bit_model", "save_checkpoint", "save_checkpoint/global_step0"]
    theirs = [] if quiet else ["save_16bit_model", "save_checkpoint", "save_checkpoint/global_step0"]
    kept = [f"trial/{name}" for name in trials] + [f"theirs/{name}" for name in theirs]
    assert found["folders"] == kept, "there to be written into, but nothing among the user's"
    assert {"latest", "weights.bin"} <= set(found["ours"]), "verification saves in any case"
    assert found["after"], "undone"


def matrices_of(folder: str) -> Any:
    """What the tuner is told of GPT-2's parameters under Muon, as DeepSpeed itself groups them.

    `deepspeed.initialize` tags them so; its Muon would compile an op.
    """
    import deepspeed
    from transformers import GPT2Config, GPT2LMHeadModel

    _, watcher = set_up(folder, None)
    net = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2, n_positions=16))
    deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon"), net)
    deepspeed_initialize(model=net, model_parameters=list(net.parameters()), config=CONFIG)
    return watcher.of("built")[0][0]["matrices"]


@pytest.mark.slow
def test_the_tuner_is_told_which_parameters_deepspeed_gives_to_muon(
    in_rank: Callable[..., Any], tmp_path: Path
) -> None:
    """GPT-2's `wte` and `wpe` are embeddings, but not by their names."""
    assert in_rank(matrices_of, str(tmp_path)) == [64 * 8, 16 * 8, 8 * 24, 8 * 8, 8 * 32, 32 * 8]


def told_of(folder: str, how: str) -> list[Any]:
    """What the tuner is told of an optimizer that the script makes: itself, or by a callable that DeepSpeed calls."""
    import torch

    _, watcher = set_up(folder, None)
    net, config = make_net(), {name: one for name, one in CONFIG.items() if name != "optimizer"}
    optimizer = {
        "its own": lambda: torch.optim.AdamW(net.parameters()),
        "a callable": lambda: lambda parameters: torch.optim.AdamW(parameters, fused=False, foreach=True),
        "none": lambda: None,
    }[how]()
    deepspeed_initialize(
        model=net,
        optimizer=optimizer,
        model_parameters=list(net.parameters()),
        config=CONFIG if how == "none" else config,
    )
    facts = watcher.of("built")[0][0]
    return [facts["client_optimizer"], facts["optimizer"], facts["torch_optimizer"]]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("its own", {"class": "AdamW", "fused": None, "foreach": None}),
        ("a callable", {"class": "AdamW", "fused": False, "foreach": True}),
        ("none", {}),
    ],
)
def test_how_the_scripts_own_optimizer_of_torchs_steps_is_told(
    in_rank: Callable[..., Any], tmp_path: Path, how: str, expected: dict[str, Any]
) -> None:
    assert in_rank(told_of, str(tmp_path), how) == [how != "none", "", expected]
