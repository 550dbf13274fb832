"""Build a named model with transformers for a task: random weights, and LoRA adapters if the job has them."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotune.problem.job import CHUNKED, LIGER_LOSS, Job
from autotune.problem.models import (
    ANSWERS,
    CAUSAL,
    CLASSIFICATION,
    IMAGE_TEXT,
    LIGER_LOSS_ALONE,
    MASKED,
    SEQ2SEQ,
    TOKENS,
    VOCABULARY_SLICES,
    ModelSpec,
)
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

    values = copy.deepcopy(model.config)  # transformers adds keys to nested values, like `rope_scaling`
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
    """
    generator, size, stop = torch.Generator(device), min(elements, _MOST_DRAWN), min(start + part.numel(), elements)
    for chunk in range(start // size, -(-stop // size)):
        generator.manual_seed(number * 1_000_003 + chunk)
        drawn = torch.empty(size, device=device).normal_(0.0, 0.02, generator=generator)
        begin, end = max(start, chunk * size), min(stop, (chunk + 1) * size)
        part[begin - start : end - start].copy_(drawn[begin - chunk * size : end - chunk * size])


def replace_loss(model: torch.nn.Module, job: Job) -> None:
    """Replace the loss as the job says, or all modules that Liger's kernels can replace.

    Raises:
        ValueError: the model's loss cannot be computed without its logits.
    """
    if job.liger or job.loss == LIGER_LOSS:
        use_liger(model, **({} if job.liger else LIGER_LOSS_ALONE))
    elif job.loss == CHUNKED:
        use_chunked_loss(model)


def use_liger(model: torch.nn.Module, **options: bool) -> None:
    """Replace modules by Liger's kernels, as Trainer's `use_liger_kernel` does, with its `liger_kernel_config` as options.

    transformers has a function for this only since version 5.
    """
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=without_adapters(model), **options)


def without_adapters(model: Any) -> Any:
    """Return the model inside peft's adapters."""
    return getattr(model, "get_base_model", lambda: model)()


def enable_checkpointing(model: torch.nn.Module, share: float = 1) -> None:
    """Turn on activation checkpointing the way Hugging Face's Trainer does, in a share of the layers."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    if share < 1:
        checkpoint_share(model, share)


def checkpoint_share(model: torch.nn.Module, share: float) -> None:
    """Keep activation checkpointing in the first `share` of the layers alone.

    The last layers run their backward first, so that their activations are gone when the others are computed again.

    Raises:
        ValueError: the model has no layers of transformers (4.53 or newer), which have flags of their own.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError("the layers of this model cannot be checkpointed one by one")
    for layer in layers[round(share * len(layers)) :]:
        layer.gradient_checkpointing = False


# -- chunked loss ------------------------------------------------------------------------------------------------------
#
# Loss of a causal model from slices of the vocabulary, so that its logits never exist as a whole.
#
# Source: trl 1.16, kernels/chunked_logprob.py and trainer/utils.py (`add_fused_lm_head`), by which SFTTrainer computes its
# loss. DeepSpeed's TiledFusedLogitsLoss runs backward within forward, where the factor of accumulation and fp16's scale do not
# reach the head's gradient. Slices of tokens would round the head's gradient once each; a slice of the vocabulary is one
# product.

IGNORED = -100  # label of tokens without a loss


def expert_blocks(model: torch.nn.Module) -> list[type[torch.nn.Module]]:
    """Return the classes of blocks with one module per expert, as transformers makes them before 5.0.

    A block skips experts without tokens, and ranks skip different ones. At stage 3 each rank gathers the parameters of the
    modules that it runs, so that ranks would wait for each other in unequal collectives. DeepSpeed gathers a leaf module as
    a whole.
    """
    return list(
        {type(one) for one in model.modules() if isinstance(getattr(one, "experts", None), torch.nn.ModuleList)}
    )


def vocabulary_slices(vocabulary: int) -> Iterator[slice]:
    """Yield at most `VOCABULARY_SLICES` slices of the head's rows."""
    size = -(-vocabulary // VOCABULARY_SLICES)
    yield from (slice(begin, min(begin + size, vocabulary)) for begin in range(0, vocabulary, size))


def _slice_of_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    at: slice,
    scale: float,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (tokens, rows of the slice) logits as the model makes them, in 32 bits.

    Also return which targets are in the slice (tokens,), and their places in it (tokens, 1).
    """
    logits = torch.nn.functional.linear(hidden, weight[at], None if bias is None else bias[at])
    if scale != 1.0:
        logits = logits * scale
    if cap:
        logits = torch.tanh(logits / cap) * cap
    place = (targets - at.start).clamp(0, logits.shape[1] - 1).unsqueeze(-1)
    return logits.float(), (targets >= at.start) & (targets < at.stop), place


class SlicedLoss(torch.autograd.Function):
    """Mean cross entropy of hidden states (tokens, width) under a head (vocabulary, width), slice by slice.

    Forward keeps the logarithm of each token's sum of exponentials; backward makes the logits of each slice again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        cap: float | None,
    ) -> torch.Tensor:
        """Return the mean loss of the tokens whose target (tokens,) is not IGNORED, in 32 bits."""
        sums = hidden.new_full(targets.shape, -math.inf, dtype=torch.float32)
        own = torch.zeros_like(sums)
        for at in vocabulary_slices(len(weight)):
            logits, inside, place = _slice_of_logits(hidden, weight, bias, targets, at, scale, cap)
            torch.logaddexp(sums, logits.logsumexp(-1), out=sums)
            own = torch.where(inside, logits.gather(-1, place).squeeze(-1), own)
            del logits
        counted = targets != IGNORED
        ctx.scale, ctx.cap = scale, cap
        ctx.save_for_backward(hidden, weight, bias, targets, sums)
        return torch.where(counted, sums - own, 0.0).sum() / counted.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        """Return the gradients of hidden states, weight and bias."""
        hidden, weight, bias, targets, sums = ctx.saved_tensors
        counted = targets != IGNORED
        share = torch.where(counted, gradient / counted.sum(), 0.0).unsqueeze(-1)
        of_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for at in vocabulary_slices(len(weight)):
            logits, inside, place = _slice_of_logits(hidden, weight, bias, targets, at, ctx.scale, ctx.cap)
            slope = (1 - (logits / ctx.cap).square()) * ctx.scale if ctx.cap else ctx.scale
            of_logits = logits.sub_(sums.unsqueeze(-1)).exp_()
            of_logits.scatter_add_(-1, place, -inside.float().unsqueeze(-1))
            low = of_logits.mul_(share).mul_(slope).to(hidden.dtype)
            del logits, of_logits, slope
            of_hidden += low @ weight[at]
            if of_weight is not None:
                torch.mm(low.t(), hidden, out=of_weight[at])
            if of_bias is not None:
                of_bias[at] = low.sum(0)
        return of_hidden.to(hidden.dtype), of_weight, of_bias, None, None, None


def use_chunked_loss(model: Any) -> None:
    """Make a causal model compute the mean loss of its labels from slices of the vocabulary; it then returns no logits.

    Call it before `deepspeed.initialize`. The head is called as a module, so that stage 3 gathers its weights.

    Raises:
        ValueError: the model has more than a backbone and a linear head, or another loss than transformers' for causal models.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    base = without_adapters(model)
    head, backbone, text = base.get_output_embeddings(), base.base_model, base.config.get_text_config()
    beside = [one for one in base.children() if one not in (head, backbone) and any(True for _ in one.parameters())]
    plain = type(head) is torch.nn.Linear and backbone is not base and not beside
    if not plain or base.loss_function is not ForCausalLMLoss or getattr(text, "output_router_logits", False):
        raise ValueError(
            f"loss chunked is for causal models of a backbone and a linear head, with the loss of the head alone: "
            f"{type(base).__name__} is none. Use loss full"
        )
    scale, cap = logit_scale(text), getattr(text, "final_logit_softcapping", None)

    def forward_of_head(hidden: torch.Tensor, targets: torch.Tensor) -> Any:
        kind = hidden.device.type
        # Backward runs outside autocast, so that the casts are made here.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else head.weight.dtype
        flat, weight, bias = hidden.reshape(-1, hidden.shape[-1]).to(dtype), head.weight.to(dtype), head.bias
        bias = None if bias is None else bias.to(dtype)
        return SlicedLoss.apply(flat, weight, bias, targets.reshape(-1), scale, cap)  # type: ignore[no-untyped-call]

    def forward(labels: torch.Tensor, **inputs: Any) -> dict[str, Any]:
        hidden = backbone(**inputs).last_hidden_state
        return {"loss": head(hidden, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED))}

    head.forward, base.forward = forward_of_head, forward


def logit_scale(config: Any) -> float:
    """Return the factor by which a model multiplies its logits before they are capped (Cohere, Falcon-H1, Granite, MiniCPM3)."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (factor := getattr(config, name, None)) is not None:
            return float(factor)
    divisor = getattr(config, "logits_scaling", None)
    if divisor is None:
        return 1.0
    return float(divisor) if config.model_type == "hyperclovax" else 1 / float(divisor)
