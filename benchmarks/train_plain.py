"""A plain DeepSpeed training, without autotune: `torchrun train_plain.py CONFIG MODEL_CONFIG SEQ_LEN STEPS`.

Prints one JSON line with the median step seconds and samples per second of its steps after the first five.
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
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("model_config")
parser.add_argument("seq_len", type=int)
parser.add_argument("steps", type=int)
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--precision", default="fp32")
arguments = parser.parse_args()

config = json.loads(Path(arguments.config).read_text())
described = json.loads(Path(arguments.model_config).read_text())
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[arguments.precision]
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(described.pop("model_type"), **described), dtype=dtype)
model.config.use_cache = False
if arguments.checkpointing:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
zero = config.get("zero_optimization", {})
if "optimizer" in config:
    optimizer = None
elif zero.get("offload_optimizer", {}).get("device", "none") != "none":
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-5)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
parameters = model.parameters() if optimizer is None else None
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=parameters, config=config)
micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
vocabulary = model.config.get_text_config().vocab_size
times = []
for _ in range(arguments.steps):
    began = time.perf_counter()
    for _ in range(accumulation):
        ids = torch.randint(0, vocabulary, (micro, arguments.seq_len)).to(engine.device)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    if engine.device.type == "cuda":
        torch.cuda.synchronize()
    times.append(time.perf_counter() - began)
kept = times[5:]
if torch.distributed.get_rank() == 0:
    step = statistics.median(kept)
    samples = micro * accumulation * torch.distributed.get_world_size() / step
    whole = micro * accumulation * torch.distributed.get_world_size() * len(kept) / sum(kept)
    print(
        "TRAINED " + json.dumps({"step_seconds": step, "samples_per_second": samples, "samples_per_second_mean": whole})
    )
torch.distributed.destroy_process_group()  # left open, gloo's threads race the interpreter's end
sys.stdout.flush()
os._exit(0)  # other libraries' threads race it, too
