"""DeepSpeed keys that change memory and that no formula here reads.

Predictions are less certain if such a key is set, and report it.
"""

from __future__ import annotations

from typing import Any

from autotune.predict.knobs import value_at
from autotune.problem.candidate import Candidate

# Keys of `zero_optimization` that the formulas read, or that hardly change memory (deepspeed 0.19.8,
# runtime/zero/config.py). Any other key, also of a newer DeepSpeed, counts as unread.
_READ = {
    "stage",
    "contiguous_gradients",
    "reduce_scatter",
    "reduce_bucket_size",
    "use_multi_rank_bucket_allreduce",
    "allgather_partitions",
    "allgather_bucket_size",
    "overlap_comm",
    "compute_grad_norm",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "offload_param",
    "offload_optimizer",
    "sub_group_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "ignore_unused_parameters",
    "round_robin_gradients",
    "parameter_alignment",  # 16 bytes per parameter
    "zero_hpz_partition_size",
    "memory_efficient_linear",
    "pipeline_loading_checkpoint",
    "override_module_apply",
    "log_trace_cache_warnings",
    "enable_sanity_checks",
}
_READ_OFFLOAD = {"device", "nvme_path", "pin_memory", "ratio", "buffer_count", "buffer_size", "max_in_cpu", "fast_init"}
_READ_OFFLOAD |= {"pipeline", "pipeline_read", "pipeline_write"}
# Other sections that change what is kept of a model, an activation or a state.
_SECTIONS = (
    "torch_autocast",
    "tensor_parallel",
    "sequence_parallel_size",
    "pipeline",
    "expert_parallel",
    "hybrid_engine",
    "compile.deepcompile",
)


def unread_keys(config: dict[str, Any]) -> list[str]:
    """Return the dotted names of the keys that a config sets and that no formula reads."""
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    found = [f"zero_optimization.{key}" for key, value in zero.items() if key not in _READ and _is_set(value)]
    for section in ("offload_optimizer", "offload_param"):
        entry = zero.get(section)
        for key, value in (entry if isinstance(entry, dict) else {}).items():
            if key not in _READ_OFFLOAD and _is_set(value):
                found.append(f"zero_optimization.{section}.{key}")
    return found + [name for name in _SECTIONS if _is_set(value_at(config, name))]


def unread_knobs(candidate: Candidate) -> list[str]:
    """Return the unread keys that a candidate sets by dotted names."""
    config: dict[str, Any] = {}
    for name, value in candidate.knobs:
        if "." in name:
            *parents, leaf = name.split(".")
            place = config
            for parent in parents:
                place = place.setdefault(parent, {})
            place[leaf] = value
    return unread_keys(config) if config else []


def _is_set(value: Any) -> bool:
    """Check that a value turns something on: a section through `enabled`, a size if it is above 1."""
    if isinstance(value, dict):
        return bool(value) and value.get("enabled", True) is True
    if isinstance(value, bool) or value is None:
        return bool(value)
    return value > 1 if isinstance(value, int | float) else value != "auto"
