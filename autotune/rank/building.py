"""A named model as transformers builds it for a task, with adapters where the job has them and random weights."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

from autotune.problem.job import Job
from autotune.problem.models import ModelSpec
from autotune.problem.tasks import ANSWERS, CAUSAL, CLASSIFICATION, IMAGE_TEXT, MASKED, SEQ2SEQ, TOKENS
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
# peft's TaskType; it has none for a masked head, which is adapted as any module is
_ADAPTED_AS = {
    CAUSAL: "CAUSAL_LM",
    CLASSIFICATION: "SEQ_CLS",
    TOKENS: "TOKEN_CLS",
    ANSWERS: "QUESTION_ANS",
    SEQ2SEQ: "SEQ_2_SEQ_LM",
    IMAGE_TEXT: "CAUSAL_LM",
}


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


def task_model(config: Any, job: Job) -> Any:
    """The job's model as transformers builds it for the job's task, in the job's precision; whether weights are initialized
    is the caller's choice (`no_init_weights`).

    Raises:
        ValueError: transformers has no head of that kind for the configuration.
    """
    import transformers

    kind = getattr(transformers, _AUTO_CLASSES[job.task])
    kept: dict[str, Any] = {"attn_implementation": job.attention} if job.attention else {}
    kept |= in_dtype(DTYPES[job.precision])
    return kind.from_config(completed(config, job.task), trust_remote_code=job.model.trust_remote_code, **kept)


def completed(config: Any, task: str) -> Any:
    """The configuration with the token ids that a task's forward insists on, where it leaves them open."""
    text = config.get_text_config()
    if getattr(text, "pad_token_id", None) is None and task == CLASSIFICATION:
        text.pad_token_id = 0  # a decoder's head reads the last token that is no padding
    if getattr(config, "decoder_start_token_id", None) is None and task == SEQ2SEQ:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def keep_cache(model: Any, kept: bool) -> None:
    """Whether forwards keep keys and values for decoding: in every configuration that a part of the model goes by."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = kept


def adapted(model: Any, job: Job) -> Any:
    """The model with the job's LoRA adapters, all else of it frozen; the model unchanged where the job has none."""
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
    # DeepSpeed's engine would make them 16 bits again
    return get_peft_model(model, config, autocast_adapter_dtype=job.lora.fp32 and job.plain)


def build_model(job: Job, device: torch.device, ds_config: dict[str, Any]) -> torch.nn.Module:
    """A named model on the device with random weights. At stage 3 it is partitioned while it is built."""
    import deepspeed

    config = transformers_config(job.model)
    stage = ds_config.get("zero_optimization", {}).get("stage", 0)
    with contextlib.ExitStack() as stack:
        if stage == 3:
            importlib.import_module("torch._dynamo")  # later it fails: Init replaces Tensor.__new__

            # No dtype here: given one, deepspeed 0.19.8 takes bf16 wherever the device has no fp16 (an operator-precedence
            # slip in `_set_dtype`); left out, it follows the config.
            stack.enter_context(deepspeed.zero.Init(config_dict_or_path=ds_config))
        else:
            stack.enter_context(device)
        stack.enter_context(no_init_weights())
        model = task_model(config, job)
    keep_cache(model, False)
    model.tie_weights()
    model = adapted(model, job)
    if stage != 3:
        model.to(device)
    fill_weights(model)
    model.train()
    assert isinstance(model, torch.nn.Module)
    return model


@torch.no_grad()
def fill_weights(model: torch.nn.Module) -> None:
    """Sets weights to small random values and norms to 1. Neither memory nor speed depends on the values, as long as no
    NaN or denormal is among them."""
    for name, parameter in model.named_parameters():
        tensor = getattr(parameter, "ds_tensor", parameter)
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if len(shape) > 1:
            tensor.data.normal_(0.0, 0.02)
        else:
            tensor.data.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)


def use_liger(model: torch.nn.Module) -> None:
    """Liger's kernels in the model's place, as Trainer's `use_liger_kernel` does; transformers has had a function of its own for
    it only since version 5."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=without_adapters(model))


def without_adapters(model: Any) -> Any:
    """The model that peft's adapters are around."""
    return getattr(model, "get_base_model", lambda: model)()


def enable_checkpointing(model: torch.nn.Module) -> None:
    """Activation checkpointing as Hugging Face's Trainer turns it on."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
