"""Functions that write files from C++ or Rust, and raise none of Python's audit events."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum, auto
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from autotune.rank.hooks.patches import Patches

_SAFETENSORS = ("safetensors", "safetensors.torch", "safetensors.numpy")


class Notice(Enum):
    """What a writer does to a file."""

    REPLACED = auto()
    CHANGED = auto()
    NEW = auto()  # it fails where there is one


Call = tuple[tuple[Any, ...], dict[str, Any]]  # its arguments, `self` among them
Reader = Callable[[Call], Iterator[tuple[Any, Notice]]]  # the paths that it writes to


def _replaces(place: int, name: str) -> Reader:
    """The path is the argument at this place, or of this name."""

    def read(call: Call) -> Iterator[tuple[Any, Notice]]:
        yield _argument(call, place, name), Notice.REPLACED

    return read


def _hdf5(call: Call) -> Iterator[tuple[Any, Notice]]:
    if (notice := _HDF5_MODES.get(_argument(call, 2, "mode"))) is not None:
        yield _argument(call, 1, "name"), notice


def _database(call: Call) -> Iterator[tuple[Any, Notice]]:
    """Each of Python's own kinds adds another suffix; `shelve` keeps its shelves so."""
    for suffix in ("", ".db", ".dir", ".pag", ".dat", ".bak"):
        yield os.fspath(_argument(call, 0, "file")) + suffix, Notice.CHANGED


def _vocabulary(call: Call) -> Iterator[tuple[Any, Notice]]:
    prefix = _argument(call, 2, "prefix") or _argument(call, 2, "name")
    for name in ("vocab.json", "merges.txt", "vocab.txt", "unigram.json"):
        yield os.path.join(_argument(call, 1, "folder"), f"{prefix}-{name}" if prefix else name), Notice.REPLACED


def _argument(call: Call, place: int, name: str) -> Any:
    args, kwargs = call
    return args[place] if len(args) > place else kwargs.get(name)


_HDF5_MODES = {"w": Notice.REPLACED, "a": Notice.CHANGED, "r+": Notice.CHANGED, "x": Notice.NEW, "w-": Notice.NEW}
_WRITERS: dict[str, dict[str, Reader]] = {
    "torch": {
        "_C.PyTorchFileWriter": _replaces(0, "name"),  # what `torch.save` writes by
        "jit.save": _replaces(1, "f"),
        "jit.RecursiveScriptModule.save": _replaces(1, "f"),
    },
    **{name: {"serialize_file": _replaces(1, "filename")} for name in _SAFETENSORS},
    "tokenizers": {"Tokenizer.save": _replaces(1, "path"), "models.Model.save": _vocabulary},
    "pyarrow.parquet.core": {"ParquetWriter.__init__": _replaces(1, "where")},
    "pyarrow.feather": {"write_feather": _replaces(1, "dest")},
    "pyarrow.csv": {"write_csv": _replaces(1, "output_file")},
    "h5py": {"File.__init__": _hdf5},
    "dbm": {"open": _database},
    "cv2": {"imwrite": _replaces(0, "filename")},
    "soundfile": {"write": _replaces(0, "file")},
}


def watch_native(patches: Patches, told: Callable[[Any, Notice], None]) -> None:
    """`told` hears of every path that one of them is about to write to; of those that are not imported yet, once they are."""
    finder = _Finder(
        {name for name in _WRITERS if name not in sys.modules}, lambda module: _wrap(patches, module, told)
    )
    for name in _WRITERS:
        if (module := sys.modules.get(name)) is not None:
            _wrap(patches, module, told)
    sys.meta_path.insert(0, finder)
    patches.on_undo(lambda: sys.meta_path.remove(finder))


def _wrap(patches: Patches, module: ModuleType, told: Callable[[Any, Notice], None]) -> None:
    for function, read in _WRITERS[module.__name__].items():
        owner: Any = module
        *path, last = function.split(".")
        with suppress(AttributeError, TypeError):  # not in every version, or not to be replaced
            for one in path:
                owner = getattr(owner, one)
            patches.wrap(owner, last, _telling(read, told))


def _telling(read: Reader, told: Callable[[Any, Notice], None]) -> Callable[..., Any]:
    def write(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with suppress(TypeError):  # arguments that the writer itself refuses
            for path, notice in list(read((args, kwargs))):
                if isinstance(path, str | bytes | os.PathLike):
                    told(path, notice)
        return original(*args, **kwargs)

    return write


class _Finder(MetaPathFinder):
    """Finds nothing itself: tells when one of the modules has been imported."""

    def __init__(self, names: set[str], imported: Callable[[ModuleType], None]) -> None:
        self._names, self._imported = names, imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Whoever asks may only want to know whether there is such a module, as `importlib.util.find_spec` does."""
        if fullname not in self._names:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ in self._names:
                self._names.discard(module.__name__)
                self._imported(module)

        with suppress(AttributeError):  # a loader that takes no attributes
            loader.exec_module = exec_module
        return spec
