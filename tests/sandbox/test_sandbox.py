"""View, limits and traces of a sandbox on folders of every kind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.predict.trace import temporary_folder
from autotune.rank.sandbox import Protection, Sandbox, _spare_bases, remove
from autotune.util import linux
from autotune.util.caches import TABLE, library_caches
from autotune.util.entry_points import NOT_PROTECTED, WITHOUT_SANDBOX
from tests.sandbox.conftest import ORDINARY, SYSTEM_PYTHON, copy_sandbox

CHILD = """
import json, os, sys
from autotune.rank.sandbox import Sandbox
stored, home, text = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
sandbox = Sandbox.from_json(stored)
sandbox.enter(home, os.environ)
exec(text)
"""
IPC_CREATE, IPC_REMOVE = 0o1600, 0  # shmget(2), shmctl(2)
BOTH = pytest.mark.parametrize("protection", [Protection.OVERLAY, Protection.LANDLOCK])
ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root mounts")
NAMES = ["two words", "a,b", "a:b=c", "back\\slash", "new\nline", os.fsdecode(b"\xff\xfe"), "quote'\"", "ümlaut"]


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder that is not below the temporary one, with a home for the caches."""
    made = Path(tempfile.mkdtemp(prefix="sandbox-", dir="/var/tmp"))
    monkeypatch.setenv("HOME", str(made))
    (made / "sockets").mkdir()
    yield made
    shutil.rmtree(made, ignore_errors=True)


def start(sandbox: Sandbox, home: Path, text: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", CHILD, json.dumps(sandbox.to_json()), str(home), text]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",
    )


def run(sandbox: Sandbox, home: Path, text: str) -> str:
    """Return what Python code prints in the sandbox."""
    process = start(sandbox, home, text)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return printed.strip()


def sandbox_in(project: Path, protection: Protection, folder: Path | None = None) -> Sandbox:
    made = Sandbox(folder or project / "runs/study/scratch", project, protection)
    made.create(project / "runs/study")
    return made


@pytest.mark.few(5)
@BOTH
@pytest.mark.parametrize("name", NAMES)
def test_project_path_may_hold_any_character(base: Path, protection: Protection, name: str) -> None:
    project = base / name
    project.mkdir()
    (project / "keep.txt").write_text("keep")
    text = "print(open('keep.txt').read()); open('new.txt', 'w').write('new'); print(open('new.txt').read())"
    assert run(sandbox_in(project, protection), base / "sockets", text).split() == ["keep", "new"]
    assert sorted(os.listdir(project)) == ["keep.txt", "runs"]


def test_ranks_and_their_children_share_one_view(base: Path) -> None:
    project = base / "project"
    project.mkdir()
    (project / "keep.txt").write_text("keep")
    sandbox = sandbox_in(project, Protection.OVERLAY)
    text = "open('keep.txt', 'w').write('first'); print('written', flush=True); input()"
    first = start(sandbox, base / "sockets", text)
    assert first.stdout is not None
    assert first.stdout.readline() == "written\n"
    text = "import subprocess; print(subprocess.check_output(['cat', 'keep.txt'], text=True)); open('/dev/shm/x', 'w')"
    assert run(sandbox, base / "sockets", text) == "first"
    assert run(sandbox, base / "sockets", "print(os.path.exists('/dev/shm/x'))") == "True"
    first.kill()
    first.communicate()
    assert (project / "keep.txt").read_text() == "keep"
    assert not os.path.exists("/dev/shm/x")


@BOTH
def test_device_files_cannot_be_removed(base: Path, protection: Protection) -> None:
    text = """
for path in ("/dev/full", "/dev/pts/ptmx", "/sys/kernel/new"):
    for change in (os.unlink, os.mkdir):
        try:
            change(path)
        except OSError:
            continue
        print("changed", path)
open("/dev/null", "w").write("x")
"""
    assert run(sandbox_in(base, protection), base / "sockets", text) == ""


@pytest.mark.parametrize("used", [False, True], ids=["first use", "later use"])
def test_the_module_of_cuda_is_loaded_before_a_sandbox_forbids_it(
    tmp_path: Path, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, devices = tmp_path / "nvidia-modprobe", tmp_path / "dev"
    monkeypatch.setenv("PATH", str(tmp_path))
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/loaded\n')
    program.chmod(0o755)
    devices.mkdir()
    linux.make_cuda_device(str(devices))  # no GPU
    for name in ("nvidiactl", *(["nvidia-uvm"] if used else [])):
        (devices / name).touch()
    assert not (tmp_path / "loaded").exists()
    linux.make_cuda_device(str(devices))
    assert (tmp_path / "loaded").exists() != used
    program.unlink()
    linux.make_cuda_device(str(devices))  # raises nothing without the program


def test_a_tree_in_an_overlay_never_contains_itself(base: Path) -> None:
    """Regression: the trial's folder showed the new root, and `rm -rf runs` removed the machine's device files by it."""
    (base / "keep.txt").write_text("keep")
    text = "print(sum(len(files) for _, _, files in os.walk('.')), os.listdir('runs/study/scratch/layers'))"
    assert run(sandbox_in(base, Protection.OVERLAY), base / "sockets", text) == "2 []"  # keep.txt, holder


REFUSED = """
import errno, sys
from autotune.rank import sandbox
from autotune.util import linux
def refuse(*arguments, **named):
    raise PermissionError(errno.EPERM, "not in this container")
for name in sys.argv.pop(1).split():
    setattr(linux, name, refuse)
sandbox.main()
"""


@pytest.mark.parametrize(
    ("refused", "protection", "left"),
    [
        ("", "overlay", "keep"),
        ("enter_mount_namespace", "landlock", "keep"),
        ("enter_mount_namespace restrict_writes", "none", "lost"),
    ],
)
def test_the_best_protection_of_a_machine_is_found_and_confines_a_module(
    base: Path, refused: str, protection: str, left: str
) -> None:
    (base / "study").mkdir()
    (base / "keep.txt").write_text("keep")
    (base / "harmful.py").write_text(
        f"try: open({str(base / 'keep.txt')!r}, 'w').write('lost')\nexcept PermissionError: pass"
    )
    words = [sys.executable, "-c", REFUSED, refused, str(base / "study")]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{base}"}
    assert subprocess.check_output(words, cwd=base, text=True, env=environment).strip() == protection
    if protection == "none":
        assert subprocess.call([*words, "harmful"], cwd=base, env=environment) == NOT_PROTECTED
        assert (base / "keep.txt").read_text() == "keep"
    assert subprocess.call([*words, WITHOUT_SANDBOX, "harmful"], cwd=base, env=environment) == 0
    assert (base / "keep.txt").read_text() == left
    assert not os.listdir(base / "study")


@pytest.mark.parametrize("refused", ["", "enter_mount_namespace", "enter_mount_namespace restrict_writes"])
def test_a_modules_own_os_error_ends_it_in_every_sandbox(base: Path, refused: str) -> None:
    (base / "study").mkdir()
    (base / "failing.py").write_text("print('ran', flush=True)\nraise FileNotFoundError('no such model')")
    words = [sys.executable, "-c", REFUSED, refused, str(base / "study"), WITHOUT_SANDBOX, "failing"]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{base}"}
    done = subprocess.run(words, cwd=base, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout.split()) == (1, ["ran"])
    assert "FileNotFoundError: no such model" in done.stderr


def test_a_modules_death_by_a_signal_is_reported_as_by_a_shell(base: Path) -> None:
    (base / "study").mkdir()
    (base / "dying.py").write_text("import os\nos.kill(os.getpid(), 9)")
    words = [sys.executable, "-m", "autotune.rank.sandbox", str(base / "study"), "dying"]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}:{base}"}
    assert subprocess.call(words, cwd=base, env=environment) == 137


def test_the_layers_of_a_killed_process_are_removed() -> None:
    with temporary_folder() as folder:
        killed = folder / "protection-7"
        left = [killed, *_spare_bases(killed)]
        for one in left:
            (one / "work").mkdir(parents=True, mode=0)
    assert not any(one.exists() for one in (folder, *left))


def test_folders_opened_before_lead_into_the_overlay(base: Path) -> None:
    (base / "keep.txt").write_text("keep")
    sandbox = sandbox_in(base, Protection.OVERLAY)
    child = os.fork()
    if not child:
        opened = os.open(base, os.O_RDONLY)
        try:
            sandbox.enter(str(base / "sockets"), os.environ)
            os.chmod("keep.txt", 0o600, dir_fd=opened)
            os.unlink("keep.txt", dir_fd=opened)
            os._exit(os.path.exists(base / "keep.txt"))
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert (base / "keep.txt").read_text() == "keep"


@ROOT
def test_a_read_only_mount_stays_so_and_mounts_below_it_are_protected(base: Path) -> None:
    code = f"""
import ctypes, subprocess, sys
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0
subprocess.check_call(["mount", "--make-rprivate", "/"])
project = {str(base / "project")!r}
subprocess.check_call(["mount", "-t", "tmpfs", "mine", project])
open(project + "/keep.txt", "w").write("keep")
import os
os.makedirs(project + "/below/deep"); os.makedirs(project + "/runs")
subprocess.check_call(["mount", "-t", "tmpfs", "mine", project + "/below"])
open(project + "/below/keep.txt", "w").write("keep")
subprocess.check_call(["mount", "-o", "remount,bind,ro", project])
from autotune.rank.sandbox import *
from pathlib import Path
sandbox = Sandbox(Path({str(base / "trial")!r}), Path(project), Protection.OVERLAY)
sandbox.create(Path(project) / "runs")
if not os.fork():
    sandbox.enter({str(base / "sockets")!r}, os.environ)
    for path in ("keep.txt", "below/keep.txt"):
        try:
            os.unlink(path)
        except OSError as error:
            print(path, error.errno)
    os._exit(0)
os.wait()
print(open(project + "/keep.txt").read(), open(project + "/below/keep.txt").read())
"""
    (base / "project").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert printed.splitlines()[-1] == "keep keep"
    assert "keep.txt 30" in printed.splitlines()  # EROFS, as without a sandbox


IN_OWN_MOUNTS = """
import ctypes, os, subprocess, sys
from pathlib import Path
project, user = Path(sys.argv[1]), int(sys.argv[2])
assert ctypes.CDLL(None).unshare(0x20000) == 0
subprocess.check_call(["mount", "--make-rprivate", "/"])
MOUNTS
os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable: its /proc files are its own
from autotune.rank.sandbox import Protection, Sandbox, remove
base = Path(sys.argv[3])
os.environ["HOME"] = str(base)
sandbox = Sandbox(base / "trial", project, Protection(sys.argv[4]))
sandbox.create(base / "study")
if not os.fork():
    try:
        sandbox.enter(str(sandbox.files), os.environ)
        SCRIPT
    finally:
        sys.stdout.flush()
        os._exit(0)
os.wait()
remove(sandbox.folder)
print("left", sorted((path, Path(project, path).read_text()) for path in KEPT), sandbox.folder.exists())
"""


def run_mounted(base: Path, project: str, user: int, protection: Protection, *texts: str) -> list[str]:
    """Return the lines that a script prints in a sandbox, and those of its user afterwards, where MOUNTS are mounted."""
    code = IN_OWN_MOUNTS
    for name, text in zip(("MOUNTS", "SCRIPT", "KEPT"), texts, strict=True):
        code = code.replace(name, text)
    copy_sandbox(base / "code")
    base.chmod(0o755)
    (base / "home").mkdir()
    os.chown(base / "home", user, user)
    words = [SYSTEM_PYTHON, "-c", code, project, str(user), str(base / "home"), str(protection)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(base / "code")}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@ROOT
def test_an_ordinary_user_has_a_mount_below_the_project(base: Path) -> None:
    """The kernel makes no overlay of a folder with mount points for an ordinary user: its entries are shown one by one."""
    project = base / "project"
    project.mkdir()
    mounts = """
for folder in (project, project / "below"):
    folder.mkdir(exist_ok=True)
    if folder != project:
        subprocess.check_call(["mount", "-t", "tmpfs", "mine", str(folder)])
    (folder / "keep.txt").write_text("keep")
    (folder / "data").mkdir()
    (folder / "data" / "large.bin").write_text("x" * (2 << 20))
    for one in (folder, folder / "keep.txt", folder / "data", folder / "data" / "large.bin"):
        os.chown(one, user, user)
"""
    script = """
        for name in ("keep.txt", "below/keep.txt", "data/large.bin", "new.txt", "below/new.txt"):
            Path(name).write_text("changed")
        os.makedirs("out/checkpoint"); os.unlink("keep.txt"); os.unlink("below/keep.txt")
        print(sorted(os.listdir(".")), sorted(os.listdir("below")))
"""
    kept = '("keep.txt", "below/keep.txt")'
    found = run_mounted(base, str(project), ORDINARY, Protection.OVERLAY, mounts, script.strip(), kept)
    assert found[0] == "['below', 'data', 'new.txt', 'out'] ['data', 'new.txt']"
    assert found[1:] == ["left [('below/keep.txt', 'keep'), ('keep.txt', 'keep')] False"]


@ROOT
@BOTH
@pytest.mark.parametrize("user", [0, ORDINARY])
def test_the_project_may_be_the_temporary_folder(base: Path, protection: Protection, user: int) -> None:
    mounts = """
subprocess.check_call(["mount", "-t", "tmpfs", "-o", "mode=1777", "mine", "/tmp"])
(project / "keep.txt").write_text("keep"); os.chown(project / "keep.txt", user, user)
"""
    script = """
        import tempfile
        print(os.getcwd().endswith("/tmp"), Path("keep.txt").read_text())
        Path("new.txt").write_text("new"); tempfile.NamedTemporaryFile().write(b"x")
        try: Path("/tmp/keep.txt").write_text("changed")
        except PermissionError: pass
"""
    found = run_mounted(base, "/tmp", user, protection, mounts, script.strip(), '("keep.txt",)')
    assert found == ["True keep", "left [('keep.txt', 'keep')] False"]


@ROOT
@BOTH
@pytest.mark.parametrize("user", [0, ORDINARY])
def test_a_project_that_nobody_can_write_is_read(base: Path, protection: Protection, user: int) -> None:
    project = base / "project"
    project.mkdir()
    (project / "keep.txt").write_text("keep")
    mounts = """
if not user:
    subprocess.check_call(["mount", "--bind", str(project), str(project)])
    subprocess.check_call(["mount", "-o", "remount,bind,ro", str(project)])
"""
    script = """
        print(Path("keep.txt").read_text())
        try: Path(project, "keep.txt").write_text("changed")
        except OSError as error: print(error.strerror)
"""
    found = run_mounted(base, str(project), user, protection, mounts, script.strip(), '("keep.txt",)')
    assert found[0] == "keep"
    assert found[1] in ("Read-only file system", "Permission denied")
    assert found[2:] == ["left [('keep.txt', 'keep')] False"]


@BOTH
@pytest.mark.parametrize("place", ["home", "shm", "tmp folder"])
def test_project_may_lie_anywhere(
    base: Path, protection: Protection, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place == "shm" and protection is Protection.LANDLOCK:
        pytest.skip("shared memory is not protected by Landlock")
    parent = {"shm": "/dev/shm", "home": str(base), "tmp folder": tempfile.gettempdir()}[place]
    with tempfile.TemporaryDirectory(dir=parent) as name:
        project = Path(name)
        if place == "home":
            monkeypatch.setenv("HOME", name)
        (project / "keep.txt").write_text("keep")
        trial = base / "trial" if place == "shm" else None
        text = f"print(open('keep.txt').read())\ntry: os.unlink({str(project / 'keep.txt')!r})\nexcept PermissionError: pass"
        assert run(sandbox_in(project, protection, trial), base / "sockets", text) == "keep"
        assert (project / "keep.txt").read_text() == "keep"


@BOTH
def test_umask_and_long_temporary_folder(base: Path, protection: Protection, monkeypatch: pytest.MonkeyPatch) -> None:
    long = base / ("t" * 120)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    before = os.umask(0o077)
    try:
        text = "import tempfile; open('new', 'w').write('x'); tempfile.NamedTemporaryFile().write(b'x'); print(oct(os.stat('new').st_mode))"
        assert run(sandbox_in(base, protection), base / "sockets", text) == "0o100600"
    finally:
        os.umask(before)
    assert [name for name in os.listdir(long) if not name.startswith("torchinductor")] == []


def test_removing_touches_no_other_folder(base: Path) -> None:
    """Regression: an early version changed the mode of /tmp."""
    shared = [Path("/"), Path("/tmp"), Path("/var/tmp"), base, base.parent, Path("/dev/shm")]
    outside = base / "outside"
    outside.mkdir(mode=0o500)
    before = [path.stat().st_mode for path in (*shared, outside)]
    sandbox = sandbox_in(base, Protection.OVERLAY)
    run(
        sandbox,
        base / "sockets",
        f"os.makedirs('a/b'); os.symlink('/tmp', 'a/tmp'); os.symlink({str(outside)!r}, 'a/o'); os.chmod('a/b', 0)",
    )
    (sandbox.folder / "files/link").symlink_to(outside)
    remove(sandbox.folder)
    assert [path.stat().st_mode for path in (*shared, outside)] == before
    assert not sandbox.folder.exists()


@pytest.mark.parametrize("kind", ["link", "link above", "dots", "deep", "home", "temporary folder"])
@BOTH
def test_a_project_may_be_named_in_any_way(
    base: Path, protection: Protection, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = base / "a" / "project"
    named = {
        "link": base / "link",
        "link above": base / "link" / "project",
        "dots": base / "a" / ".." / "a" / "project",
        "deep": Path(base, *["d" * 200] * 17),
    }.get(kind, real)
    real = named if kind == "deep" else real
    real.mkdir(parents=True)
    (base / "link").symlink_to(real if kind == "link" else base / "a")
    (real / "keep.txt").write_text("keep")
    if kind in ("home", "temporary folder"):
        monkeypatch.setenv("HOME" if kind == "home" else "TMPDIR", str(real))
    text = f"""
print(open("keep.txt").read())
open("new.txt", "w").write("new")
for change in (os.unlink, lambda path: open(path, "w").close()):
    for path in ({str(named)!r} + "/keep.txt", {str(real)!r} + "/keep.txt"):
        try: change(path)
        except OSError: pass
"""
    assert run(sandbox_in(named, protection, base / "trial"), base / "sockets", text) == "keep"
    left = {path.name: path.read_text() for path in real.iterdir() if path.is_file()}
    assert left == {"keep.txt": "keep"}


@pytest.mark.parametrize("home", [None, "", "/", "no", "/nonexistent"])
@BOTH
def test_a_home_of_any_kind(
    base: Path, protection: Protection, home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caches follow the home. Python takes it from the user's entry if the variable is missing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "caches"))
    monkeypatch.setenv("TRITON_HOME", str(base / "caches"))
    monkeypatch.setenv("CUDA_CACHE_PATH", str(base / "caches/cuda"))
    monkeypatch.setenv("HOME", home) if home is not None else monkeypatch.delenv("HOME")
    (base / "keep.txt").write_text("keep")
    text = "print(open('keep.txt').read()); open('new.txt', 'w').write('new')"
    assert run(sandbox_in(base, protection), base / "sockets", text) == "keep"
    assert not (base / "new.txt").exists()


@BOTH
def test_nothing_is_left_after_sigkill(base: Path, protection: Protection) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    sandbox = sandbox_in(base, protection)
    process = start(
        sandbox,
        base / "sockets",
        "open('/dev/shm/left', 'w') if os.path.isdir('runs') else 0; print(1, flush=True); input()",
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(0.05)
    sandbox.create(base / "runs/study")
    assert os.listdir(sandbox.folder.parent) == ["scratch"]
    assert Path("/proc/self/mountinfo").read_text() == mounts
    remove(sandbox.folder)
    assert not any(path.exists() for path in _spare_bases(sandbox.folder))  # other tests have theirs beside them
    Path("/dev/shm/left").unlink(missing_ok=True)


@ROOT
def test_layers_go_to_a_spare_folder_if_the_trials_takes_none(base: Path) -> None:
    """An overlay takes no layers on another overlay."""
    code = f"""
import ctypes, os, subprocess
libc = ctypes.CDLL(None)
assert libc.unshare(0x20000) == 0
base = {str(base)!r}
subprocess.check_call(["mount", "--make-rprivate", "/"])
for name in ("lower", "upper", "work", "project"):
    os.mkdir(f"{{base}}/{{name}}")
open(base + "/lower/keep.txt", "w").write("keep")
subprocess.check_call(["mount", "-t", "overlay", "o", "-o", f"lowerdir={{base}}/lower,upperdir={{base}}/upper,workdir={{base}}/work", base + "/project"])
from autotune.rank.sandbox import *
from autotune.rank.sandbox import _spare_bases
from pathlib import Path
project = Path(base + "/project")
sandbox = Sandbox(project / "runs/scratch", project, Protection.OVERLAY)
sandbox.create(project / "runs")
if not os.fork():
    sandbox.enter(base + "/sockets", os.environ)
    open("keep.txt", "w").write("x"); print(open("keep.txt").read(), flush=True)
    os._exit(0)
os.wait()
print(open(project / "keep.txt").read(), [one.exists() for one in _spare_bases(sandbox.folder)])
remove(sandbox.folder)
print([one.exists() for one in _spare_bases(sandbox.folder)])
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).splitlines()
    assert printed[:2] == ["x", "keep [True, False]"]
    assert printed[2] == "[False, False]"


def test_no_view_is_made_if_the_kernel_has_no_landlock(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(errno.EOPNOTSUPP, "no Landlock")

    monkeypatch.setattr(linux, "check_landlock", refuse)
    with pytest.raises(OSError, match="no Landlock"):
        sandbox_in(base, Protection.LANDLOCK)
    assert not any(path.name == "view" for path in base.rglob("*"))


def test_each_cache_has_a_source_and_a_line_in_the_document() -> None:
    page = (Path(__file__).parents[2] / "docs/script-details.md").read_text()
    rows = json.loads(TABLE.read_text())
    for name, row in rows.items():
        assert row["source"].startswith("https://")
        assert row["use"] == "base" or f"`{name}`" in page, name


def test_caches_follow_their_variables_and_defaults(tmp_path: Path) -> None:
    given = {"HOME": str(tmp_path), "HF_HOME": f"{tmp_path}/hf", "TORCH_HOME": f"{tmp_path}/weights", "USER": "me"}
    given |= {"TMPDIR": f"{tmp_path}/t", "XDG_CACHE_HOME": f"{tmp_path}/c", "TRITON_HOME": str(tmp_path)}
    given |= {"PIP_CACHE_DIR": str(tmp_path), "CUDA_CACHE_PATH": "~"}
    caches = [*library_caches(given, f"{tmp_path}/p")]
    found = {os.path.relpath(one, tmp_path) for one in caches}
    expected = {"hf/hub", "hf/datasets", "hf/assets", "hf/xet", "hf/modules", "weights"}
    assert expected | {"t/torchinductor_me", ".triton/cache"} <= found
    assert "." not in found, "a folder that holds the project is none"
    assert os.path.expanduser("~") not in caches, "the user's home is none"


@BOTH
def test_a_cache_in_another_cache_cannot_be_turned_into_a_link(base: Path, protection: Protection) -> None:
    """A trial could put a link to any folder there, which the next one would be allowed to write to."""
    (base / "docs").mkdir()
    (base / "docs/keep.txt").write_text("keep")
    (base / "hub/datasets").mkdir(parents=True)
    project = base / "project"
    project.mkdir()
    caches = f"os.environ |= {{'HF_HUB_CACHE': {str(base / 'hub')!r}, 'HF_DATASETS_CACHE': {str(base / 'hub/datasets')!r}}}; "
    plant = f"shutil.rmtree('{base}/hub/datasets'); os.symlink('{base}/docs', '{base}/hub/datasets'); print(1)"
    write = f"open('{base}/hub/datasets/keep.txt', 'w').write('lost')"
    code = CHILD.replace("sandbox.enter", f"import shutil; {caches}sandbox.enter")
    for text in (plant, f"try: {write}\nexcept PermissionError: pass"):
        sandbox = sandbox_in(project, protection, base / "trial")
        words = [sys.executable, "-c", code, json.dumps(sandbox.to_json()), str(base / "sockets"), text]
        subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    assert os.readlink(base / "hub/datasets") == f"{base}/docs", "the cache itself can be written to"
    assert (base / "docs/keep.txt").read_text() == "keep"


@ROOT
@pytest.mark.parametrize("user", [0, ORDINARY])
def test_a_file_in_dev_is_not_changed(base: Path, user: int) -> None:
    """Kubernetes mounts /dev/termination-log."""
    mounts = """
(project / "log").write_text("keep"); (project / "log").chmod(0o666)
subprocess.check_call(["mount", "--bind", str(project / "log"), "/dev/full"])
subprocess.check_call(["mount", "--bind", "/dev/null", "/dev/zero"])  # as a container has a GPU
for place in ("shm", "shm/below", "shm"):  # the second is no longer seen
    Path("/dev", place).mkdir(exist_ok=True)
    subprocess.check_call(["mount", "-t", "tmpfs", "tmpfs", f"/dev/{place}"])
"""
    script = """
        try: Path("/dev/full").write_text("lost")
        except OSError: pass
        pty = os.openpty(); os.write(pty[1], b"x")
        for one in ("null", "zero", "shm/new"): Path("/dev", one).write_text("x")
        print("ran")
"""
    project = base / "project"
    project.mkdir()
    found = run_mounted(base, str(project), user, Protection.OVERLAY, mounts, script.strip(), '("log",)')
    assert found == ["ran", "left [('log', 'keep')] False"]


@BOTH
@pytest.mark.parametrize("place", ["ops", "cache/torch/ops"])
def test_the_ops_that_the_fork_server_loads_cannot_be_changed(
    base: Path, protection: Protection, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second folder lies in TORCH_HOME, to which a trial may write otherwise."""
    library = base / place / "cpu_adam/cpu_adam.so"
    library.parent.mkdir(parents=True)
    library.write_text("built")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(base / place))
    monkeypatch.setenv("TORCH_HOME", str(base / "cache/torch"))
    text = f"""
own = os.environ["TORCH_EXTENSIONS_DIR"] + "/cpu_adam"
print(open(own + "/cpu_adam.so").read())
open(own + "/lock", "w").close(); os.unlink(own + "/lock")  # as torch does to load it
for path in (own + "/cpu_adam.so", {str(library)!r}):
    try:
        open(path + ".new", "w").write("replaced"); os.replace(path + ".new", path)
    except PermissionError: pass
"""
    project = base / "project"
    project.mkdir()
    assert run(sandbox_in(project, protection), base / "sockets", text) == "built"
    assert library.read_text() == "built"
    assert os.listdir(library.parent) == ["cpu_adam.so"]


@ROOT
@BOTH
@pytest.mark.parametrize("user", [0, ORDINARY])
def test_a_mount_that_does_not_answer_is_left_out(base: Path, protection: Protection, user: int) -> None:
    """A FUSE whose daemon reads no request: whatever asks it for anything waits forever."""
    if not os.access("/dev/fuse", os.W_OK):
        pytest.skip("this container has no FUSE")
    project = base / "project"
    project.mkdir()
    mounts = """
from autotune.util import linux
linux._ANSWER_SECONDS = 0.5
(project / "keep.txt").write_text("keep"); os.chown(project, user, user); os.chown(project / "keep.txt", user, user)
for place in (project / "dead", project.parent / "elsewhere"):
    place.mkdir(exist_ok=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    os.set_inheritable(device, True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    assert ctypes.CDLL(None).mount(b"dead", str(place).encode(), b"fuse", 0, options) == 0
"""
    script = """
        print(Path("keep.txt").read_text())
        Path("new.txt").write_text("new"); os.unlink("keep.txt")
"""
    found = run_mounted(base, str(project), user, protection, mounts, script.strip(), '("keep.txt",)')
    assert found == ["keep", "left [('keep.txt', 'keep')] False"]
