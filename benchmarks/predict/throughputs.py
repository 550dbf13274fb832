"""The predictor against throughputs that others published, for benchmarks/predict/predictor.py."""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.predict.calibration import Prior, fit
from autotune.predict.features import columns_of
from autotune.predict.predictor import Predictor, rate_factors
from autotune.predict.step_time import StepWork, seconds_by_part, step_seconds, step_work
from autotune.predict.trace import trace_job, traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.gpu_specs import named_gpu
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.models import ModelSpec, resolve_model
from autotune.util.units import GIB
from benchmarks.common import HERE
from benchmarks.predict.rows import about, at_least, at_most, judged, percent, spearman

DATA = HERE / "data"
INTER_NODE_BYTES = 1600e9 / 8  # 1600 Gbit/s a node: a ring over nodes enters each of them once, over all its links


def mpt(row: dict[str, str]) -> ModelSpec:
    """The decoder of a row: GPT-2's architecture has MPT's shapes and runs through attention without a score matrix."""
    width = int(row["d_model"])
    return ModelSpec(
        row["model"],
        {
            "model_type": "gpt2",
            "n_embd": width,
            "n_inner": 4 * width,
            "n_head": int(row["n_heads"]),
            "n_layer": int(row["n_layers"]),
            "vocab_size": int(row["vocab_size"]),
            "n_positions": int(row["seq_len"]),
            "activation_function": "gelu",
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        "llm-foundry",
    )


@dataclass(frozen=True)
class Run:
    """A published run as the predictor sees it."""

    tokens_a_step: int  # a GPU
    tokens_a_second: float  # a GPU, as published
    predictor: Predictor
    candidate: Candidate
    work: StepWork


GPUS = {"a100_40gb": "a100-40gb", "a100_80gb": "a100-80gb", "h100_80gb": "h100"}  # their names -> ours
FITTED = ("products", "moved", "comm")  # constants of a GPU type: products, other operators, communication


def published_run(row: dict[str, str]) -> Run:
    """FSDP's full sharding moves what ZeRO-3 moves."""
    facts, count = named_gpu(GPUS[row["gpu"]]), int(row["n_gpus"])
    link = facts.link_gb_per_s if count <= 8 else min(facts.link_gb_per_s, INTER_NODE_BYTES / 1e9)
    rates = {**vars(facts), "link_gb_per_s": link}
    memory = int(float(row["gpu_mem_gb"]) * GIB)
    hardware = Hardware("cuda", facts.name, count, memory, None, 2**40, facts.name, headroom=0.0, rates=rates)
    job = Job(mpt(row), count, int(row["seq_len"]), "bf16")
    trace = trace_job(job, loss="fused")  # llm-foundry's default
    micro_batch, accumulation = int(row["micro_batch"]), int(row["grad_accum"])
    candidate = Candidate.of(
        {
            "zero_stage": 3 if row["sharding"] == "FULL_SHARD" else 2,
            "overlap_comm": True,
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "activation_checkpointing": row["act_ckpt"] == "True",
            "reduce_bucket_size": 10**8,
        }
    )
    return Run(
        micro_batch * accumulation * int(row["seq_len"]),
        float(row["tokens_per_s_per_gpu"]),
        Predictor(job, hardware, trace),
        candidate,
        step_work(job, trace, columns_of([candidate], job), "cuda"),
    )


def fitted_tokens(runs: list[Run]) -> tuple[Any, dict[str, float]]:
    """Tokens a second of each run under the constants that fit them best, and these constants."""
    known = rate_factors(runs[0].predictor._time.mean)  # nothing was observed: those before any fit
    measured = np.log([run.tokens_a_second for run in runs])
    columns = [columns_of([run.candidate], run.predictor.job) for run in runs]

    def log_tokens(constants: Any) -> Any:
        """(..., runs) at the logarithms of the fitted constants, (..., 3)."""
        factors = known | {name: np.exp(constants[..., i, None]) for i, name in enumerate(FITTED)}
        steps = [
            step_seconds(seconds_by_part(run.work, c, run.predictor._rates, factors))
            for run, c in zip(runs, columns, strict=True)
        ]
        return np.log([run.tokens_a_step for run in runs]) - np.log(np.concatenate(steps, axis=-1))

    priors = [Prior(float(np.log(known[name][0])), 1.0) for name in FITTED]
    best = fit(priors, lambda constants: log_tokens(constants) - measured, noise=0.1, rounds=15).mean
    return np.exp(log_tokens(best)), dict(zip(FITTED, np.exp(best).round(3).tolist(), strict=True))


def published(most_models: int | None) -> list[dict[str, Any]]:
    """Throughputs that others published; three constants a GPU type are fitted."""
    runs: dict[str, list[Run]] = {}
    rows = list(csv.DictReader((DATA / "fsdp_throughput.csv").open()))
    models = list(dict.fromkeys((row["model"], row["seq_len"]) for row in rows))
    models.sort(key=lambda model: -len({row["gpu"] for row in rows if (row["model"], row["seq_len"]) == model}))
    for row in rows:
        if (row["model"], row["seq_len"]) in models[:most_models]:
            runs.setdefault(row["gpu"], []).append(published_run(row))
    errors, said, true = [], [], []
    for gpu, group in runs.items():
        measured = np.array([run.tokens_a_second for run in group])
        tokens, constants = fitted_tokens(group)
        errors += list(abs(tokens / measured - 1))
        said += list(tokens)
        true += list(measured)
        print(gpu, "median error", percent(float(np.median(abs(tokens / measured - 1)))), "constants", constants)
    every = [run for group in runs.values() for run in group]
    fits = [
        run.predictor.predict(run.candidate).peak_interval[0] <= run.predictor.hardware.capacity_bytes for run in every
    ]
    rate = granite_tokens()
    return [
        *about(
            f"llm-foundry, {len(every)} runs on 8 to 512 GPUs",
            at_most("tokens/s/GPU, median error", statistics.median(errors), 0.1),
            at_least("Spearman", rank := spearman(said, true), 0.95, f"{rank:.4f}"),
            judged("predicted to fit (interval)", sum(fits), f"{sum(fits)} of {len(fits)}", "all", all(fits)),
        ),
        *about(
            "Granite 7B, 4 x A100 80 GB, nothing fitted",
            at_most("tokens/s/GPU against 3094.5", rate / 3094.5 - 1, 0.1, lambda off: f"{rate:.0f} ({percent(off)})"),
        ),
    ]


def granite_tokens() -> float:
    """Tokens a second and GPU as predicted for IBM's published training of Granite 7B."""
    hardware = Hardware("cuda", "a100-80gb", 4, 80 * GIB, None, 2**40, "a100-80gb", headroom=0.0)
    job = Job(resolve_model("llama-2-7b"), 4, 4096, "bf16")
    granite = Candidate.of(
        {
            "zero_stage": 3,
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": 1,
            "activation_checkpointing": True,
            "overlap_comm": True,
        }
    )
    return traced_predictor(job, hardware).predict(granite).samples_per_second * 4096 / 4
