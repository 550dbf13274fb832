"""Measure the activations that forwards save for backward in a probe run."""

from __future__ import annotations

from typing import Any


class SavedTensors:
    """Count the bytes that forwards save for backward, from construction until `close`.

    Parameters of the model are not counted, and each storage is counted once.
    """

    def __init__(self, engine: Any) -> None:
        import torch

        self.bytes = 0
        parameters = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
        seen: set[int] = set()

        def pack(tensor: Any) -> Any:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                where = tensor.untyped_storage().data_ptr()
                if where not in parameters and where not in seen:
                    seen.add(where)
                    self.bytes += tensor.untyped_storage().nbytes()
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self._hooks.__enter__()
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._hooks.__exit__(None, None, None)
