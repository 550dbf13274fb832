"""Environment variables that libraries read once, on import or on the device's first use, and that scripts set in code.

A rank imports these libraries and initializes the device before it runs a script, so that it needs such variables from its start.
Literals set at the top of a script are read from its text. Other settings are seen in the probe run; later ranks start with those
that concern the device (axolotl sets its allocator this way, in a function).
"""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

# Settings of torch's caching allocator, `key:value,…`. torch reads only the first of these that is set, on the first allocation
# of CUDA memory (torch 2.13, c10/core/AllocatorConfig.cpp; tested with two contradictory settings).
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

# Modules that read a library's variables on import. Variables set later have no effect in a plain run either.
_HUB_MODULES = {
    *("huggingface_hub", "transformers", "datasets", "accelerate", "peft", "trl", "diffusers", "evaluate"),
    *("sentence_transformers", "unsloth"),
}
_THREADED_MODULES = {
    *_HUB_MODULES,
    *("torch", "torchvision", "deepspeed", "numpy", "pandas", "scipy", "lightning", "pytorch_lightning"),
}
_OF_THE_HUB = ("HF_", "HUGGINGFACE_", "HUGGING_FACE_", "TRANSFORMERS_")
_OF_THREADS = ("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_")
# Variables read on the first use of the device or the process group, or when an op is built.
_OF_THE_DEVICE = (
    *ALLOCATOR_VARIABLES,
    *("CUDA_", "NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "DS_"),
)
# Variables that are read at every use, written by torch, or only control messages. A rank sets these itself.
_NOT = (
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY"),
    *("TRANSFORMERS_VERBOSITY", "TRANSFORMERS_NO_ADVISORY_WARNINGS", "NCCL_DEBUG"),
    *("CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR", "DS_ACCELERATOR"),
)


class Setting(NamedTuple):
    """Change that one statement of a script makes to a variable."""

    name: str
    value: str
    default: bool  # applies only if the variable is not set yet (`setdefault`)


def settings_in(text: str) -> list[Setting]:
    """Return the literal settings in a script's top-level statements that precede the import that reads them, in order.

    The block `if __name__ == "__main__"` counts as top level.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of odd escapes
            body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the rank reports the error, or its Python is newer
        return []
    found, imported = [], set[str]()
    for statement in _outermost(body):
        imported |= _imports(statement)
        found += [one for one in _settings(statement) if _counts(one.name, imported)]
    return found


def variables_after(settings: Sequence[Setting], known: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the settings leave, given those `known` before."""
    found: dict[str, str] = {}
    for name, value, default in settings:
        if not (default and (name in found or name in known)):
            found[name] = value
    return found


def set_late(before: Mapping[str, str], now: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names of variables that changed since `before` and had already been read.

    Thread variables are excluded: launchers set them for ranks, which have their own.
    """
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return [name for name in names if name.startswith((*_OF_THE_HUB, *_OF_THE_DEVICE)) and not name.startswith(_NOT)]


def of_the_device(names: Sequence[str]) -> list[str]:
    """Return the names that the next rank can set in time: those read when it initializes the device, not on import."""
    return [name for name in names if name.startswith(_OF_THE_DEVICE) and name != "CUDA_VISIBLE_DEVICES"]


def too_late(names: Sequence[str]) -> str:
    """Return a warning about the names that `set_late` found; empty if there are none."""
    if not names:
        return ""
    return f"{', '.join(names)}: set by the script's code, after its ranks had begun to use it; export it instead"


def _counts(name: str, imported: set[str]) -> bool:
    if name.startswith(_NOT):
        return False
    if name.startswith(_OF_THE_HUB):
        return imported.isdisjoint(_HUB_MODULES)
    if name.startswith(_OF_THREADS):
        return imported.isdisjoint(_THREADED_MODULES)
    return name.startswith(_OF_THE_DEVICE)


def _outermost(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
            yield from _outermost(statement.body)
        else:
            yield statement


def _imports(statement: ast.stmt) -> set[str]:
    """Return the packages that a statement imports. Imports inside a function are skipped: they run when it is called."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return set()
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _settings(statement: ast.stmt) -> Iterator[Setting]:
    pairs: list[tuple[ast.expr | None, ast.expr]] = []
    default = False
    match statement:
        case ast.Assign(targets=targets, value=value):
            pairs = [(one.slice, value) for one in targets if isinstance(one, ast.Subscript) and _is_environ(one.value)]
        case ast.AugAssign(target=where, op=ast.BitOr(), value=ast.Dict() as added) if _is_environ(where):
            pairs = [*zip(added.keys, added.values, strict=True)]
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=where, attr=method), args=arguments, keywords=named)):
            match method, arguments:
                case "setdefault", [name, value] if _is_environ(where):
                    pairs, default = [(name, value)], True
                case "putenv", [name, value]:
                    pairs = [(name, value)]
                case "update", _ if _is_environ(where):
                    dicts = [one for one in arguments if isinstance(one, ast.Dict)]
                    pairs = [pair for one in dicts for pair in zip(one.keys, one.values, strict=True)]
                    pairs += [(ast.Constant(one.arg), one.value) for one in named]
    for pair in pairs:
        match pair:
            case ast.Constant(value=str(variable)), ast.Constant(value=str(text)):
                yield Setting(variable, text, default)


def _is_environ(where: ast.expr) -> bool:
    """Check for `os.environ`, or `environ` alone."""
    return getattr(where, "attr", getattr(where, "id", "")) == "environ"
