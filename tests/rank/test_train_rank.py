"""A rank of real training: the script has its own end, and its parent hears of it."""

import json
import os
import shutil
import textwrap
import threading
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.problem.job import Script
from autotune.rank.train_rank import TrainRank
from autotune.util.linux import NOTICES, has_signal_handler
from tests.conftest import make_candidate, make_job, wait_until
from tests.rank.conftest import Parent, Rank, make_spec
from tests.rank.test_checkpoints_trainer import checkpoint, own_part
from tests.rank.test_script_rank import CONFIG, LOOP


def start(parent: Parent, folder: Path, text: str, *, cold: bool = False, begun: Sequence[str] = ()) -> Rank:
    script, own = folder / "train.py", folder / "own"
    own.mkdir()
    script.write_text(textwrap.dedent(text))
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    job = replace(make_job(1), script=Script((str(script), str(folder / "ds.json")), str(folder)))
    knobs = make_candidate(1, 4, 1).as_dict
    spec = make_spec(folder, job, candidate=knobs, folder=str(own), earlier={}, begun=[*begun], bad=[], convert=False)
    (rank,) = parent.start("autotune.rank.train_rank", spec, cold=cold)
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
    torch.distributed.init_process_group("gloo")
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


@pytest.mark.few(1)
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


@pytest.mark.main_path
@pytest.mark.slow
def test_a_loaded_checkpoint_is_told(parent: Parent, tmp_path: Path) -> None:
    text = LOOP.format(steps=2) + f"engine.save_checkpoint({str(tmp_path / 'out')!r})\n    "
    text += f"engine.load_checkpoint({str(tmp_path / 'out')!r})\n"
    rank = start(parent, tmp_path, text)
    told = rank.wait_for("resumed")
    assert "global_step2" in told["path"]
    assert told["written"] == os.stat(told["path"]).st_mtime_ns
    assert rank.wait_for("bye")["code"] == 0
    rank.exit_status()


# As Hugging Face's examples were until transformers 5.
EXAMPLE = """
    from dataclasses import dataclass
    from pathlib import Path
    from transformers import TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    @dataclass
    class Arguments(TrainingArguments):
        overwrite_output_dir: bool = False

    arguments, found = Arguments(output_dir={out!r}, use_cpu=True), None
    if Path(arguments.output_dir).is_dir() and not arguments.overwrite_output_dir:
        found = get_last_checkpoint(arguments.output_dir)
        if found is None and any(Path(arguments.output_dir).iterdir()):
            raise ValueError("Output directory already exists and is not empty.")
    Path("found").write_text(str(found))
    """


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("left", "begun", "found"),
    [
        ("runs", True, "None"),
        ("runs", False, None),
        ("checkpoint-5", True, "checkpoint-5"),
        ("checkpoint-5", False, "checkpoint-5"),
    ],
)
def test_what_an_attempt_has_left_before_its_first_save_does_not_end_the_next(
    parent: Parent, tmp_path: Path, left: str, begun: bool, found: str | None
) -> None:
    out = tmp_path / "out"
    (out / left).mkdir(parents=True)
    rank = start(parent, tmp_path, EXAMPLE.format(out=str(out)), begun=[str(out)] * begun)
    assert rank.exit_status() == (0 if found else 1)
    assert [message["folder"] for message in rank.heard if message["type"] == "output"] == [str(out)]
    if found:
        assert (tmp_path / "found").read_text().endswith(found)


@pytest.mark.main_path
@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["latest", pytest.param("both", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_gives_way_to_an_older_one(parent: Parent, tmp_path: Path, damaged: str) -> None:
    """As a rank leaves it that is killed in the midst of a save, on a machine that loses its power."""
    out, steps = tmp_path / "out", LOOP.format(steps=2)
    text = steps + f"engine.save_checkpoint({str(out)!r}, tag='older')\n    "
    text += f"engine.save_checkpoint({str(out)!r}, tag='newer')\n"
    start(parent, tmp_path, text).exit_status()
    for tag in ("newer",) if damaged == "latest" else ("older", "newer"):
        for file in (out / tag).glob("*_states.pt"):
            file.write_bytes(file.read_bytes()[:-100])
    shutil.rmtree(tmp_path / "own")
    (tmp_path / "store").unlink(missing_ok=True)
    rank = start(parent, tmp_path, LOOP.format(steps=0) + f"engine.load_checkpoint({str(out)!r})\n")
    if damaged == "both":
        assert rank.exit_status() == 1
        assert rank.heard[-1]["unloaded"] == str(out / "newer")
        return
    assert "out/older/" in rank.wait_for("resumed")["path"]
    assert any("newer is not whole: older" in message.get("text", "") for message in rank.heard)
    assert rank.wait_for("bye")["code"] == 0
    rank.exit_status()


NOTIFIED = """
    import pathlib, signal, sys, time
    folder = pathlib.Path({folder!r})
    assert signal.getsignal(signal.SIGUSR1) is signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    caught = []
    def wait(name):
        (folder / name).touch()
        while not (folder / f"after {{name}}").exists():
            time.sleep(0.01)
    wait("not caught")
    signal.signal(signal.SIGUSR1, lambda number, frame: caught.append(number))
    signal.signal(signal.SIGUSR2, lambda number, frame: caught.append(number))
    wait("caught")
    sys.exit(len(caught))
    """


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.slow
def test_a_signal_that_reaches_a_rank_itself_ends_it_not(parent: Parent, tmp_path: Path, cold: bool) -> None:
    """`scancel --signal=USR1` reaches every process of the step. Whether a script catches it is known as before."""
    rank = start(parent, tmp_path, NOTIFIED.format(folder=str(tmp_path)), cold=cold)
    for name in ("not caught", "caught"):
        wait_until((tmp_path / name).exists, name)
        for number in NOTICES:
            assert has_signal_handler(rank.hello["pid"], number) is (name == "caught")
            os.kill(rank.hello["pid"], number)
        (tmp_path / f"after {name}").touch()
    assert rank.exit_status() == 2


HANDLED = """
    import sys
    import torch
    try:
        torch.empty(1 << 55)
    except {what}
    {after}
    """


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "what",
    [
        "Exception: sys.exit(1)",
        "Exception as error: raise ValueError('said otherwise') from error",
        "Exception: sys.exit('out of luck')",
    ],
)
def test_memory_that_ran_out_is_why_a_program_has_ended_itself(parent: Parent, tmp_path: Path, what: str) -> None:
    """As Hydra ends after any error, and many a script that logs it."""
    text = HANDLED.format(what=what, after="")
    if "ValueError" in what:
        text = "try:\n" + textwrap.indent(textwrap.dedent(text), "    ") + "except ValueError: raise SystemExit(3)\n"
    rank = start(parent, tmp_path, text)
    assert rank.exit_status() == 13
    assert "allocate memory" in rank.heard[-1]["text"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("what", "status"), [("Exception: sys.exit(0)", 0), ("Exception: pass", 4)])
def test_memory_that_ran_out_and_was_lived_with_is_not(parent: Parent, tmp_path: Path, what: str, status: int) -> None:
    rank = start(parent, tmp_path, HANDLED.format(what=what, after=f"sys.exit({status})"))
    assert rank.wait_for("bye")["code"] == status
    assert rank.exit_status() == status


# -- what a call of Trainer's `train` goes on from -----------------------------------------------------------------------


def rank_of_two(number: int, meet: threading.Barrier, said: dict[int, object]) -> TrainRank:
    """A rank of two machines, one on each, whose group is two threads of this process."""

    def all_gather_object(found: list[object], mine: object) -> None:
        said[number] = mine
        meet.wait(timeout=60)
        found[:] = [said[0], said[1]]
        meet.wait(timeout=60)

    rank = TrainRank.__new__(TrainRank)
    rank.number, rank.world, rank.local, rank.spec = number, 2, 0, {"nodes": 2, "earlier": {}, "bad": []}
    rank.channel, rank._ledgers, rank.written = Told(), {}, []
    rank.torch = types.SimpleNamespace(distributed=types.SimpleNamespace(all_gather_object=all_gather_object))
    return rank


class Told(list):
    """The parent's end, as far as it is told."""

    def send(self, kind: str, **fields: object) -> None:
        self.append((kind, fields))


def resumed(
    folder: Path, given: object = None, *, steps: tuple[tuple[int, ...], ...], started: bool = True
) -> tuple[dict, list]:
    """What both ranks go on from, after each has saved these steps on a disk of its own; and what the first has told.

    Args:
        started: whether an earlier attempt of this launch has told of the folder.
    """
    meet, said, found = threading.Barrier(2), {}, {}
    ranks = [rank_of_two(number, meet, said) for number in range(2)]

    def ask(number: int) -> None:
        disk = folder / str(number)
        disk.mkdir(exist_ok=True)
        ranks[number].spec["earlier"] = {str(disk): {"found": {}, "last": 0}} if started else {}
        found[number] = ranks[number]._resumed(disk, str(disk / given) if isinstance(given, str) else given)

    for number in range(2):
        for step in steps[number]:
            own_part(checkpoint(folder / str(number), step, ranks=0), number)
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return found, ranks[0].channel


@pytest.mark.parametrize(
    ("first", "second", "newest"),
    [((10, 20), (10, 20), 20), ((10, 20), (10,), 10), ((10, 20), (15,), None), ((10,), (), None)],
)
def test_machines_with_disks_of_their_own_agree_on_one_that_all_have(
    tmp_path: Path, first: tuple[int, ...], second: tuple[int, ...], newest: int | None
) -> None:
    for step in (30, 40):  # what only others have saved there is no part of one's own
        own_part(checkpoint(tmp_path / "0", step, ranks=0), 1)
    found, _ = resumed(tmp_path, steps=(first, second))
    assert found == {rank: newest and str(tmp_path / str(rank) / f"checkpoint-{newest}") for rank in range(2)}


def test_what_a_script_names_and_is_not_whole_for_all_is_replaced_for_all(tmp_path: Path) -> None:
    (tmp_path / "0" / "checkpoint-30").mkdir(parents=True)
    (tmp_path / "1" / "checkpoint-30").mkdir(parents=True)
    found, told = resumed(tmp_path, True, steps=((), ()))
    assert found == {0: None, 1: None}
    assert ("note", {"text": f"{tmp_path / '0' / 'checkpoint-30'} is not whole: training begins anew"}) in told


def test_a_checkpoint_of_an_earlier_launch_is_said_where_the_script_does_not_resume(tmp_path: Path) -> None:
    found, told = resumed(tmp_path, steps=((8, 24), (8, 24)), started=False)
    assert found == {0: None, 1: None}, "as the script says"
    (line,) = [message["text"] for kind, message in told if kind == "note"]
    assert line.startswith(
        f"{tmp_path / '0' / 'checkpoint-24'} is of an earlier launch, and the script does not resume by itself"
    )
    assert "`trainer.train(resume_from_checkpoint=True)`" in line


@pytest.mark.parametrize(("given", "steps"), [(True, (8,)), (None, ())])
def test_a_script_that_resumes_and_an_empty_folder_need_no_line(
    tmp_path: Path, given: object, steps: tuple[int, ...]
) -> None:
    _, told = resumed(tmp_path, given, steps=(steps, steps), started=False)
    assert not [kind for kind, _ in told if kind == "note"]
