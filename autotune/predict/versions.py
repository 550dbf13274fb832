"""What older DeepSpeed keeps and does differently, as far as memory and time go. Each difference names the version and the
reason; docs/versions.md says how they were checked.

A version is given as `versions.release` makes it.
"""

from __future__ import annotations

from autotune.interpreter import current
from autotune.problem.needs import READ as READ
from autotune.problem.needs import Release as Release
from autotune.versions import newer, release


def installed_deepspeed() -> Release:
    """Of the DeepSpeed that ranks will have; the one that was read where there is none."""
    return release(current().version("deepspeed")) or READ


def sums_in_32_bits(deepspeed: Release) -> bool:
    """Whether stage 0 in bf16 is BF16_Optimizer with gradients summed in 32 bits and masters partitioned, as stage 1 is with
    `grad_accum_dtype: fp32`. From 0.17.6 on `engine.get_data_types` keeps bf16, and FP16_Optimizer does the rest."""
    return deepspeed < (0, 17, 6)


def makes_buckets_first(deepspeed: Release) -> bool:
    """Whether stages 1 and 2 allocate their buckets before backward, beside all activations, as 0.17.0 does (stage_1_and_2.py,
    `backward`). 0.17.3 does with the first gradient."""
    return deepspeed < (0, 17, 3)


def keeps_gradients_at_stage_0(deepspeed: Release) -> bool:
    """Whether gradients of stage 0 in bf16 stay from step to step, set to zero. `engine._take_model_step` of 0.18.4 leaves them
    there, that of 0.18.6 takes them away as at other stages."""
    return deepspeed < (0, 18, 6)


def pins_unless_told(deepspeed: Release) -> bool:
    """Whether `pin_memory` of the offload sections is true where the config is silent (runtime/zero/offload_config.py): not
    yet in 0.19.3, but in 0.19.5."""
    return deepspeed >= (0, 19, 5)


def has_low_masters(deepspeed: Release) -> bool:
    """Whether `bf16_master_weights_and_grads` and `bf16_optimizer_states` are read: from 0.18.3 on. Before, 0.16 does not look
    at them, and 0.17 refuses the config."""
    return deepspeed >= (0, 18, 3)


def unknown_newer() -> list[str]:
    """A line for each library that is newer than what was tried, and on which memory and time depend."""
    return newer({name: current().version(name) for name in ("torch", "deepspeed", "transformers")})
