"""What is printed and exported about a winner trains the same as its trial: every form is followed, and its trace compared."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.problem.training_trace import TrainingTrace
from autotune.recovery import supervisor
from autotune.results.console import train_with, usage_lines
from autotune.results.export import training_arguments, write_export
from autotune.script.profile import job_of
from autotune.search.certificate import Verdict, compare
from autotune.search.study import StudyStore
from tests.cli_call import call
from tests.conftest import Scripts, free_port, make_candidate, make_job
from tests.plain_training import AT_THEIR_END, traced

WINNER = make_candidate(2, 4, 3)
IN_CODE = """
import argparse, json, pathlib
import deepspeed, torch
p = argparse.ArgumentParser()
p.add_argument("--batch_size", type=int, default=2)
p.add_argument("--update_freq", type=int, default=2)
p.add_argument("--lr", type=float, default=1e-3)
args = p.parse_args()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
own = {"train_micro_batch_size_per_gpu": args.batch_size, "gradient_accumulation_steps": args.update_freq,
       "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000, "allgather_bucket_size": 500000},
       "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
CONFIG = own  # its own config
data = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(data)
engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=CONFIG)
world = torch.distributed.get_world_size()
sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
for at, (x,) in enumerate(loader):
    if at >= 20 * args.update_freq:
        break
    engine.backward((engine(x) - x).square().mean())
    engine.step()
"""
TRAINER = """
import json
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed
set_seed(0)
ARGUMENTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True, "deepspeed": {
    "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "train_batch_size": "auto"}}
args = TrainingArguments("out", max_steps=40, report_to=[], save_strategy="no", learning_rate=1e-3, **ARGUMENTS)
rows = torch.randint(0, 64, (2048, 16), generator=torch.Generator().manual_seed(1))
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
                                                      num_hidden_layers=1, num_attention_heads=4))
Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()
"""

ACCELERATED = """
import argparse
import torch
from accelerate import Accelerator, PartialState
p = argparse.ArgumentParser()
p.add_argument("--batch_size", type=int, default=2)
p.add_argument("--lr", type=float, default=1e-3)
args = p.parse_args()
PartialState(cpu=True)  # as Trainer does: otherwise accelerate 1.15 assumes a single process
accelerator = Accelerator()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
rows = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=args.batch_size)
net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=args.lr), loader)
for at, (x,) in enumerate(loader):
    if at >= 40:
        break
    with accelerator.accumulate(net):
        accelerator.backward((net(x) - x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
OWN = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def follow(folder: Path, name: str) -> None:
    """Put the winner's config where the script has its own, as its user would."""
    source = folder / "train.py"
    text = source.read_text()
    if name == "in_code":
        text = text.replace("CONFIG = own", "CONFIG = json.loads(pathlib.Path('best.json').read_text())")
    else:
        head, _, rest = text.partition("ARGUMENTS = ")
        tail = rest.partition("\nargs = ")[2]
        text = f"{head}ARGUMENTS = json.load(open('best.training_arguments.json'))\nargs = {tail}"
    source.write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in_code", "trainer"])
def test_a_config_that_is_put_into_the_code_trains_as_its_trial(scripts: Scripts, tmp_path: Path, name: str) -> None:
    (tmp_path / "train.py").write_text(IN_CODE if name == "in_code" else TRAINER)
    found = scripts.probe(["train.py", *(["--lr", "0.001"] if name == "in_code" else [])], tmp_path)
    assert found.script.profile.batch_note == ""
    outcome = scripts.measure(found, WINNER)
    assert outcome.ok, outcome
    assert outcome.trace is not None
    job = job_of(found.script, scripts.hardware, None)
    (tmp_path / "best.json").write_text(json.dumps(WINNER.ds_config(job)))
    (tmp_path / "best.training_arguments.json").write_text(json.dumps(training_arguments(WINNER, job, "cpu")))
    told = train_with(WINNER, job, "s", tmp_path / "best.json", 1)
    follow(tmp_path, name)
    words = shlex.split(told.commands[1][1])
    assert ("--batch_size" in words) is (name == "in_code")
    if name == "trainer":
        assert (
            "with per_device_train_batch_size=4, gradient_accumulation_steps=3 in its TrainingArguments"
            in told.hints[0]
        )
    at = words.index("torchrun")
    variables = dict(word.split("=", 1) for word in words[:at])
    plain = traced(["torchrun", "--master-port", str(free_port()), *words[at + 1 :]], tmp_path, variables)
    certificate = compare(outcome.trace, WINNER, plain, WINNER)
    assert certificate.verdict is Verdict.SAME, certificate


BY_FLAGS = """
import torch
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments
(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 96
Trainer(AutoModelForCausalLM.from_config(LlamaConfig(**sizes)), args, train_dataset=rows).train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("style", ["deepspeed", "accelerate", "fsdp", "hf", "sbatch"])
def test_an_export_of_a_named_model_trains_in_a_trainer_script_as_printed(style: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BY_FLAGS)
    job = make_job(2)
    winner, hardware = SimpleNamespace(candidate=WINNER), SimpleNamespace(device="cpu", nodes=1)
    store: Any = SimpleNamespace(job=job, hardware=hardware, winner=winner)
    meta = {"your_training_must": [], "study": "s", "environment": {}}
    files = write_export(WINNER, job, tmp_path / "w", meta, style=style, device="cpu")
    printed = usage_lines(style, files, store, None)[-1].rpartition(": ")[2]
    own = ["train.py", "--output_dir", "out", "--max_steps", "2", "--report_to", "none"]
    words = shlex.split(printed.replace("YOUR_SCRIPT.py ITS_ARGUMENTS", shlex.join(own)))
    if style == "hf":
        made = printed.removesuffix(" in your script").replace("output_dir=…", "output_dir='out', max_steps=2")
        source = BY_FLAGS.replace(
            "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()", f"args = {made}"
        )
        (tmp_path / "train.py").write_text(f"import json{source}")
        words = ["deepspeed", "train.py"]
    if style in ("deepspeed", "hf"):  # its launcher starts ranks on GPUs only
        words = ["torchrun", "--master-port", str(free_port()), "--nproc-per-node", "2", *words[1:]]
    elif style != "sbatch":
        words[2:2] = ["--main_process_port", str(free_port())]
    (tmp_path / "srun").write_text('#!/bin/sh\nexec "$@"\n')  # Slurm with one node
    (tmp_path / "srun").chmod(0o755)
    path = f"PATH={tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    words[0] = words[0].replace("sbatch", "bash")
    done = subprocess.run(
        ["env", path, f"PYTHONPATH={AT_THEIR_END}", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_exported_accelerate_config_and_launch_train_as_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The winner of a real study, by its export's own line, and by `autotune launch`, whose supervisor merges the trace."""
    (tmp_path / "train.py").write_text(ACCELERATED)
    (tmp_path / "ds.json").write_text(json.dumps(OWN))
    monkeypatch.chdir(tmp_path)
    options = ("--device", "cpu", "--gpus", "2", "--budget", "60s", "--max-trials", "3", "--ds-config", "ds.json")
    code, said, err = call(monkeypatch, capsys, "run", *options, "--study", "s", "--", "train.py", "--lr", "0.001")
    assert code == 0, err
    assert "trains the same" in call(monkeypatch, capsys, "show", "s")[1]
    code, said, err = call(monkeypatch, capsys, "export", "s", "--format", "accelerate", "--out", "best.yaml")
    assert code == 0, err
    words = shlex.split(next(line for line in said.splitlines() if line.startswith("use: ")).removeprefix("use: "))
    assert words[:2] == ["accelerate", "launch"]
    store = StudyStore.load("s", None)
    trace, winner = store.winner.outcome.trace, store.winner.candidate
    assert trace is not None
    plain = traced(["accelerate", "launch", "--main_process_port", str(free_port()), *words[2:]], tmp_path)
    certificate = compare(trace, winner, plain, winner)
    assert certificate.verdict is Verdict.SAME, certificate
    launched: list[TrainingTrace | None] = []

    def merged(ranks: Sequence[Mapping[str, Any] | None]) -> TrainingTrace | None:
        launched.append(TrainingTrace.merged(ranks))
        return launched[-1]

    monkeypatch.setattr(supervisor, "TrainingTrace", SimpleNamespace(merged=merged))
    line = dict(train_with(winner, store.job, "s", Path("s.json"), 1).commands)["train with"]
    code, said, err = call(monkeypatch, capsys, *shlex.split(line)[1:])
    assert code == 0, err
    watched = launched[-1]
    assert watched is not None
    certificate = compare(trace, winner, watched, winner)
    assert certificate.verdict is Verdict.SAME, certificate
