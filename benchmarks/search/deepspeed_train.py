"""A training for DeepSpeed's autotuner: `deepspeed deepspeed_train.py --model FILE --tokens N --deepspeed_config FILE`.

Trains a causal language model of the given config on random tokens, in bf16, until the autotuner ends it.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed
from transformers import AutoConfig, AutoModelForCausalLM

STEPS = 100  # the autotuner ends an experiment before

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--model", type=Path, required=True)
parser.add_argument("--tokens", type=int, required=True)
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()

described = json.loads(arguments.model.read_text())
config = AutoConfig.for_model(described.pop("model_type"), **described)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.config.use_cache = False
engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=list(model.parameters()))
shape = (engine.train_micro_batch_size_per_gpu(), arguments.tokens)
while engine.global_steps < STEPS:
    ids = torch.randint(0, config.vocab_size, shape, device=engine.device)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
torch.distributed.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # threads of gloo race the interpreter's end
