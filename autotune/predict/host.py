"""How far the host's bill is off: one factor, learnt of hosts that ran out, of those that did not, and of what ranks held."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.predict.fit import Posterior, Prior, fit
from autotune.predict.knobs import Floats
from autotune.predict.roofline import host_limit_bytes
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Outcome

PRIOR = Prior(0.0, 0.3)  # of the factor's logarithm: fragments, copies and caches that no formula knows
NOISE = 0.1


def fit_host(bill: Floats, outcomes: Sequence[Outcome], hardware: Hardware) -> Posterior:
    """The logarithm of what hosts hold over what the bill says.

    Args:
        bill: (n,) bytes of one rank, of candidates that offload.
        outcomes: theirs, each a measurement or an OOM_HOST.
    """
    total = float(hardware.host_memory_bytes)
    own = total - host_limit_bytes(hardware)  # of processes and libraries, whatever is offloaded
    ranks = hardware.per_node
    ran_out = np.array([o.measurement is None for o in outcomes])
    held = np.array([_held(o) for o in outcomes])
    seen = (held > 0) & (bill > own / ranks)  # of less it says nothing

    def residuals(constants: Floats) -> Floats:
        each = own / ranks + np.exp(constants[..., 0, None]) * bill
        over = np.log(ranks * each / total)
        off = np.where(ran_out, np.minimum(over, 0.0), np.maximum(over, 0.0))
        return np.asarray(np.where(seen, np.log(each / np.where(seen, held, 1.0)), off))

    return fit([PRIOR], residuals, noise=NOISE)


def _held(outcome: Outcome) -> float:
    """Bytes of one rank; what is pinned is the driver's, and no part of what the kernel counts for a process."""
    measured = outcome.measurement
    return (
        float(measured.host_peak_bytes + (measured.pinned_bytes or 0)) if measured and measured.host_peak_bytes else 0.0
    )
