"""Keyword arguments of the Python API, from the fields of Request.

`python -m autotune.commands.request > autotune/commands/keywords.py` writes this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypedDict


class RunOptions(TypedDict, total=False):
    """Options of `autotune.tune`; None keeps the default."""

    # eager, sdpa, flash_attention_2, flash_attention_3 or flex_attention.
    attention: str | float | PurePath | None
    # Time for this call, verification included: 90s, 30m, 1h30m.
    budget: str | float | PurePath | None
    # Compile the model with DeepSpeed's engine.compile.
    compiled: bool | None
    # auto, cuda or cpu.
    device: str | float | PurePath | None
    # Your DeepSpeed config. Keys that are not tuned are kept.
    ds_config: str | PurePath | None
    # Hosts or slots of the hostfile to leave out.
    exclude: str | float | PurePath | None
    # local, slurm, ray, or replay:TABLE to search a recorded table.
    executor: str | float | PurePath | None
    # Use the whole budget.
    exhaustive: bool | None
    # Environment variable to pass to the machines; repeatable.
    exports: Sequence[str] | None
    # Resume a study of another job or machine.
    force: bool | None
    # Sequences per optimizer step over all ranks, or free for the fastest number; default: the number in
    # --ds-config or in your script.
    global_batch_size: int | str | float | PurePath | None
    # GPUs (or CPU ranks) to use on each machine; default: all.
    gpus: int | None
    # Share of the memory capacity to leave free; default: 5%.
    headroom: str | float | PurePath | None
    # DeepSpeed hostfile (`worker-1 slots=8` a line): machines reached by ssh.
    hostfile: str | PurePath | None
    # Height and width of images in pixels, if the model's configuration has none.
    image_size: int | None
    # Hosts of the hostfile to use, in the syntax of DeepSpeed: worker-1@worker-2:0,1.
    include: str | float | PurePath | None
    # Network interface between the machines; default: detected.
    interface: str | float | PurePath | None
    # fork (ranks from a pre-imported server) or spawn (cold starts).
    isolation: str | float | PurePath | None
    # File with the lengths of your sequences (`512,1000` a line). The winner fits the longest batch.
    lengths: str | PurePath | None
    # LoRA adapters: r=16,targets=all-linear (or q_proj+v_proj),alpha=32.
    lora: str | float | PurePath | None
    # full, chunked (from slices of the vocabulary: no logits as a whole) or liger (its kernel alone).
    loss: str | float | PurePath | None
    # KNOB=--FLAG: flag of your script that sets a knob; repeatable.
    maps: Sequence[str] | None
    # Stop after this many trials of this call.
    max_trials: int | None
    # Device memory that one rank may use, like 24GiB.
    memory_cap: str | float | PurePath | None
    # Name of a shipped model (`autotune models`), folder or config.json, or Hub id.
    model: str | float | PurePath | None
    # Do not start from the results of the gallery.
    no_gallery: bool | None
    # Do not measure DDP and FSDP2 without DeepSpeed for comparison.
    no_references: bool | None
    # Machines to use, of those in the hostfile, in Slurm's allocation or in Ray's cluster. If there are none,
    # this machine is tuned as one of so many equal ones.
    nodes: int | None
    # adamw, adam, fused_adam, lion, sgd, adagrad or muon.
    optimizer: str | float | PurePath | None
    # File for the winner; default: runs/NAME/NAME.json.
    out: str | PurePath | None
    # Pack sequences of --lengths into rows of --seq-len.
    packed: bool | None
    # Candidates to measure at the same time, each on its own --gpus devices.
    parallel: int | None
    # With --parallel: also measure candidates that offload. They share the host's speed.
    parallel_offload: bool | None
    # bf16, fp16 or fp32; default: the best that the device has.
    precision: str | float | PurePath | None
    # Python of your training environment; default: $AUTOTUNE_PYTHON, this Python, or the active environment.
    python: str | float | PurePath | None
    # nf4: keep the base weights of --lora in 4 bits (QLoRA).
    quantize: str | float | PurePath | None
    # Ray cluster, with --executor ray: HOST:PORT; default: $RAY_ADDRESS, or the cluster of this machine.
    ray_address: str | float | PurePath | None
    # Memory of each device to leave to another process, like 20GiB for the rollout engine of RL.
    reserve: str | float | PurePath | None
    # Random seed for the sampler and the data.
    seed: int | None
    # Tokens per sequence, or max; default: 2048 (CPU ranks: 64).
    seq_len: int | str | float | PurePath | None
    # Search space: a file, or a name from `autotune spaces list`.
    space: str | float | PurePath | Mapping[str, Any] | None
    # postgresql://USER:PASSWORD@HOST/DB, mysql://, sqlite:/// or journal:FILE; default: $AUTOTUNE_STORAGE, or
    # a file in runs/NAME. Calls with the same storage and study tune together.
    storage: str | float | PurePath | None
    # Name of the study. The same name resumes it.
    study: str | float | PurePath | None
    # Send this package and the script's folder to machines that do not have them in the same place.
    sync: bool | None
    # causal-lm, masked-lm, classification, token-classification, question-answering, seq2seq or image-text;
    # default: the task of the model's configuration.
    task: str | float | PurePath | None
    # Stop when the expected gain is below this share.
    tolerance: str | float | PurePath | None
    # Record each trial with wandb, mlflow or tensorboard; repeatable.
    track: Sequence[str] | None
    # Run the Python, workload, remote code and variables that a study or table of another user names.
    trust: bool | None
    # Run code of the model's repository.
    trust_remote_code: bool | None
    # Run the script even if this machine cannot protect your files from its writes.
    unprotected: bool | None
    # package.module:function that returns (model, batches). It replaces the model.
    workload: str | float | PurePath | None
    # Pad the script's batches to the longest that it allows.
    worst_case: bool | None
    # Folder of the studies; default: runs.
    runs: str | PurePath | None


class PlanOptions(TypedDict, total=False):
    """Options of `autotune.plan`; None keeps the default."""

    # eager, sdpa, flash_attention_2, flash_attention_3 or flex_attention.
    attention: str | float | PurePath | None
    # Your DeepSpeed config. Keys that are not tuned are kept.
    ds_config: str | PurePath | None
    # Sequences per optimizer step over all ranks, or free for the fastest number; default: the number in
    # --ds-config or in your script.
    global_batch_size: int | str | float | PurePath | None
    # GPU by name, like rtx3090 or a100-80gb; default: the GPU of this machine.
    gpu: str | float | PurePath | None
    # GPUs in each machine, like --nproc-per-node of torchrun.
    gpus: int | None
    # Share of the memory capacity to leave free; default: 5%.
    headroom: str | float | PurePath | None
    # Main memory of each machine, like 1TiB; default for a named GPU: its common cloud machine.
    host_memory: str | float | PurePath | None
    # Height and width of images in pixels, if the model's configuration has none.
    image_size: int | None
    # File with the lengths of your sequences (`512,1000` a line). The winner fits the longest batch.
    lengths: str | PurePath | None
    # LoRA adapters: r=16,targets=all-linear (or q_proj+v_proj),alpha=32.
    lora: str | float | PurePath | None
    # full, chunked (from slices of the vocabulary: no logits as a whole) or liger (its kernel alone).
    loss: str | float | PurePath | None
    # Longest sequence of the model after scaling its positions (rope scaling).
    max_positions: int | None
    # Device memory that one rank may use, like 24GiB.
    memory_cap: str | float | PurePath | None
    # Name of a shipped model (`autotune models`), folder or config.json, or Hub id.
    model: str | float | PurePath | None
    # Machines, each with --gpus GPUs: 2 with --gpus 8 is 16 GPUs.
    nodes: int | None
    # adamw, adam, fused_adam, lion, sgd, adagrad or muon.
    optimizer: str | float | PurePath | None
    # Pack sequences of --lengths into rows of --seq-len.
    packed: bool | None
    # bf16, fp16 or fp32; default: the best that the device has.
    precision: str | float | PurePath | None
    # Price of one GPU in dollars per hour; default: a rough estimate.
    price: float | None
    # Python of your training environment; default: $AUTOTUNE_PYTHON, this Python, or the active environment.
    python: str | float | PurePath | None
    # nf4: keep the base weights of --lora in 4 bits (QLoRA).
    quantize: str | float | PurePath | None
    # Memory of each device to leave to another process, like 20GiB for the rollout engine of RL.
    reserve: str | float | PurePath | None
    # Tokens per sequence, or max; default: 2048 (CPU ranks: 64).
    seq_len: int | str | float | PurePath | None
    # Search space: a file, or a name from `autotune spaces list`.
    space: str | float | PurePath | Mapping[str, Any] | None
    # causal-lm, masked-lm, classification, token-classification, question-answering, seq2seq or image-text;
    # default: the task of the model's configuration.
    task: str | float | PurePath | None
    # Tokens of the whole training, for its hours and cost: 1e9, 2B, 500M, 1T; default: 1B.
    tokens: str | float | PurePath | None
    # Run code of the model's repository.
    trust_remote_code: bool | None
    # package.module:function that returns (model, batches). It replaces the model.
    workload: str | float | PurePath | None
    # Folder of the studies; default: runs.
    runs: str | PurePath | None


class LaunchOptions(TypedDict, total=False):
    """Options of `autotune.launch`; None keeps the default."""

    # Also fall back to ZeRO stage 3. Checkpoints are converted for it.
    convert: bool | None
    # auto, cuda or cpu.
    device: str | float | PurePath | None
    # Your DeepSpeed config. Keys that are not tuned are kept.
    ds_config: str | PurePath | None
    # Hosts or slots of the hostfile to leave out.
    exclude: str | float | PurePath | None
    # local, slurm or ray.
    executor: str | float | PurePath | None
    # Environment variable to pass to the machines; repeatable.
    exports: Sequence[str] | None
    # Sequences per optimizer step over all ranks, or free for the fastest number; default: the number in
    # --ds-config or in your script.
    global_batch_size: int | str | float | PurePath | None
    # GPUs (or CPU ranks) to use on each machine; default: all.
    gpus: int | None
    # A training hangs if no rank computes, reads or writes for this time.
    hang_timeout: str | float | PurePath | None
    # DeepSpeed hostfile (`worker-1 slots=8` a line): machines reached by ssh.
    hostfile: str | PurePath | None
    # Height and width of images in pixels, if the model's configuration has none.
    image_size: int | None
    # Hosts of the hostfile to use, in the syntax of DeepSpeed: worker-1@worker-2:0,1.
    include: str | float | PurePath | None
    # Network interface between the machines; default: detected.
    interface: str | float | PurePath | None
    # KNOB=--FLAG: flag of your script that sets a knob; repeatable.
    maps: Sequence[str] | None
    # Give up after this many restarts without a newer checkpoint.
    max_restarts: int | None
    # Device memory that one rank may use, like 24GiB.
    memory_cap: str | float | PurePath | None
    # Model to plan for. It replaces the study.
    model: str | float | PurePath | None
    # Machines to use, of those in the hostfile, in Slurm's allocation or in Ray's cluster.
    nodes: int | None
    # bf16, fp16 or fp32; default: the best that the device has.
    precision: str | float | PurePath | None
    # Python of your training environment; default: $AUTOTUNE_PYTHON, this Python, or the active environment.
    python: str | float | PurePath | None
    # Ray cluster, with --executor ray: HOST:PORT; default: $RAY_ADDRESS, or the cluster of this machine.
    ray_address: str | float | PurePath | None
    # Tokens per sequence, or max; default: 2048 (CPU ranks: 64).
    seq_len: int | str | float | PurePath | None
    # Search space: a file, or a name from `autotune spaces list`.
    space: str | float | PurePath | Mapping[str, Any] | None
    # postgresql://USER:PASSWORD@HOST/DB, mysql://, sqlite:/// or journal:FILE; default: $AUTOTUNE_STORAGE, or
    # a file in runs/NAME. Calls with the same storage and study tune together.
    storage: str | float | PurePath | None
    # Send this package and the script's folder to machines that do not have them in the same place.
    sync: bool | None
    # causal-lm, masked-lm, classification, token-classification, question-answering, seq2seq or image-text;
    # default: the task of the model's configuration.
    task: str | float | PurePath | None
    # Run the Python, workload, remote code and variables that a study or table of another user names.
    trust: bool | None
    # Folder of the studies; default: runs.
    runs: str | PurePath | None
