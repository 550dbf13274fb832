"""Main memory that pinning takes. torch's allocator of pinned memory rounds blocks up to powers of two and never returns
them."""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np

from autotune.predict.knobs import Floats
from autotune.problem.early_variables import ALLOCATOR_VARIABLES
from autotune.units import MIB


def pinned_bytes(size: Any) -> Floats:
    """Return the bytes of host memory that `tensor.pin_memory()` takes for tensors of `size` bytes.

    Source: torch 2.13, ATen/core/CachingHostAllocator.h (`PowerOf2Ceil`), which rounds every block up to
    `pinned_max_round_threshold_mb` of PYTORCH_ALLOC_CONF; by default that is every block. DeepSpeed pins through torch,
    unless DS_PIN_MEMORY_BACKEND=native locks pages without rounding (deepspeed 0.19.8, accelerator/abstract_accelerator.py
    and utils/pin_memory.py).
    """
    exact = np.asarray(size, dtype=np.float64)
    if os.environ.get("DS_PIN_MEMORY_BACKEND", "torch").strip().lower() == "native":
        return exact
    rounded = np.exp2(np.ceil(np.log2(np.maximum(exact, 1.0))))
    return np.where((exact > 0) & (exact <= _threshold_bytes()), rounded, exact)


def _threshold_bytes() -> float:
    """Return the size above which blocks are not rounded."""
    config = next((os.environ[name] for name in ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    limits = re.findall(r"pinned_max_(?:round_threshold|cached_size)_mb\s*:\s*(\d+)", config)
    return min((float(limit) * MIB for limit in limits), default=float("inf"))
