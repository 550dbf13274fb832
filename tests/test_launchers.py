"""Commands as people type them, in real ranks: measured through their launchers, and trained with the command that is printed."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from autotune.commands.request import Request
from autotune.commands.script_probe import Probe
from autotune.commands.setup import launch_setup
from autotune.problem.candidate import Candidate
from autotune.script.argument_writer import winners_files
from autotune.script.parse_command import read_command
from autotune.script.profile import job_of, own_candidate
from autotune.script.script import command_sets_all, training_command, typed_words, variables_for
from autotune.search.certificate import Verdict, compare
from tests.cli_call import call
from tests.conftest import SCRIPTS, Scripts, free_port, make_candidate
from tests.plain_training import traced, train

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED  # with its plugin's own settings
deepspeed_config:
  gradient_accumulation_steps: 2
  zero_stage: 0  # any other has buckets of 2 GB, which its plugin has no word for
mixed_precision: 'no'
num_machines: 1
num_processes: 2
"""
TRIED = make_candidate(2, 4, 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, and an environment with a made-up framework's command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MADEUP_PORT", str(free_port()))
    shutil.copy(SCRIPTS / "launched.py", tmp_path / "train.py")
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "acc.yaml").write_text(ACCELERATE)
    (tmp_path / "mine.yaml").write_text("# mine\ndeepspeed: ds.json\noutput_dir: out/here\nsteps: 40\n")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "madeup"
    program.write_text(
        f"#!/usr/bin/env python3\nimport sys\nsys.path.append({str(SCRIPTS / 'framework')!r})\n"
        "from madeup.cli import main\nmain()\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def printed(found: Probe, scripts: Scripts, candidate: Candidate, folder: Path) -> list[str]:
    """The command that trains with a candidate, with its files written."""
    config = folder / "best.json"
    config.write_text(json.dumps(candidate.ds_config(job_of(found.script, scripts.hardware, None))))
    for path, text in winners_files(found.script, candidate, config).items():
        path.write_text(text)
    return training_command(found.script, candidate, 2, str(config))


@pytest.mark.main_path
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("MINE=7 torchrun --nproc-per-node 2 --master-port PORT train.py --config ds.json", {"MINE": "7"}),
        ("deepspeed --num_gpus 2 --master_port PORT train.py --config ds.json", {"LOCAL_SIZE": "2"}),
        (
            "accelerate launch --config_file acc.yaml --main_process_port PORT train.py",
            {"ACCELERATE_MIXED_PRECISION": "no"},
        ),
        (
            "accelerate launch --use_deepspeed --deepspeed_config_file ds.json --num_processes 2 "
            "--main_process_port PORT train.py",
            {"ACCELERATE_MIXED_PRECISION": "no"},
        ),
        ("madeup train mine.yaml", {"MINE": "1"}),
    ],
)
def test_a_command_is_tuned_as_it_is_typed(
    scripts: Scripts, folder: Path, monkeypatch: pytest.MonkeyPatch, words: str, told: dict
) -> None:
    command = [str(free_port()) if word == "PORT" else word for word in words.split()]
    found = read_command(command, [])
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    assert found.ranks == (None if "madeup" in words else 2)
    before = {path for path in folder.rglob("*") if "cache" not in path.parts}
    probed = scripts.probe_script(found.script)
    own = own_candidate(probed.script)
    assert (own.stage, own.micro_batch, own.accumulation) == (0 if "acc.yaml" in words else 1, 2, 2)
    assert probed.script.profile.batch_note == ""
    outcome = scripts.measure(probed, TRIED)
    assert outcome.ok, outcome
    assert outcome.measurement.samples_per_second * outcome.measurement.step_seconds == pytest.approx(2 * 4 * 3)
    left = {path for path in folder.rglob("*") if not {"cache", "runs"} & set(path.parts)}
    assert left == before, "nothing is left behind"

    assert command_sets_all(probed.script)
    assert [word for word in typed_words(probed.script) if word not in command] == []
    if probed.script.profile.loader_prepared:  # the printed hint: `with batch_size=4 in its data loader`
        source = folder / "train.py"
        source.write_text(source.read_text().replace("batch_size=2)", "batch_size=4)"))
    plain = traced(printed(probed, scripts, TRIED, folder), folder, variables_for(probed.script, TRIED, 2))
    assert outcome.trace is not None
    certificate = compare(outcome.trace, TRIED, plain, TRIED)
    assert certificate.verdict is Verdict.SAME, "what is printed trains the same as what was measured"
    seen = json.loads((folder / "told.json").read_text())
    assert (seen["stage"], seen["micro_batch"], seen["accumulation"]) == (2, 4, 3)
    assert {**seen["env"], **told, "WORLD_SIZE": "2"} == seen["env"]


@pytest.mark.slow
def test_a_framework_that_starts_its_own_ranks_is_left_to_it(scripts: Scripts, folder: Path) -> None:
    probed = scripts.probe_script(read_command(["madeup", "train", "mine.yaml"], []).script)
    assert probed.script.profile.relaunched == 2
    assert printed(probed, scripts, TRIED, folder) == ["madeup", "train", str(folder / "best.argument.mine.yaml")]
    copy = (folder / "best.argument.mine.yaml").read_text()
    assert copy == f"# mine\ndeepspeed: {folder / 'best.json'}\noutput_dir: out/here\nsteps: 40\n"


def make_model(folder: Path) -> None:
    """A tiny model with its tokenizer, and rows of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: at for at, word in enumerate(["<pad>", "<unk>", "<eos>", *(f"w{n}" for n in range(60))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    rows = [json.dumps({"text": " ".join(f"w{(row * n) % 60}" for n in range(20))}) for row in range(800)]
    (folder / "data/train.jsonl").write_text("\n".join(rows))


TRL = """\
# my fine-tuning
model_name_or_path: model
dataset_name: data  # rows of text
deepspeed: auto.json
per_device_train_batch_size: 2   # of a rank
gradient_accumulation_steps: 2
learning_rate: 1.0e-4
max_steps: STEPS
max_length: 32
output_dir: out
use_cpu: true
bf16: false
report_to: none
"""


@pytest.mark.slow
def test_trl_with_its_arguments_in_a_file(scripts: Scripts, folder: Path) -> None:
    make_model(folder)
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"), "auto")
    config = {**auto, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    (folder / "auto.json").write_text(json.dumps(config))
    (folder / "x.yaml").write_text(TRL.replace("STEPS", "60"))
    probed = scripts.probe_script(read_command(["trl", "sft", "--config", "x.yaml"], []).script)
    own = own_candidate(probed.script)
    assert (own.stage, own.micro_batch, own.accumulation) == (1, 2, 2)
    outcome = scripts.measure(probed, TRIED)
    assert outcome.ok, outcome
    assert not (folder / "out").exists()

    (folder / "x.yaml").write_text(TRL.replace("STEPS", "2"))
    again = read_command(["trl", "sft", "--config", "x.yaml"], []).script
    short = dataclasses.replace(again, profile=probed.script.profile)
    words = printed(Probe(short, None), scripts, TRIED, folder)
    assert words == [
        "trl",
        "sft",
        "--config",
        str(folder / "best.argument.x.yaml"),
        "--use_deepspeed",
        "--num_processes",
        "2",
    ]
    assert yaml.safe_load((folder / "best.argument.x.yaml").read_text())["per_device_train_batch_size"] == 4
    train([*words, "--main_process_port", str(free_port())], folder)
    (state,) = folder.glob("out/checkpoint-2/trainer_state.json")
    assert json.loads(state.read_text())["train_batch_size"] == 4
    ranks = list(folder.glob("out/checkpoint-2/rng_state_*.pth"))
    assert len(ranks) == 2, "both ranks were one training's"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--gpus 2 -- torchrun --nproc-per-node 4 train.py",
            "--gpus 2 contradicts `torchrun --nproc-per-node 4`. Remove one of them, or give the same number.",
        ),
        (
            "-- torchrun --nnodes 2 train.py",
            "torchrun --nnodes 2: trainings over several nodes are autotune's to start: give it --hostfile FILE",
        ),
        ("-- train.py broken.yaml", "broken.yaml:2: not YAML"),
        (
            "-- lmf train mine.yaml",
            "no script lmf: expected a Python file, `-m` and a module, or a command that is installed",
        ),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    (folder / "broken.yaml").write_text("a: 1\nb: [\n")
    code, out, err = call(monkeypatch, capsys, "run", "--device", "cpu", *words.split())
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_a_launch_of_other_ranks_than_the_study(folder: Path) -> None:
    setup = launch_setup(Request(study="s", script=["torchrun", "--nproc-per-node", "4", "train.py"]))
    assert (setup.typed.ranks, setup.typed.ranks_source) == (4, "torchrun --nproc-per-node 4")
