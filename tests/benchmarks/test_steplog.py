"""What a training's own log of steps counts, without the training knowing: rows and tokens that enter forwards."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from benchmarks.common import HERE

ENGINE = """
    import torch

    class DeepSpeedEngine:
        def __init__(self, accumulation):
            self.module, self.accumulation, self.micro_steps = torch.nn.Identity(), accumulation, 0

        def forward(self, input_ids=None, attention_mask=None):
            return input_ids

        def is_gradient_accumulation_boundary(self):
            return (self.micro_steps + 1) % self.accumulation == 0

        def step(self):
            self.micro_steps += 1
"""
TRAINING = """
    import os, torch
    from deepspeed.runtime.engine import DeepSpeedEngine

    torch.distributed.init_process_group("gloo", init_method="file://{meeting}", rank=0, world_size=1)
    engine = DeepSpeedEngine(accumulation=2)
    for length in (5, 6, 7, 8):
        ids, mask = torch.ones(3, length), torch.ones(3, length)
        mask[0, 0] = 0
        engine.forward(input_ids=ids, attention_mask=mask)
        with torch.no_grad():
            engine.forward(input_ids=ids)
        engine.step()
    os._exit(0)  # the process group is open: its threads may abort an interpreter that ends
"""


def run(folder: Path, log: str, text: str) -> str:
    """What it prints."""
    (folder / "deepspeed" / "runtime").mkdir(parents=True)
    for name in ("deepspeed/__init__.py", "deepspeed/runtime/__init__.py"):
        (folder / name).touch()
    (folder / "deepspeed" / "runtime" / "engine.py").write_text(textwrap.dedent(ENGINE))
    env = {**os.environ, "PYTHONPATH": f"{HERE / 'trials' / 'steplog'}{os.pathsep}{folder}", "STEP_LOG": log}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_line_for_every_optimizer_step_with_what_entered_its_forwards(tmp_path: Path) -> None:
    log = tmp_path / "steps"
    run(tmp_path, str(log), TRAINING.replace("{meeting}", str(tmp_path / "meeting")))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["samples"], line["tokens"]) for line in lines] == [(6, 31), (6, 43)]  # without evaluation and padding
    assert lines[0]["end"] < lines[1]["end"]
