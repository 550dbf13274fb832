"""Commands that a package has installed (`trl`, `llamafactory-cli`): Python files in the folder of an environment's programs."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from autotune.errors import UserError
from autotune.interpreter import current, which
from autotune.problem.frameworks import FRAMEWORKS


def program_file(name: str) -> Path:
    """The Python file of an installed command: what is installed beside the ranks' interpreter comes before what PATH finds.

    Raises:
        UserError: there is none, it is no Python program, or it is another environment's.
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
    """Says that a command is none that Python runs, and what to give instead.

    Args:
        started: the command that it starts, where that is known.
    """
    if not started:
        return f"`-- {name} …`: a command, no script: give what it starts, like `-- train.py …` or `-- -m trl.scripts.sft …`"
    filled = ", with its variables filled in" if "$" in started else ""
    return f"`-- {name} …`: a shell script: give what it starts{filled}: `-- {started}`"


def check_module(name: str) -> None:
    """Checks that a module can be found from here, where the ranks' interpreter is this one; another's is not asked.

    Raises:
        UserError: it cannot.
    """
    top = name.partition(".")[0]
    if current().beside or os.path.isdir(top) or os.path.isfile(f"{top}.py"):
        return
    if importlib.util.find_spec(top) is None:
        known = next((one for one in FRAMEWORKS if top in one.packages), None)
        install = f": `pip install {known.package}` there, or give the Python that has it" if known else ""
        raise UserError(f"`-- -m {name} …`: no module {top} here, nor in {_environment(current().path)}{install}")


def interpreter_of(program: Path) -> str | None:
    """The Python that a program's first lines name; None where it is none of Python's."""
    try:
        with program.open("rb") as file:
            start = file.read(1024)
    except OSError:
        return None
    if not start.startswith(b"#!") or b"\0" in start:
        return None
    lines = start.decode(errors="replace").splitlines()
    said = lines[0][2:].strip()
    if said == "/bin/sh" and len(lines) > 1:  # pip's, where the path is too long for a kernel or has blanks
        long = re.match(r"'''exec' (\"[^\"]+\"|\S+) \"\$0\"", lines[1])
        said = long[1].strip('"') if long else said
    name = said.rpartition("/")[2].split()
    return said if name and any("python" in part for part in name) else None


def _environment(python: str) -> str:
    return str(Path(python).parent.parent)


def _other(interpreter: str, python: str) -> bool:
    """Whether two interpreters belong to different environments; `/usr/bin/env python` says of none."""
    if interpreter.startswith("/usr/bin/env") or not Path(interpreter).exists():
        return False
    return os.path.realpath(os.path.dirname(interpreter)) != os.path.realpath(os.path.dirname(python))
