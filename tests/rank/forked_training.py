"""A rank of a training in a child of a fork server, so that a test need not wait for its imports."""

import atexit
import signal
import threading
from typing import NoReturn

from autotune.rank.base import exit_process
from autotune.rank.train_rank import train
from autotune.util.linux import ignore_user_signals


def become(address: str, number: int) -> NoReturn:
    """Train and end like an interpreter: threads are joined and `atexit` functions run."""
    for caught in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(caught, signal.SIG_DFL)
    ignore_user_signals()
    code = train(address, number)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    exit_process(code if isinstance(code, int) else int(code is not None))
