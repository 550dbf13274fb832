"""Peaks of device memory from ZeRO's bill and the constants of MEMORY_CONSTANTS."""

from __future__ import annotations

import numpy as np

from autotune.predict.constants import MEMORY_CONSTANTS
from autotune.predict.knobs import Floats
from autotune.predict.prepared import Prepared
from autotune.problem.hardware import Hardware
from autotune.units import GIB


def moments(p: Prepared, hardware: Hardware, constants: Floats) -> Floats:
    """(..., moments, n) bytes at constants (..., constants)."""
    k = {name: constants[..., i, None, None] for i, name in enumerate(MEMORY_CONSTANTS)}
    b = p.bill
    held = k["states"] * (b.parameters + b.gradients + b.optimizer) + k["overhead"] * GIB
    if hardware.device == "cpu":  # host and device are one
        held = held + b.host
    factor = k["activations"] * np.where(p.columns.checkpointing > 0, k["recomputed"], 1.0)
    return np.asarray(
        held
        + k["buckets"] * b.buckets
        + k["gathered"] * b.gathered
        + k["temporaries"] * b.temporaries
        + factor * b.activations
    )


def peaks(p: Prepared, hardware: Hardware, constants: Floats) -> Floats:
    """(..., n) bytes at constants (..., constants)."""
    return np.asarray(moments(p, hardware, constants).max(axis=-2))


def peaks_and_slopes(p: Prepared, hardware: Hardware, constants: Floats) -> tuple[Floats, Floats]:
    """(n,) peaks in bytes, and (n, constants) their derivatives by the constants.

    A peak is linear in the constants, but for which moment it is.
    """
    every_moment = moments(p, hardware, constants)
    at, every = every_moment.argmax(axis=0), np.arange(every_moment.shape[1])
    k, b = dict(zip(MEMORY_CONSTANTS, constants, strict=True)), p.bill
    activations, again = b.activations[at, every], p.columns.checkpointing > 0
    slopes = {
        "overhead": np.full(len(every), float(GIB)),
        "states": b.parameters + b.gradients + b.optimizer,
        "buckets": b.buckets[at, every],
        "gathered": b.gathered[at, every],
        "temporaries": b.temporaries[at, every],
        "activations": activations * np.where(again, k["recomputed"], 1.0),
        "recomputed": np.where(again, k["activations"] * activations, 0.0),
    }
    return np.asarray(every_moment[at, every]), np.array([slopes[name] for name in MEMORY_CONSTANTS]).T
