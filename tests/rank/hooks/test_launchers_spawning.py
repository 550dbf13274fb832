"""Scripts that start their ranks by a function: it is called in this process, where it would be ranks that it starts."""

import os
import sys
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch.multiprocessing
from accelerate.state import AcceleratorState

from autotune.errors import Unusable
from autotune.rank.hooks import launchers
from autotune.rank.hooks.base import Context

calls: list[Any] = []


def worker(*arguments: Any) -> str:
    calls.append((os.getpid(), *arguments))
    return "done"


def trainer(number: int, context: Context, code: int | None = 0) -> None:
    context.engine = object()
    sys.exit(code)


def one_file(number: int, folder: str) -> None:
    """In a process of its own."""
    with open(f"{folder}/{number}", "w") as file:
        file.write(str(os.getpid()))


@pytest.fixture
def make(context: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Context]:
    """The second of two ranks of a machine, hooked."""
    calls.clear()
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    def made(**script: Any) -> Context:
        found, _ = context(**script)
        launchers.install_spawning(found)
        return found

    return made


WAYS: dict[str, Callable[..., Any]] = {
    "spawn": lambda n: torch.multiprocessing.spawn(worker, (7, 8), n),
    "spawn by name": lambda n: torch.multiprocessing.spawn(fn=worker, args=(7, 8), nprocs=n, join=True, daemon=True),
    "start_processes": lambda n: torch.multiprocessing.start_processes(worker, (7, 8), n, start_method="fork"),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_this_rank_is_one_of_those_that_are_started(make: Callable[..., Context], way: str) -> None:
    made = make()
    assert WAYS[way](2) is None
    assert calls == [(os.getpid(), 1, 7, 8)]
    assert made.relaunched == 0, "no engine was made: these were no ranks"


def test_ranks_that_are_not_joined_at_once_have_ended_too(make: Callable[..., Context]) -> None:
    make()
    started = torch.multiprocessing.spawn(worker, nprocs=2, join=False)
    assert calls == [(os.getpid(), 1)]
    assert started.join(timeout=1)
    assert started.pids() == list(started.processes) == []


def test_a_notebooks_launcher(make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    AcceleratorState._reset_state(reset_partial_state=True)
    make()
    seen = []

    def train(*arguments: Any) -> None:
        seen.append(os.environ["MASTER_PORT"])
        worker(*arguments)

    accelerate.notebook_launcher(train, (5,), num_processes=2, use_port="29511")
    assert calls == [(os.getpid(), 5)]
    assert (seen, os.environ["MASTER_PORT"]) == (["29511"], "1"), "its environment, for as long as it runs"
    with pytest.raises(Unusable, match="starts 3 processes by itself \\(accelerate's notebook_launcher\\)"):
        accelerate.notebook_launcher(train, (5,), num_processes=3)


def test_only_the_first_rank_of_a_machine_goes_on_as_the_one_that_started_them(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    with pytest.raises(SystemExit) as ended:
        torch.multiprocessing.spawn(trainer, (made,), nprocs=2)
    assert (ended.value.code, made.relaunched) == (0, 2)
    first = make()
    monkeypatch.setenv("LOCAL_RANK", "0")
    torch.multiprocessing.spawn(trainer, (first,), nprocs=2)
    assert first.relaunched == 2


def test_a_failing_rank_fails(make: Callable[..., Context]) -> None:
    made = make()
    with pytest.raises(SystemExit) as ended:
        torch.multiprocessing.spawn(trainer, (made, 3), nprocs=2)
    assert ended.value.code == 3
    made.engine, made.relaunched = None, 0
    with pytest.raises(TypeError, match="trainer"):
        torch.multiprocessing.spawn(trainer, nprocs=2)


@pytest.mark.parametrize("started", [1, 3])
def test_another_number_is_refused(make: Callable[..., Context], started: int) -> None:
    make()
    with pytest.raises(Unusable) as refused:
        torch.multiprocessing.spawn(worker, nprocs=started)
    assert str(refused.value) == (
        f"train.py starts {started} processes by itself (torch.multiprocessing), and here are 2 ranks: give --gpus {started}, "
        "or let it start 2"
    )
    assert calls == []


def test_one_for_each_gpu_is_as_many_as_there_are(
    make: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make()
    made.device = "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    torch.multiprocessing.spawn(worker, nprocs=4)
    assert calls == [(os.getpid(), 1)]
    with pytest.raises(Unusable, match="starts 8 processes"):
        torch.multiprocessing.spawn(worker, nprocs=8)


def processes_of(folder: Any) -> set[str]:
    folder.mkdir()
    torch.multiprocessing.start_processes(one_file, (str(folder),), nprocs=3, start_method="fork")
    return {path.name for path in folder.iterdir() if path.read_text() != str(os.getpid())}


def test_where_none_is_started_nothing_is_called(make: Callable[..., Context]) -> None:
    """One a GPU, on a machine without."""
    made = make()
    torch.multiprocessing.spawn(worker, nprocs=0)
    assert (calls, made.relaunched) == ([], 0)


def test_what_ranks_start_is_their_own_affair(make: Callable[..., Context], tmp_path: Any) -> None:
    made = make()
    made.engine = object()
    assert processes_of(tmp_path / "trains") == {"0", "1", "2"}
    made.engine, made.relaunched = None, 2
    assert processes_of(tmp_path / "started") == {"0", "1", "2"}
    made.patches.close()
    make(launcher=("torchrun", "--nproc-per-node", "2"))
    assert processes_of(tmp_path / "launched") == {"0", "1", "2"}, "its ranks are the launcher's"
