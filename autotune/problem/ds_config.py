"""The user's DeepSpeed config."""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import UserError, did_you_mean
from autotune.problem.job import counted_ranks, sequence_ranks
from autotune.problem.knobs import ACCUMULATION, KNOBS, MICRO_BATCH, ZERO, Knob, knob_value
from autotune.util.bounds import bounded_bytes, check_data, leaves, read_text
from autotune.util.files import shipped_json

# -- DeepSpeed config files --------------------------------------------------------------------------------------------
#
# Reader of DeepSpeed configs: JSON or HJSON (JSON with comments and trailing commas), and deprecated names of keys.

MOST_BYTES = 1 << 20  # bytes; a larger file holds data

# Deprecated keys of `zero_optimization` and their replacements (0.19.8, runtime/zero/config.py). DeepSpeed refuses a config with
# both, so that a knob could not be set next to its old name.
_OLD_SECTIONS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_OLD_KEYS = {"stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save"}
_UNHEEDED = "cpu_offload_use_pin_memory"  # accepted by DeepSpeed, but never read
_YES = ("true", "1", "yes", "on", "t", "y")  # spellings of true that pydantic accepts


def parsed_config(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] = dict) -> Any:
    """Return the parsed text of a config.

    Args:
        pairs: builds an object from its keys and values.

    Raises:
        json.JSONDecodeError: the text is neither JSON nor HJSON; the error is JSON's.
    """
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError:
        if len(text) > MOST_BYTES:
            raise
        import hjson  # imported late: few texts need it, and in a rank the package is DeepSpeed's dependency

        try:
            found = hjson.loads(text, object_pairs_hook=pairs)
        except hjson.HjsonDecodeError:
            found = None
        if found is None or (not found and "{" not in text):  # HJSON reads an empty text as an empty object
            raise
        return found


def read_config(path: Path) -> Any:
    """Return the parsed contents of a config's file.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
        json.JSONDecodeError: it does not parse.
    """
    return parsed_config(bounded_bytes(path).decode())


def in_new_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with DeepSpeed's deprecated names replaced by current ones; the same object if it has none."""
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        size = {"allgather_bucket_size": config["allgather_size"]} if zero and "allgather_size" in config else {}
        return {**config, "zero_optimization": {"stage": int(zero), **size}}
    if not isinstance(zero, dict) or not zero.keys() & {*_OLD_SECTIONS, *_OLD_KEYS, _UNHEEDED}:
        return config
    found = {key: value for key, value in zero.items() if key not in (*_OLD_SECTIONS, *_OLD_KEYS, _UNHEEDED)}
    for old, new in _OLD_SECTIONS.items():
        if str(zero.get(old)).lower() in _YES and not isinstance(found.get(new), dict):
            found[new] = {"device": "cpu"}
    for old, new in _OLD_KEYS.items():
        if old in zero:
            found.setdefault(new, zero[old])
    return {**config, "zero_optimization": found}


def named_config(name: str | Path) -> Any:
    """Return a config in either form that `deepspeed.initialize` accepts: the name of its file, or its text in base64.

    Source: deepspeed 0.19.8, runtime/config.py.

    Raises:
        OSError, ValueError: it is neither, or does not parse.
    """
    if not os.path.exists(name):
        try:
            data = parsed_config(base64.urlsafe_b64decode(str(name)).decode())
        except ValueError:
            data = None
        if isinstance(data, dict):
            return data
    return read_config(Path(name))


# -- the user's settings -----------------------------------------------------------------------------------------------
#
# The user's own DeepSpeed config, read and validated once, so that later code can rely on the shape of its sections.

BATCH = "train_batch_size"
_MISSING = object()
# Sections that DeepSpeed reads as objects (0.19.8, runtime/config.py and its callees); these may also be null.
_NULLABLE = (
    *(ZERO + name for name in ("offload_optimizer", "offload_param", "zenflow")),
    *("optimizer.params", "scheduler.params", "bf16", "aio"),
)
_SECTIONS = (
    *("zero_optimization", "optimizer", "scheduler", "bfloat16", "fp16", "amp", "torch_autocast", "data_types"),
    *("compile", "checkpoint", "activation_checkpointing", "elasticity", "autotuning", "eigenvalue"),
    *("tensor_parallel", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"),
    *_NULLABLE,
)
_CHECKED = {knob.path: knob for knob in KNOBS.values() if knob.path}
_CHECKED |= {BATCH: Knob(int, low=1), "gradient_clipping": Knob(float)}
_CHECKED |= {f"{name}.enabled": Knob(bool) for name in ("bf16", "fp16", "bfloat16")}
_MAY_BE_NULL = (ZERO + "overlap_comm", "communication_data_type", "data_types.grad_accum_dtype")
# Keys for which `"auto"` is documented: transformers 5.23, integrations/deepspeed.py, and accelerate 1.15, utils/deepspeed.py. In
# any other checked key the word reaches DeepSpeed, which refuses it.
_AUTO = (
    *(BATCH, MICRO_BATCH, ACCUMULATION, "gradient_clipping", "bf16.enabled", "fp16.enabled", "bfloat16.enabled"),
    *(ZERO + name for name in ("stage", "offload_optimizer.device", "offload_param.device", "reduce_bucket_size")),
    *(ZERO + name for name in ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")),
    ZERO + "zenflow.update_interval",  # DeepSpeed defines "auto" here itself
)


def load_ds_config(path: Path, named_by: str = "--ds-config") -> dict[str, Any]:
    """Read and validate the user's own DeepSpeed config.

    Args:
        named_by: words that name the file, for the error of a file that cannot be read.

    Raises:
        UserError: the file cannot be read, is no JSON object, or has a section or a value that DeepSpeed refuses; the message
            names file and key.
    """
    text = read_text(path, f"{named_by} {path}", "expected a DeepSpeed config JSON")
    if not text.strip():
        raise UserError(f"{path} is empty; expected a DeepSpeed config, or {{}} for the defaults")
    if path.suffix in (".yaml", ".yml") and not text.lstrip().startswith("{"):
        raise UserError(f"{path}: DeepSpeed reads JSON, and this file is YAML. Write the config as JSON.")
    try:
        data = parsed_config(text, _once)
        check_data(data, str(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not JSON ({error.msg}); expected a DeepSpeed config") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({str(error)[:100]})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: expected a JSON object with DeepSpeed's keys, found {type(data).__name__}")
    data = in_new_names(data)
    for key, trouble in _troubles(data):
        raise UserError(f"{path}: {key}: {trouble}")
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object without duplicate keys; DeepSpeed refuses duplicates (0.19.8, runtime/config_utils.py)."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(key for at, (key, _) in enumerate(pairs) if key in dict(pairs[:at]))
        raise ValueError(f"{twice!r} is given twice, which DeepSpeed refuses")
    return found


def _troubles(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, problem) for every problem."""
    for key in _SECTIONS:
        section = value_at(data, key.split("."), {})
        if not isinstance(section, dict) and not (section is None and key in _NULLABLE):
            yield key, f"expected an object, found {repr(section)[:60]}"
    for key, example in (("optimizer.type", "AdamW"), ("scheduler.type", "WarmupLR")):
        name = value_at(data, key.split("."), example)
        if not (isinstance(name, str) and name):
            yield key, f"expected a name like {example}, found {name!r}; or leave it out"
    for key, knob in _CHECKED.items():
        value = value_at(data, key.split("."), _MISSING)
        if value is _MISSING or (value == "auto" and key in _AUTO) or (value is None and key in _MAY_BE_NULL):
            continue
        if key in _MAY_BE_NULL and isinstance(knob.kind, tuple) and isinstance(value, str):
            continue  # DeepSpeed accepts more names of a dtype
        if isinstance(value, str) and not isinstance(knob.kind, tuple):
            yield key, f"expected {'true or false' if knob.kind is bool else 'a number'}, found {value!r}"
            continue
        try:
            knob_value(knob, value)
        except ValueError as error:
            yield key, str(error)
    for path, value, _ in leaves(data):
        if isinstance(value, float) and not math.isfinite(value):
            yield ".".join(path), f"expected a finite number, found {value!r}"
    for key, meant in _misspelt(data):
        if not _is_ignored(key):
            yield key, f"DeepSpeed has no such key{meant}"
    on = {SIXTEEN_BITS[name] for name, enabled in sixteen_bits_enabled(data).items() if enabled is True}
    if len(on) > 1:
        yield "fp16", "bf16 and fp16 are both enabled, which DeepSpeed refuses. Disable one of them."


_LIKE = 0.75  # least similarity of a misspelt key to the key that was meant


def ignored_keys(config: dict[str, Any]) -> list[str]:
    """Return a line for each key of a config that DeepSpeed ignores, and that is spelt like one that it reads."""
    return [
        f"warning: DeepSpeed ignores {key} in your config{meant}"
        for key, meant in _misspelt(config)
        if _is_ignored(key)
    ]


def _is_ignored(key: str) -> bool:
    """Return True if DeepSpeed ignores an unknown key here. Its other sections refuse unknown keys."""
    return "." not in key or key.startswith("data_types.")


def _misspelt(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, "; did you mean …?") for every unknown key that is spelt like a known one."""
    keys = shipped_json("deepspeed_keys.json")
    sections = {"zero_optimization": keys["zero_optimization"], **keys["sections"]}
    top = {*keys["top_level"], *_SECTIONS, BATCH, MICRO_BATCH, ACCUMULATION}
    for section, known in {"": top, **sections}.items():
        found = value_at(config, section.split("."), {}) if section else config
        for key in found.keys() - set(known) if isinstance(found, dict) else ():
            if meant := did_you_mean(key, known, _LIKE):
                yield f"{section}.{key}".lstrip("."), meant


def value_at(data: Any, keys: Sequence[str], default: Any = None) -> Any:
    """Return the value below these keys, from the top; the default if there is none."""
    for key in keys:
        if not isinstance(data, Mapping) or key not in data:
            return default
        data = data[key]
    return data


# Sizes of groups of ranks that share a model (0.19.8, tensor_parallel/config.py, module_inject/auto_ep_config.py, pipe/).
_GROUP_SIZES = (
    "tensor_parallel.autotp_size",
    "tensor_parallel.tp.tp_size",
    "expert_parallel.autoep_size",
    "pipeline.stages",
)


def check_whole_model(config: dict[str, Any], file: Path | None) -> None:
    """Check that a config gives every rank the whole model.

    Raises:
        UserError: the config splits the model over ranks.
    """
    for key in _GROUP_SIZES:
        size = value_at(config, key.split("."))
        off = value_at(config, (key.partition(".")[0], "enabled")) is False
        if isinstance(size, int) and size > 1 and not off:
            raise UserError(
                f"{file}: {key} {size} splits the model over ranks. `plan` and `run --model` give each rank the whole model. "
                f"Remove {key}."
            )


SIXTEEN_BITS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}  # section of a config -> precision


def sixteen_bits_enabled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `enabled` of each section of SIXTEEN_BITS: a bool or `"auto"`; False if the config lacks the section."""
    return {name: value_at(config, (name, "enabled"), False) for name in SIXTEEN_BITS}


def global_batch_of(config: dict[str, Any], ranks: int) -> tuple[int | None, str]:
    """Return (samples per optimizer step over all ranks, their origin in words) from a checked config.

    The result is (None, "") if the config leaves the batch open, or to its caller by `"auto"`. DeepSpeed's rule (0.19.8,
    runtime/config.py, `_set_batch_related_parameters`): `train_batch_size`, or else the product of micro-batch, accumulation
    (default 1) and ranks, or groups of ranks that share sequences.
    """
    size = sequence_ranks(config)
    total, micro, accumulation = config.get(BATCH), config.get(MICRO_BATCH), config.get(ACCUMULATION, 1)
    if isinstance(total, int | float):
        return int(total), f"{BATCH} {int(total)}"
    if not isinstance(micro, int | float) or not isinstance(accumulation, int | float):
        return None, ""
    words = f"micro-batch {int(micro)} x accumulation {int(accumulation)} x {counted_ranks(ranks, size)}"
    return int(micro * accumulation) * max(1, ranks // size), words
