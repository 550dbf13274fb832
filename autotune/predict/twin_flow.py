"""Twin-Flow: which share of an offloaded optimizer stays on the device (`offload_optimizer.ratio`).

Source: deepspeed 0.19.8, `runtime/zero/stage3.py`, `_create_fp32_partitions`: the first `int((1 - ratio) * n)` of the n
sub-groups of a rank, whole ones. With one sub-group, as `sub_group_size` of 1e9 makes of most models, a ratio changes nothing.
"""

from __future__ import annotations

import numpy as np

from autotune.predict.knobs import Columns, Floats


def sub_groups(c: Columns, part: float, largest: float, ranks: float) -> Floats:
    """Elements of a sub-group of a rank that has `part` elements; no parameter is cut, and the largest of all ranks has
    `largest`."""
    return np.minimum(part, np.maximum(c.sub_group, largest / ranks))


def staying(c: Columns, part: float, largest: float, ranks: float) -> Floats:
    """The share of an offloaded optimizer that is on the device all the same, of each candidate."""
    groups = np.ceil(part / sub_groups(c, part, largest, ranks))
    return np.where(c.stage == 3, np.floor((1 - c.offload_ratio) * groups + 1e-9) / groups, 0.0)
