"""Commands of the most used fine-tuning frameworks, unmodified, tuned and trained with on two CPU ranks.

`python benchmarks/trials/frameworks.py [--only swift,dpo] [--environments DIR] [--budget 4m] [--turns 20] [--json FILE]`, whose
rows of other commands are kept

Each runs from its released package in its own environment (`framework_environments.py` makes those that are missing). A
command is tuned by `autotune run -- COMMAND`, its winner exported, and two trainings take turns (`inturn.py`): the command
as it is, and the one that autotune prints. What they train on is counted in the forwards of both (`steplog/`): rows a step
must be the same, and tokens a second are compared. Models, tokenizers and data are made here, small and random.
"""

from __future__ import annotations

import json
import re
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.problem.hardware import threads_per_rank
from benchmarks.common import HERE, command_line, kept_rows, parse, print_table, write_json
from benchmarks.trials.framework_commands import COMMANDS, Command, here, write_files
from benchmarks.trials.framework_environments import DEFAULT, environment, made
from benchmarks.trials.inturn import SETTLE_STEPS, Side, ratio, samples_per_second, take_turns

RANKS = 2
TUNING_SECONDS = 1200.0  # building DeepSpeed's ops is not in a budget
EXPORTED = ("deepspeed", "accelerate", "hf")
DEEPSPEED = re.compile(r"(?<![^ ])deepspeed(?= )")
PRINTED = re.compile(r"^  or without autotune: (.*)$", re.MULTILINE)


def tuned(command: Command, python: Path, folder: Path, limits: list[str]) -> str:
    """What `autotune run` says.

    Raises:
        RuntimeError: it failed.
    """
    options = ["--device", "cpu", "--gpus", str(RANKS), "--space", "space.yaml", "--study", "study"]
    words = shlex.split(command.words)
    return _autotune(python, folder, ["run", *options, *limits, "--", *words])


def exported(python: Path, folder: Path) -> list[str]:
    """The formats that the study exports as files that parse."""
    for form in EXPORTED:
        _autotune(python, folder, ["export", "study", "--format", form])
    return list(EXPORTED)


def _autotune(python: Path, folder: Path, words: list[str]) -> str:
    done = subprocess.run(
        [str(python), "-m", "autotune", *words],
        cwd=folder,
        env=environment(python),
        capture_output=True,
        text=True,
        timeout=TUNING_SECONDS,
    )
    if done.returncode:
        raise RuntimeError(f"autotune {words[0]}: exit {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
    return done.stdout


def training(name: str, words: str, python: Path, folder: Path) -> Side:
    """A training by the words of a command line, in the environment of whoever would type them.

    DeepSpeed's launcher takes one port, always the same: since two trainings live at once here, each is told its own.
    """
    words = DEEPSPEED.sub(f"deepspeed --master_port {free_port()}", words, count=1)
    log = folder / f"{name}.log"
    env = environment(python) | {"PYTHONPATH": str(HERE / "trials" / "steplog"), "STEP_LOG": str(log)}
    env |= {"OMP_NUM_THREADS": str(threads_per_rank(RANKS))}
    return Side(name, ["bash", "-c", words], log, folder, env)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def a_step(side: Side, what: str) -> float:
    """Rows or tokens of a step: the median, since sequences differ in length."""
    lines: list[dict[str, float]]
    lines = [json.loads(line) for line in side.log.read_text().splitlines() if line.endswith("}")]
    return statistics.median(line[what] for line in lines[SETTLE_STEPS - 1 :])


def one(command: Command, python: Path, folder: Path, limits: list[str], turns: int) -> dict[str, Any]:
    subprocess.run(
        [str(python), str(HERE / "trials" / "framework_inputs.py"), str(folder)],
        check=True,
        env=environment(python),
        capture_output=True,
    )
    write_files(command, folder)
    said = tuned(command, python, folder, limits)
    exported(python, folder)
    printed = PRINTED.search(_autotune(python, folder, ["show", "study"]))
    if printed is None:
        raise RuntimeError(f"no command printed:\n{said[-1500:]}")
    own = training("own", command.words, python, folder)
    ours = training("tuned", printed[1], python, folder)
    take_turns([own, ours], turns)
    gain, spread = ratio(ours, own)
    tokens = a_step(own, "tokens") / own.samples_a_step()  # the same data in both
    winner = re.search(r"^winner: .* \((.*)\)$", said, re.MULTILINE)
    return {
        "command": command.words,
        "framework": f"{command.framework} {version(python, command)}",
        "own tokens/s": samples_per_second(own) * tokens,
        "tuned tokens/s": samples_per_second(ours) * tokens,
        "tuned / own": gain,
        "±": spread,
        "rows a step, own and tuned": f"{a_step(own, 'samples'):.0f} and {a_step(ours, 'samples'):.0f}",
        "winner": winner[1] if winner else None,
        "needed on CPU ranks": command.needs,
        "failed": None,
        "printed": printed[1].replace(str(folder.resolve()), "…"),
    }


def version(python: Path, command: Command) -> str:
    asked = f"from importlib.metadata import version; print(version({command.environment!r}))"
    return subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def why(said: str) -> str:
    """What a command says of its failure, in one line: autotune's own, or the last; its log has the rest."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    own = [line.removeprefix("autotune: ") for line in lines if line.startswith("autotune: ")]
    return (own or lines or ["it said nothing"])[-1][:240]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help="comma-separated parts of commands")
    parser.add_argument("--environments", type=Path, default=DEFAULT, metavar="DIR", help=f"default: {DEFAULT}")
    parser.add_argument("--here", action="store_true", help="in this environment, commands of what it has")
    parser.add_argument("--budget", default="4m")
    parser.add_argument("--max-trials", default="6")
    parser.add_argument("--turns", type=int, default=20)
    arguments = parse(parser, only="torchrun --nproc", budget="5m", max_trials="1", turns=1, here=True)
    limits = ["--budget", arguments.budget, "--max-trials", arguments.max_trials]
    rows: list[dict[str, Any]] = []
    for command in COMMANDS:
        if arguments.only and not any(part in command.words for part in arguments.only.split(",")):
            continue
        own = here(command.environment) if arguments.here else None
        if arguments.here and own is None:
            continue
        python = own or made(command.environment, arguments.environments.absolute())
        with tempfile.TemporaryDirectory() as name:
            try:
                row = one(command, python, Path(name), limits, arguments.turns)
            except (RuntimeError, subprocess.SubprocessError) as error:
                if arguments.small:
                    raise
                row = {"command": command.words, "framework": command.framework, "failed": why(str(error))}
        rows.append(row)
        print(json.dumps(row), flush=True)
        # at once, in place of an earlier row of this command: all of them take an hour
        write_json(arguments.json, [*kept_rows(arguments.json, "command", [command.words]), row])
    print_table(
        "the frameworks' commands, two CPU ranks, in turn",
        [{key: value for key, value in row.items() if key != "printed"} for row in rows],
    )


if __name__ == "__main__":
    main()
