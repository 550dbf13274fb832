"""Scripts that others wrote, as their packages ship them, tuned and trained with on CPU ranks.

`python benchmarks/trials/scripts.py [--only sft,dpo] [--budget 75s] [--turns 30] [--json FILE]`, whose rows of other scripts are
kept

Each script is tuned by `autotune run -- SCRIPT …`. Then three trainings take turns (`benchmarks/trials/inturn.py`): its own
starting config and the exported one by torchrun, without autotune, and a trial of the winner; loops of accelerate's, whose
batch size stands in their code, by `autotune launch`. Last, what autotune measures of a run is compared with the log that
this run writes itself. Models, tokenizer and texts are made here, small and random.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.executors.base import MeasureSpec
from autotune.problem.candidate import Candidate
from autotune.rank.script_rank import WARMUP_STEPS
from autotune.script.script import command
from autotune.search.study import StudyStore
from benchmarks.common import command_line, kept_rows, parse, print_table, write_json
from benchmarks.trials.inturn import (
    LOGS,
    logged,
    ratio,
    samples_per_second,
    step_ends,
    take_turns,
    torchrun,
    under_autotune,
)
from benchmarks.trials.ranks import autotune_run, opened

OWN = Path(__file__).parents[2] / "tests" / "scripts"
RANKS = 2
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}
PLAIN = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}
SPACE = """
knobs:
  zero_stage: [0, 1, 2, 3]
  train_micro_batch_size_per_gpu: {from: 1, to: 64}
  gradient_accumulation_steps: {from: 1, to: 64}
  activation_checkpointing: [false, true]
  offload_optimizer: [none, cpu]
  overlap_comm: [false, true]
  reduce_bucket_size: [1000000]
  sub_group_size: [10000000]
"""
WORDS = [
    "the",
    "tuner",
    "measures",
    "what",
    "people",
    "train",
    "and",
    "says",
    "how",
    "fast",
    "it",
    "runs",
    "on",
    "which",
    "machine",
    "with",
    "much",
    "memory",
    "left",
]


def make_inputs(folder: Path) -> None:
    """A tokenizer, a causal and a classifying model, and texts for each script."""
    make_models(folder)
    make_texts(folder, random.Random(0))
    (folder / "auto.json").write_text(json.dumps(AUTO))
    (folder / "plain.json").write_text(json.dumps(PLAIN))
    (folder / "accelerate.json").write_text(json.dumps({**AUTO, "gradient_accumulation_steps": 1}))
    (folder / "space.yaml").write_text(SPACE)


def make_models(folder: Path) -> None:
    """Each with the tokenizer beside it."""
    from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

    tokenizer = made_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "pad_token_id": 1,
    }
    for name, model in (
        ("causal", LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=2, eos_token_id=3))),
        ("classifier", BertForSequenceClassification(BertConfig(**shape))),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def made_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[PAD]", "[BOS]", "[EOS]"]
    raw.train_from_iterator([" ".join(WORDS)], trainers.WordLevelTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="[UNK]",
        pad_token="[PAD]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        model_max_length=128,
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    )


def make_texts(folder: Path, chosen: random.Random) -> None:
    def text(words: int) -> str:
        return " ".join(chosen.choice(WORDS) for _ in range(words))

    tables: dict[str, list[dict[str, Any]]] = {
        "texts": [{"text": text(chosen.randint(10, 60))} for _ in range(1200)],
        "pairs": [
            {"prompt": text(8), "chosen": text(chosen.randint(8, 24)), "rejected": text(chosen.randint(8, 24))}
            for _ in range(1200)
        ],
    }
    for name, rows in tables.items():
        (folder / name).mkdir()
        (folder / name / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    glue = folder / "nyu-mll" / "glue"
    glue.mkdir(parents=True)
    for split, count in (("train", 6000), ("validation", 200)):
        rows = [{"sentence1": text(12), "sentence2": text(12), "label": at % 2, "idx": at} for at in range(count)]
        (glue / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (glue / "README.md").write_text(
        "---\nconfigs:\n- config_name: mrpc\n  data_files:\n  - split: train\n    path: train.jsonl\n"
        "  - split: validation\n    path: validation.jsonl\n---\n"
    )


def shipped(package: str, path: str) -> str:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / path)


def cases() -> dict[str, tuple[list[str], list[str]]]:
    """Name -> (options of run, the script and its arguments)."""
    trainer = [
        "--deepspeed",
        "auto.json",
        "--per_device_train_batch_size",
        "2",
        "--gradient_accumulation_steps",
        "4",
        "--max_steps",
        "100000",
        "--output_dir",
        "out",
        "--report_to",
        "none",
        "--save_strategy",
        "no",
        "--gradient_checkpointing",
        "False",
        "--use_cpu",
    ]
    trl = [*trainer, "--model_name_or_path", "causal", "--bf16", "False", "--max_length", "64", "--dtype", "float32"]
    sft = [shipped("trl", "scripts/sft.py"), *trl, "--dataset_name", "texts"]
    external = "test_utils/scripts/external_deps/test_peak_memory_usage.py"
    return {
        "trl sft": ([], sft),
        "trl sft LoRA": ([], [*sft, "--use_peft", "--lora_r", "8", "--lora_target_modules", "q_proj", "v_proj"]),
        "trl dpo": ([], [shipped("trl", "scripts/dpo.py"), *trl, "--dataset_name", "pairs"]),
        "trl reward": ([], [shipped("trl", "scripts/reward.py"), *trl, "--dataset_name", "pairs"]),
        "accelerate test_peak_memory_usage": (
            ["--ds-config", "accelerate.json"],
            [
                shipped("accelerate", external),
                "--model_name_or_path",
                "classifier",
                "--n_train",
                "6000",
                "--num_epochs",
                "99",
            ],
        ),
        "plain loop": (
            ["--map", "train_micro_batch_size_per_gpu=--batch_size"],
            [str(OWN / "plain.py"), "--deepspeed_config", "plain.json", "--batch_size", "2", "--steps", "100000"],
        ),
        "Trainer": ([], [str(OWN / "trainer.py"), *trainer]),
        "accelerate loop": ([], [str(OWN / "accelerated.py"), "--config", "accelerate.json", "--steps", "100000"]),
    }


def one(
    name: str, options: list[str], argv: list[str], folder: Path, limits: list[str], turns: int, steps: int
) -> dict[str, Any]:
    study = "".join(c if c.isalnum() else "-" for c in name)
    tuned = autotune_run(
        *["--device", "cpu", "--gpus", str(RANKS), "--space", "space.yaml", "--study", study, *limits],
        *options,
        script=argv,
        cwd=folder,
    )
    if tuned.code:
        return {"script": name, "tuned": f"exit {tuned.code}: {tuned.stderr.strip().splitlines()[-1][:200]}"}
    report = tuned.report
    store = StudyStore.load(str(folder / "runs" / study))
    script, winner = store.job.script, Candidate.of(report["winner"]["candidate"])
    assert script is not None
    exported = str(Path(folder / report["files"][0]).resolve())
    if name.startswith("accelerate"):  # a loader's batch size stands in their code, which no config reaches
        ours = under_autotune("launch", store.job, winner, folder)
    else:
        ours = torchrun("exported", command(script, winner, exported), folder, RANKS)
    own, trial = (
        torchrun("own", argv, folder, RANKS, script.ds_config),
        under_autotune("trial", store.job, winner, folder),
    )
    take_turns([own, ours, trial], turns)
    gain, gain_spread = ratio(ours, own)
    slower, slower_spread = ratio(ours, trial)
    return {
        "script": name,
        "tuned": "verified" if report["verified"] else "measured",
        "winner": str(winner),
        "own samples/s": samples_per_second(own),
        "exported samples/s": samples_per_second(ours),
        "exported / own": gain,
        "exported / own, ±": gain_spread,
        "exported / its trial": slower,
        "exported / its trial, ±": slower_spread,
        "own log / measured, same run": same_run(store, winner, folder, steps),
    }


def same_run(store: StudyStore, winner: Candidate, folder: Path, steps: int) -> float:
    """Speed by the log that a training writes itself, against what autotune measures of that very run."""
    log = folder / LOGS / "same.log"
    log.parent.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    measure_spec = MeasureSpec(min_steps=steps, max_steps=steps, min_seconds=0.0, max_seconds=300.0)
    with (
        opened(logged(store.job, log), store.hardware, folder / "same", [winner], kept=[log.parent]) as executor,
        closing(executor.session(winner, "0")) as session,
    ):
        measured = session.measure(winner, measure_spec, 300.0).measurement
    assert measured is not None
    seconds = [b - a for a, b in itertools.pairwise(step_ends(log)[WARMUP_STEPS - 1 :])]
    return measured.step_seconds / statistics.median(seconds)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", default="", help="comma-separated parts of names")
    parser.add_argument("--budget", default="75s")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--steps", type=int, default=45, help="of the run that is compared with its own log")
    arguments = parse(parser, only="plain loop", budget="5m", turns=2, steps=5)
    limits = ["--budget", arguments.budget, *(["--max-trials", "1"] if arguments.small else [])]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # a name that another folder used is not taken from there
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        make_inputs(folder)
        for case, (options, argv) in cases().items():
            if arguments.only and not any(part in case for part in arguments.only.split(",")):
                continue
            try:
                row = one(case, options, argv, folder, limits, arguments.turns, arguments.steps)
            except RuntimeError as error:
                row = {"script": case, "tuned": f"training failed: {str(error)[-3000:]}"}
            rows.append(row)
            print(json.dumps(row), flush=True)
            # at once, in place of an earlier row of this script: all eight take most of an hour
            write_json(arguments.json, [*kept_rows(arguments.json, "script", [case]), row])
    print_table("scripts of others and ours, two CPU ranks", rows)


if __name__ == "__main__":
    main()
