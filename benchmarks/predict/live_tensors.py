"""Measures live tensor bytes of real DeepSpeed on CPU ranks: `python benchmarks/predict/live_tensors.py [--json FILE]`.

What the predictor's memory is held against: two models, one and two ranks, every stage, offload, checkpointing, buckets,
fp32 and bf16; says how far predictions for the installed DeepSpeed are off. With `--own-keys` instead one model under
keys that people set in their own DeepSpeed config, with `--lora` models of which only adapters are trained, with `--knobs` one
under each knob of autotune/problem/knobs.py that CPU ranks can turn, with `--muon` models whose matrices Muon steps, with
`--loss` models whose loss is computed whole and in chunks, with `--images` a vision-language model. Every engine measures two
micro-batches; operators are slowed by counting, so speed is not recorded.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.executors.base import MeasureSpec
from autotune.predict.features import installed_deepspeed
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import CHUNKED, FULL, Job, parse_lora
from autotune.problem.models import CAUSAL, IMAGE_TEXT, SEQ2SEQ, resolve_model
from autotune.util.units import MIB
from autotune.versions import installed
from benchmarks.common import command_line, parse, print_table, write_json
from benchmarks.predict.live_error import live_error
from benchmarks.trials.ranks import opened
from tests.rank.live_rank import live_bytes, live_ranks

MEASURE_SPEC = MeasureSpec(min_steps=2, max_steps=2, min_seconds=0.0, max_seconds=20.0)


def families() -> list[dict[str, Any]]:
    big, small = 5_000_000, 500_000
    found: list[dict[str, Any]] = [{"zero_stage": 0}, {"zero_stage": 0, "activation_checkpointing": True}]
    for stage in (1, 2):
        found += [
            {"zero_stage": stage, "reduce_bucket_size": small, "overlap_comm": False, "contiguous_gradients": True},
            {"zero_stage": stage, "reduce_bucket_size": big, "overlap_comm": True, "contiguous_gradients": True},
            {
                "zero_stage": stage,
                "reduce_bucket_size": big,
                "overlap_comm": False,
                "contiguous_gradients": False,
                "activation_checkpointing": 0.5,
            },
            {"zero_stage": stage, "reduce_bucket_size": small, "overlap_comm": False, "offload_optimizer": "cpu"},
        ]
    for extra in (
        {"reduce_bucket_size": small, "sub_group_size": 10**9},
        {"reduce_bucket_size": big, "sub_group_size": 10**6, "activation_checkpointing": True},
        {"reduce_bucket_size": small, "sub_group_size": 10**6, "offload_optimizer": "cpu"},
        {"reduce_bucket_size": small, "sub_group_size": 10**9, "offload_optimizer": "cpu", "offload_param": "cpu"},
        {"reduce_bucket_size": big, "sub_group_size": 10**9, "contiguous_gradients": False},
    ):
        found.append({"zero_stage": 3, "contiguous_gradients": True, "overlap_comm": False, **extra})
    return found


Config = dict[str, Any]
Tries = list[tuple[int, int, Config]]  # stage, accumulation, knobs
SMALL = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000, "sub_group_size": 1_000_000}
OUT: Config = {"offload_optimizer": "cpu"}
SCATTERED: Config = {"contiguous_gradients": False}


def own_keys() -> list[tuple[Config, Tries]]:
    """Keys of a user's own config, and the stages, accumulations and knobs to try under them."""
    low = {"bf16_master_weights_and_grads": True}
    every: Tries = [(stage, 1, {}) for stage in (1, 2, 3)]
    sums: Tries = [(stage, many, knobs) for stage in (1, 2, 3) for many in (1, 2) for knobs in ({}, SCATTERED)]
    sums += [(1, 2, OUT), (2, 1, OUT), (2, 2, OUT), (3, 2, OUT)]
    split: Tries = [(3, 1, {**OUT, "sub_group_size": size}) for size in (10**5, 10**9)]
    return [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, [(0, 1, {}), (0, 2, {}), (1, 1, {}), (3, 1, {})]),
        ({"optimizer": {"type": "Adagrad", "params": {"lr": 1e-5}}}, [(1, 1, {})]),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, sums),
        ({"communication_data_type": "fp32"}, [(0, 1, {}), *every, (2, 1, SCATTERED), (3, 1, SCATTERED)]),
        ({"bf16": {**low, "bf16_optimizer_states": True}}, every),
        ({"bf16": low}, [(2, 1, OUT), (2, 2, OUT), (3, 1, OUT)]),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, split),
    ]


def measure_own_keys(most: int | None) -> list[dict[str, Any]]:
    rows = []
    for config, tried in own_keys()[:most]:
        job = Job(resolve_model("tiny-llama"), 2, 64, "bf16", base_config=config)
        groups = [
            [
                Candidate.of(
                    {
                        "zero_stage": stage,
                        "train_micro_batch_size_per_gpu": 1,
                        "gradient_accumulation_steps": many,
                        **SMALL,
                        **knobs,
                    }
                )
            ]
            for stage, many, knobs in tried[:most]
        ]
        rows += measured(job, groups, {"base_config": config})
    return rows


EAGER = {  # stage 3 that keeps no parameter for longer than its module runs
    "zero_optimization.stage3_max_reuse_distance": 0,
    "zero_optimization.stage3_max_live_parameters": 0,
    "zero_optimization.stage3_prefetch_bucket_size": 0,
    "zero_optimization.stage3_param_persistence_threshold": 0,
}


def lora_rows() -> list[tuple[Config, int]]:
    """Knobs and micro-batch of adapters' candidates: every stage, checkpointing, offload, and what stage 3 keeps."""
    checkpointed = {"activation_checkpointing": True}
    found: list[tuple[Config, int]]
    found = [({"zero_stage": stage, **more}, 2) for stage in (0, 1, 2, 3) for more in ({}, checkpointed)]
    found += [({"zero_stage": stage, **OUT}, 2) for stage in (1, 2, 3)]
    found += [({"zero_stage": 3, **OUT, "offload_param": "cpu"}, 2)]
    found += [({"zero_stage": 3, **EAGER, **more}, batch) for more in ({}, checkpointed) for batch in (1, 4)]
    return found


def measure_lora(most: int | None) -> list[dict[str, Any]]:
    rows = []
    for model, ranks, precision, lora in (
        ("tiny-llama", 2, "bf16", "r=4"),
        ("tiny-gemma-2", 2, "fp32", "r=8,targets=q_proj+v_proj"),
        ("tiny-llama", 1, "bf16", "r=4,dropout=0.1"),
        ("tiny-llama", 2, "bf16", "r=4,quantize=nf4"),
        ("tiny-llama", 1, "bf16", "r=16,targets=q_proj+v_proj,quantize=nf4"),
    ):
        job = Job(resolve_model(model), ranks, 64, precision, lora=parse_lora(lora))
        groups = [
            [
                Candidate.of(
                    {"train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": 1, **SMALL, **knobs}
                )
            ]
            for knobs, batch in lora_rows()[:most]
            if "quantize" not in lora or knobs["zero_stage"] < 3  # see knobs.py, `whole_if_quantized`
        ]
        rows += measured(job, groups, {"lora": lora})
    return rows


ZERO = "zero_optimization."


def knob_rows() -> list[Config]:
    """Knobs of candidates in bf16: each knob that CPU ranks can turn, at a value that is not DeepSpeed's own."""
    persistence, reuse = ZERO + "stage3_param_persistence_threshold", ZERO + "stage3_max_reuse_distance"
    live, prefetch = ZERO + "stage3_max_live_parameters", ZERO + "stage3_prefetch_bucket_size"
    split = {**OUT, "sub_group_size": 100_000}
    partitioned = {persistence: 0, prefetch: 0}  # else a tiny model's parameters are all kept
    found: list[tuple[int, Config]] = [
        *((3, {**split, ZERO + "offload_optimizer.ratio": ratio}) for ratio in (0.0, 0.3, 0.6)),
        *((3, {persistence: size}) for size in (0, 10_000, 10**7)),
        *((3, {**partitioned, reuse: size}) for size in (0, 1_000_000, 10**9)),
        *((3, {**partitioned, live: size}) for size in (0, 1_000_000)),
        (3, {**partitioned, live: 0, reuse: 0}),
        (3, {**partitioned, reuse: 0, prefetch: 500_000}),
        *((3, {ZERO + key: True}) for key in ("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential")),
        (3, {ZERO + "memory_efficient_linear": False}),
        (3, {"overlap_comm": True}),
        *((stage, {"allgather_bucket_size": size}) for stage in (1, 2) for size in (100_000, 10**9)),
        *((stage, {ZERO + "round_robin_gradients": True, **OUT}) for stage in (1, 2)),
        *((stage, {ZERO + "use_multi_rank_bucket_allreduce": False}) for stage in (1, 2)),
        *((stage, {ZERO + key: False}) for stage in (1, 2) for key in ("reduce_scatter", "allgather_partitions")),
        *((stage, {ZERO + "parameter_alignment": True}) for stage in (1, 2)),
        *((stage, {"communication_data_type": "fp32"}) for stage in (1, 3)),
        *((stage, {"data_types.grad_accum_dtype": "fp32"}) for stage in (1, 2, 3)),
        *((stage, {LOW + "master_weights_and_grads": True, LOW + "optimizer_states": True}) for stage in (1, 2, 3)),
        *((stage, {LOW + "master_weights_and_grads": True, **OUT}) for stage in (2, 3)),
    ]
    return [{"zero_stage": stage, **knobs} for stage, knobs in found]


LOW = "bf16.bf16_"


def measure_knobs(most: int | None) -> list[dict[str, Any]]:
    job = Job(resolve_model("tiny-llama"), 2, 64, "bf16")
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    return measured(job, [[Candidate.of({**SMALL, **batch, **knobs})] for knobs in knob_rows()[:most]], {})


def muon_rows() -> list[Config]:
    """Knobs of Muon's candidates: every stage, with accumulation, offload, and buckets that hold one or all matrices."""
    large = {"reduce_bucket_size": 5_000_000, "sub_group_size": 10**9}
    found: list[tuple[int, Config]] = [(stage, {**SMALL, **more}) for stage in (0, 1, 2, 3) for more in ({}, TWICE)]
    found += [(stage, {**SMALL, **OUT, **more}) for stage in (1, 2, 3) for more in ({}, TWICE)]
    found += [(stage, {**large, **more}) for stage in (1, 2, 3) for more in ({}, OUT)]
    found += [
        (stage, {**SMALL, "data_types.grad_accum_dtype": "fp32", **more}) for stage in (1, 2) for more in ({}, TWICE)
    ]
    found += [(3, {**SMALL, **SCATTERED})]
    return [{"gradient_accumulation_steps": 1, "zero_stage": stage, **knobs} for stage, knobs in found]


TWICE: Config = {"gradient_accumulation_steps": 2}
MUON: Config = {"optimizer": {"type": "Muon", "params": {"lr": 1e-5}}}


def measure_muon(most: int | None) -> list[dict[str, Any]]:
    rows = []
    for model, task, ranks, precision in (
        ("tiny-llama", CAUSAL, 2, "bf16"),
        ("tiny-t5", SEQ2SEQ, 2, "fp32"),  # `shared.weight` is no embedding by its name
        ("tiny-llama", CAUSAL, 1, "bf16"),
    ):
        job = Job(resolve_model(model), ranks, 64, precision, base_config=MUON, task=task)
        tried = [row for row in muon_rows() if precision == "bf16" or "data_types.grad_accum_dtype" not in row]
        groups = [[Candidate.of({"train_micro_batch_size_per_gpu": 1, **knobs})] for knobs in tried[:most]]
        rows += measured(job, groups, {"base_config": MUON, "task": task})
    return rows


def measure_loss(most: int | None) -> list[dict[str, Any]]:
    """Measure the whole and the chunked loss; Liger's needs a GPU."""
    rows = []
    for model, precision in (("tiny-llama", "fp32"), ("tiny-gemma-2", "fp32"), ("tiny-llama", "bf16")):
        found = [
            {"zero_stage": stage, "train_micro_batch_size_per_gpu": batch, "activation_checkpointing": checkpointing}
            for stage, batch, checkpointing in ((0, 4, False), (0, 16, True), (2, 16, False), (3, 16, True))
        ]
        groups = [[Candidate.of({**SMALL, "gradient_accumulation_steps": 1, **knobs})] for knobs in found[:most]]
        for loss in (FULL, CHUNKED):
            rows += measured(Job(resolve_model(model), 2, 64, precision, loss=loss), groups, {"loss": loss})
    return rows


def measure_images(most: int | None) -> list[dict[str, Any]]:
    """Measure a vision-language model at every stage, with and without checkpointing, whole and with adapters."""
    tried: Tries = [(stage, 1, {}) for stage in (0, 1, 2, 3)]  # the second number is the micro-batch
    tried += [(stage, 4, knobs) for stage in (0, 1, 2, 3) for knobs in ({}, {"activation_checkpointing": True})]
    found: list[Config]
    found = [{"zero_stage": stage, "train_micro_batch_size_per_gpu": batch, **knobs} for stage, batch, knobs in tried]
    rows = []
    for precision, lora in (("bf16", ""), ("fp32", ""), ("bf16", "r=4")):
        adapters = parse_lora(lora) if lora else None
        job = Job(resolve_model("tiny-llava"), 2, 64, precision, task=IMAGE_TEXT, lora=adapters)
        groups = [[Candidate.of({**SMALL, "gradient_accumulation_steps": 1, **knobs})] for knobs in found[:most]]
        rows += measured(job, groups, {"task": IMAGE_TEXT, **({"lora": lora} if lora else {})})
    return rows


Rungs = list[tuple[int, int]]  # micro-batch and accumulation


def measure(name: str, ranks: int, precision: str, rungs: Rungs, most_families: int | None) -> list[dict[str, Any]]:
    candidates = [
        [
            Candidate.of({**family, "train_micro_batch_size_per_gpu": mb, "gradient_accumulation_steps": ga})
            for mb, ga in rungs
        ]
        for family in families()[:most_families]
    ]
    return measured(Job(resolve_model(name), ranks, 64, precision), candidates, {})


def measured(job: Job, groups: list[list[Candidate]], also: Config) -> list[dict[str, Any]]:
    """A row for each candidate of groups that share an engine, with what `also` says of them all."""
    rows = []
    every = [c for group in groups for c in group]
    of = {"model": job.model.name, "ranks": job.ranks, "seq_len": job.seq_len, "precision": job.precision, **also}
    with (
        tempfile.TemporaryDirectory() as folder,
        live_ranks(),
        opened(job, detect("cpu", job.ranks), Path(folder), every) as executor,
    ):
        for at, group in enumerate(groups):
            session = executor.session(group[0], str(at))
            for candidate in group:
                outcome = session.measure(candidate, MEASURE_SPEC, 200.0)
                live = live_bytes(outcome.log)
                rows.append({**of, "candidate": candidate.as_dict, "live": live, "why": outcome.reason})
                print(job.model.name, job.ranks, job.precision, candidate, live or outcome.reason, flush=True)
                if not session.alive:
                    break
            session.close()
    return rows


def told(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Writes the rows, and prints how far predictions for the DeepSpeed that ran are off."""
    write_json(path, {"deepspeed": installed()["deepspeed"], "rows": rows})
    errors = {at: live_error(row, installed_deepspeed()) for at, row in enumerate(rows) if row["live"]}
    for at in sorted(errors, key=lambda at: -abs(errors[at]))[:5]:
        row = rows[at]
        config, candidate = row.get("base_config", ""), Candidate.of(row["candidate"])
        print(f"{errors[at]:+.1%}", row["model"], row["ranks"], row["precision"], candidate, config)
    if errors:
        sizes = [abs(error) for error in errors.values()]
        found = f"median {statistics.median(sizes):.2%}, worst {max(sizes):.2%} of {len(sizes)} candidates"
        print(f"predicted for deepspeed {installed()['deepspeed']}: {found}, {len(rows) - len(sizes)} not measured")


SETS = (("tiny-llama", 2, "bf16"), ("tiny-gemma-2", 2, "fp32"), ("tiny-gemma-2", 1, "bf16"), ("tiny-llama", 1, "fp32"))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", help="MODEL,RANKS,PRECISION of one set")
    for option, about in (
        ("--own-keys", "keys of the user's own config, at micro-batch 1"),
        ("--knobs", "each knob that CPU ranks can turn, at micro-batch 1"),
        ("--lora", "adapters only, also of 4-bit weights (needs bitsandbytes)"),
        ("--muon", "Muon at every stage, at micro-batch 1"),
        ("--loss", "the whole loss and the chunked one"),
        ("--images", "a vision-language model, also of which only adapters are trained"),
    ):
        parser.add_argument(option, action="store_true", help=about)
    arguments = parse(parser, only="tiny-llama,2,bf16")
    for chosen, measure_set in (
        (arguments.own_keys, measure_own_keys),
        (arguments.knobs, measure_knobs),
        (arguments.lora, measure_lora),
        (arguments.muon, measure_muon),
        (arguments.loss, measure_loss),
        (arguments.images, measure_images),
    ):
        if chosen:
            told(arguments.json, measure_set(2 if arguments.small else None))
            return
    sets = [s for s in SETS if arguments.only in (None, ",".join(map(str, s)))]
    if not sets:
        parser.error(f"--only {arguments.only}: expected one of {' '.join(','.join(map(str, s)) for s in SETS)}")
    rungs, most = ([(1, 1)], 2) if arguments.small else ([(1, 1), (4, 1), (4, 2)], None)
    rows: list[dict[str, Any]] = []
    for name, ranks, precision in sets:
        rows += measure(name, ranks, precision, rungs, most)
        told(arguments.json, rows)
    counted = [
        {
            "model": name,
            "ranks": ranks,
            "precision": precision,
            "candidates": len(mine := [row for row in rows if (row["model"], row["ranks"]) == (name, ranks)]),
            "measured": sum(1 for row in mine if row["live"]),
            "largest peak MiB": max((max(row["live"].values()) for row in mine if row["live"]), default=0) / MIB,
        }
        for name, ranks, precision in sets
    ]
    print_table("live tensors of real DeepSpeed on CPU ranks", counted)


if __name__ == "__main__":
    main()
