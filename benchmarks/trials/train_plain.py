"""A plain DeepSpeed training, without autotune: `torchrun train_plain.py CONFIG MODEL_CONFIG SEQ_LEN STEPS`.

Prints one JSON line with the seconds of its steps after `--warmup`, their median, and samples per second by it.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed
import transformers

HEADS = {
    "causal-lm": transformers.AutoModelForCausalLM,
    "masked-lm": transformers.AutoModelForMaskedLM,
    "classification": transformers.AutoModelForSequenceClassification,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
}

parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("model_config")
parser.add_argument("seq_len", type=int)
parser.add_argument("steps", type=int)
parser.add_argument("--warmup", type=int, default=5, help="how many of the steps are not counted")
parser.add_argument("--checkpointing", type=float, default=0, help="share of the layers")
parser.add_argument("--precision", default="fp32")
parser.add_argument("--task", choices=HEADS, default="causal-lm")
parser.add_argument("--lora", type=int, help="rank of the adapters on every linear layer")
arguments = parser.parse_args()

config = json.loads(Path(arguments.config).read_text(encoding="utf-8"))
described = json.loads(Path(arguments.model_config).read_text(encoding="utf-8"))
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[arguments.precision]
made = transformers.AutoConfig.for_model(described.pop("model_type"), **described)
model = HEADS[arguments.task].from_config(made, dtype=dtype)
model.config.use_cache = False
if arguments.lora:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=arguments.lora, lora_alpha=2 * arguments.lora, target_modules="all-linear")
    model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
if arguments.checkpointing:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = [
        one for one in model.modules() if isinstance(one, transformers.modeling_layers.GradientCheckpointingLayer)
    ]
    for layer in layers[round(arguments.checkpointing * len(layers)) :]:
        layer.gradient_checkpointing = False
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
zero = config.get("zero_optimization", {})
if "optimizer" in config:
    optimizer = None
elif zero.get("offload_optimizer", {}).get("device", "none") != "none":
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(trained, lr=1e-5)
else:
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
parameters = trained if optimizer is None else None
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=parameters, config=config)
micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
vocabulary = model.config.get_text_config().vocab_size


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, vocabulary, (micro, arguments.seq_len)).to(engine.device)
    if arguments.task == "classification":
        return {"input_ids": ids, "labels": torch.randint(0, model.config.num_labels, (micro,)).to(engine.device)}
    return {"input_ids": ids, "labels": ids}


times = []
for _ in range(arguments.steps):
    began = time.perf_counter()
    for _ in range(accumulation):
        engine.backward(engine(**batch()).loss)
        engine.step()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
kept = times[arguments.warmup :]
if torch.distributed.get_rank() == 0:
    step = statistics.median(kept)
    samples = micro * accumulation * torch.distributed.get_world_size() / step
    whole = micro * accumulation * torch.distributed.get_world_size() * len(kept) / sum(kept)
    told = {"step_seconds": step, "samples_per_second": samples, "samples_per_second_mean": whole, "each": kept}
    print("TRAINED " + json.dumps(told))
torch.distributed.destroy_process_group()  # left open, gloo's threads race the interpreter's end
sys.stdout.flush()
os._exit(0)  # other libraries' threads race it, too
