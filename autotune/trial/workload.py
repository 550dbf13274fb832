"""What a rank trains when the user brings no script: a named model with random weights, and synthetic batches."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

from autotune.job import Job
from autotune.models import ModelSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def transformers_config(model: ModelSpec) -> Any:
    """The transformers configuration object of a model.

    Raises:
        ValueError: transformers knows no such `model_type`, or refuses the configuration.
    """
    from transformers import AutoConfig

    values = dict(model.config)
    path = values.pop("_name_or_path", None)
    if model.trust_remote_code and path:
        return AutoConfig.from_pretrained(path, trust_remote_code=True)
    kind = values.pop("model_type")
    values.pop("transformers_version", None)
    return AutoConfig.for_model(kind, **values)


def build_model(job: Job, device: torch.device, ds_config: dict[str, Any]) -> torch.nn.Module:
    """The job's model on the device, its weights random; at stage 3 partitioned while it is built."""
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = transformers_config(job.model)
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    dtype = DTYPES[job.precision]
    with contextlib.ExitStack() as stack:
        if stage == 3:
            importlib.import_module("torch._dynamo")  # later it fails: Init replaces Tensor.__new__

            # No dtype here: given one, deepspeed 0.19.8 takes bf16 wherever the device has no fp16 (an operator-precedence
            # slip in `_set_dtype`); left out, it follows the config.
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=ds_config))
        else:
            stack.enter_context(device)
        stack.enter_context(no_init_weights())
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=job.model.trust_remote_code)
    model.config.use_cache = False
    model.tie_weights()
    if stage != 3:
        model.to(device)
    fill_weights(model)
    model.train()
    assert isinstance(model, torch.nn.Module)
    return model


@torch.no_grad()
def fill_weights(model: torch.nn.Module) -> None:
    """Small random values: neither memory nor speed depends on them, but NaNs and denormals would."""
    for name, parameter in model.named_parameters():
        tensor = getattr(parameter, "ds_tensor", parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if len(shape) > 1:
            tensor.data.normal_(0.0, 0.02)
        else:
            tensor.data.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def enable_checkpointing(model: torch.nn.Module) -> None:
    """Activation checkpointing as Hugging Face's Trainer turns it on."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]


def vocabulary(job: Job) -> int:
    config = transformers_config(job.model)
    return int(config.get_text_config().vocab_size)


def batches(job: Job, micro_batch: int, device: torch.device, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches at the full sequence length, made on the host and copied over as a data loader would."""
    generator = torch.Generator().manual_seed(seed)
    top = vocabulary(job)
    pool = [torch.randint(0, top, (micro_batch, job.seq_len), generator=generator) for _ in range(4)]
    if device.type == "cuda":
        pool = [tensor.pin_memory() for tensor in pool]
    while True:
        for tensor in pool:
            ids = tensor.to(device, non_blocking=True)
            yield {"input_ids": ids, "labels": ids}
