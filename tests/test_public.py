"""Public API: names that `import autotune` gives."""

import html
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import autotune
from autotune.commands import run
from autotune.commands.request import Request
from autotune.errors import BadArgument, UserError
from autotune.util.units import parse_bytes, parse_duration, parse_share
from tests.studies import study_of_every_kind

ROOT = Path(__file__).parent.parent


def test_other_names_fail_as_they_always_did() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'autotune\.nowhere'"):
        importlib.import_module("autotune.nowhere")
    with pytest.raises(AttributeError, match="has no attribute 'nowhere'"):
        autotune.nowhere  # noqa: B018


@pytest.mark.slow
def test_the_callback_is_public_and_lazy() -> None:
    code = (
        "import sys, autotune\n"
        "heavy = {'torch', 'transformers', 'optuna', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from autotune import StudyCallback, launch\n"
        "from transformers import TrainerCallback\n"
        "assert issubclass(StudyCallback, TrainerCallback)\n"
        "assert StudyCallback.__module__ == 'autotune.recovery.trainer_callback'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_version_stands_in_one_place() -> None:
    tomllib = pytest.importorskip("tomllib", reason="of Python 3.11 and later")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "autotune._version.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", autotune.__version__)


def test_launch_takes_the_commands_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print()")
    with pytest.raises(UserError, match="no study 'mine'"):
        autotune.launch(
            "mine", ["train.py"], max_restarts=2, hang_timeout="5m", memory_cap="1GiB", print_line=lambda text: None
        )
    with pytest.raises(UserError, match=r"^max_restarts: expected at least 0, found -1"):
        autotune.launch("mine", ["train.py"], max_restarts=-1)
    with pytest.raises(UserError, match="no duration"):
        autotune.launch("mine", ["train.py"], hang_timeout="soon")
    with pytest.raises(UserError, match="no script nowhere"):
        autotune.launch("mine", ["nowhere.py"])
    with pytest.raises(UserError, match=r"^no option 'max_restart'; did you mean max_restarts"):
        autotune.launch("mine", ["train.py"], max_restart=1)
    with pytest.raises(UserError, match=r"^command: expected a list, found 3"):
        autotune.launch("mine", 3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="'0s' is not possible"):
        autotune.launch("mine", ("train.py",), hang_timeout=0)


def tuned(monkeypatch: pytest.MonkeyPatch, *command: Any, **options: Any) -> Request:
    """The Request that `tune` makes of its arguments; nothing runs."""
    asked: list[Request] = []
    monkeypatch.setattr(run, "run_study", lambda request, console, **options: asked.append(request))
    autotune.tune(*command, **options)
    return asked[0]


def test_tune_takes_pythons_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is what the same number means on the command line."""
    found = tuned(monkeypatch, budget=600, headroom=np.float64(0.1), memory_cap=2**34)
    assert parse_duration(found.budget) == 600
    assert parse_share(found.headroom or "") == 0.1
    assert parse_bytes(found.memory_cap or "") == 2**34
    assert parse_duration(tuned(monkeypatch, budget=90.5).budget) == 90.5
    assert parse_bytes(tuned(monkeypatch, memory_cap=1e17).memory_cap or "") == 10**17
    assert parse_share(tuned(monkeypatch, headroom=0).headroom or "") == 0
    paths = tuned(
        monkeypatch, space=Path("s.yaml"), out="w.json", runs="here", ds_config=Path("ds.json"), model=Path("m")
    )
    assert (paths.space, paths.out, paths.runs) == ("s.yaml", Path("w.json"), Path("here"))
    assert (paths.ds_config, paths.model) == (Path("ds.json"), "m")
    numbers = tuned(monkeypatch, gpus="2", max_trials=3.0, seed=np.int64(7), seq_len="max", global_batch_size=64)
    assert (numbers.gpus, numbers.max_trials, numbers.seed) == (2, 3, 7)
    assert all(type(one) is int for one in (numbers.gpus, numbers.max_trials, numbers.seed))
    assert (numbers.seq_len, numbers.global_batch_size) == ("max", "64")
    words = tuned(monkeypatch, (Path("train.py"), "--lr", 0.1, "--text", "a\nb"), maps=("a=--b",), exhaustive=True)
    assert (words.script, words.maps) == (["train.py", "--lr", "0.1", "--text", "a\nb"], ["a=--b"])
    assert words.exhaustive
    assert tuned(monkeypatch, None, gpus=None, budget=None) == Request()


def test_plan_is_the_plan_of_the_command() -> None:
    found = autotune.plan(model="gemma-2-2b", gpu="h100", gpus=2, space={"knobs": {"zero_stage": [2, 3]}})
    assert {one.candidate.stage for one in found.best} <= {2, 3}
    assert (found.hardware.count, found.job.model.name) == (2, "gemma-2-2b")
    assert re.fullmatch(r"<Plan of gemma-2-2b, .*, on 2 x h100 .*: z[23] .* tokens/s>", repr(found))
    with pytest.raises(BadArgument, match=r"^global_batch_size 7 |^a global batch of 7 over 2 ranks"):
        autotune.plan(model="gemma-2-2b", gpu="h100", gpus=2, global_batch_size=7)
    with pytest.raises(BadArgument, match=r"^host_memory: 64 is 64 bytes; did you mean 64GiB"):
        autotune.plan(model="gemma-2-2b", gpu="h100", host_memory=64)
    with pytest.raises(BadArgument, match="no option 'budget'"):
        autotune.plan(budget="5m")


def test_a_study_shows_itself_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stored = study_of_every_kind(tmp_path / "runs")
    study = autotune.open_study("s")
    assert isinstance(study, autotune.Study)
    assert study.best == stored.winner
    assert len(study.trials) == len(stored.records())
    assert repr(study) == f"<Study 's': {len(study.trials)} trials, best: {study.best}>"
    assert str(study.best) == "trial 10 (verify): z0 mb1 ga1 at 8 samples/s"
    page = study._repr_html_()
    assert page.startswith("<iframe ")
    assert html.unescape(page.partition('srcdoc="')[2]).startswith("<!doctype html>")
    assert [path.name for path in study.export("hf")] == ["s.training_arguments.json", "s.training_arguments.meta.json"]
    assert study.report() == Path("runs/s/s.html")
    with pytest.raises(ValueError, match=r"^style toml: expected one of"):
        study.export("toml")
    with pytest.raises(ValueError, match=r"^trial 1: no measured trial"):
        study.export(trial=1)
    with pytest.raises(ValueError, match=r"no study 'nowhere'.*`storage` reaches"):
        autotune.open_study("nowhere")


def test_a_study_is_optunas_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    study_of_every_kind(tmp_path / "runs")
    study = autotune.open_study("s")
    pytest.importorskip("pandas", reason="pandas is optional")
    table = study.study.trials_dataframe()
    assert list(table["number"]) == [one.number for one in study.trials]
    assert table["value_samples per second"].max() == 8.0


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        (None, {"gpus": "two"}, "gpus: expected a whole number, found two"),
        (None, {"gpus": 1.5}, "gpus: expected a whole number, found 1.5"),
        (None, {"gpus": float("nan")}, "gpus: expected a finite number, found nan"),
        (None, {"gpus": 10**5000}, "gpus: expected at most 65536, found a number of 5001 digits"),
        (None, {"budget": 10**5000}, "budget: expected a number below 2**63"),
        (None, {"study": "a\nb"}, "study: expected one line of text"),
        (None, {"out": 3}, "out: expected a valid path, found 3"),
        (None, {"out": "a\0b"}, "out: holds a NUL character"),
        (None, {"exhaustive": "maybe"}, "exhaustive: expected true or false, found maybe"),
        (None, {"tokens": 1e9}, "no option 'tokens'"),  # of `plan`
        (None, {"maps": 3}, "maps: expected a list, found 3"),
        (None, {"budgett": "5m"}, "no option 'budgett'; did you mean budget"),
        (None, {"attn": "sdpa"}, "no option 'attn'; did you mean attention"),
        ("train.py 'x", {}, "command: not a command (no closing quotation)"),
        (["train.py", None], {}, "command: expected a valid string, found None"),
        (None, {"model": "tiny-llama", "device": "cpu", "budget": "soon"}, "'soon' is no duration"),
        (None, {"model": "tiny-llama", "device": "cpu", "headroom": 5}, "a share of '5' is not possible"),
        (None, {"model": "tiny-llama", "device": "cpu", "gpus": "0"}, "gpus: expected at least 1, found 0"),
        (
            None,
            {"model": "tiny-llama", "device": "cpu", "space": {"knobs": {"zero_stag": [1]}}},
            "space:2: zero_stag: unknown",
        ),
        (None, {"space": {"knobs": object()}, "model": "tiny-llama", "device": "cpu"}, "space: expected plain data"),
        (None, {"track": ["wandb"], "model": "tiny-llama", "device": "cpu"}, "no option 'track'"),
    ],
)
def test_tune_refuses_what_an_option_cannot_be_in_one_line(
    command: Any, options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        autotune.tune(command, quiet=True, **options)
    assert isinstance(caught.value, UserError)
    assert re.search(r"(?<![\w-])--(?!epochs|x|b\b)\w", str(caught.value)) is None, "Python has no options"
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
