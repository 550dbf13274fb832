"""A plain DeepSpeed loop, as people write it: argparse, deepspeed.initialize, a loader of its own."""

import argparse
import json
import os

import deepspeed
import torch
import torch.distributed
from transformers import AutoModelForCausalLM, LlamaConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--longest", type=int, default=32)
    parser.add_argument("--save_every", type=int, default=0)
    parser.add_argument("--out", default="out")
    parser.add_argument("--losses")
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    accumulation = engine.gradient_accumulation_steps()
    samples = torch.randint(0, 512, (4096, args.longest), generator=torch.Generator().manual_seed(1))
    step = 0
    _, state = engine.load_checkpoint(args.out) if args.save_every and os.path.isdir(args.out) else (None, None)
    if state:
        step = state["step"]
    while step < args.steps:
        share = args.batch_size * world
        total = 0.0
        for micro in range(accumulation):
            first = (step * accumulation + micro) * share + rank * args.batch_size
            rows = torch.arange(first, first + args.batch_size) % len(samples)
            ids = samples[rows].to(engine.device)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / accumulation
        torch.distributed.all_reduce(total)
        step += 1
        if rank == 0 and args.losses:
            with open(args.losses, "a") as file:
                file.write(json.dumps({"step": step, "loss": float(total / world)}) + "\n")
        if args.save_every and step % args.save_every == 0:
            engine.save_checkpoint(args.out, client_state={"step": step})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
