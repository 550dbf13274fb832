"""Every sub-group of stage 3 is filled from a universal checkpoint; tests/test_scripts.py loads a real one into engines of the
installed DeepSpeed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.rank.checkpoints import every_sub_group

RANKS = 2


class Stage3:
    """What is needed of DeepSpeed's optimizer: three parameters in two sub-groups, cut over two ranks."""

    def __init__(self, groups: list[list[torch.nn.Parameter]]) -> None:
        self.fp16_groups, self.dp_process_group, self.loss_scale = groups, None, 1.0
        sizes = [[-(-parameter.numel() // RANKS) for parameter in group] for group in groups]
        self.fp32_partitioned_groups_flat = [torch.full((sum(size),), -1.0) for size in sizes]
        self.fp16_partitioned_groups_flat = [torch.zeros(sum(size), dtype=torch.bfloat16) for size in sizes]
        self.fp16_partitioned_groups = [[torch.zeros(one, dtype=torch.bfloat16) for one in size] for size in sizes]
        self.optimizer = torch.optim.AdamW(self.fp32_partitioned_groups_flat, lr=1.0)

    def unflatten(self, flat: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(flat.split([part.numel() for part in parts]))

    def _load_global_state_stage3(self, saved: dict[str, Any]) -> None:
        self.loss_scale = saved["loss_scaler"]

    def _load_universal_checkpoint(self, folder: str, *args: Any) -> None:
        raise AssertionError("DeepSpeed's own, which fills the first sub-group alone")


def save(folder: Path, module: torch.nn.Module) -> None:
    state = {"state": {0: {"step": 7}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    for at, (name, parameter) in enumerate(module.named_parameters()):
        (folder / "zero" / name).mkdir(parents=True)
        for key, offset in (("fp32", 0), ("exp_avg", 100), ("exp_avg_sq", 200)):
            values = torch.arange(parameter.numel(), dtype=torch.float32).view_as(parameter) + offset + 10 * at
            torch.save(values, folder / "zero" / name / f"{key}.pt")
    torch.save({"loss_scaler": 64.0, "optimizer_state_dict": state}, folder / "zero" / "optimizer_state.pt")


@pytest.mark.parametrize(
    ("rank", "masters", "moments"),
    [
        (0, [[0, 1, 2, 10], [20, 21]], [[100, 101, 102, 110], [120, 121]]),
        (1, [[3, 4, 5, 11], [22, 0]], [[103, 104, 105, 111], [122, 0]]),  # the last part is filled up
    ],
)
def test_each_rank_takes_its_part_of_every_sub_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, masters: list[list[float]], moments: list[list[float]]
) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: RANKS)
    shapes = {"a": (2, 3), "b": (2,), "c": (3,)}
    module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})
    save(tmp_path, module)
    optimizer = Stage3([[module["a"], module["b"]], [module["c"]]])
    with every_sub_group(SimpleNamespace(module=module, optimizer=optimizer)):
        optimizer._load_universal_checkpoint(str(tmp_path), True, False, [])
    assert [flat.tolist() for flat in optimizer.fp32_partitioned_groups_flat] == masters
    assert [[part.tolist() for part in group] for group in optimizer.fp16_partitioned_groups] == [
        [masters[0][:3], masters[0][3:]],
        [masters[1]],
    ]
    states = [optimizer.optimizer.state[flat] for flat in optimizer.fp32_partitioned_groups_flat]
    assert [state["step"] for state in states] == [7, 7]
    assert [state["exp_avg"].tolist() for state in states] == moments
    assert [state["exp_avg_sq"].numel() for state in states] == [4, 2]
    assert optimizer.loss_scale == 64.0
    assert [(group["lr"], group["params"]) for group in optimizer.optimizer.param_groups] == [(0.5, [])]
    with pytest.raises(AssertionError, match="DeepSpeed's own"):
        optimizer._load_universal_checkpoint(str(tmp_path))
