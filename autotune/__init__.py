"""autotune: finds the fastest DeepSpeed config that fits, by measuring it.

The public door: `launch`, `StudyCallback` and `__version__`. Importing this package imports neither torch nor deepspeed;
docs/architecture.md shows the rooms behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autotune.moved import install_finder, moved_line
from autotune.version import __version__

if TYPE_CHECKING:
    from autotune.recovery.callback import StudyCallback
    from autotune.recovery.supervisor import LaunchSummary

__all__ = ["StudyCallback", "__version__", "launch"]

install_finder()


def launch(study: str, command: list[str], **options: Any) -> LaunchSummary:
    """Trains a script under a study's winner and brings it back when memory runs out, as `autotune launch` does.

    Args:
        study: name of the study, or its folder.
        command: the script and its arguments.
        options: `max_restarts`, `hang_timeout`, `memory_cap`, `maps`, `storage`, `python` and `convert`, as the command
            takes them; `say` takes a line for people (default: print).

    Raises:
        autotune.errors.UserError: bad input, or a study that is not of this script.
    """
    from autotune.commands.launch import launch_training
    from autotune.commands.request import Request

    say = options.pop("say", print)
    given = {name: value for name, value in options.items() if value is not None}
    return launch_training(Request(study=study, script=command, **given), say)


def __getattr__(name: str) -> Any:
    if name == "StudyCallback":  # it is a class of transformers', whose import takes seconds
        from autotune.recovery.callback import StudyCallback

        return StudyCallback
    raise AttributeError(moved_line(f"{__name__}.{name}") or f"module {__name__!r} has no attribute {name!r}")
