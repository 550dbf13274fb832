"""Which checkpoints load as they are, and what a converted one must not lose. tests/test_scripts.py loads real ones."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from autotune.rank import checkpoints
from autotune.rank.checkpoints import (
    _bare_states,
    _keep_groups,
    _load_converted,
    convert,
    convertible,
    layout,
    written_under,
)

NVME = {"device": "nvme", "nvme_path": "/tmp"}


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (zero(1), zero(2, offload_optimizer={"device": "cpu"}), True),
        (zero(3), zero(3, sub_group_size=1e9), True),
        (zero(3), zero(3, sub_group_size=5), False),
        (zero(2), zero(3), False),
        (zero(3), zero(3, offload_optimizer=NVME), False),
    ],
)
def test_layouts(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    assert (layout(one) == layout(other)) is same


@pytest.mark.parametrize(
    ("before", "after", "possible"),
    [
        (zero(1), zero(3), True),
        (zero(2), zero(3, offload_param={"device": "cpu"}), True),
        (zero(3), zero(3, sub_group_size=5), True),
        (zero(0), zero(3), False),
        (zero(3), zero(2), False),
        (zero(2), zero(3, offload_param=NVME), False),
    ],
)
def test_only_what_deepspeed_converts_is_converted(
    before: dict[str, Any], after: dict[str, Any], possible: bool
) -> None:
    for deepspeed in ((0, 18, 0), (0, 19, 8)):
        assert convertible(before, after, deepspeed) is possible
    assert not convertible(before, after, (0, 17, 6))


def test_every_group_keeps_its_own_settings_and_share_of_the_learning_rate() -> None:
    own = [
        {"lr": 0.0, "initial_lr": 1e-2, "weight_decay": 0.1, "step": 0},
        {"lr": 0.0, "initial_lr": 1e-3, "weight_decay": 0.0, "step": 0},
    ]
    loaded = [{"params": [1], "lr": 4e-3, "initial_lr": 1e-2, "weight_decay": 0.1, "step": 7} for _ in range(2)]
    _keep_groups(loaded, own)
    assert [group["lr"] for group in loaded] == pytest.approx([4e-3, 4e-4])
    assert [group["weight_decay"] for group in loaded] == [0.1, 0.0]
    assert loaded[1]["initial_lr"] == 1e-3
    assert all(group["step"] == 7 and group["params"] == [1] for group in loaded)


@pytest.mark.slow
def test_what_is_no_checkpoint_is_said_in_one_line(tmp_path: Path) -> None:
    assert written_under(tmp_path) is None
    with pytest.raises(RuntimeError, match="cannot be converted: FileNotFoundError"):
        convert(tmp_path, tmp_path / "universal", 2)


class Ranks:
    """Ranks of one process, one at a time, with a store between them. What each does is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, convert: Callable[..., None]) -> None:
        self.done: list[str] = []
        self._monkeypatch, store = monkeypatch, HashStore()
        distributed = torch.distributed
        monkeypatch.setattr(distributed.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
        monkeypatch.setattr(distributed, "barrier", lambda: self.done.append("barrier"))
        monkeypatch.setattr(checkpoints, "convert", convert)

    def load(self, rank: int) -> None:
        self._monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        self._monkeypatch.setattr(checkpoints, "_DONE", itertools.count(), raising=False)
        own = [{"lr": 1.0}]
        settings = SimpleNamespace(load_universal_checkpoint=False)
        optimizer = SimpleNamespace(param_groups=[{**own[0], "params": []}])
        engine = SimpleNamespace(_config=settings, optimizer=optimizer, module=torch.nn.Module())
        _load_converted(lambda *args: self.done.append("load"), engine, Path("/none/step5"), 2, own, lambda text: None)


def test_no_collective_is_pending_while_the_first_rank_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog ends a rank that sits in one for longer than its timeout."""
    ranks = Ranks(monkeypatch, lambda *args: ranks.done.append("convert"))
    looks = itertools.count()

    def sleep(seconds: float) -> None:
        ranks.done.append("sleep")
        if next(looks) == 1:
            ranks.load(0)
            ranks.done.append("the other")

    monkeypatch.setattr("time.sleep", sleep)
    ranks.load(1)
    assert ranks.done == ["sleep", "sleep", "convert", "load", "barrier", "the other", "load", "barrier"]


def test_every_rank_hears_why_a_checkpoint_cannot_be_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no space left")

    ranks = Ranks(monkeypatch, fail)
    for rank in (0, 1):
        with pytest.raises(RuntimeError, match="no space left"):
            ranks.load(rank)
    assert not ranks.done


def test_states_lose_their_dicts_and_steps_stay(tmp_path: Path) -> None:
    """What converting stages 1 and 2 writes, for a stage 3 that takes bare tensors."""
    folder = tmp_path / "zero" / "layers.0.weight"
    folder.mkdir(parents=True)
    whole = torch.arange(6.0).view(2, 3)
    torch.save({"param": whole, "cat_dim": 0}, folder / "fp32.pt")
    torch.save(7, folder / "step.pt")
    torch.save({"param_groups": []}, tmp_path / "zero" / "optimizer_state.pt")
    _bare_states(tmp_path)
    assert torch.equal(torch.load(folder / "fp32.pt"), whole)
    assert torch.load(folder / "step.pt") == 7
    assert torch.load(tmp_path / "zero" / "optimizer_state.pt") == {"param_groups": []}
