"""What an optimizer keeps for every parameter and takes for its step, by the type that DeepSpeed makes of a config."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.problem.job import Job
from autotune.problem.script_job import TORCHS

# Bytes a parameter of states in 32 bits, beside the master weights.
STATE_BYTES = {"adamw": 8, "adam": 8, "fused_adam": 8, "lion": 4, "sgd": 4, "adagrad": 4, "muon": 4, "rmsprop": 4}
STATE_BYTES |= {"onebitadam": 12, "zerooneadam": 12, "onebitlamb": 12, "fusedlamb": 8, "lamb": 8}
# States whose width does not follow the weights'. Those in 8 bits have a 32-bit scale for 256 elements (bitsandbytes 0.4x,
# functional.quantize_blockwise); paged ones are of CUDA's managed memory, which moves to the host where the device is full
# and is none of torch's. Adafactor keeps a row and a column of a matrix (Shazeer & Stern 2018).
_IN_8_BITS = 1 + 4 / 256
OTHER_STATES = {"adamw8bit": 2 * _IN_8_BITS, "adam8bit": 2 * _IN_8_BITS, "lion8bit": _IN_8_BITS, "adafactor": 0.0}
OTHER_STATES |= {"pagedadamw8bit": 0.0, "pagedadamw": 0.0, "pagedadamw32bit": 0.0, "pagedlion": 0.0}
# Bytes a parameter of intermediates of torch's `foreach` implementations, which torch takes on CUDA unless told otherwise
# (torch 2.13, torch/optim/adam.py, _multi_tensor_adam: the square root; adagrad.py, _multi_tensor_adagrad: root and
# numerator; sgd.py, _multi_tensor_sgd: none, but for the sum with decayed weights).
_FOREACH_BYTES = {"adamw": 4, "adam": 4, "adagrad": 8}
_FOREACH_DECAYED_SGD_BYTES = 4
# The same of its plain loops, of the one tensor that is stepped (_single_tensor_adam: the root, and what it is divided to;
# _single_tensor_adagrad: the root). ZeRO's partitions are one tensor each.
_LOOP_BYTES = {"adamw": 8, "adam": 8, "adagrad": 4}
# transformers 5.23, optimization.py, Adafactor.step, one parameter after the other: gradient and weights in 32 bits, the
# update and its factors.
_ADAFACTOR_BYTES = 16


@dataclass(frozen=True)
class Stepper:
    """An optimizer's bytes a parameter; `flattens`: at stage 0 in 16 bits DeepSpeed wraps it into FP16_Optimizer."""

    state_bytes: float
    temporary_bytes: float  # on CUDA, while it steps
    flattens: bool
    # Adagrad makes states with itself, of the model's own parameters; DeepSpeed makes another of its partitions
    # (stage_1_and_2.py and stage3.py, initialize_optimizer_states), and the engine keeps the first.
    stray_share: float = 0.0
    known: bool = True  # False: a type of which the states are guessed to be those of Adam
    one_by_one_bytes: float = 0.0  # intermediates of the parameter that is stepped, a byte an element of the largest
    follows_weights: bool = True  # in plain 16-bit torch the states are 16 bits, too
    loops: bool = False  # at stage 0 `temporary_bytes` are of one parameter at a time


def stepper(job: Job) -> Stepper:
    """The optimizer of the job's trials where it is not offloaded.

    Source: deepspeed 0.19.8, runtime/engine.py, _configure_basic_optimizer and _configure_fp16_optimizer. A script's own
    is what its profile says; where that says nothing it is taken for one without intermediates, as Trainer's default
    (`adamw_torch_fused`) is. Plain torch takes `foreach` unless the config says `fused`.
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
    """(bytes of intermediates, whether it `flattens`, whether it `loops`) of the optimizer that the user's own script makes and
    that steps whatever the config names; None where its profile says nothing of it.

    torch takes `foreach` on CUDA where a script has asked for nothing at all (torch 2.13, torch/optim/adam.py, `adam`).
    """
    profile = job.script.profile if job.script is not None else {}
    if found := profile.get(TORCHS):
        kind, fused, foreach = str(found["class"]).lower(), found["fused"], found["foreach"]
        loops = not fused and not foreach and (fused, foreach) != (None, None)
        table = {} if fused else _LOOP_BYTES if loops else _FOREACH_BYTES
        return float(table.get(kind, 0)), False, loops
    if found := profile.get("optimizer"):  # DeepSpeed's or apex's, which `_configure_fp16_optimizer` knows by its class
        return 0.0, found == "FusedAdam" and not job.plain, False
    return None
