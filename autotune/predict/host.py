"""Calibration of the predicted host memory: one factor, fitted to host OOMs, to runs that fitted and to the peaks of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.predict.fit import Posterior, Prior, fit
from autotune.predict.knobs import Floats
from autotune.predict.roofline import host_limit_bytes
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Outcome

PRIOR = Prior(0.0, 0.3)  # prior of the factor's logarithm: fragments, copies and caches that no formula covers
NOISE = 0.1


def fit_host(bill: Floats, outcomes: Sequence[Outcome], hardware: Hardware) -> Posterior:
    """Fit the logarithm of measured over predicted host memory.

    Args:
        bill: (n,) predicted bytes of one rank, for candidates that offload.
        outcomes: their outcomes, each a measurement or an OOM_HOST.
    """
    total = float(hardware.host_memory_bytes)
    own = total - host_limit_bytes(hardware)  # bytes of processes and libraries, without offload
    ranks = hardware.per_node
    ran_out = np.array([o.measurement is None for o in outcomes])
    held = np.array([_held(o) for o in outcomes])
    seen = (held > 0) & (bill > own / ranks)  # a smaller bill gives no information

    def residuals(constants: Floats) -> Floats:
        each = own / ranks + np.exp(constants[..., 0, None]) * bill
        over = np.log(ranks * each / total)
        off = np.where(ran_out, np.minimum(over, 0.0), np.maximum(over, 0.0))
        return np.asarray(np.where(seen, np.log(each / np.where(seen, held, 1.0)), off))

    return fit([PRIOR], residuals, noise=NOISE)


def _held(outcome: Outcome) -> float:
    """Return the bytes of one rank. Pinned memory is added: it is the driver's, and the kernel does not count it for a
    process."""
    measured = outcome.measurement
    return (
        float(measured.host_peak_bytes + (measured.pinned_bytes or 0)) if measured and measured.host_peak_bytes else 0.0
    )
