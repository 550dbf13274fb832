"""Device memory from ZeRO's bill and the constants of MEMORY_CONSTANTS: bytes that torch allocates, and bytes that NVML
shows.

`allocated` counts what torch's allocator has handed out. NVML shows what the allocator has reserved, including the blocks it
keeps for later (`cached`), and the overhead: the process's context, NCCL's buffers, kernels. Before an OOM the allocator
returns whole unused segments (torch 2.13, c10/cuda/CUDACachingAllocator.cpp, `release_cached_blocks`). A candidate therefore
*needs* the allocated bytes, the overhead, and the cached blocks between used ones. NVML shows at most the card's capacity,
unless more is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.predict.constants import MEMORY_CONSTANTS, STUCK, STUCK_UNEVEN
from autotune.predict.knobs import Floats
from autotune.predict.prepared import Prepared
from autotune.predict.zero import Bill
from autotune.problem.hardware import Hardware
from autotune.units import GIB


@dataclass(frozen=True)
class Peaks:
    """Bytes of a rank, each at its own peak; (..., n) each."""

    allocated: Floats  # by torch
    needed: Floats  # of the device, by the whole process
    shown: Floats  # by NVML


def _moments(p: Prepared, hardware: Hardware, constants: Floats) -> tuple[Floats, Floats, Floats]:
    """Return (allocated, cached, uneven) in bytes: (..., moments, n) at constants (..., constants). `uneven` is cached, too,
    in whole segments that only shorter batches use."""
    k = {name: constants[..., i, None, None] for i, name in enumerate(MEMORY_CONSTANTS)}
    b = p.bill
    held = k["scale"] * k["states"] * (b.parameters + b.gradients + b.optimizer)
    if hardware.device == "cpu":  # host and device share their memory
        held = held + b.host
    factor = k["activations"] * np.where(p.columns.checkpointing > 0, k["recomputed"], 1.0)
    passing = k["buckets"] * b.buckets + k["gathered"] * b.gathered + k["temporaries"] * b.temporaries
    passing = k["scale"] * (passing + factor * b.activations)
    cached = k["cached"] * passing
    step = np.array([float(name == "step") for name in b.moments])[:, None]
    if hardware.device != "cuda":
        return np.asarray(held + passing), np.asarray(cached), np.zeros_like(cached)
    whole = k["uneven"] * factor * p.uneven * b.activations + _elsewhere(b)
    return np.asarray(held + passing), np.asarray(cached + step * b.left + b.holes), np.asarray(k["scale"] * whole)


def _elsewhere(b: Bill) -> Floats:
    """Return (moments, n) bytes that FSDP gathers and reduces at other moments. A stream's cached blocks are closed to other
    streams (torch 2.13, CUDACachingAllocator.cpp, get_free_block; torch/distributed/fsdp, _runtime_utils.py)."""
    return np.asarray(b.sent.max(axis=0) - b.sent)


def moments(p: Prepared, hardware: Hardware, constants: Floats) -> Floats:
    """Return (..., moments, n) bytes that NVML would show on a card of unlimited memory, at constants (..., constants)."""
    allocated, cached, whole = _moments(p, hardware, constants)
    return np.asarray(allocated + cached + whole + GIB * constants[..., 0, None, None])


def peaks(p: Prepared, hardware: Hardware, constants: Floats) -> Peaks:
    """Return the peaks at constants (..., constants)."""
    allocated, cached, whole = _moments(p, hardware, constants)
    overhead = GIB * constants[..., 0, None]
    needed = (allocated + STUCK * cached + STUCK_UNEVEN * whole).max(axis=-2) + overhead
    shown = (allocated + cached + whole).max(axis=-2) + overhead
    shown = np.maximum(np.minimum(shown, float(hardware.capacity_bytes)), needed)
    return Peaks(allocated.max(axis=-2), needed, shown)


def slopes(p: Prepared, hardware: Hardware, constants: Floats) -> tuple[Floats, Floats]:
    """Return (n, constants) derivatives by the constants, first of NVML's bytes on a card of unlimited memory, then of the
    bytes that torch allocates.

    Both are linear in each constant, except where another moment becomes the peak.
    """
    allocated, cached, whole = _moments(p, hardware, constants)
    k, b = dict(zip(MEMORY_CONSTANTS, constants, strict=True)), p.bill
    every, again = np.arange(allocated.shape[1]), p.columns.checkpointing > 0
    states = b.parameters + b.gradients + b.optimizer
    on_gpu = hardware.device == "cuda"
    left, elsewhere = p.uneven * on_gpu, _elsewhere(b) * on_gpu
    found = []
    for shown in (True, False):
        at = (allocated + cached + whole if shown else allocated).argmax(axis=0)
        activations = b.activations[at, every] * np.where(again, k["recomputed"], 1.0)
        passing = {name: getattr(b, name)[at, every] for name in ("buckets", "gathered", "temporaries")}
        kept, kept_activations = 1 + k["cached"] * shown, 1 + (k["cached"] + k["uneven"] * left) * shown
        by_name = {name: k["scale"] * kept * size for name, size in passing.items()}
        in_passing = sum(k[name] * size for name, size in passing.items())
        of_activations = k["activations"] * activations
        by_name |= {
            "overhead": np.full(len(every), GIB * shown),
            "scale": k["states"] * states
            + kept * in_passing
            + kept_activations * of_activations
            + shown * elsewhere[at, every],
            "states": k["scale"] * states,
            "activations": k["scale"] * kept_activations * activations,
            "recomputed": k["scale"] * kept_activations * np.where(again, of_activations / k["recomputed"], 0.0),
            "cached": k["scale"] * shown * (in_passing + of_activations),
            "uneven": k["scale"] * shown * left * of_activations,
        }
        found.append(np.array([by_name[name] for name in MEMORY_CONSTANTS]).T)
    return found[0], found[1]
