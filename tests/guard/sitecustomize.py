"""Put on PYTHONPATH by a test: every Python that starts refuses the tuner's packages to our own modules, wherever they are
installed. Libraries may have them: deepspeed needs psutil, transformers yaml."""

import builtins
import os
import sys

REFUSED = {"optuna", "typer", "rich", "pydantic", "psutil", "yaml", "ruamel", "filelock", "sqlalchemy", "packaging"}
_import = builtins.__import__


def guarded(name, globals=None, locals=None, fromlist=(), level=0):  # type: ignore[no-untyped-def]
    who = (globals or {}).get("__package__") or ""
    if not level and name.partition(".")[0] in REFUSED and who.partition(".")[0] == "autotune":
        raise ModuleNotFoundError(f"{name} is refused to {who}")
    return _import(name, globals, locals, fromlist, level)


builtins.__import__ = guarded
if log := os.environ.get("AUTOTUNE_GUARDED"):
    with open(log, "a") as file:
        file.write(" ".join(sys.orig_argv[1:]) + "\n")
