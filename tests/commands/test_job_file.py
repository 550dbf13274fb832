"""Job files: every option by its name, with the line of whatever is wrong, and the command line in front of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from autotune.cli.options import takes_request
from autotune.commands import job_file, launch, plan, run
from autotune.commands.request import COMMANDS, Request
from autotune.errors import UserError
from autotune.problem.space import load_space
from tests.cli_call import call

NAMES = {"run": (run, "run_study"), "plan": (plan, "plans"), "launch": (launch, "launch_training")}


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns the Request that `autotune COMMAND job.yaml WORDS…` makes, or its line of error; nothing runs."""
    monkeypatch.chdir(tmp_path)

    def ask(text: str | bytes, *words: str, command: str = "run", file: str = "job.yaml") -> Any:
        Path(file).write_bytes(text if isinstance(text, bytes) else text.encode())
        found: list[Request] = []

        def stop(request: Request, *others: Any, **named: Any) -> None:
            found.append(request)
            raise UserError("stopped here")

        module, name = NAMES[command]
        monkeypatch.setattr(module, name, stop)
        code, _, err = call(monkeypatch, capsys, command, file, *words)
        assert code == 2
        assert len(err.splitlines()) == 1 or "does not use" in err
        return found[0] if found else err.strip().removeprefix("autotune: ")

    return ask


ALL = """
model: tiny-llama
gpus: 2
seq-len: 64
global_batch_size: free
budget: 10m
study: no        # YAML would make False of it
max-trials: 3
headroom: 10%
exhaustive: true
no-references: yes
map: [train_micro_batch_size_per_gpu=--bs]
export: HF_HOME
ds-config: ds.json
space:
  knobs: {zero_stage: [0, 1]}
storage:
"""


def test_a_job_file_sets_options_by_their_names(asked: Any) -> None:
    found = asked(ALL)
    assert (found.model, found.gpus, found.seq_len, found.global_batch_size) == ("tiny-llama", 2, "64", "free")
    assert (found.budget, found.study, found.max_trials, found.headroom) == ("10m", "no", 3, "10%")
    assert (found.exhaustive, found.no_references, found.exports) == (True, True, ["HF_HOME"])
    assert (found.maps, found.ds_config, found.storage) == (
        ["train_micro_batch_size_per_gpu=--bs"],
        Path("ds.json"),
        None,
    )
    assert found.space == {"name": "job", "knobs": {"zero_stage": [0, 1]}}


def test_the_command_line_overrides_a_job_file(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "gpus: 2\nbudget: 1h\nscript: [a.py, --x]\nstorage: 'mysql://joe:***@h/d'\n"
    monkeypatch.setenv("AUTOTUNE_STORAGE", "sqlite:///x.db")
    found = asked(text, "--gpus", "3", "--", "b.py", "--y")
    assert (found.gpus, found.budget, found.script, found.storage) == (3, "1h", ["b.py", "--y"], "sqlite:///x.db")
    block = "script: |\n  torchrun a.py \\\n    --x 'b c'\n"
    assert asked(block, "--gpus", "1").script == ["torchrun", "a.py", "--x", "b c"]


def test_one_job_file_serves_all_commands(asked: Any) -> None:
    text = "model: tiny-llama\nbudget: 1h\ntokens: 2B\nmax-restarts: 4\nscript: train.py --x\nglobal-batch-size: 8\n"
    assert asked(text, command="plan").tokens == "2B"
    assert asked(text, command="launch").max_restarts == 4
    assert asked(text, command="launch").script == ["train.py", "--x"]
    named = asked("study: mine\nscript: train.py\n", command="launch")
    assert (named.study, named.script) == ("mine", ["train.py"])
    assert asked("study: mine\n", "--", "other.py", command="launch").script == ["other.py"]
    assert asked("hang-timeout: 5m\n", "mine", "a.py", command="launch").study == "mine"
    assert "names no study" in asked("script: train.py --x\n", command="launch")


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ":1: the file is empty"),
        ("- a\n", ":1: found a list"),
        ("a: b: c\n", ":1: not YAML"),
        ("[" * 5000, "not YAML that can be read"),
        (b"model: \xff\n", "it is no UTF-8 text"),
        ("gpus: 1\n\nmodel: a\ngpus: 2\n", ":4: gpus is given twice, first in line 1"),
        ("\nbudgett: 1h\n", ":2: unknown option 'budgett'; did you mean budget"),
        ("? [a]\n: b\n", "found a list as a key"),
        ("gpus: four\n", ":1: gpus: expected a whole number, found four"),
        ("budget: 1h\ngpu: 2\n", ":2: gpu: unknown GPU '2'"),
        ("model: a\nbudget: 600\n", ":2: budget: '600' is no duration"),
        ("model: [a]\n", ":1: model: expected a valid string, found ['a']"),
        ("seed: 1\nexhaustive: maybe\n", ":2: exhaustive: expected true or false, found maybe"),
        ("model: !!python/name:os.system x\n", "could not determine a constructor for the tag"),
        ("script: 'a.py \"x'\n", "script: not a command (no closing quotation)"),
        ("space: [a]\n", ":1: space: expected a valid string, found ['a']"),
        (
            "gpus: 1\nspace:\n  knobs:\n    zero_stag: [1]\n",
            ":4: space: zero_stag: unknown knob; did you mean zero_stage",
        ),
        ("space: {a: 1}\n", ":1: space: a: unknown;"),
        ("space: &s {knobs: *s}\n", ":1: not YAML (an alias lies within what it names)"),
        ("storage: 'mysql://joe:***@h/d'\n", "stands for a secret, which no file keeps. Type --storage again"),
        ("script: [a.py, --key, '***']\n", "stands for a secret, which no file keeps. Type the words after `--` again"),
    ],
)
def test_a_wrong_job_file_is_one_line_with_its_place(text: str | bytes, said: str, asked: Any) -> None:
    line = asked(text)
    assert isinstance(line, str)
    assert line.startswith(("job.yaml:", "job file job.yaml"))
    assert said in line


@pytest.mark.parametrize("command", COMMANDS)
def test_the_documented_job_file_is_one(command: str, asked: Any) -> None:
    text = (Path(job_file.__file__).parents[2] / "docs" / "job-files.md").read_text()
    found = asked(
        text.partition("```yaml\n")[2].partition("```")[0],
        *(["mine", "a.py"] if command == "launch" else []),
        command=command,
    )
    assert found.global_batch_size == "64"
    if command != "launch":
        assert {"zero_stage", "train_micro_batch_size_per_gpu"} <= load_space(found.space).knobs.keys()


def test_anchors_and_json_are_read(asked: Any) -> None:
    assert asked("budget: &b 1h\nstudy: *b\n").study == "1h"
    assert asked('{\n\t"gpus": 2,\n\t"study": "a\\/b"\n}', file="job.json").study == "a/b"


def test_a_command_file_repeats_its_run_without_secrets(asked: Any) -> None:
    typed = asked(ALL, "--storage", "postgresql://joe:hunter22@h/d", "--", "a.py", "--wandb_key", "abcdef123456")
    text = job_file.job_text(typed)
    assert text.startswith(f"# yaml-language-server: $schema={job_file.schema_path()}\n")
    assert "hunter22" not in text
    assert "abcdef123456" not in text
    assert "stands for a secret" in asked(text)
    again = asked(text, "--storage", "postgresql://joe:hunter22@h/d", "--", "a.py", "--wandb_key", "abcdef123456")
    assert again.model_copy(update={"command": ""}) == typed.model_copy(update={"command": ""})


def test_the_shipped_schema_is_that_of_the_request() -> None:
    shipped = job_file.schema_path().read_text()
    assert shipped == job_file.schema_text(), "python -m autotune.commands.job_file > autotune/data/job.schema.json"
    properties = json.loads(shipped)["properties"]
    assert properties.keys() == {name for one in COMMANDS for name in job_file.options_in_files(one)}
    assert [one["type"] for one in properties["space"]["anyOf"]] == [["string", "number"], "object", "null"]
    assert yaml.safe_load(ALL).keys() - {one.replace("-", "_") for one in properties} - properties.keys() == set()


def test_a_switch_of_the_file_is_turned_off_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("model: tiny-llama\nexhaustive: true\n")
    got: list[Request] = []

    def run(request: Request) -> None:
        got.append(request)

    app = typer.Typer()
    app.command()(takes_request(run))
    for words in ([], ["--no-exhaustive"], ["--exhaustive"], ["--no-force"]):
        assert CliRunner().invoke(app, [str(tmp_path / "job.yaml"), *words]).exit_code == 0
    assert [(one.exhaustive, one.force) for one in got] == [(True, False), (False, False), (True, False), (True, False)]
    (tmp_path / "job.yaml").write_text("model: tiny-llama\nno-references: true\n")
    assert CliRunner().invoke(app, [str(tmp_path / "job.yaml"), "--references"]).exit_code == 0
    assert not got[-1].no_references


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("python: /x/bin/python", "--python /x/bin/python"),
        ("workload: mine:build", "--workload mine:build"),
        ("trust-remote-code: true", "--trust-remote-code"),
    ],
)
def test_a_job_file_supplies_no_code(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "j.yaml").write_text(f"seed: 3\n{line}\n")
    with pytest.raises(UserError, match=rf"j\.yaml:2: a job file supplies no code\. Add {words} to the command line"):
        job_file.read_job(tmp_path / "j.yaml", "run", (), print)
    name = line.partition(":")[0].replace("-", "_")
    assert job_file.read_job(tmp_path / "j.yaml", "run", (name,), print)[0] == {"seed": 3}
    (tmp_path / "j.yaml").write_text("trust-remote-code: false\n")
    assert job_file.read_job(tmp_path / "j.yaml", "run", (), print)[0] == {"trust_remote_code": False}
