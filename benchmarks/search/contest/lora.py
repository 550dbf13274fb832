"""A decoder in bf16 with LoRA on its attention: few parameters train, most only take memory."""

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=100_000)
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()

torch.manual_seed(0)
shape: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 4}
base = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, num_key_value_heads=2, use_cache=False))
model = get_peft_model(base.bfloat16(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=trained)
while engine.global_steps < arguments.steps:
    ids = torch.randint(0, 4096, (engine.train_micro_batch_size_per_gpu(), 64), device=engine.device)
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
torch.distributed.destroy_process_group()
