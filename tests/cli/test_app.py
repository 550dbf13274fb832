"""The command line: bad input is one line and exit code 2; help is fast because nothing heavy is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli.options import fail
from autotune.errors import ExitCode
from autotune.problem.outcome import OutcomeKind
from autotune.problem.space import parse_space
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from tests.cli_call import call
from tests.studies import study_of_every_kind

BASE = ("run", "--model", "tiny-llama", "--device", "cpu", "--gpus", "2", "--budget", "60s")
SCRIPT = ("run", "--device", "cpu", "--gpus", "2", "--budget", "60s", "--", "train.py", "--deepspeed_config")
JOB = "model: tiny-llama\ngpu: h100\n"
FILES = {
    "tokens.yaml": JOB + "tokens: lots",
    "seq-len.yaml": JOB + "seq-len: long",
    "global-batch-size.yaml": JOB + "global-batch-size: few",
    "precision.yaml": JOB + "precision: bf17",
    "removed.json": '{"train_batch_size": 4, "amp": {"enabled": false}}',
    "lists.json": '{"train_batch_size": 4, "zero_optimization": {"stage": [2, 3]}}',
    "empty.json": "",
    "train.py": "import deepspeed",
    "torn.json": "{",
    "list.json": "[]",
    "three.json": '{"zero_optimization": 3}',
}


@pytest.mark.few(24)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--model", "gema-2-2b", "--device", "cpu"), "did you mean gemma-2-2b"),
        (("run", "--device", "cpu"), "--model"),
        (("run", "--model", "tiny-llama"), "found no GPU on this machine; add --device cpu"),
        (
            ("run", "--device", "cpu", "--model", "tiny-llama", "--budget", "10"),
            "'10' is no duration: write it like 90s",
        ),
        ((*BASE, "--nodes", "2"), "--nodes needs several machines"),
        ((*BASE, "--budget", "0"), "30m"),
        ((*BASE, "--budget=-5m"), "30m"),
        ((*BASE, "--budget", "2s"), "shorter than one trial"),
        ((*BASE, "--storage", "mysqlx://me:secret@x/y"), "cannot be opened"),
        ((*BASE, "--space", "zero22"), "did you mean zero2"),
        ((*BASE, "--global-batch-size", "7"), "cannot be split evenly"),
        ((*BASE, "--memory-cap", "9999GiB"), "above the capacity"),
        ((*BASE, "--memory-cap", "24"), "--memory-cap: 24 is 24 bytes; did you mean 24GiB?"),
        (("plan", "--model", "tiny-llama", "--gpu", "a100", "--host-memory", "64"), "did you mean 64GiB?"),
        ((*BASE, "--seed", "-1"), "--seed: expected at least 0, found -1"),
        ((*BASE, "--out", "/"), "/ is a folder"),
        ((*BASE, "--out", "/proc/x.json"), "/proc is read-only for you")
        if os.geteuid()
        else ((*BASE, "--out", "/etc/passwd/x"), "there is no folder"),
        ((*BASE, "--out", "runs/s/study.db"), "is where a study is kept"),
        ((*SCRIPT, "gone.json"), "gone.json: no such file; expected the DeepSpeed config"),
        (("run", "--gpus", "2", "train.py", "--deepspeed", "ds.json"), "Put `--` before train.py."),
        (("launch", "mine", "torchrun", "train.py", "--lr=3"), "No such option: --lr. Put `--` before torchrun."),
        (("run", "--device", "cpu", "-m", "pkg.train", "--lr", "3"), "Put `--` before -m."),
        ((*BASE, "--study", "-neg"), "not starting with a dot or a hyphen"),
        ((*BASE, "--study", "two\nlines"), "--study: expected one line of text"),
        ((*BASE, "--study", "launch"), "Choose another name"),
        ((*BASE, "--headroom", "120%"), "--headroom: a share"),
        (("plan", "--sure", "x"), "--sure: 'x' is no share"),
        (("plan", "--host-memory", "lots"), "--host-memory: 'lots' is no size"),
        ((*BASE, "--seq-len", "0"), "--seq-len"),
        ((*BASE, "--seq-len", "99999999"), "--seq-len"),
        ((*BASE, "--optimizer", "adamm"), "adamw"),
        ((*BASE, "--ds-config", "nowhere.json"), "no such file"),
        ((*BASE, "--ds-config", "removed.json"), "removed.json: amp: deepspeed 0.19.8 refuses this key"),
        (("plan", "--model", "tiny-llama", "--gpu", "a100-80gb", "--ds-config", "removed.json"), "amp: deepspeed"),
        ((*SCRIPT, "removed.json"), "removed.json: amp: deepspeed 0.19.8 refuses this key"),
        ((*SCRIPT, "lists.json"), "zero_optimization.stage: expected a whole number, found [2, 3]"),
        ((*SCRIPT, "empty.json"), "empty.json:1: not JSON"),
        ((*BASE, "--ds-config", "torn.json"), "not JSON"),
        ((*BASE, "--ds-config", "list.json"), "JSON object"),
        ((*BASE, "--ds-config", "three.json"), "object"),
        (("plan", "tokens.yaml"), "tokens.yaml:3: tokens lots: expected"),
        (("plan", "seq-len.yaml"), "seq-len.yaml:3: seq-len long: expected"),
        (("plan", "global-batch-size.yaml"), "global-batch-size.yaml:3: global-batch-size few: expected"),
        (("plan", "precision.yaml"), "precision.yaml:3: precision bf17: expected"),
        ((*BASE, "--max-trials", "0"), "at least 1"),
        (("show", "nothing-here"), "no study"),
        (("plan", "--gpu", "h100"), "or a Hub id; `autotune run -- train.py`"),
        (("spaces", "show", "zero22"), "did you mean"),
        (("frobnicate",), "frobnicate"),
        (("gallery", "list"), "gallery is gone: every search starts"),
        ((*BASE, "--no-gallery"), "--no-gallery is gone: remove it"),
        (("export", "x", "--format"), "(`autotune export --help`)"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    code, _, err = call(monkeypatch, capsys, *words)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err
    assert "secret" not in err


def test_the_log_of_a_script_that_fails_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for keeps_lines, lines in ((True, 3), (False, 1)):
        with pytest.raises(SystemExit) as ended:
            fail("the script fails:\n  File x.py\n  IndexError", ExitCode.BAD_INPUT, keeps_lines=keeps_lines)
        assert ended.value.code == ExitCode.BAD_INPUT
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_a_space_without_a_candidate_and_an_unreadable_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text("knobs:\n  train_micro_batch_size_per_gpu: [3]\n")
    code, _, err = call(monkeypatch, capsys, *BASE, "--space", "s.yaml", "--global-batch-size", "8")
    assert (code, "cannot be made from" in err) == (2, True)
    (tmp_path / "runs").write_text("a file where the folder should be")
    code, _, err = call(monkeypatch, capsys, *BASE)
    assert (code, "cannot be written" in err) == (2, True)


def test_help_does_not_import_torch() -> None:
    code = "import sys; sys.argv=['autotune','--help']\nfrom autotune.cli import app as cli\ntry:\n    cli.main()\nexcept SystemExit: pass\n"
    code += "heavy = {'torch','deepspeed','transformers','optuna','numpy'} & set(sys.modules)\nsys.exit(f'imported {heavy}' if heavy else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "COVERAGE_PROCESS_START": ""}
    )
    assert done.returncode == 0, done.stderr
    assert "run" in done.stdout


def test_models_and_spaces(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(monkeypatch, capsys, "models", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["version"], found["models"]["gemma-2-2b"]["parameters"]) == (1, 2614341888)
    out = call(monkeypatch, capsys, "models")[1]
    assert "base-uncased     67 M  distilbert/" in out
    assert "\ngemma-2-2b                2.61 B  google/" in out
    assert "default" in json.loads(call(monkeypatch, capsys, "spaces", "list", "--json")[1])["spaces"]
    assert "zero2" in call(monkeypatch, capsys, "spaces", "list")[1]
    assert "knobs:" in call(monkeypatch, capsys, "spaces", "show", "zero3")[1]
    assert "valid" in call(monkeypatch, capsys, "spaces", "validate", "default")[1]
    assert "stage 3 with offload_optimizer cpu" in call(monkeypatch, capsys, "spaces", "knobs")[1]
    known = json.loads(call(monkeypatch, capsys, "spaces", "knobs", "--json")[1])["knobs"]
    assert known["bf16.bf16_optimizer_states"]["since deepspeed"] == "0.18.3"
    assert "changes what is computed" in known["bf16.bf16_optimizer_states"]
    assert json.loads(call(monkeypatch, capsys, "spaces", "validate", "zero2", "--json")[1])["families"] > 10
    assert call(monkeypatch, capsys, "--version")[1].strip()


@pytest.fixture
def study(tmp_path: Path) -> StudyStore:
    return study_of_every_kind(tmp_path / "runs")


def test_export(
    study: StudyStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for style in ("deepspeed", "accelerate", "hf"):
        code, out, _ = call(monkeypatch, capsys, "export", "s", "--format", style)
        assert code == 0
        assert "wrote" in out
        assert {"deepspeed": "--deepspeed_config runs/s/s.json", "accelerate": "--config_file ", "hf": "**json.load("}[
            style
        ] in out
    config = json.loads((tmp_path / "runs/s/s.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == 1
    assert "optimizer" not in config
    meta = json.loads((tmp_path / "runs/s/s.meta.json").read_text())
    assert meta["verified"] is True
    assert meta["trial"] == len(OutcomeKind) + 1
    assert meta["fingerprint"]["versions"]["deepspeed"]
    assert any("optimizer" in line for line in meta["your_training_must"])
    code, _, err = call(monkeypatch, capsys, "export", "s", "--trial", "1")
    assert (code, "no measured trial" in err) == (2, True)
    code, out, _ = call(monkeypatch, capsys, "export", "s", "--trial", "0", "--out", "x.json", "--json")
    assert json.loads(out)["files"] == ["x.json", "x.meta.json"]


def test_a_study_in_a_renamed_folder_has_its_new_name(
    study: StudyStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/s").rename(tmp_path / "runs/other")
    assert json.loads(call(monkeypatch, capsys, "show", "other", "--json")[1])["study"] == "other"
    assert "wrote runs/other/other.json" in call(monkeypatch, capsys, "export", "other")[1]
    assert "no study 's'" in call(monkeypatch, capsys, "show", "s")[2]
    mine = (study.job, study.hardware, parse_space(study.space_text))
    url = default_storage(tmp_path / "runs/other")
    resumed, known = StudyStore.create_or_resume("other", url, tmp_path / "runs/other", *mine, force=True)
    assert (known, resumed.name, len(resumed.records())) == (True, "other", len(study.records()))


THREADS = """
import os, sys
from autotune.cli.options import load_numpy
load_numpy()
import numpy
numpy.ones((600, 600)) @ numpy.ones((600, 600))
print(len(os.listdir("/proc/self/task")), os.environ.get("OPENBLAS_NUM_THREADS"))
"""


@pytest.mark.parametrize("chosen", [None, "2"])
def test_the_tuner_has_one_blas_thread_which_its_children_do_not_inherit(chosen: str | None) -> None:
    env = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    env |= {"OPENBLAS_NUM_THREADS": chosen} if chosen else {}
    done = subprocess.run([sys.executable, "-c", THREADS], env=env, capture_output=True, text=True, check=True)
    threads = min(int(chosen), len(os.sched_getaffinity(0))) if chosen else 1
    assert done.stdout.strip() == f"{threads} {chosen}"


@pytest.mark.parametrize("option", ["--partition", "--yes", "--time", "--slurm", "--sync"])
def test_a_removed_option_names_its_replacement(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"{option.lstrip('-')}: x\n")
    for words in ([option, "x"], [f"{option}=x"], [str(job)]):
        code, out, err = call(monkeypatch, capsys, "run", *words)
        assert (code, out) == (2, "")
        assert f"{option} is gone: " in err
        assert err.count("\n") == 1
