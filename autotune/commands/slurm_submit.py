"""`--executor slurm` outside an allocation: one job for the whole call, in which the same command runs again.

The call waits in the queue only once. The job's time limit and a preemption reach it as SIGTERM, on which it ends as on Ctrl-C:
measurements are kept, and the same command resumes.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from autotune.commands.request import Request
from autotune.errors import UserError
from autotune.executors.cluster.transports import PACKAGE, slurm_output
from autotune.masking import hide_password, shell_text
from autotune.util.files import write_atomically
from autotune.util.linux import ENDING_SIGNALS, handled_signals

_LEAST_SECONDS = 180  # s; shortest time limit: the warning may come a minute early (sbatch(1), --signal)
_ENDED = 128 + signal.SIGTERM  # a shell's status of a command that SIGTERM killed before it had set a handler
GRACE_SECONDS = 90  # between Slurm's warning and the end; ending and recording a trial takes a few
_LOOK_SECONDS = 1.0
_PREFIX = "AUTOTUNE_"  # prefix of variables that carry a command's secrets
_ASK_SECONDS = 5.0  # between queries to the controller
# Reasons for waiting that never end: squeue(1), job reason codes.
_NEVER = re.compile(
    r"Partition(Config|NodeLimit|TimeLimit)|BadConstraints|Invalid(Account|QOS)|.*PerJobLimit|.*WallDuration.*"
)
_OWN = re.compile(r"--(nodes|ntasks|ntasks-per-node|output|error|signal|requeue|parsable|wrap|export)")


def options_of(request: Request) -> list[str]:
    """Return the options of sbatch for a request, one word each.

    Raises:
        UserError: an option does not parse, or is set by autotune.
    """
    time = request.time
    if time and (limit := limit_seconds(time)) is not None and 0 < limit < _LEAST_SECONDS:
        raise UserError(
            f"--time {time}: Slurm warns {GRACE_SECONDS} s before the end, and up to a minute earlier: give at least "
            f"{_LEAST_SECONDS // 60} minutes"
        )
    found = [
        f"--nodes={request.nodes or 1}",
        "--ntasks-per-node=1",
        "--open-mode=append",
        f"--signal=B:TERM@{GRACE_SECONDS}",
        "--requeue",
        "--export=ALL",  # overrides SBATCH_EXPORT: the job needs the environment of this call
    ]
    if request.device != "cpu" and request.gpus is not None:
        found.append(f"--gpus-per-node={request.gpus}")
    named = {"partition": request.partition, "account": request.account, "time": time}
    found += [f"--{name}={value}" for name, value in named.items() if value]
    for text in request.slurm:
        word = f"--{text.lstrip('-')}"
        if not re.fullmatch(r"--[a-z][a-z-]*(=\S.*)?", word):
            raise UserError(f"--slurm {text}: expected KEY=VALUE, an option of sbatch like gres=gpu:8")
        if _OWN.fullmatch(word.partition("=")[0]):
            raise UserError(f"--slurm {text}: autotune sets this option. Remove it.")
        found.append(word)
    return found


def words_without_password(words: Sequence[str]) -> list[str]:
    """Return the typed words without a `--storage` that has a password."""
    end = words.index("--") if "--" in words else len(words)  # the script follows
    kept = list[str]()
    typed = iter(words[:end])
    for word in typed:
        one = [word, next(typed, "")] if word == "--storage" else [word]
        if word.partition("=")[0] != "--storage" or hide_password(one[-1]) == one[-1]:
            kept += one
    return [*kept, *words[end:]]


def limit_seconds(text: str) -> float | None:
    """Return a time limit in seconds, or None if the text is none; Slurm reports such errors itself.

    Formats of sbatch: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
    """
    found = re.fullmatch(r"(?:([0-9]+)-)?([0-9]+)(?::([0-9]+))?(?::([0-9]+))?", text)
    if found is None:
        return None
    days, *clock = found.groups()
    numbers = [int(number) for number in clock if number is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return float(86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds)


def submit(
    words: Sequence[str],
    options: Sequence[str],
    folder: Path,
    print_line: Callable[[str], None],
    *,
    needs: Sequence[str] = (),
) -> int:
    """Run `autotune WORDS` in a Slurm allocation, show its output, and return its exit code.

    Args:
        options: of sbatch.
        folder: for the job's files.
        print_line: receives lines for display.
        needs: variables of this environment that the command needs there.

    Raises:
        UserError: Slurm refuses the job, or loses it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    script, output, code = (stem.with_suffix(end) for end in (".sbatch", ".log", ".code"))
    secrets: dict[str, tuple[str, str]] = {}
    shell_text(words, secrets, _PREFIX)
    # sbatch passes them on; the script is stored in a file
    os.environ.update({name: value for name, (_, value) in secrets.items()})
    write_atomically(script, batch_script(words, code, needs))
    job = slurm_output(
        "sbatch", "--parsable", f"--output={output}", "--job-name=autotune", *options, str(script)
    ).strip()
    job = job.partition(";")[0]
    print_line(f"job {job} is submitted (log: {output}); Ctrl-C ends it")
    with _cancelled_by_signals(job):
        return _follow(job, output, code, print_line)


def batch_script(words: Sequence[str], code: Path, needs: Sequence[str] = ()) -> str:
    """Return the script that Slurm runs on the first node, see `submit`.

    The script is stored in a file, so that it refers to secrets by variables.
    """
    secrets: dict[str, tuple[str, str]] = {}
    command = f"{shlex.join([sys.executable, str(PACKAGE)])} {shell_text(words, secrets, _PREFIX)}"
    needs = [*needs, *secrets]
    keep = f"echo $code > {shlex.quote(f'{code}.new')} && mv {shlex.quote(f'{code}.new')} {shlex.quote(str(code))}"
    checks = "".join(
        f"""if [ -z "${{{name}:-}}" ]; then
  echo "autotune: Slurm has not handed {name} on to its job: set it where jobs find it, or ask what clears it" >&2
  code=2
  {keep}
  exit $code
fi
"""
        for name in needs
    )
    return f"""#!/bin/bash
cd {shlex.quote(os.getcwd())}
rm -f {shlex.quote(str(code))}
{checks}{command} &
tuner=$!
trap 'kill -TERM $tuner' TERM
wait $tuner
code=$?
while kill -0 $tuner 2>/dev/null; do  # a signal has ended the waiting, not the tuner
  wait $tuner
  code=$?
done
{keep}
exit $code
"""


@contextmanager
def _cancelled_by_signals(job: str) -> Iterator[None]:
    """End the job on Ctrl-C and SIGTERM, as Slurm's own warning does; its last output is still shown."""

    def cancel(number: int, frame: object) -> None:
        waits = _state(job)[0] == "PENDING"  # a pending job receives no signals (scancel(1))
        gently = ("--batch", "--signal=TERM") if number == signal.SIGINT and not waits else ()
        with suppress(UserError):
            slurm_output("scancel", *gently, job)

    held = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    with handled_signals(cancel, held):
        yield


def _follow(job: str, output: Path, code: Path, print_line: Callable[[str], None]) -> int:
    shown, state, next_question = 0, "", 0.0
    while True:
        shown = _show(output, shown)
        if code.exists():
            _show(output, shown)
            status = int(code.read_text(encoding="utf-8").strip() or 1)
            if status == _ENDED:
                raise UserError(f"job {job} was stopped before it began. Give it a longer --time, or try again.")
            return status
        if time.monotonic() > next_question:
            next_question = time.monotonic() + _ASK_SECONDS
            now, why = _state(job)
            if now == "PENDING" and _NEVER.fullmatch(why):
                with suppress(UserError):
                    slurm_output("scancel", job)
                raise UserError(
                    f"--executor slurm: the job can never start ({why}). Request fewer nodes or less time; `sinfo` shows the "
                    "limits."
                )
            if now != state and now:
                print_line(f"job {job} is {now.lower()}{f' ({why})' if now == 'PENDING' else ''}")
            state = now
            if not state:
                time.sleep(_LOOK_SECONDS)  # its last file may arrive late over a network
                if code.exists():
                    continue
                raise UserError(
                    f"job {job} ended without an exit code. `sacct -j {job}` may show the reason; log: {output}"
                )
        time.sleep(_LOOK_SECONDS)


def _state(job: str) -> tuple[str, str]:
    """Return the job's state and its reason from squeue; the state is empty once the job is over."""
    try:
        state, _, why = slurm_output("squeue", "-h", "-j", job, "-o", "%T %r").strip().partition(" ")
    except UserError as error:
        return ("" if "Invalid job id" in str(error) else "UNKNOWN"), ""
    return (
        "" if state in ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY") else state
    ), why


def _show(path: Path, shown: int) -> int:
    """Print the new part of a file, and return how much of it has been shown."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(shown)
        data = file.read()
        print(data.decode(errors="replace"), end="", flush=True)
        return shown + len(data)
    return shown
