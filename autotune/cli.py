"""The command line: thin, and fast to start. Everything heavy is imported inside a command."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune import __version__
from autotune.errors import NothingFits, UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Finds the fastest DeepSpeed config that fits your GPUs, by measuring it.",
)
spaces_app = typer.Typer(no_args_is_help=True, help="List, show and validate search spaces.")
app.add_typer(spaces_app, name="spaces")

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
StudyArgument = Annotated[str, typer.Argument(help="Name of the study, or its folder.")]
LoraOption = Annotated[str | None, typer.Option(help="Adapters: r=16,targets=all-linear (or q_proj+v_proj),alpha=32.")]
AttentionOption = Annotated[
    str | None, typer.Option("--attn", help="eager, sdpa, flash_attention_2, flash_attention_3 or flex_attention.")
]
WorkloadOption = Annotated[
    str | None, typer.Option(help="package.module:function that returns (model, batches) instead of a model.")
]
StorageOption = Annotated[str | None, typer.Option(help="Database URL; default: runs/NAME/study.db.")]


def console(stderr: bool = False) -> Any:
    from rich.console import Console

    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=140)


def emit(data: Any) -> None:
    print(json.dumps(data, indent=2, default=str))


@app.command()
def run(
    script: Annotated[
        list[str] | None, typer.Argument(metavar="[-- SCRIPT ARGS…]", help="Your own training script, tuned as it is.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Shipped name (`autotune models`), folder or config.json, or Hub id.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs (or CPU ranks) to use; default: all.")] = None,
    budget: Annotated[str, typer.Option(help="Time for this call, verification included: 90s, 30m, 1h30m.")] = "30m",
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    seq_len: Annotated[
        str | None, typer.Option(help="Tokens a sequence, or max; default 2048 (CPU ranks: 64).")
    ] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; default: the best the device has.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam, fused_adam, lion, sgd or adagrad.")] = "adamw",
    global_batch_size: Annotated[
        int | None, typer.Option(help="Sequences an optimizer step over all ranks, kept exactly.")
    ] = None,
    ds_config: Annotated[
        Path | None, typer.Option(help="Your own DeepSpeed config: what is not tuned is kept.")
    ] = None,
    space: Annotated[
        str | None, typer.Option(help="Search space: a file, or a name of `autotune spaces list`.")
    ] = None,
    memory_cap: Annotated[str | None, typer.Option(help="What one rank may use, like 24GiB.")] = None,
    headroom: Annotated[
        str | None, typer.Option(help="Share of the capacity that the winner leaves free; default 5%.")
    ] = None,
    study: Annotated[str | None, typer.Option(help="Name of the study; the same name resumes it.")] = None,
    storage: StorageOption = None,
    seed: Annotated[int, typer.Option(help="Of the sampler and of the data.")] = 0,
    max_trials: Annotated[int | None, typer.Option(help="Stop after this many trials of this call.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where the winner goes; default: runs/NAME/NAME.json.")] = None,
    isolation: Annotated[str, typer.Option(help="fork (pre-imported server) or spawn (cold starts).")] = "fork",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    tolerance: Annotated[str, typer.Option(help="Stop when going on promises less than this share.")] = "1%",
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Use the whole budget.")] = False,
    executor: Annotated[str, typer.Option(help="local, or replay:TABLE to search a recorded table.")] = "local",
    maps: Annotated[
        list[str] | None, typer.Option("--map", help="KNOB=--FLAG: the script's flag that carries a knob; repeatable.")
    ] = None,
    worst_case: Annotated[
        bool, typer.Option("--worst-case", help="Pad the script's batches to the longest that it allows.")
    ] = False,
    lora: LoraOption = None,
    attn: AttentionOption = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the model (DeepSpeed's engine.compile).")
    ] = False,
    workload: WorkloadOption = None,
    lengths: Annotated[
        Path | None, typer.Option(help="A data set's lengths (`512,1000` a line): the winner fits its longest batch.")
    ] = None,
    packed: Annotated[
        bool, typer.Option("--packing", help="Sequences of --lengths laid end to end in rows of --seq-len.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Go on with a study of another job or machine.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Tune, verify and export; run again with the same study to go on."""
    from autotune.commands.run import Request, run_study

    request = Request(
        model,
        gpus=gpus,
        budget=budget,
        device=device,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        global_batch_size=global_batch_size,
        ds_config=ds_config,
        space=space,
        memory_cap=memory_cap,
        headroom=headroom,
        study=study,
        storage=storage,
        seed=seed,
        max_trials=max_trials,
        out=out,
        force=force,
        isolation=isolation,
        trust_remote_code=trust_remote_code,
        tolerance=tolerance,
        exhaustive=exhaustive,
        executor=executor,
        script=script or [],
        maps=maps or [],
        worst_case=worst_case,
        lora=lora,
        attention=attn,
        compiled=compiled,
        lengths=lengths,
        packed=packed,
        workload=workload,
    )
    ask = None if yes or as_json or not sys.stdin.isatty() else (lambda text: typer.confirm(text, default=True))
    report = run_study(request, console(stderr=as_json), quiet=as_json, confirm=ask)
    if as_json:
        emit(report.to_json())
    else:
        for line in report.lines:
            print(line)
        for path in report.files:
            print(f"wrote {path}")
    if report.interrupted:
        raise typer.Exit(130)


@app.command()
def plan(
    model: Annotated[
        str | None, typer.Option(help="Shipped name (`autotune models`), folder or config.json, or Hub id.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Name like rtx3090 or a100-80gb; default: the machine's own.")] = None,
    gpus: Annotated[int, typer.Option(help="How many.")] = 1,
    compare: Annotated[str | None, typer.Option(help="Several GPUs side by side: rtx4090,a100-80gb,h100.")] = None,
    seq_len: Annotated[str | None, typer.Option(help="Tokens a sequence, or max; default 2048.")] = None,
    precision: Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; default: the best the GPU has.")] = None,
    optimizer: Annotated[str, typer.Option(help="adamw, adam, fused_adam, lion, sgd or adagrad.")] = "adamw",
    global_batch_size: Annotated[int | None, typer.Option(help="Sequences an optimizer step over all ranks.")] = None,
    ds_config: Annotated[
        Path | None, typer.Option(help="Your own DeepSpeed config: what is not planned is kept.")
    ] = None,
    space: Annotated[str, typer.Option(help="Search space: a file, or a name of `autotune spaces list`.")] = "default",
    headroom: Annotated[str, typer.Option(help="Share of the capacity to leave free.")] = "5%",
    lora: LoraOption = None,
    attn: AttentionOption = None,
    workload: WorkloadOption = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own code.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Predict what fits and how fast, without running anything: by stage, by GPU, and what would unlock more."""
    from autotune.commands.plan import show_comparison, show_plan
    from autotune.commands.run import Request, plans

    request = Request(
        model,
        gpus,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        global_batch_size=global_batch_size,
        ds_config=ds_config,
        space=space,
        headroom=headroom,
        trust_remote_code=trust_remote_code,
        lora=lora,
        attention=attn,
        workload=workload,
    )
    names: list[str | None] = [*compare.split(",")] if compare else [gpu]
    made = plans(request, names)
    if as_json:
        emit([one.to_json() for one in made] if compare else made[0].to_json())
    elif compare:
        show_comparison(made, console())
    else:
        show_plan(made[0], console())


@app.command()
def launch(
    words: Annotated[
        list[str], typer.Argument(metavar="[STUDY] -- SCRIPT ARGS…", help="A study, then the script to train.")
    ],
    model: Annotated[str | None, typer.Option(help="Instead of a study: start from the plan for this model.")] = None,
    gpus: Annotated[int | None, typer.Option(help="With --model: GPUs (or CPU ranks); default: all.")] = None,
    device: Annotated[str, typer.Option(help="With --model: auto, cuda or cpu.")] = "auto",
    seq_len: Annotated[str | None, typer.Option(help="With --model: tokens a sequence, or max.")] = None,
    precision: Annotated[str | None, typer.Option(help="With --model: bf16, fp16 or fp32.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="With --model: sequences an optimizer step.")] = None,
    ds_config: Annotated[Path | None, typer.Option(help="With --model: your own DeepSpeed config.")] = None,
    space: Annotated[str | None, typer.Option(help="With --model: search space.")] = None,
    maps: Annotated[list[str] | None, typer.Option("--map", help="KNOB=--FLAG, as for run.")] = None,
    max_restarts: Annotated[int, typer.Option(help="Give up after this many.")] = 10,
    hang_timeout: Annotated[str, typer.Option(help="Without a step for so long it hangs.")] = "30m",
    convert: Annotated[
        bool, typer.Option("--convert-checkpoints", help="Step down to stage 3 too, converting checkpoints for it.")
    ] = False,
    memory_cap: Annotated[str | None, typer.Option(help="What one rank may use, like 24GiB.")] = None,
    storage: StorageOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Train your script under the winner, and bring it back with less memory when it runs out."""
    from autotune.commands.launch import launch_training
    from autotune.commands.run import Request

    study = None if model else words[0]
    request = Request(
        model,
        gpus,
        device=device,
        seq_len=seq_len,
        precision=precision,
        global_batch_size=global_batch_size,
        ds_config=ds_config,
        space=space,
        memory_cap=memory_cap,
    )
    summary = launch_training(
        study,
        words if model else words[1:],
        request=request,
        maps=maps,
        storage=storage,
        memory_cap=memory_cap,
        max_restarts=max_restarts,
        hang_timeout=hang_timeout,
        convert=convert,
        say=lambda text: print(f"autotune: {text}", file=sys.stderr, flush=True),
    )
    if as_json:
        emit(summary.to_json())
    else:
        for line in summary.lines():
            print(f"autotune: {line}", file=sys.stderr)
    raise typer.Exit(summary.code)


@app.command()
def show(study: StudyArgument, storage: StorageOption = None, as_json: JsonFlag = False) -> None:
    """A study's trials with their reasons, and its winner."""
    from autotune.results import console as report
    from autotune.search.study import StudyStore
    from autotune.units import format_duration

    store = StudyStore.load(study, storage)
    if as_json:
        emit(report.study_json(store))
        return
    records, calls = store.records(), store.calls()
    out = console()
    out.print(report.trials_table(records))
    for reason, count in sorted(store.skips.items(), key=lambda item: -item[1])[:12]:
        out.print(f"not tried ({count}): {reason}", markup=False, highlight=False, soft_wrap=True)
    total = sum(call.used_seconds for call in calls)
    if calls:
        last = calls[-1]
        print(
            f"\n{len(records)} trials; this study used {format_duration(total)} in {len(calls)} calls, the last "
            f"{format_duration(last.used_seconds)} of {format_duration(last.budget_seconds)} "
            f"({last.ended or 'not ended'})"
        )
    if (winner := store.winner) is not None:
        for line in report.winner_lines(winner, records, store.job, store.hardware):
            print(line)
    else:
        print("no winner yet")


@app.command()
def export(
    study: StudyArgument,
    style: Annotated[str, typer.Option("--format", help="deepspeed, accelerate or hf.")] = "deepspeed",
    out: Annotated[Path | None, typer.Option(help="File to write; default: in the study's folder.")] = None,
    trial: Annotated[int | None, typer.Option(help="A trial's number instead of the winner.")] = None,
    storage: StorageOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write the winner as a DeepSpeed config, an accelerate config or TrainingArguments."""
    from autotune.commands.run import export_record
    from autotune.results.export import FORMATS
    from autotune.search.study import VERIFY, StudyStore

    if style not in FORMATS:
        raise UserError(f"--format {style}: expected one of {', '.join(FORMATS)}")
    store = StudyStore.load(study, storage)
    record = store.winner
    if trial is not None:
        record = next((one for one in store.records() if one.number == trial), None)
        if record is None or record.outcome is None or not record.outcome.ok:
            raise UserError(
                f"--trial {trial}: no measured trial of that number in {store.name} (`autotune show {study}`)"
            )
    if record is None:
        raise UserError(f"study {store.name} has no winner yet: `autotune run --study {store.name} …` goes on")
    suffix = {"deepspeed": ".json", "accelerate": ".accelerate.yaml", "hf": ".training_arguments.json"}[style]
    target = out or (store.folder or Path()) / f"{store.name}{suffix}"
    files = export_record(store, record, target, style, record.role == VERIFY)
    if as_json:
        emit({"files": [str(path) for path in files]})
    else:
        for path in files:
            print(f"wrote {path}")


@app.command()
def record(
    study: StudyArgument,
    out: Annotated[
        Path | None, typer.Option(help="Table to write; default: NAME.csv.gz in the study's folder.")
    ] = None,
    storage: StorageOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a study as a table that `run --executor replay:TABLE` and the search benchmark replay."""
    from autotune.commands.run import record_study
    from autotune.search.study import StudyStore

    store = StudyStore.load(study, storage)
    table, about, count = record_study(store, out or (store.folder or Path()) / f"{store.name}.csv.gz")
    if as_json:
        emit({"table": str(table), "facts": str(about), "rows": count})
    else:
        print(f"wrote {table} ({count} candidates) and {about}")


@app.command()
def models(as_json: JsonFlag = False) -> None:
    """The models that resolve offline by name."""
    from autotune.problem.models import shipped_models
    from autotune.units import format_count

    found = shipped_models()
    if as_json:
        emit({name: {"parameters": spec.parameters, "source": spec.source} for name, spec in found.items()})
        return
    for name, spec in found.items():
        print(f"{name:20} {format_count(spec.parameters) if spec.parameters else 'tiny':>8}  {spec.source}")


@spaces_app.command("list")
def spaces_list(as_json: JsonFlag = False) -> None:
    """The shipped search spaces."""
    from autotune.problem.space_file import load_space, shipped_spaces

    found = {name: load_space(name).about for name in shipped_spaces()}
    if as_json:
        emit(found)
        return
    for name, about in found.items():
        print(f"{name:12} {about}")


@spaces_app.command("show")
def spaces_show(space: Annotated[str, typer.Argument(help="Name or file.")]) -> None:
    """A search space's file, comments included."""
    from autotune.problem.space_file import load_space

    print(load_space(space).text, end="")


@spaces_app.command("validate")
def spaces_validate(space: Annotated[str, typer.Argument(help="Name or file.")], as_json: JsonFlag = False) -> None:
    """Check a search space, and count what it holds."""
    from autotune.problem.space_file import load_space

    found = load_space(space)
    families = sum(1 for _ in found.families())
    if as_json:
        emit({"name": found.name, "families": families, "knobs": {n: list(d.values) for n, d in found.knobs.items()}})
        return
    for name, domain in found.knobs.items():
        when = "; ".join(f"{knob} in {list(values)}" for knob, values in domain.when)
        print(f"{name:32} {', '.join(map(str, domain.values))}{f'  (when {when})' if when else ''}")
    print(f"{found.name}: valid, {families} engines before batch shapes")


@app.command()
def doctor(
    nvme_path: Annotated[Path | None, typer.Option(help="A folder that nvme offload would use.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check driver, torch, NCCL, DeepSpeed's ops, memory and disk; builds CPU Adam ahead of time."""
    from autotune.commands.doctor import examine

    findings = examine(nvme_path)
    if as_json:
        emit([vars(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{finding.level:5} {finding.what}: {finding.found}")
            if finding.cost:
                print(f"      costs: {finding.cost}\n      fix:   {finding.fix}")
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Exit codes: 0 done, 2 bad input, 3 nothing feasible, 130 interrupted."""
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except UserError as error:
        fail(str(error), 2)
    except NothingFits as error:
        fail(str(error), 3)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except Exception as error:
        if hasattr(error, "format_message"):  # click's usage errors
            fail(f"{error.format_message()} (`autotune --help`)", 2)
        raise


def fail(text: str, code: int) -> None:
    print(f"autotune: {text}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
