"""A decoder trained by `engine.backward`, its batches drawn as large as the engine asks."""

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4}

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=100_000)
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()

torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=4, use_cache=False))
engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
while engine.global_steps < arguments.steps:
    ids = torch.randint(0, SHAPE["vocab_size"], (engine.train_micro_batch_size_per_gpu(), 64), device=engine.device)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
torch.distributed.destroy_process_group()
