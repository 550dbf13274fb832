"""Training command of a shell script, which runs in a sandbox with programs that write down how they were called.

The shell itself expands variables, functions and loops. Files are the overlay's, and programs of the network do nothing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import UserError
from autotune.script.command_line import FRAMEWORKS, MODULES, PROGRAMS, CommandLine
from autotune.script.source_digests import digests
from autotune.util.entry_points import SHELL_SCRIPT
from autotune.util.interpreter import ANSWER_SECONDS, Interpreter, sandboxed_command

_OF_THE_SHELL = re.compile(r"_|PATH|PWD|OLDPWD|SHLVL|BASH_\w+|VIRTUAL_ENV\w*|CONDA_\w+|AUTOTUNE_\w+|TMPDIR")


def started_training(line: CommandLine, words: Sequence[str], interpreter: Interpreter) -> list[str]:
    """Return the training command that a shell script starts, as a user would type it.

    Commands of launchers are preferred to plain Python, and then commands with a DeepSpeed config.

    Args:
        line: as typed.
        words: those after the shell.

    Raises:
        UserError: it starts none or several, in another folder or with a file that only it writes, or cannot be run safely.
    """
    name, cwd = f"`-- {' '.join(line.target[:2])} …`", os.getcwd()
    own = {**os.environ, **dict(line.environment)}
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        command = sandboxed_command(interpreter.path, folder, SHELL_SCRIPT, cwd, *words, agreed=False)
        environment, order = interpreter.environment(), json.dumps(own)
        done = subprocess.run(command, input=order, stdout=subprocess.PIPE, env=environment, encoding="utf-8")
    if done.returncode:
        raise UserError(f"{name}: it cannot run here without a change of your files: give the training's command")
    found: dict[str, tuple[int, str, dict[str, str]]] = {}
    for place, call, variables, files in json.loads(done.stdout.splitlines()[-1]):
        changed = sorted(variables.items() - own.items())
        typed = [f"{key}={value}" for key, value in changed if not _OF_THE_SHELL.fullmatch(key)]
        launched = call[0] != "python" or "".join(call[2:3]) in MODULES
        found[shlex.join([*typed, *call])] = 2 * launched + ("deepspeed" in " ".join(call)), place, files
    most = max((rate for rate, *_ in found.values()), default=0)
    best = [text for text, (rate, *_) in found.items() if rate == most]
    if len(best) != 1:
        quoted = "".join(f", `-- {text}`" for text in best[:3])
        raise UserError(f"{name}: it starts {len(best) or 'no'} trainings: give the command of one{quoted}")
    _, place, files = found[best[0]]
    if place != cwd:
        raise UserError(f"{name}: it trains in {place}: call autotune there with `-- {best[0]}`")
    there = digests(files, cwd)
    if written := ", ".join(file for file, digest in files.items() if there.get(file) != digest):
        raise UserError(f"{name}: it writes {written}: write that first, then call autotune again")
    return shlex.split(best[0])


def main() -> None:
    """Run a shell script in this sandbox, and print the commands that it has started as JSON."""
    _, cwd, *words = sys.argv
    folder, environment = tempfile.mkdtemp(), {**json.load(sys.stdin), "TMPDIR": tempfile.gettempdir()}
    launchers = " ".join([*PROGRAMS, *(name for one in FRAMEWORKS for name in one.programs)])
    runner = str(Path(__file__).parents[1] / "data/shell/run.sh")
    subprocess.run(
        ["bash", runner, folder, launchers, sys.executable, f"{ANSWER_SECONDS}", "bash", *words], env=environment
    )
    found = []
    for file in sorted(Path(folder, "calls").iterdir(), key=os.path.getmtime):
        number, place, *rest = os.fsdecode(file.read_bytes()).split("\0")[:-1]
        call, variables = rest[: int(number) + 1], rest[int(number) + 1 :]
        files = digests((word.rpartition("=")[2] for word in call), place)
        found.append([place, call, dict(one.split("=", 1) for one in variables), files])
    view = os.getcwd().removesuffix(cwd)  # Landlock's
    print(json.dumps(found).replace(view or "\0", ""))


if __name__ == "__main__":
    main()
