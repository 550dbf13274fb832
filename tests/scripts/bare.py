"""A DeepSpeed loop that needs torch and deepspeed alone. Writes down in which environment it has run."""

import argparse
import importlib.util
import json
import subprocess
import sys

import deepspeed
import torch

LOOKED_FOR = ("transformers", "accelerate", "optuna", "rich", "alembic", "pynvml")


def environment() -> dict:
    """This process's Python, and which packages it and a Python that it starts can import."""
    code = f"import importlib.util as u; print([name for name in {LOOKED_FOR} if u.find_spec(name)])"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = [name for name in LOOKED_FOR if importlib.util.find_spec(name)]
    return {"python": sys.executable, "found": found, "found_by_child": child.stdout.strip()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", default="ds.json")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seen", required=True)
    args = parser.parse_args()
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    engine, *_ = deepspeed.initialize(config=args.config, model=model, model_parameters=model.parameters())
    rows = torch.randn(512, 64)
    for step in range(args.steps * engine.gradient_accumulation_steps()):
        size = engine.train_micro_batch_size_per_gpu()
        batch = rows[torch.arange(step * size, (step + 1) * size) % len(rows)].to(engine.device)
        loss = engine(batch).pow(2).mean()
        engine.backward(loss)
        engine.step()
    if torch.distributed.get_rank() == 0:
        with open(args.seen, "w") as file:
            json.dump({**environment(), "steps": engine.global_steps}, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
