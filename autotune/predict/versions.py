"""Memory and time differences of older DeepSpeed versions. Each names the version and the reason; docs/versions.md describes
the checks.

A version has the format of `versions.release`.
"""

from __future__ import annotations

from autotune.interpreter import current
from autotune.problem.needs import READ as READ
from autotune.problem.needs import Release as Release
from autotune.versions import newer, release


def installed_deepspeed() -> Release:
    """Return the ranks' DeepSpeed version, or the version these formulas are based on if none is installed."""
    return release(current().version("deepspeed")) or READ


def sums_in_32_bits(deepspeed: Release) -> bool:
    """Check that stage 0 in bf16 uses BF16_Optimizer, with gradients summed in 32 bits and partitioned masters, like stage 1
    with `grad_accum_dtype: fp32`. From 0.17.6 on, `engine.get_data_types` keeps bf16 and FP16_Optimizer runs."""
    return deepspeed < (0, 17, 6)


def makes_buckets_first(deepspeed: Release) -> bool:
    """Check that stages 1 and 2 allocate their buckets before backward, in addition to all activations, as 0.17.0 does
    (stage_1_and_2.py, `backward`). 0.17.3 allocates them with the first gradient."""
    return deepspeed < (0, 17, 3)


def keeps_gradients_at_stage_0(deepspeed: Release) -> bool:
    """Check that gradients of stage 0 in bf16 stay allocated from step to step, set to zero. `engine._take_model_step` of
    0.18.4 keeps them; that of 0.18.6 frees them as at other stages."""
    return deepspeed < (0, 18, 6)


def pins_unless_told(deepspeed: Release) -> bool:
    """Check that `pin_memory` of the offload sections defaults to true (runtime/zero/offload_config.py): not yet in 0.19.3,
    but in 0.19.5."""
    return deepspeed >= (0, 19, 5)


def has_low_masters(deepspeed: Release) -> bool:
    """Check that `bf16_master_weights_and_grads` and `bf16_optimizer_states` are read: from 0.18.3 on. 0.16 ignores them, and
    0.17 refuses the config."""
    return deepspeed >= (0, 18, 3)


def unknown_newer() -> list[str]:
    """Return a line for each library that is newer than the tested versions and that memory and time depend on."""
    return newer({name: current().version(name) for name in ("torch", "deepspeed", "transformers")})
