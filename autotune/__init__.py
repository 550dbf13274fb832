"""autotune: finds the fastest DeepSpeed config that fits, by measuring it.

Public names: `tune`, `open_study`, `export_study`, `launch`, `StudyCallback` and `__version__`. Importing this package imports
neither torch nor deepspeed; docs/architecture.md describes its parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune._version import __version__

if TYPE_CHECKING:
    from autotune.commands.run import RunSummary
    from autotune.recovery.supervisor import LaunchSummary
    from autotune.recovery.trainer_callback import StudyCallback
    from autotune.search.study import StudyStore

__all__ = ["StudyCallback", "__version__", "export_study", "launch", "open_study", "tune"]


def tune(command: list[str] | None = None, *, quiet: bool = False, **options: Any) -> RunSummary:
    """Tune, verify and export, as `autotune run` does; an existing study resumes.

    Args:
        command: a training script and its arguments, tuned unmodified; without it set `model` or `workload`.
        quiet: print nothing.
        options: the command's options by name with underscores: `model`, `gpus`, `budget`, `study`, `space`, `global_batch_size`,
            `max_trials` and so on; `attention` for `--attn`, `compiled` for `--compile`, `packed` for `--packing`, `maps` for
            `--map`. Values are texts as on the command line, or Python's: `budget=600` is in seconds, `memory_cap=2**34` in
            bytes, `headroom=0.1` a share, a path a `Path`.

    Returns:
        The winner with its measurement, the files written, and the lines for display.

    Raises:
        autotune.errors.UserError: bad input, or a script that fails by itself.
        autotune.errors.NothingFits: no candidate is feasible.
        autotune.errors.MachineTrouble: the machine fails, for any candidate.
    """
    from rich.console import Console

    from autotune.commands.request import request_of
    from autotune.commands.run import run_study

    return run_study(request_of("run", command, options, "quiet"), Console(quiet=quiet), quiet=quiet)


def open_study(study: str, storage: str | None = None) -> StudyStore:
    """Open an existing study: its trials, calls and winner.

    Args:
        study: its name, or its folder.
        storage: its database, if that is not in the folder.

    Raises:
        autotune.errors.UserError: there is no study of that name.
    """
    from autotune.search.study import StudyStore

    return StudyStore.load(study, storage)


def export_study(
    study: str,
    *,
    style: str = "deepspeed",
    out: str | Path | None = None,
    trial: int | None = None,
    storage: str | None = None,
) -> list[Path]:
    """Write a study's winner as a config, as `autotune export` does, and return the files.

    Args:
        study: its name, or its folder.
        style: `deepspeed`, `accelerate` or `hf`.
        out: file to write; default: in the study's folder.
        trial: a trial's number instead of the winner.
        storage: its database, if that is not in the folder.

    Raises:
        autotune.errors.UserError: no such study, trial or style, or a file that cannot be written.
    """
    from autotune.results.export import export_study as export

    return export(study, storage, style, Path(out) if out is not None else None, trial)


def launch(study: str, command: list[str], **options: Any) -> LaunchSummary:
    """Train a script under a study's winner and restart it after an OOM, as `autotune launch` does.

    Args:
        study: name of the study, or its folder.
        command: the script and its arguments.
        options: `max_restarts`, `hang_timeout`, `memory_cap`, `maps`, `storage`, `python`, `trust`, `convert` and
            `global_batch_size`, as on the command line; `say` receives lines for display (default: print).

    Raises:
        autotune.errors.UserError: bad input, or a study of another script.
    """
    from autotune.commands.launch import launch_training
    from autotune.commands.request import request_of

    say = options.pop("say", print)
    return launch_training(request_of("launch", command, options, "say", study=study), say)


def __getattr__(name: str) -> Any:
    if name == "StudyCallback":  # a subclass of a transformers class, whose import takes seconds
        from autotune.recovery.trainer_callback import StudyCallback

        return StudyCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
