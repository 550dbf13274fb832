"""A build that was killed leaves its lock; nobody may wait for it."""

import os
import signal
import struct
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from autotune.errors import UserError
from autotune.util.linux import boot_id
from autotune.workers import jit_ops
from autotune.workers.jit_ops import wait_for_lock


def make_lock(folder: Path, age_seconds: float) -> Path:
    lock = folder / "lock"
    lock.touch()
    old = time.time() - age_seconds
    os.utime(lock, (old, old))
    return lock


def test_a_killed_builds_lock_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = make_lock(tmp_path, age_seconds=3600)
    wait_for_lock(lock)
    assert not lock.exists()
    assert str(lock) in capsys.readouterr().out


def test_no_lock_no_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(jit_ops.time, "sleep", naps.append)
    wait_for_lock(tmp_path / "lock")
    assert naps == []


def test_a_held_lock_is_waited_for(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, age_seconds=3600)
    with lock.open():
        waiter = threading.Thread(target=wait_for_lock, args=[lock], daemon=True)
        waiter.start()
        waiter.join(1.0)
        assert waiter.is_alive()
        assert lock.exists()
        lock.unlink()  # as the builder does when it is done
        waiter.join(60.0)
    assert not waiter.is_alive()


def test_a_folder_that_changes_is_another_hosts_build(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, age_seconds=3600)
    built = tmp_path / "adam.o"
    built.touch()
    waiter = threading.Thread(target=wait_for_lock, args=[lock], daemon=True)
    waiter.start()
    waiter.join(0.7)
    assert lock.exists(), "something in its folder is new"
    os.utime(built, (0, 0))
    waiter.join(60.0)
    assert not lock.exists()


@pytest.mark.parametrize(("mark", "ours"), [("", True), (boot_id(), True), ("elsewhere", False)])
def test_only_this_machines_build_is_known_to_be_dead(tmp_path: Path, mark: str, ours: bool) -> None:
    (tmp_path / "adam").mkdir()
    (tmp_path / ".adam.building").write_text(mark)
    lock, done = make_lock(tmp_path / "adam", age_seconds=0), threading.Event()

    def end() -> None:  # the other machine's build
        done.set()
        lock.unlink()

    if not ours:
        threading.Timer(0.5, end).start()
    with jit_ops.hold_build_lock(tmp_path, "adam") as going_on:
        assert going_on is ours
        assert done.is_set() is not ours, "it is waited for"
        assert not lock.exists()
        assert (tmp_path / ".adam.building").read_text() == (boot_id() if ours else mark)
    assert (tmp_path / ".adam.building").exists() is not ours, "whose mark that is"


def test_a_mark_of_a_boot_that_is_gone_goes(tmp_path: Path) -> None:
    """The power was cut amid a build: the next is waited for as another machine's would be, and no later one."""
    (tmp_path / "adam").mkdir()
    mark = tmp_path / ".adam.building"
    mark.write_text("an earlier boot")
    os.utime(mark, (0, 0))
    with jit_ops.hold_build_lock(tmp_path, "adam") as going_on:
        assert not going_on
        assert mark.read_text() == boot_id()
    assert not mark.exists()


def elf(reaches: int) -> bytes:
    """A header whose one section header ends there (`man 5 elf`)."""
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    struct.pack_into("=Q", header, 0x28, reaches - 64)
    struct.pack_into("=HH", header, 0x3A, 64, 1)
    return bytes(header)


@pytest.mark.parametrize(
    ("content", "stays"),
    [
        (b"", False),
        (b"\0" * 4096, False),
        (elf(4096), False),
        (elf(4096) + b"x" * 4032, True),
        (b"BC\xc0\xde" + b"x" * 100, True),  # a compiler's own
    ],
)
def test_what_a_power_cut_left_of_a_compiled_file_is_compiled_again(
    tmp_path: Path, content: bytes, stays: bool
) -> None:
    place = tmp_path / "adam"
    place.mkdir()
    for name in ("adam.so", "adam.o"):
        (place / name).write_bytes(content)
    jit_ops.note_built("AdamBuilder", "adam", 1.0, tmp_path)
    assert jit_ops.is_built("AdamBuilder", tmp_path) is stays
    with jit_ops.hold_build_lock(tmp_path, "adam"):
        assert [(place / name).exists() for name in ("adam.so", "adam.o")] == [stays, stays]


def test_a_real_library_is_whole(tmp_path: Path) -> None:
    (tmp_path / "adam").mkdir()
    copy = tmp_path / "adam" / "adam.so"
    copy.write_bytes(next(Path(psutil.__file__).parent.glob("*.so")).read_bytes())
    jit_ops.remove_incomplete(copy.parent)
    assert copy.exists()
    os.truncate(copy, copy.stat().st_size // 2)
    jit_ops.remove_incomplete(copy.parent, 60.0)
    assert copy.exists(), "it may be another's that is just being written"
    jit_ops.remove_incomplete(copy.parent)
    assert not copy.exists()


@pytest.mark.parametrize("linked", ["adam", "adam/build.ninja", ".adam.building", ".adam.lock"])
def test_no_build_writes_through_a_link_that_a_trial_left(tmp_path: Path, linked: str) -> None:
    """A trial may write to this cache. Its link would lead a later build, which no sandbox confines, to any file."""
    folder, mine = tmp_path / "extensions", tmp_path / "mine"
    (mine if linked == "adam" else folder / "adam").mkdir(parents=True)
    thesis = mine / "lock" if linked == "adam" else mine
    thesis.write_text("mine")
    os.utime(thesis, (0, 0))
    folder.mkdir(exist_ok=True)
    (folder / linked).symlink_to(mine)
    with pytest.raises(UserError, match="is a link out of"), jit_ops.hold_build_lock(folder, "adam"):
        pass
    assert thesis.read_text() == "mine"
    (folder / linked).unlink()
    (folder / "adam").mkdir(exist_ok=True)
    (folder / "adam" / "one").touch()
    (folder / "adam" / "two").symlink_to("one")
    with jit_ops.hold_build_lock(folder, "adam"):
        assert (folder / "adam" / "two").exists(), "a link within the folder is none of those"


def test_a_child_that_is_forked_meanwhile_holds_nothing(tmp_path: Path) -> None:
    with jit_ops.hold_build_lock(tmp_path, "adam"):
        forked = os.fork()
        if forked == 0:
            time.sleep(60)
            os._exit(0)
    waited: list[str] = []
    try:
        with jit_ops.hold_build_lock(tmp_path, "adam", lambda: waited.append("waits")):
            assert waited == []
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


@pytest.mark.parametrize(
    ("compiled_for", "prebuilt"), [("cpu", True), ("cuda", False), ("", False)], ids=["here", "elsewhere", "unknown"]
)
def test_ops_prebuilt_for_another_accelerator_are_built_under_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled_for: str, prebuilt: bool
) -> None:
    """As DeepSpeed's OpBuilder.load does: it would build them silently."""
    from deepspeed import git_version_info

    monkeypatch.setattr(git_version_info, "installed_ops", {"adam": True})
    monkeypatch.setattr(git_version_info, "accelerator_name", compiled_for, raising=False)
    states: list[str] = []
    held_while_loading: list[bool] = []
    builder = SimpleNamespace(
        name="adam", load=lambda verbose: held_while_loading.append((tmp_path / ".adam.building").exists())
    )
    jit_ops._load("AdamBuilder", builder, tmp_path, lambda **said: states.append(said["state"]))
    assert held_while_loading == [not prebuilt]
    assert states == ([] if prebuilt else ["building"])


def test_reason_of_a_failed_op_does_not_end_with_deepspeeds_empty_error_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> bool:
        raise RuntimeError("Unable to JIT load the async_io op due to hardware/software issue. None")

    accelerator = SimpleNamespace(create_op_builder=lambda name: object())
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace())  # type: ignore[arg-type]
    deepspeed = SimpleNamespace(get_accelerator=lambda: accelerator)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", deepspeed)  # type: ignore[arg-type]
    monkeypatch.setattr(jit_ops, "use_own_folder", lambda: tmp_path)
    monkeypatch.setattr(jit_ops, "_load", load)
    failed = jit_ops.load_ops(["AsyncIOBuilder"])
    assert failed == {"AsyncIOBuilder": "Unable to JIT load the async_io op due to hardware/software issue."}
