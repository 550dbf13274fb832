"""Python of ranks, the fork server and the tracer: the tuner's own, or that of the user's training environment.

`commands/environment.py` selects it once per call, and a `Job` holds it. Functions that have no job, and start a process or
need a version, receive it as an argument. The user's Python sees only this package from the tuner's environment, in a folder
without any other: neither a rank nor its children see optuna, or another torch.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.util import inquiry
from autotune.util.entry_points import SANDBOX, WITHOUT_SANDBOX
from autotune.util.files import cache_root

ANSWER_SECONDS = 60.0  # for an interpreter to answer; a cold conda on a network takes ten
LEAST_PYTHON = (3, 11)
_LAUNCHERS = {
    "torchrun": "torch.distributed.run",
    "deepspeed": "deepspeed.launcher.runner",
    "accelerate": "accelerate.commands.accelerate_cli",
}
NVML_FILE = "AUTOTUNE_NVML"  # variable with the path of nvidia-ml-py's one file, for ranks; see `problem.nvml`
_PACKAGE = Path(__file__).parents[1]
_INSTALLED = ("site-packages", "dist-packages")
# A user's file in the current folder, like random.py, must not replace a library's. Option -P needs Python 3.11.
APART = "import sys; sys.path[:] = [p for p in sys.path if p not in ('', '.')]; "
_RUN = "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
# Runs before any other import: imports take seconds, in which the tuner may be killed.
_BOUND = "from autotune.util.linux import die_with_parent; die_with_parent(int(sys.argv.pop(1))); "
_CONTAINED = "from autotune.util.linux import contain; contain(int(sys.argv.pop(1))); "
# Every Python since 2.4 can run this: the oldest only print their version.
_ASK = (
    f"{APART}print('PYTHON %d.%d.%d' % sys.version_info[:3]); "
    f"sys.version_info >= {LEAST_PYTHON} and __import__('runpy').run_path(sys.argv.pop(1), run_name='__main__')"
)


@dataclass(frozen=True)
class Interpreter:
    """A Python and its environment."""

    answer: Mapping[str, Any] | None = field(default=None, hash=False)  # `inquiry.facts` there; None: the tuner's own

    @property
    def is_other(self) -> bool:
        """True if this Python differs from the tuner's own."""
        return self.answer is not None

    @property
    def path(self) -> str:
        """The executable."""
        return str(self.answer["executable"]) if self.answer else sys.executable

    @property
    def python(self) -> str:
        """Its version, like `3.12.1`."""
        return str(self.answer["python"]) if self.answer else ".".join(map(str, sys.version_info[:3]))

    @property
    def cuda(self) -> str | None:
        """CUDA version for which its torch is built."""
        return self.answer["cuda"] if self.answer else inquiry.cuda()

    @property
    def nccl(self) -> str | None:
        """NCCL version that came with its torch."""
        return self.answer["nccl"] if self.answer else inquiry.nccl()

    def version(self, package: str) -> str | None:
        """Return the version of one of `inquiry.PACKAGES`, or None if it is missing."""
        return self.answer["versions"].get(package) if self.answer else inquiry.version(package)

    def has(self, module: str) -> bool:
        """Check that a top-level module can be imported."""
        return _has(self.path, module) if self.answer else inquiry.has(module)

    def origin(self, module: str) -> str | None:
        """Return the file of a module, the current folder included, or None."""
        return _query(self.path, "origin", module)[1] if self.answer else inquiry.origin(module)

    def environment(self) -> dict[str, str]:
        """Return this process's environment, in which `python -m autotune.…` finds this package even if it is not installed."""
        found = dict(os.environ)
        if not self.answer:
            # An installed package is found anyway. All of `site-packages` in PYTHONPATH would reach other Pythons that a
            # script starts.
            return found if _PACKAGE.parent.name in _INSTALLED else _with_path(found, _PACKAGE.parent)
        own = found.get("VIRTUAL_ENV")
        if own and Path(own).resolve() == Path(sys.prefix).resolve():  # the tuner's environment is not the ranks'
            del found["VIRTUAL_ENV"]
        if (nvml := inquiry.origin("pynvml")) is not None:
            found[NVML_FILE] = nvml
        return _with_path(found, _package_alone())


OWN = Interpreter()


def other_python(interpreter: Interpreter) -> str | None:
    """Return an interpreter's path if it is not the tuner's own. A study stores it, so that a later call uses it too."""
    return interpreter.path if interpreter.is_other else None


def module_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the words that run a module of this package like `-m`, but without searching the current folder."""
    return [python, "-c", APART + _RUN, module, *arguments]


def sandboxed_command(python: str, folder: str, module: str, *arguments: str, agreed: bool) -> list[str]:
    """Return `contained_command` for a module that runs in a sandbox; its exit status is NOT_PROTECTED if there is none.

    Args:
        folder: takes what the module writes.
        agreed: run it without a sandbox on a machine that offers none.
    """
    return contained_command(python, SANDBOX, folder, *([WITHOUT_SANDBOX] if agreed else []), module, *arguments)


def bound_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return `module_command` for a process that dies with this one, from its start."""
    return [python, "-c", APART + _BOUND + _RUN, str(os.getpid()), module, *arguments]


def contained_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return `bound_command` for a process whose descendants die with it, if the kernel has PID namespaces."""
    return [python, "-c", APART + _CONTAINED + _RUN, str(os.getpid()), module, *arguments]


def console_script(command: str, interpreter: Interpreter = OWN) -> str | None:
    """Return a console script of the user's environment: next to its interpreter, else in PATH."""
    beside = Path(interpreter.path).parent / command
    if os.sep not in command and os.path.isfile(beside) and os.access(beside, os.X_OK):
        return str(beside)
    return shutil.which(command)


def launch_command(words: Sequence[str], python: str | None) -> list[str]:
    """Return a launcher's command line that works without activating the ranks' environment.

    The launcher is named by its path, or as a module if the environment has no such script.

    Args:
        python: of the ranks; None: the tuner's own.
    """
    if python is None:
        return list(words)
    if words[0] == "python":
        return [python, *words[1:]]
    module, script = _LAUNCHERS.get(words[0]), Path(python).parent / words[0]
    if not script.is_file():
        return [python, "-m", module, *words[1:]] if module else list(words)
    found = shutil.which(words[0])
    return [words[0] if found is not None and os.path.samefile(found, script) else str(script), *words[1:]]


# -- another's ------------------------------------------------------------------------------------------------------------


def interpreter_at(typed: str, said_by: str) -> Interpreter:
    """Return the interpreter at a path, of a command in PATH, or in the folder of a virtual environment.

    Args:
        said_by: the option or variable that named it, for messages: `--python`.

    Raises:
        UserError: it is missing, cannot be run, is no Python or too old, or does not answer.
    """
    executable, label = _executable(typed, f"{said_by} {typed}"), f"{said_by} {typed}"
    try:
        version, found = _query(executable, "facts")
    except _QueryFailed as error:
        raise UserError(f"{label}: {error}; expected the Python of the environment that you train in") from None
    if found is None:
        least = ".".join(map(str, LEAST_PYTHON))
        raise UserError(f"{label} is Python {version}: expected {least} or newer")
    if Path(found["prefix"]).resolve() == Path(sys.prefix).resolve() and version == OWN.python:
        return OWN
    # Later calls skip a shim of pyenv or a wrapper script, which would be an extra process in between.
    return Interpreter({**found, "executable": found["executable"] or executable, "python": version})


def _executable(typed: str, label: str) -> str:
    """Return the path of an executable.

    Raises:
        UserError: there is nothing that can be run.
    """
    path = os.path.expanduser(typed)
    if os.path.isdir(path):
        path = f"{path}/bin/python"
    found = shutil.which(path)
    if found is None:
        raise UserError(
            f"{label}: no such executable; expected the Python of the environment that you train in, or its folder"
        )
    return os.path.abspath(found)  # not resolved: the link's location decides the environment


class _QueryFailed(Exception):
    """Failure of an interpreter to answer; the message describes it."""


@functools.cache
def _has(executable: str, module: str) -> bool:
    return bool(_query(executable, "has", module)[1])


def _query(executable: str, *question: str) -> tuple[str, Any]:
    """Return (version, answer of `inquiry`); the answer is None if the Python is too old.

    Raises:
        _QueryFailed: it cannot be run, hangs or is no Python.
    """
    command = [executable, "-c", _ASK, str(Path(__file__).with_name("inquiry.py")), *question]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise _QueryFailed(f"it cannot be run ({error.strerror})") from None
    try:
        out, err = process.communicate(timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        raise _QueryFailed(f"no answer within {ANSWER_SECONDS:.0f} s") from None
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and its children
            process.kill()
            process.wait()
    lines = out.splitlines()
    at = next((i for i, line in enumerate(lines) if line.startswith("PYTHON ")), None)
    if at is None:
        raise _QueryFailed("it is no Python")
    version = lines[at].removeprefix("PYTHON ")
    if tuple(int(part) for part in version.split(".")) < LEAST_PYTHON:
        return version, None
    with suppress(ValueError):
        return version, json.loads(lines[-1])
    raise _QueryFailed(f"it fails ({(err.strip().splitlines() or [f'exit status {process.returncode}'])[-1][:160]})")


# -- this package, for another ---------------------------------------------------------------------------------------------


def _with_path(environment: dict[str, str], folder: Path) -> dict[str, str]:
    path = filter(None, [str(folder), environment.get("PYTHONPATH")])
    return {**environment, "PYTHONPATH": os.pathsep.join(path)}


@functools.cache
def _package_alone() -> Path:
    """Return a folder with a link to this package and nothing else.

    The package's neighbours, a whole `site-packages`, must not be visible in another environment.
    """
    key = hashlib.sha256(os.fsencode(_PACKAGE)).hexdigest()[:12]
    folder = cache_root() / "package" / key
    try:
        _link(folder)
    except OSError:  # a home folder that is not writable
        folder = Path(tempfile.mkdtemp(prefix="autotune-package-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        _link(folder)
    return folder


def _link(folder: Path) -> None:
    link = folder / "autotune"
    if link.is_symlink() and Path(os.readlink(link)) == _PACKAGE:
        return
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f".{os.getpid()}"  # replaced atomically: another call may be starting ranks
    made.symlink_to(_PACKAGE, target_is_directory=True)
    os.replace(made, link)
