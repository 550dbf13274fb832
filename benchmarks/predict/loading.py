"""Measures the memory of ranks that load a checkpoint, next to the prediction of `plan`.

    python benchmarks/predict/loading.py [--checkpoint FOLDER] [--dtype bfloat16] [--ranks 2]

Without a folder a llama of 222 million parameters is written in 32 bits. The ranks load it twice: plainly, and under DeepSpeed's
stage 3, as `from_pretrained` does while an HfDeepSpeedConfig lives. `copied` is anonymous memory, which the kernel can only
kill for; `mapped` are pages of the file, which ranks share and the kernel may drop.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from autotune.util.units import MIB
from benchmarks.common import print_table


def main() -> None:
    """Print predicted and measured MiB of each rank and of all together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    rows = []
    for zero_init in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            if asked.checkpoint is None:
                shape = LlamaConfig(vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16)
                AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
            jobs = [
                (rank, asked.ranks, asked.checkpoint or folder, asked.dtype, zero_init, folder)
                for rank in range(asked.ranks)
            ]
            with multiprocessing.get_context("spawn").Pool(asked.ranks, maxtasksperchild=1) as pool:
                found = pool.starmap(load, jobs, chunksize=1)
        whole = {name: sum(one[name] for one in found) for name in found[0]}
        for rank, one in [*enumerate(found), ("all", whole)]:
            way = "zero.Init" if zero_init else "a copy each"
            rows.append({"way": way, "rank": rank, **{name: f"{size / MIB:.0f}" for name, size in one.items()}})
    print_table(f"MiB of ranks that load a checkpoint in {asked.dtype}", rows, keys=2)


def load(rank: int, ranks: int, checkpoint: str, dtype: str, zero_init: bool, folder: str) -> dict[str, float]:
    """Load the checkpoint in this rank; return bytes of a copy as predicted, and of what was held."""
    config = _stage_3(rank, ranks, dtype, Path(folder, "rendezvous")) if zero_init else None
    ended, before = threading.Event(), _held()
    peaks = [0, 0]

    def watch() -> None:
        while not ended.wait(0.01):
            peaks[:] = map(max, peaks, _held())

    watching = threading.Thread(target=watch)
    watching.start()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    time.sleep(0.1)
    ended.set()
    watching.join()
    after = _held()
    elements = sum(getattr(one, "ds_numel", one.numel()) for one in model.parameters())
    copy = elements * next(model.parameters()).element_size() / (1 if config is None else ranks)
    return {
        "predicted": copy,
        "copied, at most": peaks[0] - before[0],
        "copied, after": after[0] - before[0],
        "mapped, at most": peaks[1] - before[1],
    }


def _held() -> tuple[int, int]:
    """Return the bytes of this process in anonymous memory, and of files; proc(5), /proc/pid/status."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text("utf-8").splitlines())
    anonymous, files = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return anonymous, files


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
