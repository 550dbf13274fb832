"""Measures the private memory of a process that loads a checkpoint, next to the prediction of `plan`.

    python benchmarks/predict/loading.py [--checkpoint FOLDER] [--dtype bfloat16]

Without a folder a llama of 222 million parameters is written in 32 bits. Private memory is USS: mapped pages of the file that
other ranks share, or that the kernel may drop, do not count once another rank maps them.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time

import psutil
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from autotune.util.units import MIB


def main() -> None:
    """Print parameters, predicted and measured MiB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.checkpoint is None:
            shape = LlamaConfig(vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16)
            AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
        process, ended = psutil.Process(), threading.Event()
        before, peak = process.memory_full_info().uss, [0]

        def watch() -> None:
            while not ended.wait(0.02):
                peak[0] = max(peak[0], process.memory_full_info().uss)

        watching = threading.Thread(target=watch)
        watching.start()
        model = AutoModelForCausalLM.from_pretrained(asked.checkpoint or folder, dtype=getattr(torch, asked.dtype))
        time.sleep(0.1)
        ended.set()
        watching.join()
        after = process.memory_full_info().uss
        copied = sum(one.numel() * one.element_size() for one in model.parameters())
        found = {"predicted": copied, "held after": after - before, "highest": peak[0] - before}
        print(asked.dtype, ", ".join(f"{name} {size / MIB:.0f} MiB" for name, size in found.items()))


if __name__ == "__main__":
    main()
