"""GPT-2 in bf16 by `loss.backward()`, as DeepSpeed's newer examples do it, over a loader of the script's own."""

import argparse

import deepspeed
import torch
import torch.distributed
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=100_000)
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=4096, n_positions=64, n_embd=192, n_layer=4, n_head=4, use_cache=False))
engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
texts = TensorDataset(torch.randint(0, 4096, (8192, 64)))
while engine.global_steps < arguments.steps:
    for (ids,) in DataLoader(texts, batch_size=engine.train_micro_batch_size_per_gpu(), shuffle=True):
        ids = ids.to(engine.device)
        # DeepSpeed 0.19 divides the gradient by the accumulation at every output: with the model's own loss beside its
        # logits twice, so that every other accumulation would be another training.
        logits = engine(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        engine.step()
        if engine.global_steps >= arguments.steps:
            break
torch.distributed.destroy_process_group()
