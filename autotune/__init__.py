"""autotune: finds the fastest DeepSpeed config that fits, by measuring it.

Public names: `tune`, `plan`, `sampler`, `open_study`, `Study`, `export_study`, `launch`, `StudyCallback` and `__version__`.
Importing this package imports neither torch nor deepspeed; docs/architecture.md describes its parts.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from autotune._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autotune.commands.run import RunSummary
    from autotune.commands.study_output import Study
    from autotune.recovery.supervisor import LaunchSummary
    from autotune.recovery.trainer_callback import StudyCallback
    from autotune.results.plan import Plan
    from autotune.search.sampler import FeasibleSampler, Sampler
    from autotune.search.study import Callback

__all__ = ["Study", "StudyCallback", "__version__", "export_study", "launch", "open_study", "plan", "sampler", "tune"]


def tune(
    command: Sequence[Any] | None = None,
    *,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    sampler: Sampler | None = None,
    **options: Any,
) -> RunSummary:
    """Tune, verify and export, as `autotune run` does; an existing study resumes.

    Args:
        command: a training script and its arguments, tuned unmodified; without it set `model` or `workload`.
        quiet: print nothing.
        callbacks: called with the Optuna study and the finished trial after each trial, as those of `optuna.Study.optimize`.
        sampler: another of Optuna's samplers that proposes the trials, such as `optuna.samplers.TPESampler()`.
        options: the command's options by name with underscores: `model`, `gpus`, `budget`, `study`, `space`, `global_batch_size`,
            `max_trials` and so on; `attention` for `--attn`, `maps` for `--map`. Values are texts as on the command line, or
            Python's: `budget=600` is in seconds, `memory_cap=2**34` in bytes, `headroom=0.1` a share, a path a `Path`, a space a
            name, a file or a mapping.

    Returns:
        The winner with its measurement, the files written, and the lines for display.

    Raises:
        autotune.errors.BadArgument: bad input; it is a ValueError and a UserError.
        autotune.errors.Unusable: a script that fails by itself.
        autotune.errors.NothingFits: no candidate is feasible.
        autotune.errors.MachineError: the machine fails, for any candidate.
    """
    from rich.console import Console

    from autotune.commands.request import python_errors, request_of
    from autotune.commands.run import run_study

    with python_errors():
        request = request_of("run", command, options)
        return run_study(request, Console(quiet=quiet), quiet=quiet, callbacks=callbacks, sampler=sampler)


def plan(*, quiet: bool = True, **options: Any) -> Plan:
    """Predict which configs fit and how fast they are, as `autotune plan` does. Nothing is run, and no GPU is needed.

    Args:
        quiet: print no notes.
        options: the command's options by name with underscores: `model`, `gpu`, `gpus`, `nodes`, `seq_len`, `global_batch_size`,
            `tokens` and so on.

    Returns:
        The fastest configs that fit, each way to train, and other GPUs that would do.

    Raises:
        autotune.errors.BadArgument: bad input; it is a ValueError and a UserError.
    """
    from autotune.commands.plan import plans
    from autotune.commands.request import python_errors, request_of

    with python_errors():
        request = request_of("plan", None, options)
        (found,) = plans(request, [request.gpu], (lambda text: None) if quiet else print)
    return found


def sampler(**options: Any) -> FeasibleSampler:
    """Return the search as a sampler for your own Optuna study, which measures in its own way.

    Args:
        options: as those of `plan`: `model`, `gpu`, `gpus`, `space`, `global_batch_size` and so on.

    Raises:
        autotune.errors.BadArgument: bad input; it is a ValueError and a UserError.
    """
    from autotune.commands.plan import planned_sampler
    from autotune.commands.request import python_errors, request_of

    with python_errors():
        return planned_sampler(request_of("plan", None, options))


def open_study(study: str | PurePath, storage: str | None = None) -> Study:
    """Open an existing study: its trials, calls and winner.

    Args:
        study: its name, or its folder.
        storage: its database, if that is not in the folder.

    Raises:
        autotune.errors.BadArgument: there is no study of that name.
    """
    from autotune.commands.request import python_errors
    from autotune.commands.study_output import Study

    with python_errors():
        return Study.load(str(study), storage)


def export_study(
    study: str | PurePath,
    *,
    style: str = "deepspeed",
    out: str | PurePath | None = None,
    trial: int | None = None,
    storage: str | None = None,
) -> list[Path]:
    """Write a study's winner as a config, as `autotune export` does, and return the files.

    Args:
        study: its name, or its folder.
        style: `deepspeed`, `accelerate`, `hf`, `fsdp` or `sbatch`.
        out: file to write; default: in the study's folder.
        trial: a trial's number instead of the winner.
        storage: its database, if that is not in the folder.

    Raises:
        autotune.errors.BadArgument: no such study, trial or style, or a file that cannot be written.
    """
    return open_study(study, storage).export(style, out=out, trial=trial)


def launch(
    study: str, command: Sequence[Any], *, print_line: Callable[[str], None] = print, **options: Any
) -> LaunchSummary:
    """Train a script under a study's winner and restart it after an OOM, as `autotune launch` does.

    Args:
        study: name of the study, or its folder.
        command: the script and its arguments.
        print_line: receives lines for display.
        options: `max_restarts`, `hang_timeout`, `memory_cap`, `maps`, `storage`, `python`, `convert` and
            `global_batch_size`, as on the command line.

    Raises:
        autotune.errors.BadArgument: bad input, or a study of another script.
    """
    from autotune.commands.launch import launch_training
    from autotune.commands.request import python_errors, request_of

    with python_errors():
        return launch_training(request_of("launch", command, options, study=study), print_line)


def __getattr__(name: str) -> Any:
    if name == "Study":  # imports Optuna
        from autotune.commands.study_output import Study

        return Study
    if name == "StudyCallback":  # a subclass of a transformers class, whose import takes seconds
        from autotune.recovery.trainer_callback import StudyCallback

        return StudyCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
