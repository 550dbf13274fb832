"""Records what real DeepSpeed does on CPU ranks: `python benchmarks/search/real_tables.py [NAME…] [--out DIR]`, an hour and
a half.

Every candidate of a small space is trained in fresh ranks as torchrun starts them (`table_ranks.py`), round after round in
another order, without any part of autotune in them; a candidate whose two measurements differ by more than a tenth gets a
third, and the median counts. Memory is the peak that a rank really had; the table's capacity is drawn at a share of those
peaks, and what is above ran out of memory. One candidate of each table is also trained by torchrun itself: `by torchrun` is
its speed over the table's. The tables go to `benchmarks/data/landscapes_real`, those of shares of checkpointed layers to
`landscapes_shares`, and `search.py` replays them. `gain of shares` is the best speed over the best with all layers checkpointed
or none. Tables that are there and were not named are left as they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

import yaml

from autotune.commands.script_probe import StartupDeadline, probe
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.job import Job, Lora, Script
from autotune.problem.models import ModelSpec
from autotune.problem.outcome import OutcomeKind
from autotune.problem.space import load_space
from autotune.script.profile import job_of, unknown_job
from autotune.util.interpreter import OWN
from autotune.util.units import GIB
from benchmarks.common import HERE, command_line, parse, print_table, write_json
from benchmarks.search.replay import Row, load_replay_table, write_replay_table
from benchmarks.trials.ranks import (
    TRAINING_SECONDS,
    opened,
    plain_environment,
    plain_words,
    run_limited,
    torchrun_words,
)

AGREE = 1.1  # two measurements of one candidate
ENDLESS = 10**6  # steps: a rank ends once it was timed
PROBE_SECONDS = 300.0

STAGES: dict[str, Any] = {"zero_stage": [0, 1, 2, 3]}
BUCKETS: dict[str, Any] = {"reduce_bucket_size": [200_000, 5_000_000], "overlap_comm": [False, True]}
OFFLOAD: dict[str, Any] = {"offload_optimizer": ["none", "cpu"]}
CHECKPOINTING: dict[str, Any] = {"activation_checkpointing": [False, True]}
SHARES: dict[str, Any] = {"activation_checkpointing": [False, 0.25, 0.5, 0.75, True], "zero_stage": [1, 2]}


def llama(hidden: int, layers: int, **more: int) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return {"model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 512, **shape, **heads, **more}


def bert(hidden: int, layers: int) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    return {"model_type": "bert", "vocab_size": 8192, "max_position_embeddings": 512, "num_attention_heads": 4, **shape}


GEMMA = {
    "model_type": "gemma2",
    "vocab_size": 32_000,
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 48,
    "sliding_window": 256,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 8192, "n_positions": 256, "n_embd": 256, "n_layer": 4, "n_head": 4}
T5 = {
    "model_type": "t5",
    "vocab_size": 4096,
    "d_model": 192,
    "d_kv": 48,
    "d_ff": 768,
    "num_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
MIXTRAL = {**llama(192, 3), "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Recipe:
    """One table: what is trained, and the space all of which is measured."""

    name: str
    model: dict[str, Any]  # a configuration; empty for a script of benchmarks/search/contest
    ranks: int
    knobs: dict[str, Any]
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    rows_per_rank: int = 8  # micro-batch x accumulation
    seq_len: int = 64
    precision: str = "fp32"
    task: str = "causal-lm"
    lora: int | None = None
    fits: float = 0.8  # share of candidates at or under the capacity
    config: dict[str, Any] = field(default_factory=dict)  # of a script
    folder: str = "landscapes_real"  # of benchmarks/data

    @property
    def batch(self) -> int:
        return self.rows_per_rank * self.ranks

    def space_text(self) -> str:
        sizes = {"train_micro_batch_size_per_gpu": list(self.micro_batches)}
        steps = {"gradient_accumulation_steps": sorted({self.rows_per_rank // size for size in self.micro_batches})}
        return yaml.safe_dump({"name": self.name, "knobs": {**STAGES, **sizes, **steps, **self.knobs}}, sort_keys=False)


def with_shares(name: str, model: dict[str, Any], ranks: int) -> Recipe:
    """A table whose capacity lies between the peaks of all layers checkpointed and of none."""
    return Recipe(name, model, ranks, SHARES, (1, 2), 2, seq_len=256, fits=0.6, folder="landscapes_shares")


ADAMW = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
PLAIN = {"optimizer": ADAMW, "zero_allow_untested_optimizer": True}
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("llama-wide_2xcpu", llama(384, 2), 2, BUCKETS, (1, 2, 8)),
        Recipe("llama-deep_1xcpu", llama(128, 10), 1, CHECKPOINTING, (1, 2, 4, 8, 16), 16, fits=0.9),
        Recipe("llama-bf16_2xcpu", llama(256, 4), 2, OFFLOAD | CHECKPOINTING, (1, 4, 8), precision="bf16"),
        Recipe("gemma_2xcpu", GEMMA, 2, CHECKPOINTING, (1, 4, 8), fits=0.6),
        Recipe("gemma-bf16_1xcpu", GEMMA, 1, OFFLOAD, (1, 2, 4, 8), precision="bf16", fits=0.7),
        Recipe("gpt2_2xcpu", GPT2, 2, OFFLOAD, (1, 4, 16), 16, seq_len=96, fits=0.7),
        Recipe("bert_1xcpu", bert(256, 4), 1, CHECKPOINTING, (2, 4, 8), task="classification", fits=1.0),
        Recipe("lora_2xcpu", llama(256, 6), 2, CHECKPOINTING, (1, 4, 16), 16, lora=8),
        Recipe("lora-bf16_1xcpu", llama(256, 6), 1, CHECKPOINTING, (1, 4, 16), 16, precision="bf16", lora=8, fits=0.6),
        Recipe("t5_2xcpu", T5, 2, OFFLOAD, (1, 4, 16), 16, task="seq2seq", fits=0.9),
        Recipe("mixtral_1xcpu", MIXTRAL, 1, OFFLOAD, (1, 4, 8), seq_len=48, fits=0.8),
        Recipe("images-script_1xcpu", {}, 1, OFFLOAD, (1, 2, 4, 8, 16), 16, config=PLAIN),
        Recipe("encoder-script_2xcpu", {}, 2, OFFLOAD, (1, 4, 16), 16, config=PLAIN, fits=0.7),
        with_shares("llama-shares_1xcpu", llama(256, 12), 1),
        with_shares("gpt2-shares_2xcpu", {**GPT2, "n_layer": 8}, 2),
        with_shares("gemma-shares_2xcpu", {**GEMMA, "num_hidden_layers": 8}, 2),
    )
}


# -- what is trained -----------------------------------------------------------------------------------------------------


def job_for(recipe: Recipe, folder: Path) -> Job:
    """The Job; a script's after its first run has shown what it is."""
    if recipe.model:
        model = ModelSpec(recipe.name.split("_")[0], recipe.model, "made here")
        lora = Lora(recipe.lora) if recipe.lora else None
        more: dict[str, Any] = {"lora": lora, "task": recipe.task}
        return Job(model, recipe.ranks, recipe.seq_len, recipe.precision, global_batch_size=recipe.batch, **more)
    own = folder / "own.json"
    micro = recipe.micro_batches[1]
    batch = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": recipe.rows_per_rank // micro}
    own.write_text(json.dumps({**recipe.config, **batch, "zero_optimization": {"stage": 0}}))
    hardware = detect("cpu", recipe.ranks)
    script = Script(tuple(script_words(recipe, own)), str(folder))
    with opened(unknown_job(script, hardware), hardware, folder, [Candidate(())]) as executor:
        seen = probe(
            executor, script, folder, StartupDeadline(PROBE_SECONDS), lambda text: print(text, file=sys.stderr)
        )
    return job_of(seen.script, hardware, recipe.batch)


def script_words(recipe: Recipe, config: Path) -> list[str]:
    script = HERE / "search" / "contest" / f"{recipe.name.split('-script')[0]}.py"
    return [str(script), "--deepspeed", "--deepspeed_config", str(config)]


def words(recipe: Recipe, job: Job, candidate: Candidate, folder: Path, steps: int = ENDLESS) -> list[str]:
    """A plain training with the candidate: its script and arguments."""
    config = candidate.ds_config(job)
    if job.script is not None:
        (folder / "ds.json").write_text(json.dumps(config))
        return [*script_words(recipe, folder / "ds.json"), "--steps", str(steps)]
    adapters = ["--lora", str(recipe.lora)] if recipe.lora else []
    checkpointing = ["--checkpointing", str(candidate.checkpointed_share)]
    return [*plain_words(job, config, steps, folder), "--task", recipe.task, *adapters, *checkpointing]


# -- measured ------------------------------------------------------------------------------------------------------------


class Ranks:
    """The process that forks ranks, for trainings of one number of ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        env = {**plain_environment("cpu", ranks), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(HERE / "search" / "table_ranks.py")]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process: Any = subprocess.Popen(command, env=env, text=True, **pipes)

    def train(self, argv: list[str]) -> dict[str, float]:
        """
        Raises:
            RuntimeError: a rank failed; with what it said.
        """
        self._process.stdin.write(json.dumps({"argv": argv, "ranks": self.ranks}) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        if "failed" in found:
            raise RuntimeError(found["failed"])
        return dict(found)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


Measured = dict[Candidate, list[dict[str, float]]]


def measure(recipe: Recipe, job: Job, candidates: list[Candidate], folder: Path, rounds: int) -> Measured:
    """Every candidate `rounds` times, those whose measurements disagree once more; candidates that fail are left out."""
    found: Measured = {candidate: [] for candidate in candidates}
    failed: dict[Candidate, str] = {}
    ranks = Ranks(recipe.ranks)
    for at in range(rounds + 1):
        order = [c for c in candidates if c not in failed and (at < rounds or spread(found[c]) > AGREE)]
        random.Random(at).shuffle(order)
        for candidate in order:
            try:
                found[candidate].append(ranks.train(words(recipe, job, candidate, folder)))
            except RuntimeError as error:
                failed[candidate] = str(error)
                print(f"{recipe.name}: {candidate}: {error}", file=sys.stderr, flush=True)
    ranks.close()
    if len(failed) == len(candidates):
        raise SystemExit(f"{recipe.name}: no candidate trains; the last said: {list(failed.values())[-1]}")
    return {candidate: times for candidate, times in found.items() if candidate not in failed}


def spread(times: list[dict[str, float]]) -> float:
    """The slowest of a candidate's measurements over the fastest."""
    steps = [one["step_seconds"] for one in times]
    return max(steps) / min(steps)


def middle(times: list[dict[str, float]], what: str) -> float:
    return statistics.median(one[what] for one in times)


def by_torchrun(recipe: Recipe, job: Job, candidate: Candidate, folder: Path, steps: int) -> float:
    """Step seconds of a training that torchrun itself starts; of a script, by the clock of `timed.py`."""
    log = folder / "steps.log"
    argv = [str(HERE / "trials" / "timed.py"), str(log), *words(recipe, job, candidate, folder, steps)]
    env = {**plain_environment("cpu", recipe.ranks), "HF_HUB_OFFLINE": "1"}
    done = run_limited([*torchrun_words(recipe.ranks), *argv], TRAINING_SECONDS, env=env)
    if not log.exists():
        raise RuntimeError(done.stderr[-2000:])
    ends: list[float] = [json.loads(line)["end"] for line in log.read_text().splitlines()]
    return statistics.median(b - a for a, b in itertools.pairwise(ends[3:]))


def capacity_gib(peaks: list[float], fits: float) -> float:
    """Where memory ends: at most this share of the ascending peaks fits. It lies in the widest gap of two of them near there,
    since a per cent of a peak is noise."""
    if fits == 1 or len(peaks) == 1:
        return 1.5 * peaks[-1]
    most = int(fits * len(peaks)) - 1
    least = max(0, most - len(peaks) // 4)
    at = max(range(least, most + 1), key=lambda at: peaks[at + 1] / peaks[at])
    return math.sqrt(peaks[at] * peaks[at + 1])


def table_rows(found: Measured, fits: float) -> tuple[float, dict[Candidate, Row]]:
    """(the capacity in GiB, the table's rows)."""
    capacity = capacity_gib(sorted(middle(times, "data_bytes") / GIB for times in found.values()), fits)
    rows = {}
    for candidate, times in found.items():
        peak, startup = middle(times, "data_bytes") / GIB, middle(times, "startup_seconds")
        ok = peak <= capacity
        step = middle(times, "step_seconds") if ok else None
        rows[candidate] = Row(peak, step, startup, OutcomeKind.OK if ok else OutcomeKind.OOM_DEVICE)
    return capacity, rows


def record(recipe: Recipe, out: Path, rounds: int, most: int | None, steps: int) -> dict[str, Any]:
    """Writes one table; a row of what it holds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "space.yaml").write_text(recipe.space_text())
        job = job_for(recipe, folder)
        candidates = load_space(str(folder / "space.yaml")).candidates(job)[:most]
        found = measure(recipe, job, candidates, folder, rounds)
        capacity_gib, rows = table_rows(found, recipe.fits)
        best = min((c for c in rows if rows[c].step_seconds), key=lambda c: middle(found[c], "step_seconds"))
        plain = middle(found[best], "step_seconds") / by_torchrun(recipe, job, best, folder, steps)
    hardware = detect("cpu", recipe.ranks)
    if job.script is not None:  # where it lay is of no use to whoever searches the table
        job = dataclasses.replace(job, script=dataclasses.replace(job.script, argv=(f"{job.script.name}.py",), cwd="."))
    disagreement = statistics.median(spread(times) for times in found.values())
    facts = {
        "model": job.model.name,
        "seq_len": job.seq_len,
        "precision": job.precision,
        "global_batch_size": job.global_batch_size,
        "device": "cpu",
        "gpu": hardware.name,
        "gpu_memory_gib": round(capacity_gib, 5),
        "n_gpus": recipe.ranks,
        "host_memory_gib": hardware.host_memory_bytes / GIB,
        "job": job.to_json(),
        "recorded_from": "plain DeepSpeed in ranks as torchrun starts them (benchmarks/search/real_tables.py)",
        "measurements": sum(map(len, found.values())),
        "slowest over fastest of a candidate, median": round(disagreement, 4),
        "by torchrun": round(plain, 4),
        "versions": {name: OWN.version(name) for name in ("torch", "deepspeed", "transformers")},
    }
    write_replay_table(out / f"{recipe.name}.csv.gz", facts, rows)
    return described(out / recipe.name)


def described(path: Path) -> dict[str, Any]:
    table = load_replay_table(path)
    kinds = [row.kind for row in table.rows.values()]
    steps = [row.step_seconds for row in table.rows.values() if row.step_seconds]
    whole = [row.step_seconds for c, row in table.rows.items() if row.step_seconds and c.checkpointed_share in (0, 1)]
    return {
        "table": path.name,
        "candidates": len(kinds),
        "fit": kinds.count(OutcomeKind.OK),
        "measurements": table.facts["measurements"],
        "slowest / fastest": max(steps) / min(steps),
        "within 5 %": sum(step <= min(steps) / 0.95 for step in steps),
        "gain of shares": min(whole) / min(steps),
        "measured twice, ratio": table.facts["slowest over fastest of a candidate, median"],
        "by torchrun": table.facts["by torchrun"],
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--candidates", type=int, help="the first so many of each space")
    parser.add_argument(
        "--steps", type=int, default=40, help="of the training by torchrun that a table is checked with"
    )
    parser.add_argument("--described", action="store_true", help="say what is recorded, and measure nothing")
    arguments = parse(parser, rounds=1, candidates=1, steps=6)
    if unknown := set(arguments.names) - RECIPES.keys():
        parser.error(f"no table {', '.join(sorted(unknown))}; expected some of {', '.join(RECIPES)}")
    names = arguments.names or (["lora-bf16_1xcpu"] if arguments.small else list(RECIPES))
    names = [] if arguments.described else names
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) if arguments.small else arguments.out
        folders = {name: out or HERE / "data" / recipe.folder for name, recipe in RECIPES.items()}
        rows = []
        for name in names:
            rows.append(record(RECIPES[name], folders[name], arguments.rounds, arguments.candidates, arguments.steps))
            print(rows[-1], flush=True)
        others = [folder / name for name, folder in folders.items() if name not in names]
        rows += [described(path) for path in others if path.with_suffix(".json").exists()]
    print_table("recorded from real DeepSpeed on CPU ranks", rows)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
