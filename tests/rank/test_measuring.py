"""Which saves certify a candidate; tests/rank/test_model.py and test_script.py save real engines."""

from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.problem.outcome import Phase
from autotune.rank import measuring

PARAMETERS = 1000


class Asked:
    """Stands for a rank without a process: what `certify_save` asks of one."""

    world = 1
    phase = Phase.STEP

    def __init__(self) -> None:
        self.sent: dict[str, Any] = {}
        self.channel = SimpleNamespace(send=lambda kind, **fields: self.sent.update(fields))
        self.own_device = SimpleNamespace(synchronize=lambda: None, peaks=lambda: {"data_bytes": 1})


@pytest.mark.parametrize(
    ("stage", "gathers", "free_bytes", "saves"),
    [
        (2, False, 8 * PARAMETERS + 1, True),
        (2, False, 8 * PARAMETERS, False),
        (3, True, 10**9, True),
        (3, False, 10**9, False),
    ],
)
def test_a_save_needs_gathered_weights_and_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, gathers: bool, free_bytes: int, saves: bool
) -> None:
    usage = namedtuple("usage", "free")(free_bytes)
    monkeypatch.setattr(measuring.shutil, "disk_usage", lambda folder: usage)
    engine = SimpleNamespace(
        module=torch.nn.Linear(PARAMETERS, 1, bias=False),
        zero_optimization_stage=lambda: stage,
        zero_gather_16bit_weights_on_model_save=lambda: gathers,
    )
    saved_into: list[Path] = []
    rank: Any = Asked()

    def save(folder: str) -> bool:
        (Path(folder) / "weights").touch()
        saved_into.append(Path(folder))
        return True

    measuring.certify_save(rank, engine, save, {"folder": str(tmp_path)})
    assert rank.sent == {"certified": True, "saved": saves, "data_bytes": 1}
    assert rank.phase is Phase.SAVE
    assert [folder.parent for folder in saved_into] == [tmp_path] * saves
    assert list(tmp_path.iterdir()) == []
