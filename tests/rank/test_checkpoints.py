"""Which checkpoints load as they are, and what a converted one must not lose. tests/test_scripts.py loads real ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.rank.checkpoints import _bare_states, _keep_groups, convert, convertible, layout, written_under

NVME = {"device": "nvme", "nvme_path": "/tmp"}


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (zero(1), zero(2, offload_optimizer={"device": "cpu"}), True),
        (zero(3), zero(3, offload_param={"device": "cpu"}, stage3_prefetch_bucket_size=1), True),
        (zero(3), zero(3, sub_group_size=1e9), True),
        (zero(3), zero(3, sub_group_size=5), False),
        (zero(2), zero(3), False),
        (zero(0), zero(1), False),
        ({}, zero(0), True),
        (zero(3), zero(3, offload_optimizer=NVME), False),
    ],
)
def test_layouts(one: dict[str, Any], other: dict[str, Any], same: bool) -> None:
    assert (layout(one) == layout(other)) is same


@pytest.mark.parametrize(
    ("before", "after", "oldest"),
    [
        (zero(1), zero(3), (0, 16)),
        (zero(2), zero(3, offload_param={"device": "cpu"}), (0, 16)),
        (zero(3), zero(3, sub_group_size=5), (0, 18)),
        (zero(0), zero(3), None),
        (zero(3), zero(2), None),
        (zero(2), zero(3, offload_param=NVME), None),
    ],
)
def test_only_what_deepspeed_converts_is_converted(
    before: dict[str, Any], after: dict[str, Any], oldest: tuple[int, int] | None
) -> None:
    for deepspeed in ((0, 16, 0), (0, 17, 6), (0, 18, 0), (0, 19, 8)):
        assert convertible(before, after, deepspeed) is (oldest is not None and deepspeed >= oldest)


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


def test_what_is_no_checkpoint_is_said_in_one_line(tmp_path: Path) -> None:
    assert written_under(tmp_path) is None
    with pytest.raises(RuntimeError, match="cannot be converted: FileNotFoundError"):
        convert(tmp_path, tmp_path / "universal", 2)


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
