"""Trainer's checkpoints in a folder: which are whole, whose they are, and which one a call of `train` goes on from."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.rank.checkpoints import (
    STATE,
    CheckpointLedger,
    CheckpointShare,
    Choice,
    TaggedFolderView,
    checkpoint_to_resume,
    instead_of_latest,
    is_cut_off,
    lacks_own_files,
    tags_in,
)

SAVED = b"PK\x03\x04" + bytes(100) + b"PK\x05\x06" + bytes(18)  # the ends of what torch.save writes


def checkpoint(folder: Path, step: int, ranks: int = 2, changed: float = 100.0, latest: bool = True) -> Path:
    made = folder / f"checkpoint-{step}"
    shards = made / f"global_step{step}"
    shards.mkdir(parents=True, exist_ok=True)
    (shards / "mp_rank_00_model_states.pt").write_bytes(SAVED)
    for rank in range(ranks):
        own_part(made, rank)
    if latest:
        (made / "latest").write_text(shards.name)
    state = made / STATE
    state.write_text(json.dumps({"global_step": step}))
    os.utime(state, (changed, changed))
    return made


def own_part(made: Path, rank: int) -> None:
    """A rank's own files of a checkpoint."""
    (made / f"rng_state_{rank}.pth").write_bytes(SAVED)
    (next(made.glob("global_step*")) / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(SAVED)


class Attempts:
    """One launch's ranks, of which the parent tells the next what the last have told it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, None
        self.bad = list[str]()  # what the parent knows cannot be loaded
        self.start()

    def start(self) -> None:
        self.ledger = CheckpointLedger.of(self.folder, json.loads(json.dumps(self.told)))

    def train(self, given: Any = None) -> Choice | None:
        """The script calls `train`."""
        self.ledger.begin()
        self.told = self.ledger.to_json()
        seen = [self.ledger.seen(CheckpointShare(rank, 2, rank), given, self.bad) for rank in range(2)]
        return checkpoint_to_resume(seen, self.ledger.call)

    def again(self, given: Any = None) -> Choice | None:
        """It is started again, and does."""
        self.start()
        return self.train(given)


@pytest.fixture
def attempts(tmp_path: Path) -> Attempts:
    """The script has called `train` once, into an empty folder."""
    made = Attempts(tmp_path)
    assert made.train() is None
    return made


def test_the_newest_is_that_of_the_most_steps(attempts: Attempts) -> None:
    assert attempts.again() is None
    for step in (5, 20, 9):
        checkpoint(attempts.folder, step)
    assert attempts.again() == Choice(20)
    assert attempts.ledger.path(20).is_dir()


def test_what_is_not_whole_is_no_checkpoint(attempts: Attempts) -> None:
    checkpoint(attempts.folder, 1)
    checkpoint(attempts.folder, 2, ranks=1)
    checkpoint(attempts.folder, 3, latest=False)
    (checkpoint(attempts.folder, 6) / STATE).write_text('{"global_st')
    (attempts.folder / "checkpoint-7").mkdir()
    assert attempts.again() == Choice(1, 3)


@pytest.mark.parametrize("name", ["latest", "rng_state_1.pth", "*/mp_rank_00_model*", "*/zero_pp_rank_1_*"])
@pytest.mark.parametrize("how", ["cut off", "empty", "zeros", "missing"])
def test_a_damaged_one_is_not_taken(attempts: Attempts, name: str, how: str) -> None:
    """A power cut, a full disk or a lost write leaves the newest so, with its state and all its names in place."""
    checkpoint(attempts.folder, 4)
    (file,) = checkpoint(attempts.folder, 8).glob(name)
    assert attempts.again() == Choice(8)
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes({"cut off": SAVED[:-30], "empty": b"", "zeros": bytes(len(SAVED))}[how])
    missing_model = (how, name[2:4]) == ("missing", "mp")  # at stage 3 there is none
    assert attempts.again() == (Choice(8) if missing_model else Choice(4, 8))


def test_one_without_shards_is_not_taken(attempts: Attempts) -> None:
    checkpoint(attempts.folder, 4)
    for shard in checkpoint(attempts.folder, 600).glob("*/*.pt"):
        shard.unlink()
    assert attempts.again() == Choice(4, 600)
    assert attempts.again(True) == Choice(4, 600)


def test_a_damaged_one_of_before_is_not_taken_because_the_script_says_so(tmp_path: Path) -> None:
    checkpoint(tmp_path, 500)
    (file,) = checkpoint(tmp_path, 600).glob("*/zero_pp_rank_1_*")
    assert Attempts(tmp_path).train(True) is None
    file.write_bytes(SAVED[:-30])
    assert Attempts(tmp_path).train(True) == Choice(500, 600)


@pytest.mark.parametrize(
    ("names", "lacking"),
    [
        (["zero_pp_rank_0", "zero_pp_rank_2", "zero_pp_rank_3"], [1]),
        (["zero_pp_rank_0"], [1, 2, 3]),
        (["expp_rank_0"], []),  # of experts, and all ranks' own states in the model's
        (["bf16_zero_pp_rank_2", "bf16_zero_pp_rank_3"], [0, 1]),  # what the second machine has on a disk of its own
    ],
)
def test_whose_own_files_are_missing(tmp_path: Path, names: list[str], lacking: list[int]) -> None:
    for name in names:
        (tmp_path / f"{name}_mp_rank_00_optim_states.pt").write_bytes(SAVED)
    assert [rank for rank in range(4) if lacks_own_files(tmp_path, CheckpointShare(rank, 4, rank % 2))] == lacking


def test_what_torch_writes_is_whole_until_it_is_cut_off(tmp_path: Path) -> None:
    for legacy in (False, True):
        file = tmp_path / f"{legacy}.pt"
        torch.save({"weight": torch.ones(1000)}, file, _use_new_zipfile_serialization=not legacy)
        assert not is_cut_off(file)
    file = tmp_path / "False.pt"
    file.write_bytes(file.read_bytes()[:-100])
    assert is_cut_off(file)


def test_what_could_not_be_loaded_is_taken_where_there_is_no_other(attempts: Attempts) -> None:
    made = checkpoint(attempts.folder, 8)
    attempts.bad = [str(made / "global_step8")]
    assert attempts.again() == Choice(8), "whatever fails there, training does not begin anew"
    checkpoint(attempts.folder, 4)
    assert attempts.again() == Choice(4)
    assert attempts.again(True) == Choice(4)
    checkpoint(attempts.folder, 12)
    assert attempts.again() == Choice(12)


def test_one_of_before_that_could_not_be_loaded_gives_way(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, 8)
    attempts = Attempts(tmp_path)
    attempts.bad = [str(made / "global_step8")]
    assert attempts.train(True) is None
    checkpoint(tmp_path, 4)
    assert Attempts(tmp_path).train(True) is None
    attempts = Attempts(tmp_path)
    attempts.bad = [str(made / "global_step8")]
    assert attempts.train(True) == Choice(4, 8)


@pytest.mark.parametrize("server_seconds", [-1e6, 0.0, 1e6], ids=["clock behind", "clock right", "clock ahead"])
def test_older_checkpoints_are_known_whatever_the_clocks_say(tmp_path: Path, server_seconds: float) -> None:
    checkpoint(tmp_path, 90)
    checkpoint(tmp_path, 40)
    attempts = Attempts(tmp_path)
    assert attempts.train() is None
    assert attempts.again() is None, "nothing of this launch"
    checkpoint(tmp_path, 40, changed=200.0 + server_seconds)
    assert attempts.again() == Choice(40), "it was written again"
    checkpoint(tmp_path, 60, changed=300.0 + server_seconds)
    assert attempts.again() == Choice(60)


# -- what the script says --------------------------------------------------------------------------------------------


def half_written(folder: Path, step: int) -> Path:
    """As a rank leaves it that dies in the midst of saving: the state is written last."""
    made = checkpoint(folder, step)
    (made / STATE).unlink()
    return made


@pytest.mark.parametrize("how", ["True", "path", "relative path"])
def test_a_half_written_checkpoint_is_not_taken_because_the_script_says_so(
    attempts: Attempts, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.chdir(attempts.folder)
    made = half_written(attempts.folder, 50)
    given = {"True": True, "path": str(made), "relative path": made.name}[how]
    assert attempts.again(given) == Choice(None, 50), "there is none"
    assert attempts.again(None) is None, "the script says nothing of it"
    checkpoint(attempts.folder, 40)
    assert attempts.again(given) == Choice(40)


def test_one_of_before_takes_its_place(tmp_path: Path) -> None:
    checkpoint(tmp_path, 500, ranks=0)  # of a launch with other ranks
    attempts = Attempts(tmp_path)
    assert attempts.train(True) is None, "it is what the script says"
    half_written(tmp_path, 600)
    assert attempts.again(True) == Choice(500, 600)
    assert attempts.again(str(tmp_path / "checkpoint-500")) is None
    assert Attempts(tmp_path).train(True) == Choice(500, 600), "a launch that comes after it"


def test_what_lies_elsewhere_is_the_scripts_own_affair(
    attempts: Attempts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = half_written(tmp_path_factory.mktemp("elsewhere"), 50)
    missing = attempts.folder / "checkpoint-7"
    for given in (str(elsewhere), elsewhere, str(missing), "meta/llama", False, None, True):
        assert attempts.again(given) is None


def test_a_newer_one_that_the_script_says_is_taken(attempts: Attempts) -> None:
    """A script that calls `train` again upon an error, and goes on from whatever there is."""
    checkpoint(attempts.folder, 10)
    assert attempts.train(True) is None
    checkpoint(attempts.folder, 20, changed=200.0)
    assert attempts.again(True) is None
    assert attempts.again(None) == Choice(10), "the first call's own"


# -- several calls ---------------------------------------------------------------------------------------------------


def test_a_second_training_does_not_take_the_firsts_checkpoints(attempts: Attempts) -> None:
    checkpoint(attempts.folder, 50)
    checkpoint(attempts.folder, 100)
    assert attempts.train() is None, "the second call"
    assert attempts.again() == Choice(100), "the first one is over"
    assert attempts.train() is None, "the second has saved nothing yet"
    checkpoint(attempts.folder, 50, changed=200.0)
    assert attempts.again() == Choice(100)
    assert attempts.train() == Choice(50)


def test_who_has_written_what_is_known_whenever_an_attempt_ends(attempts: Attempts) -> None:
    checkpoint(attempts.folder, 100)
    assert attempts.train() is None
    checkpoint(attempts.folder, 50, changed=200.0)  # the second's, of which nobody has told yet
    assert attempts.again() == Choice(100)  # and it dies once more before the second begins
    assert attempts.again() == Choice(100)
    assert attempts.train() == Choice(50)
    checkpoint(attempts.folder, 100, changed=300.0)  # the second's takes the place of the first's
    assert attempts.again() is None, "all of the first's are gone: it begins anew"
    checkpoint(attempts.folder, 10, changed=400.0)
    assert attempts.train() == Choice(100)


# -- scripts that save by themselves ---------------------------------------------------------------------------------


def test_a_damaged_latest_gives_way_to_the_newest_that_is_whole_for_all(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        made = checkpoint(tmp_path, step) / f"global_step{step}"
        made.rename(tmp_path / made.name)
        for file in (tmp_path / made.name).iterdir():
            os.utime(file, (step, step))
    (tmp_path / "latest").write_text("global_step12")

    def instead(bad: set[str] = frozenset()) -> str | None:
        return instead_of_latest([tags_in(tmp_path, CheckpointShare(rank, 2, rank)) for rank in range(2)], bad)

    assert instead() is None
    assert instead({"global_step12"}) == "global_step8"
    (tmp_path / "global_step12" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(SAVED[:-30])
    assert instead() == "global_step8"
    (tmp_path / "global_step8" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    assert instead() == "global_step4"
    assert instead({"global_step4"}) is None, "nothing is better than what the script says"
    assert instead_of_latest([TaggedFolderView(None, {}), TaggedFolderView(None, {})], set()) is None
