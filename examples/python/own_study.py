"""Searches in an Optuna study of its own, with autotune's sampler; here the measurement is a formula.

python own_study.py
"""

from __future__ import annotations

import optuna

import autotune

sampler = autotune.sampler(model="tiny-llama", gpu="l4", gpus=2, seq_len=128, global_batch_size=32)
study = optuna.create_study(direction="maximize", sampler=sampler)


def objective(trial: optuna.Trial) -> float:
    """Return samples per second; an OOM prunes the trial."""
    config = sampler.suggest(trial)  # a DeepSpeed config: train a few steps with it here
    micro_batch, stage = config["train_micro_batch_size_per_gpu"], config["zero_optimization"]["stage"]
    if micro_batch > 8:
        raise optuna.TrialPruned("out of memory")
    trial.set_user_attr("peak_bytes", micro_batch * 2**30)
    return 100.0 * micro_batch / (micro_batch + 2) / (1 + 0.1 * stage)


study.optimize(objective, n_trials=30)
print(f"{study.best_value:.1f} samples/s after {len(study.trials)} trials: {study.best_params}")
