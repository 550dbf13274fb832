"""autotune: finds the fastest DeepSpeed config that fits, by measuring it.

The public door: `tune`, `open_study`, `export_study`, `launch`, `StudyCallback` and `__version__`. Importing this package
imports neither torch nor deepspeed; docs/architecture.md shows the rooms behind it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.moved import install_finder, moved_line
from autotune.version import __version__

if TYPE_CHECKING:
    from autotune.commands.run import RunSummary
    from autotune.recovery.callback import StudyCallback
    from autotune.recovery.supervisor import LaunchSummary
    from autotune.search.study import StudyStore

__all__ = ["StudyCallback", "__version__", "export_study", "launch", "open_study", "tune"]

install_finder()


def tune(command: list[str] | None = None, *, quiet: bool = False, **options: Any) -> RunSummary:
    """Tunes, verifies and exports, as `autotune run` does; the same study goes on where it stopped.

    Args:
        command: a training script and its arguments, tuned as it is; without it `model` or `workload` says what is trained.
        quiet: print nothing.
        options: what the command takes, by its names with underscores: `model`, `gpus`, `budget`, `study`, `space`,
            `global_batch_size`, `max_trials` and the others; `attention` for `--attn`, `compiled` for `--compile`, `packed` for
            `--packing`, `maps` for `--map`. Texts as the command takes them, or Python's own: `budget=600` is seconds,
            `memory_cap=2**34` bytes, `headroom=0.1` a share, a path a `Path`.

    Returns:
        The winner with its measurement, the files written, and the lines for people.

    Raises:
        autotune.errors.UserError: bad input, or a script that fails by itself.
        autotune.errors.NothingFits: no candidate is feasible.
        autotune.errors.MachineTrouble: the machine fails, whatever the candidate.
    """
    from rich.console import Console

    from autotune.commands.python_options import request_of
    from autotune.commands.run import run_study

    return run_study(request_of(command, options, ["quiet"]), Console(quiet=quiet), quiet=quiet)


def open_study(study: str, storage: str | None = None) -> StudyStore:
    """An existing study: its trials, calls and winner.

    Args:
        study: its name, or its folder.
        storage: its database, where it is not in the folder.

    Raises:
        autotune.errors.UserError: there is none of that name.
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
    """Writes a study's winner as a config, as `autotune export` does, and returns the files.

    Args:
        study: its name, or its folder.
        style: `deepspeed`, `accelerate` or `hf`.
        out: file to write; default: in the study's folder.
        trial: a trial's number instead of the winner.
        storage: its database, where it is not in the folder.

    Raises:
        autotune.errors.UserError: no such study, trial or style, or a file that cannot be written.
    """
    from autotune.results.export import export_study as export

    return export(study, storage, style, Path(out) if out is not None else None, trial)


def launch(study: str, command: list[str], **options: Any) -> LaunchSummary:
    """Trains a script under a study's winner and brings it back when memory runs out, as `autotune launch` does.

    Args:
        study: name of the study, or its folder.
        command: the script and its arguments.
        options: `max_restarts`, `hang_timeout`, `memory_cap`, `maps`, `storage`, `python`, `trust`, `convert` and
            `global_batch_size`, as the command takes them; `say` takes a line for people (default: print).

    Raises:
        autotune.errors.UserError: bad input, or a study that is not of this script.
    """
    from autotune.commands.launch import launch_training
    from autotune.commands.python_options import request_of

    say = options.pop("say", print)
    return launch_training(request_of(command, options, ["say"], study=study), say)


def __getattr__(name: str) -> Any:
    if name == "StudyCallback":  # it is a class of transformers', whose import takes seconds
        from autotune.recovery.callback import StudyCallback

        return StudyCallback
    raise AttributeError(moved_line(f"{__name__}.{name}") or f"module {__name__!r} has no attribute {name!r}")
