"""Shell scripts that start a training. Python cannot run them, but the command that they start could be given instead."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import UserError
from autotune.problem.command_line import take_apart
from autotune.problem.frameworks import FRAMEWORKS
from autotune.problem.programs import interpreter_of

_SHELLS = {"sh", "bash", "dash", "zsh", "ksh", "fish"}
_MOST_BYTES = 1 << 20
_LONGEST = 500  # characters of a quoted line
_BEFORE = {
    "exec",
    "nohup",
    "time",
    "then",
    "do",
    "else",
    "srun",
    "mpirun",
    "mpiexec",
    "uv",
    "conda",
    "{",
}  # words in front of a command
_BETWEEN = re.compile(r"\s*(?:&&|\|\||;)\s*")
_QUOTED = re.compile(r"\b(?:ba|da|z|k)?sh\s+-\w*c\s+(['\"])(.*)\1")
_AFTER = re.compile(r"\s+(?:\||\d?>|&|#).*")  # pipes, redirections and comments after a command
_PROGRAMS = {name for one in FRAMEWORKS for name in one.programs}


def shell_script(words: Sequence[str]) -> Path | None:
    """Return the shell script that these words start, directly or by a shell (`bash train.sh`); None if there is none."""
    path = Path(words[0])
    if os.path.isfile(path):  # `os.path.isfile` accepts a text of any length; Path refuses a long one
        return path if path.suffix[1:] in _SHELLS or _names_a_shell(path) else None
    named = (Path(word) for word in words[1:] if not word.startswith("-")) if path.name in _SHELLS else ()
    return next((one for one in named if os.path.isfile(one)), None)


def _names_a_shell(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(256).decode(errors="replace")
    if not first.startswith("#!") or interpreter_of(path) is not None:  # programs of pip may begin with a shell, too
        return False
    return not _SHELLS.isdisjoint(part.rpartition("/")[2] for part in first[2:].split())


def training_line(path: Path) -> str:
    """Return the line of a shell script that starts its training; empty if none was found.

    Commands of launchers and frameworks are preferred to plain Python, and then commands with a DeepSpeed config. If
    several launcher commands are left, the first is returned, since later ones evaluate. If several plain Python commands are
    left, the last is returned, since earlier ones prepare data.
    """
    try:
        text = path.read_text(errors="replace", encoding="utf-8") if path.stat().st_size <= _MOST_BYTES else ""
    except OSError:
        return ""
    lines = [_QUOTED.sub(r"&& \2", line) for line in re.sub(r"\\\r?\n", " ", text).splitlines()]
    commands = [_command(_alone(part).split()) for line in lines for part in _BETWEEN.split(line)]
    most = max(map(_likely, commands), default=0)
    alike = [command for command in commands if _likely(command) == most] if most else [[]]
    alike = [command for command in alike if "deepspeed" in " ".join(command[1:])] or alike
    line = " ".join(alike[-1 if most == 1 else 0])
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} …"


def _alone(part: str) -> str:
    """Return a command without its surroundings: parentheses of a subshell, or an unmatched quote."""
    part = _AFTER.sub("", part).strip().lstrip("(")
    if part.count(")") > part.count("("):
        part = part.rstrip(") ")
    return part.rstrip("'\"") if part.count('"') % 2 or part.count("'") % 2 else part


def _command(words: list[str]) -> list[str]:
    """Return the words without those in front of a command (`srun --nodes 1 torchrun …`)."""
    if not words or words[0] not in _BEFORE:
        return words
    return next((words[at:] for at in range(1, len(words)) if _likely(words[at:])), [])


def _likely(words: Sequence[str]) -> int:
    """Rate how likely a command is a training: 2 for a launcher or a framework, 1 for Python, 0 for anything else."""
    try:
        line = take_apart(words)
    except UserError:  # the launcher is configured for several nodes
        return 2
    if line.kind or not _PROGRAMS.isdisjoint(line.target[:1]):
        return 2
    runs = line.target[:1] == ("-m",) or "".join(line.target[:1]).endswith(".py")
    return int(line.python and runs and line.target[:2] != ("-m", "pip"))
