"""What a rank trains without a script: a named model with random weights and synthetic batches, or the model and batches
that a function of the user returns (`--workload package.module:function`)."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotune.problem.job import Job
from autotune.problem.models import ModelSpec

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


Batch = Any  # keyword arguments of the model's forward as a dict, or its positional ones as a tuple
Source = Callable[[int, torch.device, int], Iterator[Batch]]  # (micro-batch, device, seed)


def load_builder(reference: str) -> Callable[[], Any]:
    """Imports the function `package.module:function`; the current folder is on the path.

    Raises:
        ValueError: there is no such function.
    """
    name, colon, function = reference.partition(":")
    if not colon or not name or not function:
        raise ValueError(f"{reference}: expected package.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(name), function, None)
    except ImportError as error:
        raise ValueError(f"{reference}: {error}") from None
    if not callable(found):
        raise ValueError(f"{reference}: {name} has no function {function}")
    return found  # type: ignore[no-any-return]


def own_workload(reference: str) -> tuple[torch.nn.Module, Callable[[int], Any]]:
    """Calls the user's function: a model, and a function from a micro-batch size to an iterable of batches.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    made = load_builder(reference)()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and callable(made[1])):
        raise ValueError(
            f"{reference}: expected it to return (model, batches), where batches(micro_batch) gives an "
            "iterable of the forward's arguments"
        )
    return made


def loss_of(out: Any) -> torch.Tensor:
    """The loss in what a forward returns: its `loss`, the first of a tuple, or the tensor itself."""
    if isinstance(out, dict):
        out = out["loss"]
    elif hasattr(out, "loss"):
        out = out.loss
    elif isinstance(out, tuple):
        out = out[0]
    assert isinstance(out, torch.Tensor)
    return out


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """The loss of one batch."""
    return loss_of(model(**batch) if isinstance(batch, dict) else model(*batch))


def to_device(value: Any, device: torch.device) -> Any:
    """A batch's tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


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


def causal_model(config: Any, job: Job) -> Any:
    """The job's model as transformers builds it, in the job's precision; whether weights are initialized is the caller's
    choice (`no_init_weights`)."""
    from transformers import AutoModelForCausalLM

    kept = {"attn_implementation": job.attention} if job.attention else {}
    return AutoModelForCausalLM.from_config(
        config, dtype=DTYPES[job.precision], trust_remote_code=job.model.trust_remote_code, **kept
    )


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
        lora_dropout=job.lora.dropout,
        task_type="CAUSAL_LM",
    )
    # DeepSpeed's engine would make them 16 bits again
    return get_peft_model(model, config, autocast_adapter_dtype=job.lora.fp32 and job.plain)


def build(job: Job, device: torch.device, ds_config: dict[str, Any]) -> tuple[torch.nn.Module, Source]:
    """The job's model on the device, and the source of its batches. At stage 3 the model is partitioned while it is built."""
    if job.workload is None:
        model = build_model(job, device, ds_config)
        return model, lambda micro_batch, device, seed: batches(job, micro_batch, device, seed)
    import deepspeed

    partitioned = ds_config.get("zero_optimization", {}).get("stage", 0) == 3
    with deepspeed.zero.Init(config_dict_or_path=ds_config) if partitioned else contextlib.nullcontext():
        model, source = own_workload(job.workload)
    if not partitioned:
        model.to(device=device, dtype=DTYPES[job.precision])
    model.train()

    def endless(micro_batch: int, device: torch.device, seed: int) -> Iterator[Batch]:
        torch.manual_seed(seed)
        while True:
            empty = True
            for batch in source(micro_batch):
                empty = False
                yield to_device(batch, device)
            if empty:
                raise ValueError(f"{job.workload}: batches({micro_batch}) gave nothing")

    return model, endless


def build_model(job: Job, device: torch.device, ds_config: dict[str, Any]) -> torch.nn.Module:
    """A named model on the device with random weights. At stage 3 it is partitioned while it is built."""
    import deepspeed
    from transformers.initialization import no_init_weights

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
        model = causal_model(config, job)
    model.config.use_cache = False
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


def enable_checkpointing(model: torch.nn.Module) -> None:
    """Activation checkpointing as Hugging Face's Trainer turns it on."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]


def vocabulary(job: Job) -> int:
    config = transformers_config(job.model)
    return int(config.get_text_config().vocab_size)


def batches(job: Job, micro_batch: int, device: torch.device, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Endless batches of `input_ids` and `labels`, each (micro_batch, tokens), made on the host and copied to the device as
    a data loader does.

    Every batch has the full sequence length. Of a job with a data set's lengths only the first two batches have, so that
    the worst case is met with and without gradients from before; the sequences of the others are drawn from the data set's
    lengths, each batch padded to its longest. Rows of a packed job are full and have `position_ids`.
    """
    generator = torch.Generator().manual_seed(seed)
    top = vocabulary(job)
    widths, first = [job.seq_len] * 4, 0
    if job.lengths and not job.packed:
        drawn = draw(job, 16 * micro_batch, generator)
        widths, first = [job.seq_len] * 2 + drawn.view(16, micro_batch).max(dim=1).values.tolist(), 2
    pool = [{"input_ids": torch.randint(0, top, (micro_batch, width), generator=generator)} for width in widths]
    for batch in pool:
        batch["labels"] = batch["input_ids"]
        if job.packed:
            batch["position_ids"] = torch.stack([packed_positions(job, generator) for _ in range(micro_batch)])
            # the first token of a sequence is not predicted from the sequence before it
            batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, -100)
    if device.type == "cuda":
        pool = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in pool]
    yield from (to_device(batch, device) for batch in pool)
    while True:
        yield from (to_device(batch, device) for batch in pool[first:])


def draw(job: Job, count: int, generator: torch.Generator) -> torch.Tensor:
    """(count,) lengths of sequences in tokens, drawn with the frequencies of the job's data set."""
    tokens, often = (torch.tensor(column) for column in zip(*job.lengths, strict=True))
    return tokens[torch.multinomial(often.double(), count, replacement=True, generator=generator)]


def packed_positions(job: Job, generator: torch.Generator) -> torch.Tensor:
    """(seq_len,) position ids of a row of sequences laid end to end, the last one cut off. Each sequence begins at 0, which
    is how transformers tells them apart."""
    shortest = min(tokens for tokens, _ in job.lengths)
    lengths = draw(job, -(-job.seq_len // shortest), generator)
    starts = torch.cat([torch.zeros(1, dtype=lengths.dtype), lengths.cumsum(0)])
    places = torch.arange(job.seq_len)
    return places - starts[torch.searchsorted(starts, places, right=True) - 1]
