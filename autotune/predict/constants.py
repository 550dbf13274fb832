"""Constants that the predictor's formulas leave open, with their priors. A study's measurements fit them."""

from __future__ import annotations

import numpy as np

from autotune.predict.fit import Prior
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job

# Share of a peak before calibration; if ranks share states, `SHARDED` is added. Residuals of the fitted sources on
# one GPU, for rows of the stated length: half are within 3 to 4 %.
MEMORY_NOISE = 0.05
TIME_NOISE = 0.08  # in the logarithm of a step's seconds
REPEAT_MEMORY, REPEAT_TIME = 0.004, 0.02  # in logarithms; the same candidate measured twice
# In the same logarithm, for a like job measured by another user on the same card with other software. Half of the
# gallery's entries differ that much from a prediction made without them. With TIME_NOISE instead, such entries
# mislead.
ELSEWHERE = 0.18
UNTRACED = 3.0  # factor on the intervals of a model that could not be traced
# Share of gradients, states, buffers and gathered parameters, if ZeRO or FSDP shards them. Versions and frameworks
# differ in how often they copy these, and in when they free the copies. Frozen weights and activations are as certain
# as on one GPU. Source: residuals of the fitted sources.
SHARDED = 0.17
UNREAD_STATES = 0.2  # share of parameters, gradients and states, if a key is set that no formula reads

# Factors on the lines of ZeRO's bill. `cached` is a share of all bytes that come and go within a step: blocks that
# the caching allocator keeps in addition to those in use.
MEMORY = {
    # factor on all that torch allocates, for settings and versions of a training that are not recorded
    "scale": Prior(1.0, 0.02),
    "states": Prior(1.0, 0.02),
    "buckets": Prior(1.0, 0.2),
    "gathered": Prior(1.0, 0.3),
    "temporaries": Prior(1.0, 0.25),
    "activations": Prior(1.0, 0.05),
    "recomputed": Prior(1.0, 0.15),
    "cached": Prior(0.15, 0.08),
    # Factor on the estimate of `uneven.py` for batches of many lengths. A loop that sorts its rows or empties the
    # cache keeps less.
    "uneven": Prior(1.0, 0.35),
}
STUCK = 0.3  # share of the cached blocks that cannot be given back, as they share a segment with used blocks
STUCK_UNEVEN = (
    0.1  # share of the blocks of shorter batches; each has its own segment, which a shorter batch may be using
)
MEMORY_CONSTANTS = ("overhead", *MEMORY)  # in the order of a fit
# GiB of one process's context: 0.4 to 0.6 with CUDA's lazy loading (torch 2 on CUDA 11.7 and later), 1.3 with all
# kernels loaded (transformers' guide to training on one GPU, on a V100 in 2022 and 2023: rows of
# huggingface/transformers).
_CONTEXT_GIB = {"cuda": Prior(0.75, 0.4), "cpu": Prior(0.40, 0.1)}
_HOPPER_ON, _HOPPER_GIB = ("h100", "h200", "b200"), 0.1
# NCCL's buffers grow with its channels, and channels depend on the link. The number of ranks in a node hardly matters
# beyond two (its maintainer in NVIDIA/nccl issue 986). Measured: 0.53 GiB between two and 0.67 among four A100 on
# NVLink (issue 964); 0.99 with the context on 8 H100 before an all-to-all, which ZeRO does not use (issue 1685). Few
# channels are enough over PCIe.
_NCCL_GIB = {"nvlink": (Prior(0.45, 0.15), Prior(0.55, 0.2)), "pcie": (Prior(0.25, 0.15), Prior(0.25, 0.15))}
MEASURED_OVERHEAD_GIB = 0.03  # standard deviation of an overhead that ranks have measured from inside

# Logarithms of factors on full rates. A matrix product reaches 60 to 70 % of a GPU's peak; streaming from memory or
# over a link reaches 75 to 85 %. The hidden share is a logit.
TIME = {
    "products": Prior(np.log(1 / 0.86), 0.07),
    "tail": Prior(np.log(1.4), 0.5),
    "moved": Prior(np.log(1 / 0.8), 0.12),
    "starts": Prior(0.0, 0.2),
    "comm": Prior(np.log(1 / 0.7), 0.4),
    "reduce": Prior(np.log(0.8), 0.4),
    "hidden": Prior(0.4, 0.8),
    "pcie": Prior(np.log(1 / 0.7), 0.4),
    "cpu_adam": Prior(1.5, 0.9),
    "optimizer": Prior(np.log(1 / 0.7), 0.3),
    "collectives": Prior(0.0, 0.8),
    "loop": Prior(0.0, 0.7),
}
# Constants that depend on the parameters alone. Their sizes may be known without a trace.
_OF_PARAMETERS = ("comm", "reduce", "pcie", "cpu_adam", "optimizer", "collectives")
_OF_THE_CARD = ("products", "tail", "moved", "comm", "pcie", "optimizer")  # constants that depend on the card's rates
_CPU_SIGMA = 1.2  # a CPU's rates are guesses until the first trial
# CPU ranks, in logarithms. `machine`: its rates together may be several times the assumed ones. `stageN`: how much
# longer a step takes than predicted once stage 0 is measured, as ZeRO's hooks and copies into buckets cost a larger
# share. Seven tables of real DeepSpeed set stages 1 and 2, and seven other tables confirm them; stage 3 has two
# (benchmarks/cpu_ranks.py).
_CPU_QUIRKS = {
    "machine": Prior(0.0, _CPU_SIGMA),
    "stage1": Prior(0.09, 0.08),
    "stage2": Prior(0.23, 0.15),
    "stage3": Prior(0.65, 0.3),
}
# Standard deviations of effects that no formula covers: the logarithm of a small factor for each kind of config, and
# slopes. They follow TIME in a fit.
QUIRKS = {
    "machine": 0.07,
    "stage1": 0.06,
    "stage2": 0.06,
    "stage3": 0.08,
    "checkpointed": 0.05,
    "offloaded": 0.1,
    "parameters out": 0.1,
    "overlapped": 0.05,
    "micro-batch": 0.05,
    "bucket": 0.03,
    "sub-group": 0.02,
    "contiguous": 0.03,
    "compiled": 0.15,
    "adapted": 0.05,
    "packed": 0.1,
    "nodes": 0.03,
}


def overhead_prior(hardware: Hardware, ranks: int) -> Prior:
    """Return the GiB that a rank holds on its device outside torch's tensors: its context and NCCL's buffers."""
    context = _CONTEXT_GIB[hardware.device]
    if hardware.device != "cuda":
        return context
    facts = hardware.gpu_facts
    assert facts is not None, "of any GPU"
    newer = _HOPPER_GIB if facts.name.startswith(_HOPPER_ON) else 0.0
    if ranks == 1:
        return Prior(context.mean + newer, context.sigma)
    link = _NCCL_GIB.get(facts.link, _NCCL_GIB["pcie"])
    nccl = link[0 if ranks == 2 else 1]
    return Prior(context.mean + newer + nccl.mean, float(np.hypot(context.sigma, nccl.sigma)))


def memory_priors(job: Job, hardware: Hardware, widen: float, unread: bool = False) -> list[Prior]:
    """Return the priors in the order of MEMORY_CONSTANTS; the overhead is in GiB.

    Args:
        widen: factor on the activations' sigma.
        unread: the user's own config sets keys that no formula reads, so the states are uncertain, too.
    """
    wider = UNTRACED if unread else 1.0
    factors = {
        **MEMORY,
        "activations": Prior(MEMORY["activations"].mean, MEMORY["activations"].sigma * max(widen, wider)),
        "states": Prior(MEMORY["states"].mean, UNREAD_STATES if unread else MEMORY["states"].sigma),
    }
    return [overhead_prior(hardware, job.ranks), *factors.values()]


def time_priors(hardware: Hardware, widen: float, untraced: bool = False, counted: bool = True) -> list[Prior]:
    """Return the priors of TIME, then those of QUIRKS. If the table has no row for the card, its doubt is added.

    Args:
        widen: factor on the sigmas of the rates.
        untraced: the model could not be traced, so sigmas are wider.
        counted: the parameters' sizes are known, so sigmas that depend on them alone stay.
    """
    facts = hardware.gpu_facts
    least = {name: _CPU_SIGMA if facts is None and name != "hidden" else 0.0 for name in TIME}
    doubt = dict.fromkeys(_OF_THE_CARD, facts.doubt if facts is not None else 0.0)

    def sigma(name: str) -> float:
        wider = UNTRACED if untraced and not (counted and name in _OF_PARAMETERS) else widen
        return float(np.hypot(max(TIME[name].sigma, least[name]) * wider, doubt.get(name, 0.0)))

    rates = [Prior(prior.mean, sigma(name)) for name, prior in TIME.items()]
    quirks = {name: Prior(0.0, sigma) for name, sigma in QUIRKS.items()} | (_CPU_QUIRKS if facts is None else {})
    return [*rates, *quirks.values()]
