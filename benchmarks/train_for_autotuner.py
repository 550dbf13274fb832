"""The training that DeepSpeed's own autotuner runs: `deepspeed --autotuning tune train_for_autotuner.py MODEL SEQ ...`."""

import argparse
import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("model_config")
parser.add_argument("seq_len", type=int)
parser.add_argument("--local_rank", type=int, default=-1)
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()

described = json.loads(Path(arguments.model_config).read_text())
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(described.pop("model_type"), **described))
model.config.use_cache = False
engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
vocabulary = model.config.get_text_config().vocab_size
for _ in range(200):
    ids = torch.randint(0, vocabulary, (engine.train_micro_batch_size_per_gpu(), arguments.seq_len)).to(engine.device)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
torch.distributed.destroy_process_group()  # left open, gloo's threads race the interpreter's end
sys.stdout.flush()
os._exit(0)  # other libraries' threads race it, too
