"""What is read of /proc, against psutil."""

import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.util import linux
from autotune.util.linux import descendants, is_open, main_memory, name_of, own_memory, pid_is_alive
from autotune.util.units import GIB, MIB
from tests.conftest import wait_until


def copies_at_once() -> bool:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (5, 14)


def test_main_memory_is_as_psutil_has_it() -> None:
    ours, theirs = main_memory(), psutil.virtual_memory()
    assert ours.total == theirs.total
    assert abs(ours.available - theirs.available) < 2 * GIB, "others take and give some between the two"


def memory_blocks(folder: Path, online: int, offline: int = 0) -> None:
    """Blocks of 128 MiB, as sysfs shows them."""
    folder.mkdir(exist_ok=True)
    (folder / "block_size_bytes").write_text("8000000\n")
    for number in range(online + offline):
        (folder / f"memory{number}").mkdir(exist_ok=True)
        (folder / f"memory{number}" / "state").write_text("online\n" if number < online else "offline\n")


def test_main_memory_that_starts_small_counts_with_what_is_plugged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linux, "_MEMORY_BLOCKS", tmp_path)
    total = psutil.virtual_memory().total
    blocks = 2 * total // (128 * MIB)
    memory_blocks(tmp_path, blocks, offline=blocks)
    usable = int(blocks * 128 * MIB * 63 / 64)
    found = main_memory()
    assert found.total == usable
    assert abs(found.available - psutil.virtual_memory().available - (usable - total)) < 2 * GIB
    memory_blocks(tmp_path, 3 * blocks)  # plugged in while the process runs
    assert main_memory().total == int(3 * blocks * 128 * MIB * 63 / 64)


def test_what_the_kernel_keeps_for_itself_is_no_main_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "_MEMORY_BLOCKS", tmp_path)
    total = psutil.virtual_memory().total
    memory_blocks(tmp_path, int(1.05 * total) // (128 * MIB))
    assert main_memory().total == total
    monkeypatch.setattr(linux, "_MEMORY_BLOCKS", tmp_path / "of an older kernel")
    assert main_memory().total == total


def test_a_process_that_runs_has_a_name_and_one_that_has_ended_does_not_run() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert pid_is_alive(process.pid)
        assert name_of(process.pid) == psutil.Process(process.pid).name()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not pid_is_alive(process.pid), "a zombie"
    assert not pid_is_alive(process.pid)
    assert name_of(process.pid) is None


def test_a_name_that_the_kernel_cuts_is_whole(tmp_path: Path) -> None:
    long = tmp_path / "a-program-with-a-long-name"
    long.symlink_to("/bin/sleep")
    with subprocess.Popen([long, "600"]) as process:
        try:
            until = time.monotonic() + 60
            while name_of(process.pid) != long.name and time.monotonic() < until:
                time.sleep(0.01)  # Popen returns in the middle of `exec`
            assert name_of(process.pid) == long.name == psutil.Process(process.pid).name()
        finally:
            process.kill()


def test_a_name_that_is_cut_in_the_middle_of_a_character(tmp_path: Path) -> None:
    long = tmp_path / "fourteen-bytesé"
    long.symlink_to("/bin/sleep")
    with subprocess.Popen([long, "600"]) as process:
        try:
            wait_until(lambda: name_of(process.pid) == long.name, "exec")  # Popen returns in the middle of it
            comm = Path(f"/proc/{process.pid}/comm").read_bytes()
            assert comm == "fourteen-bytesé".encode()[:15] + b"\n"
            assert pid_is_alive(process.pid)
        finally:
            process.kill()


def test_descendants_of_several() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with (
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as one,
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as two,
    ):
        try:
            wait_until(lambda: len(descendants(one.pid, two.pid)) == 2, "both children")
            apart = descendants(one.pid), descendants(two.pid)
            assert [len(found) for found in apart] == [1, 1]
            assert descendants(one.pid, two.pid, one.pid) == [*apart[0], *apart[1]]
            assert descendants(apart[0][0]) == []
        finally:
            for pid in descendants(one.pid, two.pid):
                os.kill(pid, signal.SIGKILL)


def test_a_file_is_open_as_long_as_anybody_has_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with (tmp_path / "file").open("w"):
        assert is_open(tmp_path / "file")
        assert is_open(tmp_path / "link")
    assert not is_open(tmp_path / "file")
    code = f"import sys; file = open({str(tmp_path / 'file')!r}); print('open', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            process.stdout.readline()
            assert is_open(tmp_path / "file")
        finally:
            process.kill()
    assert not is_open(tmp_path / "file")


@pytest.mark.skipif(not copies_at_once(), reason="this kernel copies pages as they are written to (Linux before 5.14)")
def test_a_forked_child_takes_its_memory_for_its_own_and_nothing_that_nobody_has_touched() -> None:
    # so large that the kernel may make one mapping of the two: that is mostly untouched then
    touched, untouched = mmap.mmap(-1, 32 * MIB, mmap.MAP_PRIVATE), mmap.mmap(-1, 256 * MIB, mmap.MAP_PRIVATE)
    touched.write(b"x" * 32 * MIB)

    def shared_and_used() -> tuple[int, int]:
        text = Path("/proc/self/smaps_rollup").read_text()
        sizes = dict(line.split()[:2] for line in text.splitlines()[1:])
        return int(sizes["Shared_Dirty:"]) * 1024, int(sizes["Rss:"]) * 1024

    ours, theirs = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            before = shared_and_used()
            own_memory()
            os.write(theirs, json.dumps([before, shared_and_used(), touched[:] == b"x" * 32 * MIB]).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    before, after, kept = json.loads(os.read(ours, 4096))
    assert kept
    assert before[0] > 32 * MIB
    assert after[0] < before[0] / 4
    assert after[1] < before[1] + 64 * MIB, "what lay untouched does so still"
    untouched.close()


def test_signals_are_handled_in_the_block_and_an_ignored_closed_terminal_stays_ignored() -> None:
    got: list[int] = []
    before = {number: signal.getsignal(number) for number in linux.ENDING_SIGNALS}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
        with linux.handled_signals(lambda number, _: got.append(number)):
            for number in linux.ENDING_SIGNALS:
                signal.raise_signal(number)
        assert got == [signal.SIGINT, signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert [signal.getsignal(number) for number in got] == [before[signal.SIGINT], before[signal.SIGTERM]]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
