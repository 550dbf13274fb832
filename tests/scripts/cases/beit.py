"""As BEiT's finetuning: --batch_size and --update_freq, a DeepSpeed config that the script writes into its output folder
at run time and names in args.deepspeed_config, learning rates from a table by `data_iter_step // update_freq`, an epoch cut at len(dataset) // total batch, a check of the engine's accumulation."""

import argparse
import json
import math
import os
import sys

import deepspeed
import numpy as np
import torch
import torch.distributed as dist


def create_ds_config(args):
    args.deepspeed_config = os.path.join(args.output_dir, "deepspeed_config.json")
    with open(args.deepspeed_config, "w") as f:
        json.dump(
            {
                "train_batch_size": args.batch_size * args.update_freq * int(os.environ["WORLD_SIZE"]),
                "train_micro_batch_size_per_gpu": args.batch_size,
                "steps_per_print": 1000,
                "optimizer": {
                    "type": "Adam",
                    "adam_w_mode": True,
                    "params": {"lr": args.lr, "weight_decay": 0.05, "betas": [0.9, 0.999], "torch_adam": True},
                },
                "zero_optimization": {
                    "stage": args.zero_stage,
                    "reduce_bucket_size": 500_000,
                    "allgather_bucket_size": 500_000,
                },
            },
            f,
            indent=2,
        )


class ViT(torch.nn.Module):
    def __init__(self, width=32, depth=1):
        super().__init__()
        self.patch = torch.nn.Conv2d(3, width, 8, 8)
        self.blocks = torch.nn.TransformerEncoder(
            torch.nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True),
            depth,
            enable_nested_tensor=False,
        )
        self.head = torch.nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, i):
        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i)), i % 10


def train_one_epoch(model, criterion, loader, optimizer, epoch, start_steps, lrs, per_epoch, update_freq, args):
    model.train(True)
    model.zero_grad()
    model.micro_steps = 0
    for data_iter_step, (samples, targets) in enumerate(loader):
        step = data_iter_step // update_freq
        if step >= per_epoch:
            continue
        it = start_steps + step
        for group in optimizer.param_groups:
            group["lr"] = lrs[it]
        loss = criterion(model(samples), targets)
        if not math.isfinite(loss.item()):
            sys.exit(1)
        model.backward(loss)
        model.step()
        if args.stop and model.global_steps >= args.stop:
            break
    if dist.get_rank() == 0:
        print(
            f"epoch {epoch}: optimizer steps {model.global_steps}, lr at the end {optimizer.param_groups[0]['lr']:.3e} of index {it} of {len(lrs)}, batch {args.batch_size} x {update_freq}, engine {model.train_micro_batch_size_per_gpu()} x {model.gradient_accumulation_steps()}",
            flush=True,
        )


def main(args):
    os.makedirs(args.output_dir, exist_ok=True)
    create_ds_config(args)
    deepspeed.init_distributed()
    dist.barrier()  # every rank writes the config: none may read what another has just emptied
    torch.manual_seed(0)
    np.random.seed(0)
    data = Images()
    sampler = torch.utils.data.DistributedSampler(data, shuffle=True)
    loader = torch.utils.data.DataLoader(
        data, sampler=sampler, batch_size=args.batch_size, num_workers=0, drop_last=True
    )
    model = ViT()
    total = args.batch_size * args.update_freq * dist.get_world_size()
    per_epoch = len(data) // total
    model, optimizer, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), dist_init_required=False
    )
    if args.check:
        assert model.gradient_accumulation_steps() == args.update_freq
    steps = args.epochs * per_epoch
    lrs = [args.lr * 0.5 * (1 + math.cos(math.pi * i / steps)) for i in range(steps)]
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(
            model,
            torch.nn.CrossEntropyLoss(),
            loader,
            optimizer,
            epoch,
            epoch * per_epoch,
            lrs,
            per_epoch,
            args.update_freq,
            args,
        )
        if args.stop and model.global_steps >= args.stop:
            break


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch_size", default=64, type=int)
    p.add_argument("--epochs", default=3, type=int)
    p.add_argument("--update_freq", default=1, type=int)
    p.add_argument("--lr", default=1e-3, type=float)
    p.add_argument("--zero_stage", default=1, type=int)
    p.add_argument("--output_dir", default="out")
    p.add_argument("--stop", default=0, type=int)
    p.add_argument("--check", action="store_true")
    p.add_argument("--local_rank", default=-1, type=int)
    p.add_argument("--enable_deepspeed", action="store_true")
    p.add_argument("--deepspeed_config", default=None)
    main(p.parse_args())
