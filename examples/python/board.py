"""Tunes from Python and records each trial for TensorBoard, whose package must be installed.

python board.py                                        on this machine's GPUs
python board.py --model tiny-llama --device cpu --gpus 2 --budget 1m   without one, to see it work
tensorboard --logdir runs/board                        shows scalars, and knobs against speed under HParams
"""

from __future__ import annotations

import argparse
import json

import optuna
from torch.utils.tensorboard import SummaryWriter

import autotune


def record(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
    """Write a finished trial: its knobs, and samples per second or 0 if it failed."""
    with SummaryWriter(f"runs/board/trial-{trial.number}") as writer:
        writer.add_text("outcome", json.dumps(trial.user_attrs["outcome"], indent=1))
        writer.add_hparams(trial.params, {"samples_per_second": trial.value or 0.0}, run_name=".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-2-2b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpus", type=int)
    parser.add_argument("--budget", default="15m")
    parser.add_argument("--space", default="default")
    parser.add_argument("--max-trials", type=int)
    autotune.tune(study="board", callbacks=[record], **vars(parser.parse_args()))


if __name__ == "__main__":
    main()
