"""Run ways in sandboxes and compare the user's tree before and after each: `runner.py PROTECTION FOLDER < WAYS.json`.

A process of its own with the standard library only, so that an ordinary user can run it. Prints a JSON object for each way.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

SECONDS = 30  # for one way
MOST_BYTES = 1 << 24  # compared of a file, with its size and times
GET_FLAGS = 0x80086601  # ioctl_iflags(2)
SOURCES = {
    "home/.bashrc": "alias",
    "home/.gitconfig": "[user]\nname = owner\nemail = owner@example.org\n[core]\nautocrlf = false\n[init]\ndefaultBranch = main\n",
    "home/notes.txt": "notes",
    "home/docs/a.txt": "docs",
    "home/project/train.py": "print('training')\n",
    "home/project/keep.txt": "keep\nb\na\n",
    "home/project/Makefile": "clean:\n\trm -rf out\nkeep.txt: clean.sh\n\techo made > keep.txt\n",
    "home/project/clean.sh": "rm -rf out/*\n",
    "home/project/readonly.txt": "read only",
    "home/project/ignored.bin": "ignored",
    "home/project/.gitignore": "*.bin\nout/\nruns/\n",
    "home/project/model.pt": "weights" * 1000,
    "home/project/values.npy": "values",
    "home/project/hard.txt": "hard",
    "home/project/out/checkpoint-1/weights": "1",
    "home/project/out/checkpoint-2/weights": "2",
    "home/project/out/checkpoint-3/weights": "3",
    "home/project/out/model.pt": "best",
    "data/train.bin": "train" * 1000,
    "data/keep.patch": "--- a/keep.txt\n+++ b/keep.txt\n@@ -1,3 +1,3 @@\n-keep\n+lost\n b\n a\n",
    "tmp/note.txt": "note",
}


def make_tree(base: Path, live: Path) -> None:
    """Write the user's files to `base`; links name their places in `live`."""
    for name, text in SOURCES.items():
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text(text)
    project = base / "home/project"
    (project / "empty").mkdir()
    for name in ("checkpoint-1", "checkpoint-2", "checkpoint-3"):
        (project / "out" / name / "rank").mkdir()
    os.symlink(live / "home/project/out/checkpoint-3", project / "out/latest")
    os.symlink("checkpoint-1", project / "out/rel")
    os.symlink("../../data", project / "linked")
    os.link(project / "hard.txt", base / "data/hard.txt")
    os.setxattr(project / "keep.txt", "user.owner", b"me")
    (project / "clean.sh").chmod(0o755)
    (project / "readonly.txt").chmod(0o444)
    git = "init -q --template=; add .; commit -qm 1; branch side; commit -q --allow-empty -m 2"
    environment = {**os.environ, "HOME": str(base / "home")}
    for words in git.split("; "):
        subprocess.run(["git", *words.split()], cwd=project, env=environment, check=True)
    for name in ("keep.txt", "Makefile"):
        with open(project / name, "a") as file:
            file.write("# changed\n")
    archive = "import tarfile, sys; t = tarfile.open(sys.argv[1], 'w'); t.add(sys.argv[2], 'keep.txt'); t.close()"
    subprocess.run([sys.executable, "-c", archive, base / "data/keep.tar", project / "clean.sh"], check=True)
    database = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('create table t (a)'); c.commit()"
    subprocess.run([sys.executable, "-c", database, project / "db.sqlite3"], check=True)
    compress = "import gzip, sys; gzip.open(sys.argv[1], 'w').write(b'notes')"
    subprocess.run([sys.executable, "-c", compress, base / "data/notes.gz"], check=True)
    for path in [*base.rglob("*")]:
        if not path.is_symlink():
            os.utime(path, (1.7e9, 1.7e9))


def tree_of(base: Path, *, attributes: bool = True) -> dict[str, Any]:
    """Return all that a user can see of files: content, links and, with `attributes`, mode, owner, attributes, and times of files."""
    found: dict[str, Any] = {}
    for path, folders, files in os.walk(base):
        folders[:] = [name for name in folders if not (path.endswith("project") and name == "runs")]
        for name in (*folders, *files):
            at = os.path.join(path, name)
            state = os.lstat(at)
            row: list[Any] = [stat.S_IFMT(state.st_mode)]
            if not stat.S_ISDIR(state.st_mode):
                row += [state.st_nlink, state.st_size]
            if stat.S_ISLNK(state.st_mode):
                row.append(os.readlink(at))
            elif attributes:
                row += [(key, str(os.getxattr(at, key))) for key in os.listxattr(at)]
            if attributes:
                row += [oct(state.st_mode), state.st_uid, state.st_gid, state.st_rdev]
            if attributes and not stat.S_ISDIR(state.st_mode):
                row.append(state.st_mtime_ns)
            if stat.S_ISREG(state.st_mode):
                if not attributes:
                    os.chmod(at, stat.S_IMODE(state.st_mode) | stat.S_IRUSR)
                with open(at, "rb") as file:
                    row.append(file.read(MOST_BYTES).hex())
                    if attributes:
                        row.append(fcntl.ioctl(file, GET_FLAGS, bytes(8)).hex())
            found[os.path.relpath(at, base)] = row
    return found


class Runner:
    """A user's tree, and ways run in it one after another."""

    def __init__(self, protection: str, folder: Path) -> None:
        from autotune.rank.sandbox import Protection

        self.protection, self.folder, self.live = Protection(protection), folder, folder / "live"
        make_tree(folder / "template", self.live)
        for key, path in {"P": "home/project", "H": "home", "D": "data", "T": "tmp"}.items():
            os.environ[key] = str(self.live / path)
        os.environ.update(HOME=str(self.live / "home"), RUN=str(self.live / "home/project/runs"))
        os.environ.pop("TMPDIR", None)
        self.expected = dict[str, Any]()
        self.renew()

    def renew(self) -> None:
        """Make the user's tree as it was."""
        if self.live.exists():
            shutil.rmtree(self.live, ignore_errors=True)
        if self.live.exists():
            subprocess.run(["chattr", "-R", "-i", "-a", self.live], stderr=subprocess.DEVNULL, check=False)
            subprocess.run(["chmod", "-R", "u+rwX", self.live], check=False)
            shutil.rmtree(self.live)
        subprocess.run(["cp", "-a", self.folder / "template", self.live], check=True)
        project = self.live / "home/project"
        (project / "runs").mkdir()
        if self.protection != "none":
            self.run({"kind": "sh", "text": "true"})  # makes the caches' folders
        self.expected = self.tree()

    def tree(self) -> dict[str, Any]:
        """Return the user's tree. Landlock does not cover attributes of files."""
        return tree_of(self.live, attributes=self.protection != "landlock")

    def run(self, way: dict[str, Any]) -> tuple[int, str]:
        """Return the way's exit status, and what it has printed."""
        from autotune.rank.sandbox import Protection, Sandbox, remove

        project = self.live / "home/project"
        home = Path(tempfile.mkdtemp(prefix="sandbox-home-"))
        sandbox = Sandbox(project / "runs/study/scratch", project, self.protection)
        confined = self.protection is not Protection.NONE
        if confined:
            sandbox.create(project / "runs/study")
        log = self.folder / "log"
        child = os.fork()
        if not child:
            try:
                os.setsid()
                output = os.open(log, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.chdir(project)
                if confined:
                    sandbox.enter(str(home), os.environ)
                if way["kind"] == "sh":
                    os.execvp("bash", ["bash", "-c", way["text"]])
                names = {"os": os, "sys": sys, "shutil": shutil, "Path": Path, "ctypes": ctypes}
                names |= {key: os.environ.get(key) for key in ("P", "H", "D", "T")}
                exec(way["text"], {**names, "libc": ctypes.CDLL(None, use_errno=True)})
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        status = wait(child)
        printed = log.read_text(errors="replace")
        if confined:
            remove(sandbox.folder)
        shutil.rmtree(home, ignore_errors=True)
        return status, printed

    def test(self, way: dict[str, Any]) -> dict[str, Any]:
        """Run a way; return its status and the paths of the user's that differ."""
        began = time.monotonic()
        status, printed = self.run(way)
        took = time.monotonic() - began
        found = self.tree()
        changed = [path for path in {**self.expected, **found} if self.expected.get(path) != found.get(path)]
        if changed:
            self.renew()
        return {
            "name": way["name"],
            "status": status,
            "changed": sorted(changed),
            "printed": printed[-600:],
            "seconds": took,
        }


def wait(child: int) -> int:
    """Return the exit status of a process, which is killed with its session after SECONDS."""
    ends = time.monotonic() + SECONDS
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > ends:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.001)


def main() -> None:
    libc = ctypes.CDLL(None)
    if os.getuid() == 0:  # an attack that succeeds reaches mounts of this process only
        assert libc.unshare(0x20000) == 0
        assert libc.mount(None, b"/", None, ctypes.c_ulong(0x44000), None) == 0
    protection, folder, user = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if user:
        os.chown(folder, user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        libc.prctl(4, 1, 0, 0, 0)  # dumpable: its /proc files are its own
    ways = json.load(sys.stdin)
    for module in dict.fromkeys(way["module"] for way in ways if way["module"]):
        importlib.import_module(module)
    runner = Runner(protection, folder)
    for way in ways:
        print(json.dumps(runner.test(way)), flush=True)


if __name__ == "__main__":
    main()
