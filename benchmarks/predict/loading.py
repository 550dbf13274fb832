"""Measures the private memory of processes that load a checkpoint, next to the prediction of `plan`.

    python benchmarks/predict/loading.py [--checkpoint FOLDER] [--dtype bfloat16] [--ranks 2 [--zero-init]]

Without a folder a llama of 222 million parameters is written in 32 bits. Private memory is USS: mapped pages of the file that
other ranks share, or that the kernel may drop, do not count once another rank maps them. With `--zero-init` the ranks load under
DeepSpeed's stage 3, as `from_pretrained` does while an HfDeepSpeedConfig lives.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from autotune.util.units import MIB


def main() -> None:
    """Print predicted and measured MiB of each rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--zero-init", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.checkpoint is None:
            shape = LlamaConfig(vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16)
            AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
        arguments = (asked.ranks, asked.checkpoint or folder, asked.dtype, asked.zero_init, folder)
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=load, args=(rank, *arguments)) for rank in range(asked.ranks)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        raise SystemExit(max(one.exitcode or 0 for one in ranks))


def load(rank: int, ranks: int, checkpoint: str, dtype: str, zero_init: bool, folder: str) -> None:
    """Load the checkpoint in this rank, and print what it held."""
    config = None
    if zero_init:
        config = _stage_3(rank, ranks, dtype, Path(folder, "rendezvous"))
    process, ended = psutil.Process(), threading.Event()
    before, peak = process.memory_full_info().uss, [0]

    def watch() -> None:
        while not ended.wait(0.02):
            peak[0] = max(peak[0], process.memory_full_info().uss)

    watching = threading.Thread(target=watch)
    watching.start()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    time.sleep(0.1)
    ended.set()
    watching.join()
    after = process.memory_full_info().uss
    elements = sum(getattr(one, "ds_numel", one.numel()) for one in model.parameters())
    copied = elements * next(model.parameters()).element_size()
    found = {"full copy (predicted)": copied, "held after": after - before, "highest": peak[0] - before}
    way = "zero.Init" if config is not None else "no zero.Init"
    print(f"rank {rank}, {dtype}, {way}: {', '.join(f'{name} {size / MIB:.0f} MiB' for name, size in found.items())}")


def _stage_3(rank: int, ranks: int, dtype: str, store: Path) -> object:
    """Join the ranks, and return the config that makes `from_pretrained` use zero.Init while it lives."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "DS_ACCELERATOR": "cpu"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    import deepspeed  # after DS_ACCELERATOR is set
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    deepspeed.init_distributed("gloo", verbose=False)
    return HfDeepSpeedConfig(
        {
            "zero_optimization": {"stage": 3},
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": dtype == "bfloat16"},
            "fp16": {"enabled": dtype == "float16"},
        }
    )


if __name__ == "__main__":
    main()
