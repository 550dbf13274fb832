"""Every command-line option, once, and helpers of all commands."""

from __future__ import annotations

import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.errors import MachineTrouble, UserError, one_line
from autotune.masking import masked_data, masked_words

if TYPE_CHECKING:
    from rich.console import Console

# -- helpers of all commands -------------------------------------------------------------------------------------------
#
# Helpers that the commands of the command line share.

Text = str | None
STORAGE_VARIABLE = "AUTOTUNE_STORAGE"


_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def load_numpy() -> None:
    """Import numpy with one BLAS thread in this process, unless the user has chosen a number.

    The tuner's matrices are small, so that more threads only wait for cores that ranks and other programs use. With many threads,
    resuming a large study on a busy machine took four times as long. Ranks and other child processes do not inherit the setting.
    """
    if _BLAS_THREADS in os.environ or "numpy" in sys.modules:
        return
    os.environ[_BLAS_THREADS] = "1"  # OpenBLAS reads it when it is loaded
    try:
        importlib.import_module("numpy")
    finally:
        del os.environ[_BLAS_THREADS]


def option(help: str, *names: str) -> Any:
    """Declare a command-line option with its help and names."""
    return typer.Option(*names, help=help)


Json = Annotated[bool, option("One JSON object on stdout, nothing else.", "--json")]


def console(stderr: bool = False) -> Console:
    """Return a console that prints data unchanged: no markup, no emoji, and no control characters except rich's."""
    from autotune.results.tables import DataConsole

    stream = sys.stderr if stderr else sys.stdout
    make = partial(DataConsole, file=getattr(stream, "styled", stream), markup=False, emoji=False)
    found = make()
    return found if found.is_terminal else make(width=140)


def begin(text: str, as_json: bool) -> Console:
    """Return the console of a command that takes long, after a first line about what it does if a terminal shows it.

    The line is printed before the imports of the command, which take seconds on a loaded machine.
    """
    shown = console(stderr=as_json)
    if shown.is_terminal and not as_json:
        shown.print(f"{text} …", style="dim")
    return shown


def asking(as_json: bool = False) -> Callable[[str], bool] | None:
    """Return a function that asks the reader, with the default answer no; None without a terminal."""
    from autotune.util.streams import is_watched

    return None if as_json or not is_watched(sys.stdin) else lambda text: typer.confirm(text, err=True)


def emit(data: Any) -> None:
    """Print data as JSON, with secrets masked."""
    text = json.dumps(masked_data(json.loads(json.dumps(data, default=str))), indent=2)
    print(text.replace("\x7f", "\\u007f"))


def typed_command() -> str:
    """Return the command line as a shell would take it again, without secrets."""
    return shlex.join(["autotune", *masked_words(sys.argv[1:])])


def say(text: str) -> None:
    """Print a message to standard error."""
    with suppress(OSError):  # if nothing can be written, the exit code still reports the failure
        print(f"autotune: {text}", file=sys.stderr, flush=True)


def fail(text: str, code: int) -> None:
    """Print an error and exit with the code. Code 2 (bad input) is printed in one line."""
    say(" ".join(map(str.strip, text.splitlines())) if code == 2 else text)  # bad input is reported in one line
    sys.exit(code)


def of_a_database(error: Exception) -> tuple[str, int]:
    """Return the line and exit code of an error of a study's database, a disk or a file; raise any other error."""
    if "optuna" not in sys.modules and not isinstance(error, OSError):
        raise error
    from autotune.search.storage import failures_in_one_line

    try:
        with failures_in_one_line():
            raise error
    except (UserError, MachineTrouble) as told:
        return str(told), 2 if isinstance(told, UserError) else 4
    except OSError as of_a_file:
        if of_a_file.filename is None:
            return f"the machine refuses: {one_line(of_a_file)}", 4
        return f"{of_a_file.filename}: {of_a_file.strerror}", 2


# -- options -----------------------------------------------------------------------------------------------------------
#
# Options of the command line, each defined once; a command sets its default.
#
# An option's parameter has the name of its field in Request.

# the training
Model = Annotated[Text, option("Shipped name (`autotune models`), folder or config.json, or Hub id.")]
Workload = Annotated[Text, option("package.module:function that returns (model, batches) instead of a model.")]
Task = Annotated[
    Text,
    option(
        "causal-lm, masked-lm, classification, token-classification, question-answering, seq2seq or image-text; default: "
        "what the model's configuration is for."
    ),
]
ImageSize = Annotated[int | None, option("Height and width of images in pixels, where the configuration has none.")]
SeqLen = Annotated[Text, option("Tokens a sequence, or max; default 2048 (CPU ranks: 64).")]
Precision = Annotated[Text, option("bf16, fp16 or fp32; default: the best the device has.")]
Optimizer = Annotated[str, option("adamw, adam, fused_adam, lion, sgd or adagrad.")]
GlobalBatchSize = Annotated[
    Text,
    option(
        "Sequences an optimizer step over all ranks, kept exactly; default: what --ds-config says, or a script's own; free: "
        "whatever is fastest."
    ),
]
DsConfig = Annotated[Path | None, option("Your own DeepSpeed config: what is not tuned is kept.")]
Lora = Annotated[Text, option("Adapters: r=16,targets=all-linear (or q_proj+v_proj),alpha=32.")]
Attention = Annotated[Text, option("eager, sdpa, flash_attention_2, flash_attention_3 or flex_attention.", "--attn")]
Compiled = Annotated[bool, option("Compile the model (DeepSpeed's engine.compile).", "--compile")]
Lengths = Annotated[Path | None, option("A data set's lengths (`512,1000` a line): the winner fits its longest batch.")]
Packed = Annotated[bool, option("Sequences of --lengths laid end to end in rows of --seq-len.", "--packing")]
TrustRemoteCode = Annotated[bool, option("Run the model's own code.", "--trust-remote-code")]
ScriptWords = Annotated[
    list[str] | None, typer.Argument(metavar="[-- SCRIPT ARGS…]", help="Your own training script, tuned as it is.")
]
Maps = Annotated[list[str] | None, option("KNOB=--FLAG: the script's flag that carries a knob; repeatable.", "--map")]
WorstCase = Annotated[bool, option("Pad the script's batches to the longest that it allows.", "--worst-case")]

# the devices
Gpus = Annotated[
    int | None, option("GPUs (or CPU ranks) to use, of each machine where there are several; default: all.")
]
Parallel = Annotated[int, option("Candidates to measure at once, each on devices of its own (--gpus says how many).")]
ParallelOffload = Annotated[
    bool, option("With --parallel: also those that offload, which share the host's speed.", "--parallel-offload")
]
Device = Annotated[str, option("auto, cuda or cpu.")]
MemoryCap = Annotated[Text, option("What one rank may use, like 24GiB.")]
Headroom = Annotated[Text, option("Share of the capacity to leave free; default 5%.")]
Executor = Annotated[str, option("local, slurm, ray, or replay:TABLE to search a recorded table.")]
Python = Annotated[
    Text, option("Python of the environment that you train in; default: $AUTOTUNE_PYTHON, this one, or an active one.")
]
Isolation = Annotated[str, option("fork (pre-imported server) or spawn (cold starts).")]

# the machines
Hostfile = Annotated[
    Path | None, option("DeepSpeed's hostfile (`worker-1 slots=8` a line): several machines, over ssh.")
]
Include = Annotated[Text, option("Hosts of it to use: worker-1@worker-2:0,1, as DeepSpeed's launcher takes them.")]
Exclude = Annotated[Text, option("Hosts or slots of it to leave out.")]
NodeCount = Annotated[
    int | None,
    option(
        "Machines: of the hostfile the first so many, of Slurm or Ray so many; for run with neither: tune this one as a slice "
        "of so many like it.",
        "--nodes",
    ),
]
RayAddress = Annotated[
    Text, option("Of the cluster, with --executor ray: HOST:PORT; default: $RAY_ADDRESS, or the one of this machine.")
]
Sync = Annotated[
    bool,
    option("Send this package and the script's folder to machines that have them not in the same place.", "--sync"),
]
Interface = Annotated[Text, option("Network interface by which the machines reach each other; default: found out.")]
Exports = Annotated[
    list[str] | None, option("A variable of yours that the machines are told too; repeatable.", "--export")
]
Partition = Annotated[
    Text, option("Of Slurm, with --executor slurm outside an allocation; so are --account and --time.")
]
Account = Annotated[Text, option("Slurm's.")]
SlurmTime = Annotated[Text, option("How long Slurm's allocation may last, as sbatch takes it.", "--time")]
SlurmOptions = Annotated[list[str] | None, option("KEY=VALUE: another option of sbatch's; repeatable.", "--slurm")]

# the search, and its storage
Space = Annotated[Text, option("Search space: a file, or a name of `autotune spaces list`.")]
Budget = Annotated[str, option("Time for this call, verification included: 90s, 30m, 1h30m.")]
MaxTrials = Annotated[int | None, option("Stop after this many trials of this call.")]
Tolerance = Annotated[str, option("Stop when going on promises less than this share.")]
Exhaustive = Annotated[bool, option("Use the whole budget.", "--exhaustive")]
Seed = Annotated[int, option("Of the sampler and of the data.")]
StudyName = Annotated[Text, option("Name of the study; the same name resumes it.")]
StudyArgument = Annotated[str, typer.Argument(help="Name of the study, or its folder.")]
Storage = Annotated[
    Text,
    typer.Option(
        help="postgresql://USER:PASSWORD@HOST/DB, mysql://, sqlite:/// or journal:FILE; default: $AUTOTUNE_STORAGE, or a file in "
        "runs/NAME. Calls that name the same tune one study together.",
        envvar=STORAGE_VARIABLE,
        show_envvar=False,
    ),
]
WinnerFile = Annotated[Path | None, option("Where the winner goes; default: runs/NAME/NAME.json.")]
NoGallery = Annotated[
    bool, option("Do not begin with what the gallery knows of such a job and its card.", "--no-gallery")
]
Force = Annotated[bool, option("Go on with a study of another job or machine.", "--force")]
Unprotected = Annotated[
    bool, option("Run the script even if this machine cannot keep its writes from your files.", "--unprotected")
]
Trust = Annotated[
    bool,
    option("Run what a study or table of another user names: Python, workload, remote code, variables.", "--trust"),
]

# plan and launch
Gpu = Annotated[Text, option("Name like rtx3090 or a100-80gb; default: the machine's own.")]
GpuCount = Annotated[int, option("How many in each machine, as torchrun's --nproc-per-node.")]
Nodes = Annotated[int, option("Machines, each with --gpus of them: 2 with --gpus 8 is 16 GPUs.")]
Tokens = Annotated[Text, option("Say hours and cost for so many: 1e9, 2B, 500M, 1T; default 1B.")]
HostMemory = Annotated[Text, option("Main memory of each machine, like 1TiB; default of a named GPU: 32 GiB each.")]
Price = Annotated[float | None, option("Dollars that one of these GPUs costs an hour; default: a rough one.")]
Compare = Annotated[Text, option("Several GPUs side by side: rtx4090,a100-80gb,h100.")]
LaunchWords = Annotated[
    list[str], typer.Argument(metavar="[STUDY] -- SCRIPT ARGS…", help="A study, then the script to train.")
]
PlannedModel = Annotated[Text, option("Instead of a study: start from the plan for this model.", "--model")]
MaxRestarts = Annotated[int, option("Give up after this many without a newer checkpoint.")]
HangTimeout = Annotated[str, option("No rank computes, reads or writes for so long: it hangs.")]
Convert = Annotated[bool, option("Step down to stage 3 too, converting checkpoints for it.", "--convert-checkpoints")]

# output
Yes = Annotated[bool, option("Ask nothing.", "--yes", "-y")]
