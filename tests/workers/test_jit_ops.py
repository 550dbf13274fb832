"""A build that was killed leaves its lock; nobody may wait for it."""

import fcntl
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.errors import UserError
from autotune.util.linux import boot_id
from autotune.workers import jit_ops


def make_lock(folder: Path, op: str = "adam", age_seconds: float = 0.0) -> Path:
    """The lock of torch in an op's folder, as a build left it that long ago."""
    (folder / op).mkdir(parents=True)
    lock = folder / op / "lock"
    lock.touch()
    old = time.time() - age_seconds
    os.utime(lock, (old, old))
    return lock


def test_a_killed_build_leaves_no_lock_of_any_op(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """AsyncIO builds pin_memory first, and a kill then leaves the lock of pin_memory."""
    locks = [make_lock(tmp_path, "pin_memory"), make_lock(tmp_path, "async_io")]
    (tmp_path / ".building").write_text(boot_id())
    with jit_ops.hold_build_lock(tmp_path):
        assert not any(lock.exists() for lock in locks)
        assert (tmp_path / ".building").read_text() == boot_id()
    assert not (tmp_path / ".building").exists()
    assert all(f"removed {lock}" in capsys.readouterr().out for lock in locks[:1])


def test_the_lock_of_a_build_without_autotune_is_removed_once_it_is_old(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, age_seconds=3600)
    with jit_ops.hold_build_lock(tmp_path):
        assert not lock.exists()


@pytest.mark.parametrize("mark", [None, "elsewhere"])
def test_a_lock_that_may_be_held_is_waited_for_with_its_time(
    tmp_path: Path, mark: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process has it open, or a file of its folder is new: another host with the same home may build."""
    monkeypatch.setattr(jit_ops, "_SHOWN_SECONDS", 0.1)
    lock = make_lock(tmp_path, age_seconds=3600 if mark is None else 0.0)
    if mark is not None:
        (tmp_path / ".building").write_text(mark)
    waited: list[float] = []

    def waiting(seconds: float) -> None:
        waited.append(seconds)
        if seconds > 0.2:
            lock.unlink(missing_ok=True)  # as the builder does when it is done

    with lock.open() if mark is None else nullcontext(), jit_ops.hold_build_lock(tmp_path, waiting):
        pass
    assert waited[0] == 0.0
    assert len(waited) > 1


@pytest.mark.parametrize("holder", ["lock of torch", "lock of autotune"])
def test_a_holder_without_a_compiler_is_named_after_two_minutes(
    tmp_path: Path, holder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert jit_ops.IDLE_SECONDS == 120.0
    monkeypatch.setattr(jit_ops, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(jit_ops, "_SHOWN_SECONDS", 0.1)
    lock = make_lock(tmp_path, age_seconds=3600)
    if holder == "lock of autotune":
        lock.unlink()
        os.utime(tmp_path / "adam", (0, 0))
        lock = tmp_path / ".lock"
        lock.touch()
    with lock.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        with (
            pytest.raises(UserError, match=f"{lock} is held by a process that has run no compiler for 0 s"),
            jit_ops.hold_build_lock(tmp_path),
        ):
            pass


@pytest.mark.parametrize("left", ["no op", "lock of torch", "mark of autotune", "lock of autotune"])
def test_an_unfinished_build_is_left_to_a_process_that_sees_all_compilers(
    tmp_path: Path, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PID namespace hides the process that has the lock open, and its compilers."""
    loaded: list[bool] = []
    builder = SimpleNamespace(name="adam", load=lambda verbose: loaded.append(verbose))
    accelerator = SimpleNamespace(create_op_builder=lambda name: builder)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", SimpleNamespace(get_accelerator=lambda: accelerator))
    monkeypatch.setattr(jit_ops, "_is_prebuilt", lambda op: False)
    monkeypatch.setattr(jit_ops, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(jit_ops, "_SHOWN_SECONDS", 0.1)
    monkeypatch.setenv(jit_ops.FOLDER, str(tmp_path))
    kept = make_lock(tmp_path, age_seconds=3600)
    if left != "lock of torch":
        kept.unlink()
    if left != "no op":
        (kept.parent / "adam.so").write_bytes(b"built")
    if left == "mark of autotune":
        kept = tmp_path / ".building"
        kept.write_text(boot_id())
    with (tmp_path / ".lock").open("w") as lock:
        if left == "lock of autotune":
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.utime(kept.parent / "adam.so", (0, 0))
        assert jit_ops.load_ops(["AdamBuilder"], build=False) == {"AdamBuilder": jit_ops.NOT_BUILT}
    assert kept.exists() == (left in ("lock of torch", "mark of autotune"))
    assert loaded == []
    assert jit_ops.load_ops(["AdamBuilder"]) == {}
    assert jit_ops.load_ops(["AdamBuilder"], build=False) == (
        {"AdamBuilder": jit_ops.NOT_BUILT} if left == "no op" else {}
    )
    assert len(loaded) == (1 if left == "no op" else 2)


def test_an_op_that_builds_another_one_holds_the_folder_already(tmp_path: Path) -> None:
    with jit_ops.hold_build_lock(tmp_path), jit_ops.hold_build_lock(tmp_path):
        pass
    assert not (tmp_path / ".building").exists()


def test_a_child_that_is_forked_meanwhile_holds_nothing(tmp_path: Path) -> None:
    with jit_ops.hold_build_lock(tmp_path):
        forked = os.fork()
        if forked == 0:
            time.sleep(60)
            os._exit(0)
    waited: list[str] = []
    try:
        with jit_ops.hold_build_lock(tmp_path, lambda seconds: waited.append("waits")):
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
        name="adam", load=lambda verbose: held_while_loading.append((tmp_path / ".building").exists())
    )
    jit_ops._load("AdamBuilder", builder, tmp_path, lambda **said: states.append(said["state"]), build=True)
    assert held_while_loading == [not prebuilt]
    assert states == ([] if prebuilt else ["building"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "Unable to JIT load the async_io op due to hardware/software issue. None",
            "Unable to JIT load the async_io op due to hardware/software issue.",
        ),
        (
            "Error building extension 'adam': [1/2] c++ -c adam.cpp -o adam.o\n[2/2] c++ adam.o -L/a b/lib -ltorch -o adam.so\n"
            "FAILED: [code=1] adam.so \nc++ adam.o -o adam.so\n/usr/bin/ld: cannot find -ltorch: No such file or directory\n",
            "Error building extension 'adam': /usr/bin/ld: cannot find -ltorch: No such file or directory",
        ),
        (
            "Error building extension 'adam': [1/2] c++\nadam.cpp:3:1: error: expected ';'\nadam.cpp:9:1: error: more",
            "Error building extension 'adam': adam.cpp:3:1: error: expected ';'",
        ),
        ("", "RuntimeError"),
    ],
)
def test_a_failed_build_is_explained_by_its_first_error(text: str, reason: str) -> None:
    assert jit_ops.failure_reason(RuntimeError(text)) == reason


def test_torch_is_linked_by_a_path_without_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    torch = tmp_path / "a b" / "torch"
    torch.mkdir(parents=True)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(jit_ops, "_package_folder", lambda name: torch)
    folder = tmp_path / "ops"
    for _ in range(2):  # the link of an earlier build stays, and is no link of a trial
        with jit_ops.hold_build_lock(folder):
            assert str(folder / "torch" / "lib") == cpp_extension.TORCH_LIB_PATH
            assert (folder / "torch").resolve() == torch
    with pytest.raises(UserError, match="its path has a space, and so has"), jit_ops.hold_build_lock(tmp_path / "c d"):
        pass
