"""What certifies a candidate beside its steps; tests/rank/test_model_rank.py and test_script.py save and load real engines."""

import os
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.problem.outcome import Phase
from autotune.rank import measure

PARAMETERS = 1000


class Asked:
    """Stands for a rank without a process: what `measuring` asks of one."""

    phase = Phase.STEP

    def __init__(self, **spec: Any) -> None:
        self.spec = spec
        self.sent: list[dict[str, Any]] = []
        self.channel = SimpleNamespace(send=lambda kind, **fields: self.sent.append({"type": kind, **fields}))
        nothing = lambda: None  # noqa: E731
        self.own_device = SimpleNamespace(
            synchronize=nothing, note=nothing, reset_peaks=nothing, peaks=lambda: {"data_bytes": 1}
        )

    def reduce(self, values: list[float], operation: str) -> list[float]:
        return values

    def enter(self, phase: Phase) -> None:
        self.phase = phase

    def fault(self, phase: Phase) -> None:
        pass


@pytest.mark.parametrize("saves", [True, False])
def test_the_gathered_weights_go_nowhere(saves: bool) -> None:
    rank: Any = Asked()
    into: list[str] = []

    def save(folder: str, name: str) -> bool:
        into.append(f"{folder}/{name}")
        return saves

    measure.certify_save(rank, save)
    assert rank.sent == [{"type": "measured", "certified": True, "saved": saves, "data_bytes": 1}]
    assert rank.phase is Phase.SAVE
    assert into == [os.devnull]


@pytest.mark.parametrize(("free_bytes", "room"), [(17_601 * PARAMETERS, True), (17_600 * PARAMETERS, False)])
def test_a_checkpoint_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, room: bool) -> None:
    usage = namedtuple("usage", "free")(free_bytes / 1000)
    monkeypatch.setattr(measure.shutil, "disk_usage", lambda folder: usage)
    engine = SimpleNamespace(module=torch.nn.Linear(PARAMETERS, 1, bias=False))
    rank: Any = Asked()
    saved_into: list[str] = []
    measure.checkpoint(rank, engine, saved_into.append, {"folder": str(tmp_path)})
    assert rank.sent == [{"type": "measured", "checkpointed": room}]
    assert saved_into == [str(tmp_path)] * room


def test_frozen_parameters_take_less_of_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")(4.5 * PARAMETERS)
    monkeypatch.setattr(measure.shutil, "disk_usage", lambda folder: usage)
    module = torch.nn.Linear(PARAMETERS, 1, bias=False).requires_grad_(False)
    rank: Any = Asked()
    measure.checkpoint(rank, SimpleNamespace(module=module), lambda folder: None, {"folder": str(tmp_path)})
    assert rank.sent == [{"type": "measured", "checkpointed": True}]


def test_loading_is_a_phase_and_what_it_took_is_told() -> None:
    loaded: list[str] = []

    def load_checkpoint(folder: str) -> tuple[str | None, dict[str, Any]]:
        loaded.append(folder)
        return (None if folder == "empty" else folder), {}

    fresh: Any = Asked()
    measure.load(fresh, load_checkpoint)
    assert (fresh.sent, fresh.phase) == ([], Phase.STEP), "nothing to load"
    resumed: Any = Asked(resume="folder")
    measure.load(resumed, load_checkpoint)
    assert resumed.sent == [{"type": "loaded", "data_bytes": 1}]
    assert resumed.phase is Phase.LOAD
    with pytest.raises(RuntimeError, match="nothing to load"):
        measure.load(Asked(resume="empty"), load_checkpoint)  # type: ignore[arg-type]
    assert loaded == ["folder", "empty"]
