"""Bytes that an optimizer keeps per parameter and needs for its step, by the type that DeepSpeed makes from a config."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.problem.job import Job
from autotune.problem.script_job import TORCHS

# Bytes of 32-bit states per parameter, without the master weights.
STATE_BYTES = {"adamw": 8, "adam": 8, "fused_adam": 8, "lion": 4, "sgd": 4, "adagrad": 4, "muon": 4, "rmsprop": 4}
STATE_BYTES |= {"onebitadam": 12, "zerooneadam": 12, "onebitlamb": 12, "fusedlamb": 8, "lamb": 8}
# States whose width does not follow the weights'. 8-bit states have a 32-bit scale for 256 elements (bitsandbytes
# 0.4x, functional.quantize_blockwise). Paged states use CUDA's managed memory, which moves to the host when the
# device is full, and torch does not count it. Adafactor keeps a row and a column of a matrix (Shazeer & Stern 2018).
_IN_8_BITS = 1 + 4 / 256
OTHER_STATES = {"adamw8bit": 2 * _IN_8_BITS, "adam8bit": 2 * _IN_8_BITS, "lion8bit": _IN_8_BITS, "adafactor": 0.0}
OTHER_STATES |= {"pagedadamw8bit": 0.0, "pagedadamw": 0.0, "pagedadamw32bit": 0.0, "pagedlion": 0.0}
# Bytes of intermediates per parameter of torch's `foreach` implementations, the default on CUDA (torch 2.13,
# torch/optim/adam.py, _multi_tensor_adam: the square root; adagrad.py, _multi_tensor_adagrad: root and numerator;
# sgd.py, _multi_tensor_sgd: none, except for the sum with decayed weights).
_FOREACH_BYTES = {"adamw": 4, "adam": 4, "adagrad": 8}
_FOREACH_DECAYED_SGD_BYTES = 4
# Bytes of intermediates of torch's plain loops, for the tensor being stepped (_single_tensor_adam: the root and the
# quotient; _single_tensor_adagrad: the root). ZeRO's partitions are one tensor each.
_LOOP_BYTES = {"adamw": 8, "adam": 8, "adagrad": 4}
# transformers 5.23, optimization.py, Adafactor.step, one parameter at a time: gradient and weights in 32 bits, the
# update and its factors.
_ADAFACTOR_BYTES = 16


@dataclass(frozen=True)
class Stepper:
    """Bytes of an optimizer per parameter. `flattens`: DeepSpeed wraps it into FP16_Optimizer at stage 0 in 16 bits."""

    state_bytes: float
    temporary_bytes: float  # on CUDA, during the step
    flattens: bool
    # Adagrad's constructor makes states for the model's own parameters. DeepSpeed then makes another Adagrad for its
    # partitions (stage_1_and_2.py and stage3.py, initialize_optimizer_states), and the engine keeps the first.
    stray_share: float = 0.0
    known: bool = True  # False: an unknown type, whose states are assumed to be Adam's
    # bytes per element of the largest parameter: intermediates of the parameter being stepped
    one_by_one_bytes: float = 0.0
    follows_weights: bool = True  # with plain 16-bit torch the states are 16 bits, too
    loops: bool = False  # at stage 0, `temporary_bytes` hold one parameter at a time


def stepper(job: Job) -> Stepper:
    """Return the optimizer of the job's trials without offload.

    Source: deepspeed 0.19.8, runtime/engine.py, _configure_basic_optimizer and _configure_fp16_optimizer. A script's profile
    describes the script's own optimizer. If the profile lacks it, the optimizer is assumed to have no intermediates, like
    Trainer's default (`adamw_torch_fused`). Plain torch uses `foreach` unless the config sets `fused`.
    """
    kind = job.optimizer_kind
    other = kind.replace("_", "").replace("-", "")
    if other in OTHER_STATES:
        one_by_one = _ADAFACTOR_BYTES if other == "adafactor" else 0
        return Stepper(OTHER_STATES[other], 0.0, False, one_by_one_bytes=one_by_one, follows_weights=False)
    named = "type" in job.own_optimizer
    own = job.own_optimizer.get("params")
    own = own if isinstance(own, dict) else {}
    is_adam = kind in ("adam", "adamw")
    deepspeeds = kind == "fused_adam" or (named and is_adam and not own.get("torch_adam"))
    deepspeeds = deepspeeds and not job.plain
    temporary = 0.0
    if kind == "sgd":
        temporary = _FOREACH_DECAYED_SGD_BYTES if own.get("weight_decay") else 0.0
    elif kind == "adagrad" or (is_adam and (named or job.plain) and not deepspeeds and not own.get("fused")):
        temporary = _FOREACH_BYTES[kind]
    stray = 1.0 if kind == "adagrad" else 0.0
    of_script = _of_script(job)
    temporary, deepspeeds, loops = (temporary, deepspeeds, False) if of_script is None else of_script
    states, known = float(STATE_BYTES.get(kind, 8)), kind in STATE_BYTES
    return Stepper(states, float(temporary), deepspeeds, stray, known, loops=loops)


def _of_script(job: Job) -> tuple[float, bool, bool] | None:
    """Return (bytes of intermediates, `flattens`, `loops`) of the script's own optimizer, which steps regardless of the
    config. None if the profile has no optimizer.

    torch uses `foreach` on CUDA if a script sets neither option (torch 2.13, torch/optim/adam.py, `adam`).
    """
    profile = job.script.profile if job.script is not None else {}
    if found := profile.get(TORCHS):
        kind, fused, foreach = str(found["class"]).lower(), found["fused"], found["foreach"]
        loops = not fused and not foreach and (fused, foreach) != (None, None)
        table = {} if fused else _LOOP_BYTES if loops else _FOREACH_BYTES
        return float(table.get(kind, 0)), False, loops
    # DeepSpeed's or apex's, which `_configure_fp16_optimizer` recognizes by its class
    if found := profile.get("optimizer"):
        return 0.0, found == "FusedAdam" and not job.plain, False
    return None
