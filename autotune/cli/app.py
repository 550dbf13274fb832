"""Command line: a thin layer that starts fast. Slow imports are inside the commands."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune._version import __version__
from autotune.cli.machine_commands import agent, doctor, models
from autotune.cli.options import (
    STORAGE_VARIABLE,
    Account,
    Attention,
    Budget,
    Compare,
    Compiled,
    Convert,
    Device,
    DsConfig,
    Exclude,
    Executor,
    Exhaustive,
    Exports,
    Force,
    GlobalBatchSize,
    Gpu,
    GpuCount,
    Gpus,
    HangTimeout,
    Headroom,
    Hostfile,
    HostMemory,
    ImageSize,
    Include,
    Interface,
    Isolation,
    Json,
    LaunchWords,
    Lengths,
    Lora,
    Maps,
    MaxRestarts,
    MaxTrials,
    MemoryCap,
    Model,
    NodeCount,
    Nodes,
    NoGallery,
    Optimizer,
    Packed,
    Parallel,
    ParallelOffload,
    Partition,
    PlannedModel,
    Precision,
    Price,
    Python,
    RayAddress,
    ScriptWords,
    Seed,
    SeqLen,
    SlurmOptions,
    SlurmTime,
    Space,
    Storage,
    StudyName,
    Sync,
    Task,
    Tokens,
    Tolerance,
    Trust,
    TrustRemoteCode,
    Unprotected,
    WinnerFile,
    Workload,
    WorstCase,
    Yes,
    asking,
    console,
    emit,
    fail,
    load_numpy,
    of_a_database,
    option,
    say,
    typed_command,
)
from autotune.cli.study_commands import export, gallery_app, record, report, share, show, spaces_app
from autotune.errors import MachineTrouble, NothingFits, Stopped, UserError
from autotune.masking import learn_environment
from autotune.util.streams import is_watched, lasting_streams

if TYPE_CHECKING:
    from autotune.commands.request import Request

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Finds the fastest DeepSpeed config that fits your GPUs, by measuring it.",
)
app.add_typer(spaces_app, name="spaces")
app.add_typer(gallery_app, name="gallery")


def typed(parameters: dict[str, Any]) -> Request:
    """Return the Request of a command's `locals()`, whose parameters have the names of its fields.

    None keeps a field's default.
    """
    load_numpy()
    from autotune.commands.request import Request

    os.environ.pop(STORAGE_VARIABLE, None)  # already read, and ranks need no password
    fields = {field.name for field in dataclasses.fields(Request)}
    return Request(**{name: value for name, value in parameters.items() if name in fields and value is not None})


# -- commands ------------------------------------------------------------------------------------------------------------


@app.command()
def run(
    script: ScriptWords = None,
    model: Model = None,
    gpus: Gpus = None,
    parallel: Parallel = 1,
    parallel_offload: ParallelOffload = False,
    budget: Budget = "30m",
    device: Device = "auto",
    seq_len: SeqLen = None,
    precision: Precision = None,
    optimizer: Optimizer = "adamw",
    global_batch_size: GlobalBatchSize = None,
    ds_config: DsConfig = None,
    space: Space = None,
    memory_cap: MemoryCap = None,
    headroom: Headroom = None,
    study: StudyName = None,
    storage: Storage = None,
    seed: Seed = 0,
    max_trials: MaxTrials = None,
    out: WinnerFile = None,
    isolation: Isolation = "fork",
    python: Python = None,
    task: Task = None,
    image_size: ImageSize = None,
    trust_remote_code: TrustRemoteCode = False,
    tolerance: Tolerance = "1%",
    exhaustive: Exhaustive = False,
    executor: Executor = "local",
    hostfile: Hostfile = None,
    include: Include = None,
    exclude: Exclude = None,
    nodes: NodeCount = None,
    ray_address: RayAddress = None,
    sync: Sync = False,
    interface: Interface = None,
    exports: Exports = None,
    partition: Partition = None,
    account: Account = None,
    time: SlurmTime = None,
    slurm: SlurmOptions = None,
    maps: Maps = None,
    worst_case: WorstCase = False,
    lora: Lora = None,
    attention: Attention = None,
    compiled: Compiled = False,
    workload: Workload = None,
    lengths: Lengths = None,
    packed: Packed = False,
    no_gallery: NoGallery = False,
    force: Force = False,
    unprotected: Unprotected = False,
    trust: Trust = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Tune, verify and export; run again with the same study to go on."""
    request = dataclasses.replace(typed(locals()), command=typed_command())
    if executor == "slurm":
        _in_one_job(request, partition=partition, account=account, time=time, more=slurm or [])
    _tune(request, yes, as_json)


def _in_one_job(request: Request, **where: Any) -> None:
    """Outside of a Slurm allocation, run this command in one and exit with its code."""
    from autotune.commands.slurm_submit import options_of, outside, submit, words_without_password

    if outside():
        words, _ = words_without_password(sys.argv[1:])
        if request.storage:
            os.environ[STORAGE_VARIABLE] = request.storage  # sbatch passes it on; the words are stored in a file
        options = options_of(nodes=request.nodes, gpus=request.gpus, device=request.device, **where)
        raise typer.Exit(
            submit(words, options, request.runs / "slurm", say, needs=[STORAGE_VARIABLE] if request.storage else [])
        )


def _tune(request: Request, yes: bool, as_json: bool) -> None:
    from autotune.commands.run import run_study

    confirm = None if yes or as_json or not is_watched(sys.stdin) else (lambda text: typer.confirm(text, default=True))
    shown = console(stderr=as_json)
    summary = run_study(request, shown, quiet=as_json, confirm=confirm, ask=asking(as_json))
    if as_json:
        emit(summary.to_json())
    else:
        print(*summary.lines, *(f"wrote {path}" for path in summary.files), sep="\n")
    if summary.interrupted:
        raise typer.Exit(130)


@app.command()
def plan(
    model: Model = None,
    gpu: Gpu = None,
    gpus: GpuCount = 1,
    nodes: Nodes = 1,
    tokens: Tokens = None,
    compare: Compare = None,
    seq_len: SeqLen = None,
    precision: Precision = None,
    optimizer: Optimizer = "adamw",
    global_batch_size: GlobalBatchSize = None,
    ds_config: DsConfig = None,
    space: Space = "default",
    memory_cap: MemoryCap = None,
    host_memory: HostMemory = None,
    headroom: Headroom = None,
    price: Price = None,
    lora: Lora = None,
    attention: Attention = None,
    lengths: Lengths = None,
    packed: Packed = False,
    workload: Workload = None,
    task: Task = None,
    image_size: ImageSize = None,
    trust_remote_code: TrustRemoteCode = False,
    python: Python = None,
    html: Annotated[Path | None, option("Write the plan as one HTML page, too.")] = None,
    as_json: Json = False,
) -> None:
    """Predict what fits, how fast and for what money, on how many of which GPUs, and what would help; runs nothing."""
    request = typed(locals())
    from autotune.commands.plan import plans
    from autotune.results.output_files import check_out
    from autotune.results.plan import show_comparison, show_plan

    if html is not None:
        check_out(html)
    names = [one for one in map(str.strip, [gpu or "", *(compare or "").split(",")]) if one]
    made = plans(request, [*dict.fromkeys(names)] if compare else [gpu], say)
    if html is not None:
        from autotune.commands.study_output import write_plan

        write_plan(made, html)
    if as_json:
        emit([one.to_json() for one in made] if compare else made[0].to_json())
    elif compare:
        show_comparison(made, console())
    else:
        show_plan(made[0], console())
    if not any(one.best for one in made):
        raise typer.Exit(3)


@app.command()
def launch(
    words: LaunchWords,
    model: PlannedModel = None,
    task: Task = None,
    image_size: ImageSize = None,
    gpus: Gpus = None,
    device: Device = "auto",
    seq_len: SeqLen = None,
    precision: Precision = None,
    global_batch_size: GlobalBatchSize = None,
    ds_config: DsConfig = None,
    space: Space = None,
    maps: Maps = None,
    max_restarts: MaxRestarts = 10,
    hang_timeout: HangTimeout = "30m",
    convert: Convert = False,
    executor: Executor = "local",
    hostfile: Hostfile = None,
    include: Include = None,
    exclude: Exclude = None,
    nodes: NodeCount = None,
    ray_address: RayAddress = None,
    sync: Sync = False,
    interface: Interface = None,
    exports: Exports = None,
    memory_cap: MemoryCap = None,
    storage: Storage = None,
    python: Python = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Train your script under the winner, and bring it back with less memory when it runs out.

    Options that say what is trained and on what, up to --space, go with --model: a study knows its own. Where the command says
    another global batch than the study's, --global-batch-size trains with the study's.
    """
    study, script = (None, words) if model else (words[0], words[1:])
    request = typed(locals())
    from autotune.commands.launch import launch_training

    summary = launch_training(request, say, ask=asking(as_json))
    if as_json:
        emit(summary.to_json())
    else:
        for line in summary.lines():
            print(f"autotune: {line}", file=sys.stderr)
    raise typer.Exit(summary.code)


for command in (show, report, export, record, share, models, doctor):
    app.command()(command)
app.command(hidden=True)(agent)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, option("Print the version.", "--version")] = False) -> None:
    """Print the version if `--version` is given."""
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line. Exit codes: 0 done, 2 bad input, 3 nothing feasible, 4 the machine fails, 130 interrupted."""
    learn_environment()
    with lasting_streams():
        _call()


def _call() -> None:
    try:
        code = app(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()  # a failed write is reported here, and not by the interpreter at its exit
        sys.exit(code if isinstance(code, int) else 0)
    except UserError as error:
        fail(str(error), 2)
    except NothingFits as error:
        fail(str(error), 3)
    except MachineTrouble as error:
        fail(str(error), 4)
    except Stopped as stopped:
        fail(str(stopped), 130)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's usage errors
            fail(f"{error.format_message()} (`autotune --help`)", 2)
        fail(*of_a_database(error))


if __name__ == "__main__":
    main()
