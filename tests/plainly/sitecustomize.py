"""How the ranks of a training that knows nothing of autotune end in these tests: at once, after all that `atexit` holds.

A training's own end aborts now and then on busy cores: with the process group open its threads race the interpreter's end;
and a daemon thread of a library that asks for the interpreter's lock then is ended by force, which C++ code above it answers
by "terminate called without an active exception" (Python's Py_Finalize before 3.14; seen with the group left, too).
"""

import atexit
import os
import sys

_exit, _codes = sys.exit, [0]


def remembered(code: object = None) -> None:
    """`sys.exit`, whose code is this process's."""
    _codes[0] = code if isinstance(code, int) else int(code is not None)
    _exit(code)


def leave() -> None:
    distributed = sys.modules.get("torch.distributed")
    failed = getattr(sys, "last_value", None) is not None  # an exception that nothing caught
    if not failed and distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if failed else _codes[0])


if "LOCAL_RANK" in os.environ:
    sys.exit = remembered
    atexit.register(leave)  # the first that is registered is the last that is called
