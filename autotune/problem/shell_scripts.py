"""Shell scripts that start a training: not Python's to run, but what they start could be given instead."""

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
_LONGEST = 500  # characters of a line that is quoted
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
}  # words before a command
_BETWEEN = re.compile(r"\s*(?:&&|\|\||;)\s*")
_QUOTED = re.compile(r"\b(?:ba|da|z|k)?sh\s+-\w*c\s+(['\"])(.*)\1")
_AFTER = re.compile(r"\s+(?:\||\d?>|&|#).*")  # of a command: pipes, redirections, comments
_PROGRAMS = {name for one in FRAMEWORKS for name in one.programs}


def shell_script(words: Sequence[str]) -> Path | None:
    """The shell script that these words start, by its own name or by a shell's (`bash train.sh`); None where they start none."""
    path = Path(words[0])
    if os.path.isfile(path):  # of a text of any length, which Path refuses
        return path if path.suffix[1:] in _SHELLS or _names_a_shell(path) else None
    named = (Path(word) for word in words[1:] if not word.startswith("-")) if path.name in _SHELLS else ()
    return next((one for one in named if os.path.isfile(one)), None)


def _names_a_shell(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(256).decode(errors="replace")
    if not first.startswith("#!") or interpreter_of(path) is not None:  # programs of pip's begin with a shell, too
        return False
    return not _SHELLS.isdisjoint(part.rpartition("/")[2] for part in first[2:].split())


def training_line(path: Path) -> str:
    """The command in a shell script that starts its training, in one line; empty where none is seen. A launcher's or a
    framework's comes before one of Python alone. Of several alike that which is given a DeepSpeed config is taken; else the first
    of a launcher's, which others evaluate, and the last of Python's, for which others prepare data."""
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
    """A command without what stands around it: a subshell's parentheses, a quote of which the other is elsewhere."""
    part = _AFTER.sub("", part).strip().lstrip("(")
    if part.count(")") > part.count("("):
        part = part.rstrip(") ")
    return part.rstrip("'\"") if part.count('"') % 2 or part.count("'") % 2 else part


def _command(words: list[str]) -> list[str]:
    """The words without those that only stand before a command (`srun --nodes 1 torchrun …`)."""
    if not words or words[0] not in _BEFORE:
        return words
    return next((words[at:] for at in range(1, len(words)) if _likely(words[at:])), [])


def _likely(words: Sequence[str]) -> int:
    """How likely a command is a training's: 2 of a launcher or a framework, 1 of Python, 0 of anything else."""
    try:
        line = take_apart(words)
    except UserError:  # of a launcher, told of several nodes
        return 2
    if line.kind or not _PROGRAMS.isdisjoint(line.target[:1]):
        return 2
    runs = line.target[:1] == ("-m",) or "".join(line.target[:1]).endswith(".py")
    return int(line.python and runs and line.target[:2] != ("-m", "pip"))
