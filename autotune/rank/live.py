"""Count the bytes of live tensors, real or fake: the requests to an allocator without its overhead."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Count every storage that an operator returns, from allocation to release, while the mode is active.

    Attributes:
        bytes: bytes live now.
        peak: highest live bytes since `reset_peak()`.
        events: None, or a list that receives (storage's key, bytes) per allocation and (key, -bytes) per release.

    Args:
        watch: called with the live bytes after every change.
    """

    def __init__(self, watch: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self.watch = watch
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.events: list[tuple[int, int]] | None = None
        # Storages released by a communication thread. Two threads that use `+=` on the count would lose an update.
        self._elsewhere: deque[int] = deque()
        self._thread = threading.get_ident()  # thread of the last operator; with CUDA, autograd has its own threads
        self.bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._thread = threading.get_ident()
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return out

    def add(self, tensor: torch.Tensor) -> None:
        """Count a tensor that no operator under this mode created. A storage is counted once."""
        if tensor.device.type == "meta":  # DeepSpeed keeps the shapes of its parameters as such tensors
            return
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        self._settle()  # first, because a storage released elsewhere may have had this address
        key = storage._cdata
        size = storage.nbytes()
        known = self._known.get(key)
        if known is not None:
            if size != known[1]:  # resized in place, as ZeRO does with parameters
                self._known[key] = (known[0], size)
                self._change(size - known[1])
            return
        reference = weakref.ref(storage, functools.partial(self._died, key))
        self._known[key] = (reference, size)
        if self.events is not None and size:
            self.events.append((key, size))
        self._change(size)

    def _died(self, key: int, _: object) -> None:
        if threading.get_ident() == self._thread:
            self._release(key)
        else:
            self._elsewhere.append(key)

    def _settle(self) -> None:
        while self._elsewhere:
            self._release(self._elsewhere.popleft())

    def _release(self, key: int) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            if self.events is not None and known[1]:
                self.events.append((key, -known[1]))
            self._change(-known[1])

    def _change(self, size: int) -> None:
        self.bytes += size
        if self.bytes > self.peak:
            self.peak = self.bytes
        if self.watch is not None and size:
            self.watch(self.bytes)

    def reset_peak(self) -> None:
        self._settle()
        self.peak = self.bytes
