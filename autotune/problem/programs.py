"""Commands installed by a package (`trl`, `llamafactory-cli`): Python files in an environment's folder of programs."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from autotune.errors import UserError
from autotune.interpreter import current, which
from autotune.problem.frameworks import FRAMEWORKS


def program_file(name: str) -> Path:
    """Return the Python file of an installed command. The ranks' environment takes precedence over PATH.

    Raises:
        UserError: the command is missing, is no Python program, or belongs to another environment.
    """
    python, found = current().path, which(name)
    known = next((one for one in FRAMEWORKS if name in one.programs), None)
    if found is None and known is not None:
        raise UserError(
            f"`-- {name} …`: {known.package} is not installed in {_environment(python)}: "
            f"`pip install {known.package}` there, or give the Python that has it"
        )
    if found is None:
        raise UserError(f"no script {name}: expected a Python file, `-m` and a module, or an installed command")
    interpreter = interpreter_of(Path(found))
    if interpreter is None:
        raise UserError(no_script(name))
    if _other(interpreter, python):
        raise UserError(
            f"`-- {name} …`: {found} is of {_environment(interpreter)}, and ranks run in {_environment(python)}: "
            f"install it there, or give the Python that has it"
        )
    return Path(found)


def no_script(name: str, started: str = "") -> str:
    """Return an error for a command that Python cannot run, with a replacement.

    Args:
        started: the command that it starts, if known.
    """
    if not started:
        return f"`-- {name} …`: a command, no script: give what it starts, like `-- train.py …` or `-- -m trl.scripts.sft …`"
    filled = ", with its variables filled in" if "$" in started else ""
    return f"`-- {name} …`: a shell script: give what it starts{filled}: `-- {started}`"


def check_module(name: str) -> None:
    """Check that a module can be found, if the ranks' interpreter is this one. Another interpreter is not checked.

    Raises:
        UserError: the module was not found.
    """
    top = name.partition(".")[0]
    if current().beside or os.path.isdir(top) or os.path.isfile(f"{top}.py"):
        return
    if importlib.util.find_spec(top) is None:
        known = next((one for one in FRAMEWORKS if top in one.packages), None)
        install = f": `pip install {known.package}` there, or give the Python that has it" if known else ""
        raise UserError(f"`-- -m {name} …`: no module {top} here, nor in {_environment(current().path)}{install}")


def interpreter_of(program: Path) -> str | None:
    """Return the Python in a program's shebang, or None if the program is not a Python one."""
    try:
        with program.open("rb") as file:
            start = file.read(1024)
    except OSError:
        return None
    if not start.startswith(b"#!") or b"\0" in start:
        return None
    lines = start.decode(errors="replace").splitlines()
    said = lines[0][2:].strip()
    if said == "/bin/sh" and len(lines) > 1:  # pip's form if the path is too long for the kernel or has blanks
        long = re.match(r"'''exec' (\"[^\"]+\"|\S+) \"\$0\"", lines[1])
        said = long[1].strip('"') if long else said
    name = said.rpartition("/")[2].split()
    return said if name and any("python" in part for part in name) else None


def _environment(python: str) -> str:
    return str(Path(python).parent.parent)


def _other(interpreter: str, python: str) -> bool:
    """Check that two interpreters belong to different environments; `/usr/bin/env python` matches any."""
    if interpreter.startswith("/usr/bin/env") or not Path(interpreter).exists():
        return False
    return os.path.realpath(os.path.dirname(interpreter)) != os.path.realpath(os.path.dirname(python))
