"""Commands that need no study: explain, models, doctor and agent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import Json, Python, begin, emit, load_numpy, option, print_line, show_lines
from autotune.errors import ExitCode


def models(as_json: Json = False) -> None:
    """List the models that resolve offline by name."""
    from autotune.problem.models import shipped_models
    from autotune.util.units import format_count

    found = shipped_models()
    if as_json:
        emit({"models": {name: {"parameters": one.parameters, "source": one.source} for name, one in found.items()}})
        return
    width = max(map(len, found))
    for name, spec in found.items():
        size = format_count(spec.parameters) if spec.parameters else "tiny"
        source = spec.source.removeprefix("https://huggingface.co/").partition(",")[0]
        print(f"{name:{width}} {size:>8}  {source}")


def explain(
    log: Annotated[
        Path | None,
        typer.Argument(help="Log of a training that failed; standard input if missing or -.", metavar="LOG"),
    ] = None,
    model: Annotated[
        str | None, option("Model, if the log does not name it: a shipped name or a folder.", metavar="NAME")
    ] = None,
    gpus: Annotated[int | None, option("Number of GPUs, if the log does not tell.", metavar="N")] = None,
    ds_config: Annotated[
        Path | None, option("DeepSpeed config of the training, if the log does not show it.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say why a training failed: what ran out, which tensor asked for it, and the change that helps. Nothing is run."""
    load_numpy()
    from autotune.explain.command import explain_log

    if str(log) == "-":
        log = None
    found = explain_log(log, model, gpus, ds_config)
    if as_json:
        emit(vars(found))
    else:
        show_lines(found.lines())


def doctor(
    nvme_path: Annotated[Path | None, option("Folder for NVMe offload.", metavar="PATH")] = None,
    python: Python = None,
    as_json: Json = False,
) -> None:
    """Check driver, torch, DeepSpeed ops, memory and disk. CPU Adam is built ahead of time."""
    shown = begin("looking at this machine", as_json)
    from autotune.commands.doctor import Finding, examine
    from autotune.commands.environment import ranks_python
    from autotune.results.console import make_observer

    findings: list[Finding] = []
    ranks = ranks_python(python, print_line)
    with make_observer(shown, quiet=as_json) as view:
        for finding in examine(nvme_path, view.doing, ranks):
            findings.append(finding)
            view.print_line(f"{finding.level:5} {finding.what}: {finding.found}")
            if finding.cost:
                label = "note: " if finding.level == "good" else "costs:"
                view.print_line(f"      {label} {finding.cost}\n      fix:   {finding.fix}")
    if as_json:
        emit({"findings": [vars(finding) for finding in findings]})
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(ExitCode.FINDINGS)


def agent() -> None:
    """Serve a tuner on this node. The tuner starts this command; both exchange JSON lines on stdin and stdout."""
    from autotune.executors.cluster.agent import main

    main()
