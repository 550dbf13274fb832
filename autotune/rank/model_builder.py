"""Build a named model with transformers for a task: random weights, and LoRA adapters if the job has them."""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

from autotune.problem.job import Job
from autotune.problem.models import ANSWERS, CAUSAL, CLASSIFICATION, IMAGE_TEXT, MASKED, SEQ2SEQ, TOKENS, ModelSpec
from autotune.rank.training_trace import local_part
from autotune.rank.versions import in_dtype, no_init_weights

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_AUTO_CLASSES = {
    CAUSAL: "AutoModelForCausalLM",
    MASKED: "AutoModelForMaskedLM",
    CLASSIFICATION: "AutoModelForSequenceClassification",
    TOKENS: "AutoModelForTokenClassification",
    ANSWERS: "AutoModelForQuestionAnswering",
    SEQ2SEQ: "AutoModelForSeq2SeqLM",
    IMAGE_TEXT: "AutoModelForImageTextToText",
}
# Values of peft's TaskType. peft has none for a masked head, whose model is adapted like any module.
_ADAPTED_AS = {
    CAUSAL: "CAUSAL_LM",
    CLASSIFICATION: "SEQ_CLS",
    TOKENS: "TOKEN_CLS",
    ANSWERS: "QUESTION_ANS",
    SEQ2SEQ: "SEQ_2_SEQ_LM",
    IMAGE_TEXT: "CAUSAL_LM",
}


def transformers_config(model: ModelSpec) -> Any:
    """Return the transformers configuration object of a model.

    Raises:
        ValueError: transformers does not know the `model_type`, or refuses the configuration.
    """
    from transformers import AutoConfig

    values = dict(model.config)
    path = values.pop("_name_or_path", None)
    if model.trust_remote_code and path:
        return AutoConfig.from_pretrained(path, trust_remote_code=True)
    kind = values.pop("model_type")
    values.pop("transformers_version", None)
    return AutoConfig.for_model(kind, **values)


def task_model(config: Any, job: Job) -> Any:
    """Build the job's model for its task and in its precision.

    The caller decides with `no_init_weights` whether weights are initialized.

    Raises:
        ValueError: transformers has no head of that kind for the configuration.
    """
    import transformers

    kind = getattr(transformers, _AUTO_CLASSES[job.task])
    kept: dict[str, Any] = {"attn_implementation": job.attention} if job.attention else {}
    kept |= in_dtype(DTYPES[job.precision])
    return kind.from_config(completed(config, job.task), trust_remote_code=job.model.trust_remote_code, **kept)


def completed(config: Any, task: str) -> Any:
    """Set the token ids that the task's forward needs and the configuration leaves open."""
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None and task == CLASSIFICATION:
        text.pad_token_id = 0  # a decoder's head reads the last token that is not padding
    if getattr(config, "decoder_start_token_id", None) is None and task == SEQ2SEQ:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def keep_cache(model: Any, kept: bool) -> None:
    """Set `use_cache` in the configurations of all parts of the model: keep keys and values for decoding, or not."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = kept


def adapted(model: Any, job: Job) -> Any:
    """Add the job's LoRA adapters and freeze all other weights. Return the model unchanged if the job has none."""
    if job.lora is None:
        return model
    from peft import LoraConfig, get_peft_model

    targets = "all-linear" if job.lora.targets == ("all-linear",) else list(job.lora.targets)
    config = LoraConfig(
        r=job.lora.rank,
        lora_alpha=job.lora.alpha or 2 * job.lora.rank,
        target_modules=targets,
        modules_to_save=list(job.lora.saved) or None,
        lora_dropout=job.lora.dropout,
        task_type=_ADAPTED_AS.get(job.task),
    )
    # DeepSpeed's engine would cast them back to 16 bits.
    return get_peft_model(model, config, autocast_adapter_dtype=job.lora.fp32 and job.plain)


def build_model(
    job: Job, device: torch.device, ds_config: dict[str, Any], shard: Callable[[Any], None] | None = None
) -> torch.nn.Module:
    """Build a named model on the device with random weights. At stage 3 it is partitioned during construction.

    Args:
        shard: shards the model, which is on the host, over the ranks' devices before its weights are drawn.
    """
    import deepspeed

    config = transformers_config(job.model)
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    with contextlib.ExitStack() as stack:
        if stage == 3:
            importlib.import_module("torch._dynamo")  # a later import fails because Init replaces Tensor.__new__

            # No dtype is passed here. With one, deepspeed 0.19.8 uses bf16 if the device lacks fp16 (an
            # operator-precedence bug in `_set_dtype`). Without one, it follows the config.
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=ds_config))
        else:
            stack.enter_context(device if shard is None else torch.device("cpu"))
        stack.enter_context(no_init_weights())
        model = task_model(config, job)
    keep_cache(model, False)
    model.tie_weights()
    if job.lora is not None and job.lora.quantize:
        fill_weights(model, device)  # before their values become codes
        quantize(model, job, device)
    model = adapted(model, job)
    if shard is not None:
        shard(model)
    elif stage != 3:
        model.to(device)
    fill_weights(model, device)
    model.train()
    assert isinstance(model, torch.nn.Module)
    return model


def quantize(model: Any, job: Job, device: torch.device) -> None:
    """Replace the linear layers by bitsandbytes' with 4-bit weights on the device, as transformers does, except for the head."""
    import bitsandbytes

    head = model.get_output_embeddings()
    for module in list(model.modules()):
        for name, inner in list(module.named_children()):
            if type(inner) is not torch.nn.Linear or inner is head:
                continue
            made = bitsandbytes.nn.Linear4bit(
                inner.in_features,
                inner.out_features,
                inner.bias is not None,
                compute_dtype=DTYPES[job.precision],
                quant_type="nf4",
                compress_statistics=True,
                device="meta",
            )
            made.weight = bitsandbytes.nn.Params4bit(
                inner.weight.data, False, quant_type="nf4", compress_statistics=True
            )
            made.bias = inner.bias
            setattr(module, name, made.to(device))


_MOST_DRAWN = 2**20  # elements that are drawn at once


@torch.no_grad()
def fill_weights(model: torch.nn.Module, device: torch.device) -> None:
    """Set weights to small random values and norms to 1.

    A weight depends only on its parameter and its index, so that a model has the same weights at every stage and on any
    number of ranks. Memory and speed do not depend on the values unless a NaN or denormal is among them.

    Args:
        model: the model, whose parameters may be partitioned.
        device: device on which the values are drawn.
    """
    for number, (name, parameter) in enumerate(model.named_parameters()):
        tensor, start = _part(parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if not parameter.is_floating_point():
            continue  # codes of quantized weights
        if len(shape) > 1:
            draw_weights(tensor.data.view(-1), number, start, math.prod(shape), device)
        else:
            tensor.data.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def _part(parameter: Any) -> tuple[torch.Tensor, int]:
    """Return what this rank holds of a parameter, and the index of its first element."""
    if hasattr(parameter, "device_mesh"):
        return local_part(parameter)
    part = getattr(parameter, "ds_tensor", parameter)
    if part is parameter or part.numel() >= parameter.ds_numel:
        return part, 0
    return part, torch.distributed.get_rank(group=parameter.ds_process_group) * int(part.numel())


def draw_weights(part: torch.Tensor, number: int, start: int, elements: int, device: torch.device) -> None:
    """Fill a part of a parameter with its random values.

    Args:
        part: (n,) elements of this rank; those beyond the parameter's end are padding.
        number: number of the parameter in its model.
        start: index of the part's first element in the parameter.
        elements: elements of the whole parameter.
        device: device on which the values are drawn.
    """
    generator, size, stop = torch.Generator(device), min(elements, _MOST_DRAWN), min(start + part.numel(), elements)
    for chunk in range(start // size, -(-stop // size)):
        generator.manual_seed(number * 1_000_003 + chunk)
        drawn = torch.empty(size, device=device).normal_(0.0, 0.02, generator=generator)
        begin, end = max(start, chunk * size), min(stop, (chunk + 1) * size)
        part[begin - start : end - start].copy_(drawn[begin - chunk * size : end - chunk * size])


def use_liger(model: torch.nn.Module) -> None:
    """Replace modules by Liger's kernels, as Trainer's `use_liger_kernel` does.

    transformers has a function for this only since version 5.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=without_adapters(model))


def without_adapters(model: Any) -> Any:
    """Return the model inside peft's adapters."""
    return getattr(model, "get_base_model", lambda: model)()


def enable_checkpointing(model: torch.nn.Module) -> None:
    """Turn on activation checkpointing the way Hugging Face's Trainer does."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
