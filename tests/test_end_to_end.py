"""`autotune run` as a user runs it: a process of its own, real ranks, real out-of-memory, real interruptions."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.problem.outcome import Kind
from autotune.search.study import VERIFY, StudyStore

AUTOTUNE = [sys.executable, "-m", "autotune.cli"]
SPACE = """
knobs:
  zero_stage: [0, 2]
  train_micro_batch_size_per_gpu: [1, 2, 4, 256]
  offload_optimizer: [none, cpu]
  reduce_bucket_size: [500000]
"""
RUN = [
    *AUTOTUNE,
    "run",
    "--model",
    "tiny-llama",
    "--device",
    "cpu",
    "--gpus",
    "2",
    "--seq-len",
    "32",
    "--space",
    "s.yaml",
    "--memory-cap",
    "700MiB",
    "--study",
    "s",
    "--exhaustive",
    "--yes",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one study is run, killed, resumed, interrupted and exported: the tests below follow each other."""
    folder = tmp_path_factory.mktemp("end-to-end")
    (folder / "s.yaml").write_text(SPACE)
    return folder


def wait_for_trials(folder: Path, count: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        try:
            done = [r for r in StudyStore.load("s", runs=folder / "runs").records() if r.outcome]
        except Exception:
            done = []
        if len(done) >= count:
            return
        time.sleep(0.2)
    raise AssertionError("no trials in two minutes")


def leftovers(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if process.info["cwd"] == str(folder) and "autotune" in " ".join(process.info["cmdline"] or []):
            found.append(" ".join(process.info["cmdline"]))
    return found


def test_after_sigkill_nothing_finished_is_lost(folder: Path) -> None:
    process = subprocess.Popen(
        [*RUN, "--budget", "5m"], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_for_trials(folder, 2)
    process.kill()
    process.wait()
    time.sleep(1.5)
    assert leftovers(folder) == [], "a killed tuner leaves no orphan"
    store = StudyStore.load("s", runs=folder / "runs")
    assert sum(1 for record in store.records() if record.outcome) >= 2
    assert store.calls()[0].used_seconds > 0


def test_ctrl_c_exports_the_best_so_far_and_exits_130(folder: Path) -> None:
    before = len(StudyStore.load("s", runs=folder / "runs").records())
    process = subprocess.Popen(
        [*RUN, "--budget", "5m"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_trials(folder, before + 1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "goes on" in output
    assert "Traceback" not in output
    assert leftovers(folder) == []
    json.loads((folder / "runs/s/s.json").read_text())
    meta = json.loads((folder / "runs/s/s.meta.json").read_text())
    assert meta["verified"] is False


def test_resumed_it_ends_with_a_verified_winner(folder: Path) -> None:
    done = subprocess.run([*RUN, "--budget", "150s", "--json"], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verified"] is True
    assert report["used_seconds"] <= 152
    store = StudyStore.load("s", runs=folder / "runs")
    records = [record for record in store.records() if record.outcome]
    kinds = {record.outcome.kind for record in records if record.outcome}
    assert Kind.OOM_DEVICE in kinds, "256 sequences do not fit into 700 MiB"
    searched = [
        r.candidate
        for r in records
        if r.role != VERIFY and r.outcome and r.outcome.kind.says_something_of_the_candidate
    ]
    assert len(set(searched)) == len(searched), "nothing is measured twice"
    assert store.winner is not None
    assert store.winner.role == VERIFY
    assert len(store.calls()) == 3


def test_the_exported_config_trains_under_plain_deepspeed(folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(
        "import json, sys, torch, deepspeed\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(64, 64)\n"
        "config = json.load(open(sys.argv[1]))\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        "if 'offload_optimizer' in config.get('zero_optimization', {}):\n"
        "    from deepspeed.ops.adam import DeepSpeedCPUAdam\n"
        "    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)\n"
        "engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)\n"
        "losses = []\n"
        "for _ in range(4 * config['gradient_accumulation_steps']):\n"
        "    loss = engine(torch.ones(config['train_micro_batch_size_per_gpu'], 64)).square().mean()\n"
        "    engine.backward(loss); engine.step(); losses.append(loss.item())\n"
        "assert losses[-1] < losses[0] and type(engine).__name__ == 'DeepSpeedEngine'\n"
        "assert engine.zero_optimization_stage() == config.get('zero_optimization', {}).get('stage', 0)\n"
    )
    torchrun(folder, "train.py", "runs/s/s.json")


def torchrun(folder: Path, *words: str) -> str:
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_training_arguments_train_under_trainer(folder: Path) -> None:
    subprocess.run([*AUTOTUNE, "export", "s", "--format", "hf", "--out", "hf.json"], cwd=folder, check=True)
    (folder / "trainer.py").write_text(
        "import json, sys, torch\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments\n"
        "values = json.load(open(sys.argv[1]))\n"
        "arguments = TrainingArguments(output_dir='out', max_steps=3, report_to=[], save_strategy='no', **values)\n"
        "config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)\n"
        "rows = [{'input_ids': torch.arange(8), 'labels': torch.arange(8)} for _ in range(4096)]\n"
        "trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)\n"
        "result = trainer.train()\n"
        "assert type(trainer.model_wrapped).__name__ == 'DeepSpeedEngine', type(trainer.model_wrapped)\n"
        "assert trainer.model_wrapped.zero_optimization_stage() == values['deepspeed'].get('zero_optimization', {}).get('stage', 0)\n"
        "assert result.global_step == 3\n"
    )
    torchrun(folder, "trainer.py", "hf.json")


def test_the_accelerate_config_trains_under_accelerate_launch(folder: Path) -> None:
    subprocess.run([*AUTOTUNE, "export", "s", "--format", "accelerate", "--out", "acc.yaml"], cwd=folder, check=True)
    (folder / "acc.py").write_text(
        "import torch\n"
        "from accelerate import Accelerator\n"
        "accelerator = Accelerator()\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
        "if 'offload_optimizer' in accelerator.state.deepspeed_plugin.deepspeed_config.get('zero_optimization', {}):\n"
        "    from deepspeed.ops.adam import DeepSpeedCPUAdam\n"
        "    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-3)\n"
        "size = accelerator.state.deepspeed_plugin.deepspeed_config['train_micro_batch_size_per_gpu']\n"
        "data = torch.utils.data.DataLoader(torch.ones(64 * size, 8), batch_size=size)\n"
        "model, optimizer, data = accelerator.prepare(model, optimizer, data)\n"
        "assert type(model).__name__ == 'DeepSpeedEngine', type(model)\n"
        "for batch in data:\n"
        "    with accelerator.accumulate(model):\n"
        "        accelerator.backward(model(batch).square().mean()); optimizer.step(); optimizer.zero_grad()\n"
        "print('trained')\n"
    )
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", "acc.yaml", "acc.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained" in done.stdout


def test_when_nothing_fits_it_says_what_came_closest(folder: Path) -> None:
    (folder / "big.yaml").write_text("knobs:\n  zero_stage: [0]\n  train_micro_batch_size_per_gpu: [512]\n")
    command = [
        *AUTOTUNE,
        "run",
        "--model",
        "tiny-llama",
        "--device",
        "cpu",
        "--gpus",
        "1",
        "--seq-len",
        "64",
        "--space",
        "big.yaml",
        "--memory-cap",
        "600MiB",
        "--study",
        "big",
        "--budget",
        "60s",
        "--yes",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "closest: " in done.stderr
    assert "short of at least" in done.stderr
    assert "micro-batch 512 -> 256" in done.stderr


def test_a_model_that_fails_by_itself_stops_the_study(folder: Path) -> None:
    (folder / "bad").mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 7,
        "num_hidden_layers": 1,
        "vocab_size": 50,
        "intermediate_size": 64,
        "num_key_value_heads": 3,
        "max_position_embeddings": 64,
    }
    (folder / "bad/config.json").write_text(json.dumps(config))
    command = [
        *AUTOTUNE,
        "run",
        "--model",
        "./bad",
        "--device",
        "cpu",
        "--gpus",
        "1",
        "--seq-len",
        "16",
        "--budget",
        "60s",
        "--study",
        "bad",
        "--yes",
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "fails by itself" in done.stderr
    log = re.search(r"traceback in (\S+)\)", done.stderr)
    assert log is not None
    assert "Traceback" in (folder / log[1]).read_text()


def test_another_job_under_the_same_name_is_refused(folder: Path) -> None:
    done = subprocess.run(
        [*RUN, "--budget", "60s", "--precision", "bf16"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "precision" in done.stderr
    assert "--force" in done.stderr
