"""A compiler that takes as long as it is told and makes a module of whatever it is given, with functions that do nothing where a
group of one CPU rank calls them: DeepSpeed's and torch's own way of building an op is real, what comes out is not."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

# `$CXX -MMD -MF x.d … -DTORCH_EXTENSION_NAME=cpu_adam … -c cpu_adam.cpp -o cpu_adam.o`, and `$CXX a.o b.o … -o cpu_adam.so`
_WRAPPER = """#!/bin/sh
case " $* " in
  *" -c "*) ;;
  *" -shared "*) exec cc -shared $(printf '%s\\n' "$@" | grep '[.]o$') -o "$(printf '%s\\n' "$@" | tail -n 1)";;
  *) exec c++ "$@";;
esac
for word; do
  case "$word" in
    -DTORCH_EXTENSION_NAME=*) name="${word#*=}";;
    *.cpp) source="$word";;
  esac
  out="$word"
done
echo "$$ $out" >> FOLDER/started
while [ -e FOLDER/slow ]; do sleep 0.05; done
printf '#define PY_SSIZE_T_CLEAN\\n#include <Python.h>\\nstatic PyObject *nothing(PyObject *self, PyObject *given) { return PyLong_FromLong(0); }\\nstatic PyMethodDef made_of[] = {{"initialize", nothing, METH_VARARGS, 0}, {"vector_kernel_level", nothing, METH_VARARGS, 0}, {0}};\\nstatic struct PyModuleDef made = {PyModuleDef_HEAD_INIT, "x", 0, -1, made_of};\\n__attribute__((weak)) PyObject *PyInit_%s(void) { return PyModule_Create(&made); }\\n' "$name" > "$out.c"
cc -fPIC -IINCLUDE -c "$out.c" -o "$out" || exit 1
echo "$out: $source" > "$out.d"
echo "$out" >> FOLDER/finished
"""


class SlowCompiler:
    """Compiles at once, or does not come to an end as long as `slow` exists."""

    def __init__(self, folder: Path, include: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "c++"
        self.path.write_text(_WRAPPER.replace("FOLDER", str(folder)).replace("INCLUDE", include))
        self.path.chmod(self.path.stat().st_mode | stat.S_IXUSR)

    @property
    def slow(self) -> Path:
        return self.folder / "slow"

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def started(self) -> list[str]:
        """The objects whose compilation has begun, once for each time."""
        return [Path(line.split()[1]).name for line in self._lines("started")]

    @property
    def finished(self) -> list[str]:
        return [Path(line).name for line in self._lines("finished")]

    @property
    def at_work(self) -> list[int]:
        """Process ids of its compilers that run."""
        return [pid for pid in (int(line.split()[0]) for line in self._lines("started")) if _runs(pid, str(self.path))]

    def environment(self, home: Path) -> dict[str, str]:
        """Of a process with a cache of its own, which builds with this compiler."""
        env = {name: value for name, value in os.environ.items() if name != "TORCH_EXTENSIONS_DIR"}
        here = {"XDG_CACHE_HOME": str(home), "HOME": str(home), "CXX": str(self.path)}
        return {**env, **here, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def _runs(pid: int, program: str) -> bool:
    try:
        return program in Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return False


LOAD = """
import json, sys
from autotune.workers.jit_ops import load_ops
def tell(**said): print(json.dumps(said), flush=True)
tell(state="over", failed=load_ops(sys.argv[1:], tell))
"""


def load(env: dict[str, str], *builders: str, python: str = sys.executable) -> subprocess.Popen[str]:
    """A process that loads these ops and prints a JSON line for all that it is told."""
    return subprocess.Popen([python, "-c", LOAD, *builders], env=env, stdout=subprocess.PIPE, text=True)
