"""How the ranks of a training that knows nothing of autotune end in these tests: at once, after all that `atexit` holds.

A training's own end aborts now and then on busy cores: with the process group open its threads race the interpreter's end;
and a daemon thread of a library that asks for the interpreter's lock then is ended by force, which C++ code above it answers
by "terminate called without an active exception" (Python's Py_Finalize before 3.14; seen with the group left, too).

Where `PLAIN_TRACE` names a folder, each rank writes its training trace there, as `RANK.json`.

Ops are linked as autotune links them below a folder with a space, where torch alone cannot.
"""

import atexit
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


class Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that passes one module to a function, once it is imported."""

    def __init__(self, name: str, then: Callable[[Any], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        assert spec is not None
        assert spec.loader is not None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: object) -> None:
        self.loader.exec_module(module)  # type: ignore[arg-type]
        self.then(module)


def link(module: Any) -> None:
    """Use the link that a trial left in the folder of ops."""
    torch = Path(os.environ["TORCH_EXTENSIONS_DIR"], "torch")
    if torch.is_symlink():
        module.TORCH_LIB_PATH = str(torch / "lib")


def record(module: Any) -> None:
    """Wrap the methods of a training step."""
    import torch

    from autotune.rank.training_trace import TraceRecorder

    engine_class = module.DeepSpeedEngine
    recorder, file = TraceRecorder(), Path(os.environ["PLAIN_TRACE"], f"{os.environ['RANK']}.json")
    forward, backward, step = engine_class.forward, engine_class.backward, engine_class.step

    def traced_forward(engine, *args, **kwargs):  # type: ignore[no-untyped-def]
        first = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)), None)
        recorder.forward(first, 0 if first is None else len(first))
        return forward(engine, *args, **kwargs)

    def traced_backward(engine, loss, *args, **kwargs):  # type: ignore[no-untyped-def]
        recorder.backward(engine, loss, scaled=kwargs.get("scale_wrt_gas", True))
        return backward(engine, loss, *args, **kwargs)

    def traced_step(engine, *args, **kwargs):  # type: ignore[no-untyped-def]
        ends = engine.is_gradient_accumulation_boundary()
        if ends:
            recorder.before_step(engine)
        result = step(engine, *args, **kwargs)
        if ends and recorder.records:
            recorder.after_step(engine)
            file.write_text(json.dumps(recorder.report()))
        return result

    engine_class.forward, engine_class.backward, engine_class.step = traced_forward, traced_backward, traced_step


if "PLAIN_TRACE" in os.environ and "RANK" in os.environ:
    sys.meta_path.insert(0, Hook("deepspeed.runtime.engine", record))
if "TORCH_EXTENSIONS_DIR" in os.environ:
    sys.meta_path.insert(0, Hook("torch.utils.cpp_extension", link))
if "LOCAL_RANK" in os.environ:
    sys.exit = remembered
    atexit.register(leave)  # the first that is registered is the last that is called
