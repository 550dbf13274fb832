"""A rank of real training: the script has its own end, and its parent hears of it."""

import json
import os
import textwrap
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.problem.job import Script
from autotune.rank.train import TrainRank, checkpoints, newest_checkpoint
from tests.conftest import make_candidate, make_job
from tests.rank.conftest import Parent, Rank, make_spec
from tests.rank.test_script import CONFIG, LOOP


def start(parent: Parent, folder: Path, text: str, *, cold: bool = False) -> Rank:
    script, own = folder / "train.py", folder / "own"
    own.mkdir()
    script.write_text(textwrap.dedent(text))
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    job = replace(make_job(1), script=Script((str(script), str(folder / "ds.json")), str(folder)))
    knobs = make_candidate(1, 4, 1).as_dict
    spec = make_spec(folder, job, candidate=knobs, folder=str(own), earlier={}, convert=False)
    (rank,) = parent.start("autotune.rank.train", spec, cold=cold)
    return rank


def test_a_training_is_told_step_by_step(parent: Parent, tmp_path: Path) -> None:
    rank = start(parent, tmp_path, LOOP.format(steps=5))
    bye = rank.wait_for("bye")
    assert (bye["code"], bye["steps"]) == (0, 5)
    assert rank.exit_status() == 0
    assert [message["phase"] for message in rank.heard if message["type"] == "phase"] == ["start", "init", "forward"]
    assert [message["steps"] for message in rank.heard if message["type"] == "progress"][:3] == [1, 2, 3]


# What an interpreter does at its end: waits for threads, then runs what atexit holds (the process group is still open
# there).
ENDING = """
    import atexit, pathlib, sys, threading, time
    import torch.distributed
    folder = pathlib.Path({folder!r})
    late = threading.Thread(target=lambda: (time.sleep(0.5), (folder / "thread").touch()))
    late.start()
    def leaving():
        assert (folder / "thread").exists()
        assert torch.distributed.is_initialized()
        (folder / "atexit").touch()
    atexit.register(leaving)
    sys.exit({code})
    """


@pytest.mark.parametrize(
    ("cold", "code", "status"),
    [pytest.param(True, "7", 7, marks=pytest.mark.slow), (False, "7", 7), (False, "None", 0), (False, "'no luck'", 1)],
)
def test_a_script_has_its_own_end(parent: Parent, tmp_path: Path, cold: bool, code: str, status: int) -> None:
    rank = start(parent, tmp_path, ENDING.format(folder=str(tmp_path), code=code), cold=cold)
    bye = rank.wait_for("bye")
    assert (bye["code"], bye["steps"]) == (status, 0)
    assert rank.exit_status() == status
    assert (tmp_path / "atexit").exists()


def test_a_file_that_the_script_leaves_open_is_flushed(parent: Parent, tmp_path: Path) -> None:
    rank = start(parent, tmp_path, f"file = open({str(tmp_path / 'file')!r}, 'w')\nfile.write('flushed')")
    assert rank.exit_status() == 0
    assert (tmp_path / "file").read_text() == "flushed"


def test_a_failure_of_the_script_is_reported(parent: Parent, tmp_path: Path) -> None:
    rank = start(parent, tmp_path, "raise ZeroDivisionError('my own')")
    assert rank.exit_status() == 1
    assert rank.heard[-1]["type"] == "error"
    assert rank.heard[-1]["kinds"][0] == "builtins.ZeroDivisionError"
    assert rank.heard[-1]["files"][-1] == str(tmp_path / "train.py")


def test_a_script_without_deepspeed_trains_and_is_noticed(parent: Parent, tmp_path: Path) -> None:
    text = """
        import torch
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        """
    rank = start(parent, tmp_path, text)
    assert rank.wait_for("bye")["code"] == 0
    assert rank.kinds().count("strayed") == 2, "its first step may be a preparation"
    assert rank.exit_status() == 0


def test_a_loaded_checkpoint_is_told(parent: Parent, tmp_path: Path) -> None:
    text = LOOP.format(steps=2) + f"engine.save_checkpoint({str(tmp_path / 'out')!r})\n    "
    text += f"engine.load_checkpoint({str(tmp_path / 'out')!r})\n"
    rank = start(parent, tmp_path, text)
    assert "global_step2" in rank.wait_for("resumed")["path"]
    assert rank.wait_for("bye")["code"] == 0
    rank.exit_status()


# -- the newest checkpoint of Trainer's ------------------------------------------------------------------------------


def checkpoint(folder: Path, step: int, ranks: int = 2, changed: float = 100.0, latest: bool = True) -> Path:
    made = folder / f"checkpoint-{step}"
    made.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        (made / f"rng_state_{rank}.pth").touch()
    if latest:
        (made / "latest").touch()
    state = made / "trainer_state.json"
    state.write_text(json.dumps({"global_step": step}))
    os.utime(state, (changed, changed))
    return made


def test_the_newest_is_that_of_the_most_steps(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path, {}, 2) is None
    checkpoint(tmp_path, 5)
    newest = checkpoint(tmp_path, 20)
    checkpoint(tmp_path, 9)
    assert newest_checkpoint(tmp_path, {}, 2) == newest


def test_what_is_not_whole_is_no_checkpoint(tmp_path: Path) -> None:
    good = checkpoint(tmp_path, 1)
    checkpoint(tmp_path, 2, ranks=1)
    checkpoint(tmp_path, 3, latest=False)
    (checkpoint(tmp_path, 6) / "trainer_state.json").write_text('{"global_st')
    (tmp_path / "checkpoint-7").mkdir()
    assert newest_checkpoint(tmp_path, {}, 2) == good


@pytest.mark.parametrize("server_seconds", [-1e6, 0.0, 1e6], ids=["clock behind", "clock right", "clock ahead"])
def test_earlier_checkpoints_are_known_whatever_the_clocks_say(tmp_path: Path, server_seconds: float) -> None:
    checkpoint(tmp_path, 90)
    written_again = checkpoint(tmp_path, 40)
    earlier = checkpoints(tmp_path)
    assert len(earlier) == 2
    assert newest_checkpoint(tmp_path, earlier, 2) is None, "nothing of this launch"
    checkpoint(tmp_path, 40, changed=200.0 + server_seconds)
    assert newest_checkpoint(tmp_path, earlier, 2) == written_again
    newer = checkpoint(tmp_path, 60, changed=300.0 + server_seconds)
    assert newest_checkpoint(tmp_path, earlier, 2) == newer


def rank_of_two(number: int, meet: threading.Barrier, said: dict[int, set[int]]) -> TrainRank:
    """A rank of two machines, one on each, whose group is two threads of this process."""

    def all_gather_object(found: list[set[int]], mine: set[int]) -> None:
        said[number] = mine
        meet.wait(timeout=60)
        found[:] = [said[0], said[1]]

    rank = TrainRank.__new__(TrainRank)
    rank.number, rank.world, rank.spec = number, 2, {"nodes": 2}
    rank.torch = types.SimpleNamespace(distributed=types.SimpleNamespace(all_gather_object=all_gather_object))
    return rank


def own_part(disk: Path, step: int, rank: int) -> None:
    (checkpoint(disk, step, ranks=0) / f"rng_state_{rank}.pth").touch()


@pytest.mark.parametrize(
    ("first", "second", "newest"),
    [((10, 20), (10, 20), 20), ((10, 20), (10,), 10), ((10, 20), (15,), None), ((10,), (), None)],
)
def test_machines_with_disks_of_their_own_agree_on_one_that_all_have(
    tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...], newest: int | None
) -> None:
    meet, said, found = threading.Barrier(2), {}, {}
    for rank, steps in enumerate((first, second)):
        for step in steps:
            own_part(tmp_path / str(rank), step, rank)
    for step in (30, 40):  # what only others have saved there is no part of one's own
        own_part(tmp_path / "0", step, 1)

    def ask(rank: int) -> None:
        found[rank] = rank_of_two(rank, meet, said)._newest(tmp_path / str(rank), {})

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {rank: newest and tmp_path / str(rank) / f"checkpoint-{newest}" for rank in range(2)}
