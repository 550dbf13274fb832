"""Twin-Flow: the share of an offloaded optimizer that stays on the device (`offload_optimizer.ratio`).

Source: deepspeed 0.19.8, `runtime/zero/stage3.py`, `_create_fp32_partitions`: the first `int((1 - ratio) * n)` whole
sub-groups of a rank's n. With one sub-group the ratio changes nothing; `sub_group_size` of 1e9 gives most models only one.
"""

from __future__ import annotations

import numpy as np

from autotune.predict.knobs import Columns, Floats


def sub_groups(c: Columns, part: float, largest: float, ranks: float) -> Floats:
    """Return the elements of a sub-group of a rank with `part` elements. No parameter is cut; the largest has `largest`
    elements over all ranks."""
    return np.minimum(part, np.maximum(c.sub_group, largest / ranks))


def staying(c: Columns, part: float, largest: float, ranks: float) -> Floats:
    """Return the share of an offloaded optimizer that stays on the device, for each candidate."""
    groups = np.ceil(part / sub_groups(c, part, largest, ranks))
    return np.where(c.stage == 3, np.floor((1 - c.offload_ratio) * groups + 1e-9) / groups, 0.0)
