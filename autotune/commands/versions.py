"""Whether the installed libraries can be worked with, before anything is started."""

from __future__ import annotations

from autotune.errors import UserError
from autotune.versions import complaint, installed


def check_versions() -> None:
    """
    Raises:
        UserError: a library is older than what works; the message says which, and what is accepted.
    """
    if why := complaint(installed()):
        raise UserError(f"{why}: install another version, or use another environment")
