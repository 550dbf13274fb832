"""autotune: finds the fastest DeepSpeed config that fits, by measuring it.

Importing this package imports neither torch nor deepspeed; see docs/architecture.md for the rooms of the house.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.recovery.supervisor import LaunchSummary

__version__ = "0.1.0"


def launch(study: str, command: list[str], **options: Any) -> LaunchSummary:
    """Trains a script under a study's winner and brings it back when memory runs out, as `autotune launch` does.

    Args:
        study: name of the study, or its folder.
        command: the script and its arguments.
        options: of `autotune.commands.launch.launch_training`: `max_restarts`, `hang_timeout`, `memory_cap`, `maps`, `say`.

    Raises:
        autotune.errors.UserError: bad input, or a study that is not of this script.
    """
    from autotune.commands.launch import launch_training

    return launch_training(study, command, **options)
