"""What the predictor's formulas leave open: constants with their priors, fitted to what a study measures."""

from __future__ import annotations

import numpy as np

from autotune.predict.fit import Prior
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job

# Of a peak, before calibration; where ranks share states `SHARDED` comes on top. Residuals of the fitted sources on one GPU, of
# rows that are as long as they say: half are within 3 to 4 %.
MEMORY_NOISE = 0.05
TIME_NOISE = 0.08  # of the logarithm of a step's seconds
REPEAT_MEMORY, REPEAT_TIME = 0.004, 0.02  # the same candidate measured twice
# Of the same logarithm where somebody else measured a like job on the same card, with other software around it: half of the
# gallery's entries are that far from what is predicted without them. With TIME_NOISE in its place entries of others mislead.
ELSEWHERE = 0.18
UNTRACED = 3.0  # times as wide are intervals for a model that could not be traced
# Of gradients, states, buffers and what is gathered, where ZeRO or FSDP shares them among ranks: how often they are copied, and
# when the copies go, differs between versions and frameworks. Frozen weights and activations are as certain as on one GPU.
# Residuals of the fitted sources.
SHARDED = 0.17
UNREAD_STATES = 0.2  # of parameters, gradients and states, where a key is set that no formula reads

# Factors on the lines of ZeRO's bill, and `cached`: blocks that the caching allocator keeps beside what is in use, as a share of
# all that comes and goes within a step.
MEMORY = {
    # of all that torch allocates: what the settings and versions of a training change without anyone saying so
    "scale": Prior(1.0, 0.02),
    "states": Prior(1.0, 0.02),
    "buckets": Prior(1.0, 0.2),
    "gathered": Prior(1.0, 0.3),
    "temporaries": Prior(1.0, 0.25),
    "activations": Prior(1.0, 0.05),
    "recomputed": Prior(1.0, 0.15),
    "cached": Prior(0.15, 0.08),
    # of what `uneven.py` says that batches of many lengths leave behind: less where a loop sorts its rows or empties the cache
    "uneven": Prior(1.0, 0.35),
}
STUCK = 0.3  # of the cached blocks cannot be given back, for they share a segment with used ones
STUCK_UNEVEN = (
    0.1  # of the blocks of shorter batches: each has a segment of its own, which a shorter batch may be using
)
MEMORY_CONSTANTS = ("overhead", *MEMORY)  # in the order of a fit
# The context of one process. With CUDA's lazy loading (torch 2 on CUDA 11.7 and later) 0.4 to 0.6 GiB, with all kernels loaded
# 1.3 (transformers' guide to training on one GPU, on a V100 in 2022 and 2023: rows of huggingface/transformers).
_CONTEXT_GIB = {"cuda": Prior(0.75, 0.4), "cpu": Prior(0.40, 0.1)}
_HOPPER_ON, _HOPPER_GIB = ("h100", "h200", "b200"), 0.1
# NCCL's buffers grow with its channels, and those with the link, but hardly with the ranks of a node beyond two (its
# maintainer in NVIDIA/nccl issue 986). Measured: 0.53 GiB between two and 0.67 among four A100 on NVLink (issue 964); 0.99
# with the context on 8 H100 before an all-to-all, which ZeRO does not use (issue 1685). Over PCIe a few channels do.
_NCCL_GIB = {"nvlink": (Prior(0.45, 0.15), Prior(0.55, 0.2)), "pcie": (Prior(0.25, 0.15), Prior(0.25, 0.15))}
MEASURED_OVERHEAD_GIB = 0.03  # standard deviation of an overhead that ranks have measured from inside

# Logarithms of factors on full rates; a matrix product reaches 60 to 70 % of a GPU's peak, a stream of memory or of a
# link 75 to 85 %. The hidden share is a logit.
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
# What only parameters decide, whose sizes may be known even where nothing was traced.
_OF_PARAMETERS = ("comm", "reduce", "pcie", "cpu_adam", "optimizer", "collectives")
_OF_THE_CARD = ("products", "tail", "moved", "comm", "pcie", "optimizer")  # what its rates decide
_CPU_SIGMA = 1.2  # a CPU's rates are guesses until the first trial
# On CPU ranks: the machine, whose rates may all be several times ours together, and how much longer a step takes at a stage than
# what is predicted once stage 0 is measured (ZeRO's copies into buckets and hooks cost more of a step there). As logarithms;
# stages 1 and 2 were set by seven tables of real DeepSpeed and hold on seven others, stage 3 has two (benchmarks/cpu_ranks.py).
_CPU_QUIRKS = {
    "machine": Prior(0.0, _CPU_SIGMA),
    "stage1": Prior(0.09, 0.08),
    "stage2": Prior(0.23, 0.15),
    "stage3": Prior(0.65, 0.3),
}
# Standard deviations of what no formula knows: the logarithm of a small factor for each kind of config, and slopes. In a
# fit they follow TIME.
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
    """What a rank holds of its device beside torch's tensors, in GiB: its context and NCCL's buffers."""
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
    """In the order of MEMORY_CONSTANTS; the overhead is in GiB. `widen` multiplies the activations' sigma; with `unread`
    keys in the user's own config the states are uncertain, too."""
    wider = UNTRACED if unread else 1.0
    factors = {
        **MEMORY,
        "activations": Prior(MEMORY["activations"].mean, MEMORY["activations"].sigma * max(widen, wider)),
        "states": Prior(MEMORY["states"].mean, UNREAD_STATES if unread else MEMORY["states"].sigma),
    }
    return [overhead_prior(hardware, job.ranks), *factors.values()]


def time_priors(hardware: Hardware, widen: float, untraced: bool = False, counted: bool = True) -> list[Prior]:
    """Those of TIME, then those of QUIRKS. `widen` multiplies the sigmas of the rates; where the model could not be traced, they
    are wider but for what its parameters decide, if these were `counted`; where no row of the table has the card's, its doubt
    comes on top of them."""
    facts = hardware.gpu_facts
    least = {name: _CPU_SIGMA if facts is None and name != "hidden" else 0.0 for name in TIME}
    doubt = dict.fromkeys(_OF_THE_CARD, facts.doubt if facts is not None else 0.0)

    def sigma(name: str) -> float:
        wider = UNTRACED if untraced and not (counted and name in _OF_PARAMETERS) else widen
        return float(np.hypot(max(TIME[name].sigma, least[name]) * wider, doubt.get(name, 0.0)))

    rates = [Prior(prior.mean, sigma(name)) for name, prior in TIME.items()]
    quirks = {name: Prior(0.0, sigma) for name, sigma in QUIRKS.items()} | (_CPU_QUIRKS if facts is None else {})
    return [*rates, *quirks.values()]
