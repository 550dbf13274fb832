"""Constants of the predictor: priors and their Bayesian fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.predict.features import Columns, Floats
from autotune.predict.step_time import cores_of, host_limit_bytes
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Outcome

# -- Bayesian fit ------------------------------------------------------------------------------------------------------
#
# A robust fit of a few constants with priors. One observation already helps, and a wrong one cannot dominate.

DEGREES = 4.0  # degrees of freedom of Student's t: a far outlier counts little


@dataclass(frozen=True)
class Prior:
    """Normal prior of one constant."""

    mean: float
    sigma: float


@dataclass
class Posterior:
    """Constants after a fit, with their uncertainty."""

    mean: Floats  # (constants,)
    covariance: Floats  # (constants, constants)
    noise: float  # standard deviation of one observation, in the residual's unit

    def variance(self, jacobian: Floats) -> Floats:
        """Return (n,) variances of predictions that the constants cause.

        `jacobian` (n, constants) has the derivatives of the predictions.
        """
        return np.asarray(np.maximum(np.einsum("ij,ij->i", jacobian @ self.covariance, jacobian), 0.0))


SETTLED = 1e-4  # largest step at convergence; constants are logarithms or shares, so smaller changes decide nothing


def jacobian_of(model: Callable[[Floats], Floats], at: Floats) -> Floats:
    """Return (n, constants) derivatives by forward differences. The model is called once, with (1 + constants, constants)."""
    h = 1e-6 * np.maximum(1.0, abs(at))
    found = model(np.vstack([at, at + np.diag(h)]))
    return np.asarray((found[1:] - found[0]).T / h)


_NOISE_WEIGHT = 4.0  # observations


def fit(
    priors: Sequence[Prior], residuals: Callable[[Floats], Floats] | None, *, noise: float, rounds: int = 8
) -> Posterior:
    """Find the most probable constants by Gauss-Newton, with Student's t weights for the observations.

    Args:
        priors: prior of each constant.
        residuals: (..., observations) at constants (..., constants); a censored residual is zero if it agrees.
        noise: expected standard deviation of one residual before any observation; it counts for `_NOISE_WEIGHT` of them.
    """
    mean = prior_mean = np.array([prior.mean for prior in priors])
    variances: Floats = np.array([prior.sigma**2 for prior in priors])
    if residuals is None:
        return Posterior(mean, np.asarray(np.diag(variances)), noise)
    hessian = precision = np.diag(1 / variances)
    for _ in range(rounds):
        r = residuals(mean)
        jacobian = jacobian_of(residuals, mean)
        typical = float(np.sum(np.minimum(r**2, (6 * noise) ** 2)))
        scale = np.sqrt((_NOISE_WEIGHT * noise**2 + typical) / (_NOISE_WEIGHT + len(r)))
        weight = (DEGREES + 1) / (DEGREES + (r / scale) ** 2) / scale**2
        hessian = precision + jacobian.T @ (weight[:, None] * jacobian)
        gradient = jacobian.T @ (weight * r) + precision @ (mean - prior_mean)
        step = np.linalg.solve(hessian, gradient)
        mean = mean - np.clip(step, -1.0, 1.0)
        if np.abs(step).max() < SETTLED:
            break
    r = residuals(mean)
    # Residuals that the fit could not explain widen every interval, outliers included.
    wide = np.sqrt((_NOISE_WEIGHT * noise**2 + float(np.sum(r**2))) / (_NOISE_WEIGHT + len(r)))
    return Posterior(mean, np.asarray(np.linalg.inv(hessian), dtype=np.float64), float(max(wide, 0.5 * noise)))


# -- constants ---------------------------------------------------------------------------------------------------------
#
# Constants that the predictor's formulas leave open, with their priors. A study's measurements fit them.

# Share of a peak before calibration; if ranks share states, `SHARDED` is added. Residuals of the fitted sources on
# one GPU, for rows of the stated length: half are within 3 to 4 %.
MEMORY_NOISE = 0.05
TIME_NOISE = 0.08  # in the logarithm of a step's seconds
UNTRACED = 3.0  # factor on the intervals of a model that could not be traced
# Share of gradients, states, buffers and gathered parameters, if ZeRO or FSDP shards them. Versions and frameworks
# differ in how often they copy these, and in when they free the copies. Frozen weights and activations are as certain
# as on one GPU. Source: residuals of the fitted sources.
SHARDED = 0.17
UNREAD_STATES = 0.2  # share of parameters, gradients and states, if a key is set that no formula reads

# Factors on the lines of the memory estimate. `cached` is a share of all bytes that come and go within a step: blocks that
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
    # Factor on the estimate of `predictor.py` for batches of many lengths. A loop that sorts its rows or empties the
    # cache keeps less.
    "uneven": Prior(1.0, 0.35),
    # factor on the step's flat tensors in separate segments: other blocks that backward leaves may hold some
    "segments": Prior(1.0, 0.5),
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
# An H100 with NCCL 2.28 and driver 580 had 0.60 GiB of context, 0.55 more after the first collective of a single rank (0.37
# of two ranks), and 0.13 more after products: 1.29 GiB in every trial of one rank (benchmarks/results/gpu-h100.json).
_RECENT_GIB, _RECENT_ALONE_GIB = 0.1, 0.5
# NCCL's buffers grow with its channels, and channels depend on the link. The number of ranks in a node hardly matters
# beyond two (its maintainer in NVIDIA/nccl issue 986). Measured: 0.53 GiB between two and 0.67 among four A100 on
# NVLink (issue 964); 0.99 with the context on 8 H100 before an all-to-all, which ZeRO does not use (issue 1685). Few
# channels are enough over PCIe.
_NCCL_GIB = {"nvlink": (Prior(0.45, 0.15), Prior(0.55, 0.2)), "pcie": (Prior(0.25, 0.15), Prior(0.25, 0.15))}
MEASURED_OVERHEAD_GIB = 0.03  # standard deviation of an overhead that ranks have measured from inside

# Logarithms of factors on full rates. A matrix product reaches 60 to 70 % of a GPU's peak; streaming from memory reaches 95 %
# of it and of `step_time.POINTWISE_GB_PER_S`, over a link 75 to 85 %. The hidden share is a logit. `starts` and `hooks` differ by
# host and version; their centres and ranges are at `step_time.OPERATOR_SECONDS`.
TIME = {
    "products": Prior(np.log(1 / 0.86), 0.07),
    "moved": Prior(np.log(1 / 0.95), 0.12),
    "starts": Prior(0.0, 0.3),
    "hooks": Prior(0.0, 0.25),
    "comm": Prior(np.log(1 / 0.7), 0.4),
    "reduce": Prior(np.log(0.8), 0.4),
    "hidden": Prior(0.4, 0.8),
    "pcie": Prior(np.log(1 / 0.7), 0.4),
    "cpu_adam": Prior(1.5, 0.9),
    "optimizer": Prior(np.log(1 / 0.7), 0.3),
    "collectives": Prior(0.0, 0.8),
    "loop": Prior(0.0, 0.7),
}
_KNOWN_CORES = Prior(np.log(1 / 0.85), 0.35)  # `cpu_adam`, if the number of cores is known
_KNOWN_RING = Prior(
    np.log(1 / 0.8), 0.2
)  # `comm`, if the self-test measured an all-reduce, which takes `reduce` as long
# Constants that depend on the parameters alone. Their sizes may be known without a trace.
_OF_PARAMETERS = ("comm", "reduce", "pcie", "cpu_adam", "optimizer", "collectives")
_OF_THE_CARD = ("products", "moved", "comm", "pcie", "optimizer")  # constants that depend on the card's rates
_CPU_SIGMA = 1.2  # a CPU's rates are guesses until the first trial
# CPU ranks, in logarithms. `machine`: its rates together may be several times the assumed ones. `stageN`: how much
# longer a step takes than predicted once stage 0 is measured, as ZeRO's hooks and copies into buckets cost a larger
# share. Seven tables of real DeepSpeed set stages 1 and 2, and seven other tables confirm them; stage 3 has two
# (benchmarks/predict/cpu_ranks.py).
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
}


# Stragglers and congestion: sigma of all steps for each doubling of the nodes. Source: InternLM/InternEvo's rows on 16 to 1024
# GPUs (`benchmarks/predict/published.py --rows`).
_NODES_SIGMA = 0.03


def overhead_prior(hardware: Hardware, ranks: int) -> Prior:
    """Return the GiB that a rank holds on its device outside torch's tensors: its context and NCCL's buffers."""
    context = _CONTEXT_GIB[hardware.device]
    if hardware.device != "cuda":
        return context
    facts = hardware.gpu_facts
    assert facts is not None, "of any GPU"
    newer = (_RECENT_ALONE_GIB if ranks == 1 else _RECENT_GIB) if facts.is_recent_server_card else 0.0
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
    known, doubt, quirks = dict(TIME), dict.fromkeys(TIME, 0.0), {name: Prior(0.0, one) for name, one in QUIRKS.items()}
    quirks["machine"] = Prior(0.0, float(np.hypot(QUIRKS["machine"], _NODES_SIGMA * np.log2(hardware.nodes))))
    if cores_of(hardware):
        known["cpu_adam"] = _KNOWN_CORES
    if facts is None:
        known = {name: Prior(prior.mean, max(prior.sigma, _CPU_SIGMA)) for name, prior in known.items()}
        known["hidden"] = TIME["hidden"]
        quirks |= _CPU_QUIRKS
    else:
        doubt |= dict.fromkeys(_OF_THE_CARD, facts.doubt)
        if facts.ring_gb_per_s:
            known["comm"], doubt["comm"] = _KNOWN_RING, 0.0
    wider = dict.fromkeys(TIME, UNTRACED if untraced else widen)
    if counted:
        wider |= dict.fromkeys(_OF_PARAMETERS, widen)
    rates = [
        Prior(prior.mean, float(np.hypot(prior.sigma * wider[name], doubt[name]))) for name, prior in known.items()
    ]
    return [*rates, *quirks.values()]


# -- coverage ----------------------------------------------------------------------------------------------------------
#
# Factors on the intervals of uncalibrated predictions, with which they hold 90 % of the published rows of a kind of job.
# Source: `benchmarks/predict/published.py --coverage`. Every other kind has 1.

_QLORA_PEAK = 1.47517
_LORA_PEAK, _LORA_STAGE3_PEAK = 1.97185, 1.27966  # on several GPUs of one machine
_STAGE3_PEAK = (1.4975, 1.09399)  # full training without offload on one GPU, and on several of one machine
_STAGE3_STEP = 1.17769  # full training on several GPUs of one machine, without offload
_NODES_STEP = 1.09061  # full training on several machines


def coverage_factors(job: Job, hardware: Hardware, columns: Columns) -> tuple[Floats, Floats]:
    """Return (n,) factors each on the intervals of peaks and of steps, until a trial has been observed."""
    adapted, one_machine = columns.lora > 0, hardware.nodes == 1
    several = one_machine and hardware.count > 1
    stage3 = (columns.stage == 3) & (columns.offload_optimizer == 0) & (columns.offload_param == 0)
    peak = np.where(adapted & several, np.where(stage3, _LORA_STAGE3_PEAK, _LORA_PEAK), 1.0)
    if job.lora and job.lora.quantize:
        peak = np.where(adapted, _QLORA_PEAK, peak)
    full = stage3 & ~adapted
    peak = np.where(full & one_machine, _STAGE3_PEAK[several], peak)
    step = np.where(full & several, _STAGE3_STEP, 1.0)
    return peak, np.where(~adapted & (not one_machine), _NODES_STEP, step)


# -- host memory constants ---------------------------------------------------------------------------------------------
#
# Calibration of the predicted host memory: one factor, fitted to host OOMs, to runs that fitted and to the peaks of
# ranks.

PRIOR = Prior(0.0, 0.3)  # prior of the factor's logarithm: fragments, copies and caches that no formula covers
NOISE = 0.1


def fit_host(estimate: Floats, outcomes: Sequence[Outcome], hardware: Hardware) -> Posterior:
    """Fit the logarithm of measured over predicted host memory.

    Args:
        estimate: (n,) predicted bytes of one rank, for candidates that offload.
        outcomes: their outcomes, each a measurement or an OOM_HOST.
    """
    total = float(hardware.host_memory_bytes)
    own = total - host_limit_bytes(hardware)  # bytes of processes and libraries, without offload
    ranks = hardware.per_node
    ran_out = np.array([o.measurement is None for o in outcomes])
    held = np.array([_held(o) for o in outcomes])
    seen = (held > 0) & (estimate > own / ranks)  # a smaller estimate gives no information

    def residuals(constants: Floats) -> Floats:
        each = own / ranks + np.exp(constants[..., 0, None]) * estimate
        over = np.log(ranks * each / total)
        off = np.where(ran_out, np.minimum(over, 0.0), np.maximum(over, 0.0))
        return np.asarray(np.where(seen, np.log(each / np.where(seen, held, 1.0)), off))

    return fit([PRIOR], residuals, noise=NOISE)


def _held(outcome: Outcome) -> float:
    """Return the bytes of one rank.

    Pinned memory is added: it is the driver's, and the kernel does not count it for a process.
    """
    measured = outcome.measurement
    return (
        float(measured.host_peak_bytes + (measured.pinned_bytes or 0)) if measured and measured.host_peak_bytes else 0.0
    )
