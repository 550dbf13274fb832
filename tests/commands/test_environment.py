"""Which Python is taken, and what one lacks is said in one line."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.commands import environment as module
from autotune.commands.environment import check_executor, check_versions, ranks_python
from autotune.errors import UserError
from autotune.util import inquiry
from tests.cli_call import call
from tests.util.test_interpreter import FACTS, program, stand_in

RUN = ("run", "--model", "tiny-llama", "--device", "cpu", "--gpus", "1")


@pytest.fixture(autouse=True)
def nothing_is_active(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (module.VARIABLE, *module.ACTIVE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tuner's own environment has no torch, no deepspeed and no transformers."""
    monkeypatch.setattr(inquiry, "version", lambda package: None)
    monkeypatch.setattr(inquiry, "has", lambda name: False)


def taken(typed: str | None = None, **options: object) -> tuple[str, list[str]]:
    """The path of the one that is taken, and what was said."""
    said: list[str] = []
    return ranks_python(typed, said.append, **options).path, said  # type: ignore[arg-type]


def test_who_is_asked_in_which_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed, variable, _ = (str(stand_in(tmp_path / name / "bin/python")) for name in "abd")
    monkeypatch.setenv("VIRTUAL_ENV", f"{tmp_path}/d")
    assert taken() == (sys.executable, []), "its own has torch"
    monkeypatch.setenv(module.VARIABLE, variable)
    assert taken() == (variable, [])
    assert taken(typed) == (typed, [])
    monkeypatch.setenv(module.VARIABLE, " ")
    assert taken() == (sys.executable, []), "set to nothing, as shells unset"


def test_an_active_environment_is_taken_and_said_where_the_tuners_own_has_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_torch: None
) -> None:
    bare = stand_in(tmp_path / "bare/bin/python", versions={})
    conda = stand_in(tmp_path / "conda/bin/python")
    monkeypatch.setenv("VIRTUAL_ENV", str(bare.parents[1]))
    monkeypatch.setenv("CONDA_PREFIX", str(conda.parents[1]))
    path, (line,) = taken(needed=module.TRAINING)
    assert path == str(conda)
    assert line == f"ranks run in {conda}, of the active environment; --python names another"
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.setenv("CONDA_PREFIX", f"{tmp_path}/gone")
    assert taken() == (sys.executable, [])


def test_nowhere_a_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_torch: None) -> None:
    code, _, err = call(monkeypatch, capsys, *RUN)
    assert code == 2
    assert err.startswith("autotune: no torch and no deepspeed and no transformers in autotune's own environment")
    assert "give --python PATH" in err
    assert err.count("\n") == 1


def test_a_plan_without_torch_is_a_rougher_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_torch: None
) -> None:
    typed = ("plan", "--model", "tiny-gemma-2", "--seq-len", "48", "--gpu", "rtx3090", "--space", "zero3")
    code, out, err = call(monkeypatch, capsys, *typed)
    assert (code, err) == (0, "")
    assert "not traced (torch and transformers not installed; --python names" in " ".join(out.split())


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"versions": {}}, "no torch and no deepspeed and no transformers there"),
        ({"versions": {**FACTS["versions"], "torch": "1.13.1+cu117"}}, "torch 1.13.1+cu117 (expected 2.6 or newer)"),  # type: ignore[dict-item]
        ({"version": "3.8.1"}, "is Python 3.8.1: expected 3.11 or newer"),
    ],
)
@pytest.mark.parametrize("by_variable", [False, True])
@pytest.mark.parametrize("words", [RUN, ("plan", "--model", "tiny-llama", "--gpu", "a100")])
def test_what_an_environment_lacks_is_one_line_and_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    facts: dict,
    said: str,
    by_variable: bool,
    words: tuple[str, ...],
) -> None:
    python = str(stand_in(tmp_path / "bin/python", **facts))
    if by_variable:
        monkeypatch.setenv(module.VARIABLE, python)
    code, out, err = call(monkeypatch, capsys, *words, *(() if by_variable else ("--python", python)))
    assert (code, out) == (2, "")
    assert said in err
    name = module.VARIABLE if by_variable else module.OPTION
    assert err.startswith(f"autotune: {name} {python}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command", [RUN, ("plan", "--model", "tiny-llama"), ("doctor",), ("launch", "--model", "tiny-llama", "--", "x.py")]
)
def test_a_path_that_is_no_python_is_one_line_and_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    for typed, said in (
        (str(program(tmp_path / "no", "exit 0")), "it is no Python"),
        ("/gone", "no such executable"),
        ("", "is empty"),
    ):
        words = (command[0], "--python", typed, *command[1:])
        code, out, err = call(monkeypatch, capsys, *words)
        assert (code, out) == (2, "")
        assert err.startswith("autotune: --python ")
        assert said in err
        assert err.count("\n") == 1


def test_versions_that_nobody_can_read_are_left_alone() -> None:
    def check(found: dict[str, str]) -> None:
        check_versions(SimpleNamespace(version=found.get))  # type: ignore[arg-type]

    check({"torch": "a-build-of-mine", "deepspeed": "0.19.9+local", "other": "1"})
    check({})
    with pytest.raises(UserError, match=r"torch 2\.5\.1 \(expected .*\), deepspeed 0\.9\.0 \(expected"):
        check({"torch": "2.5.1", "deepspeed": "0.9.0", "transformers": "5.23.0"})


def test_an_unknown_executor_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UserError, match=r"^--executor replay:t: expected local or slurm or ray$"):
        check_executor("replay:t")


def test_a_studys_python_is_typed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = str(stand_in(tmp_path / "bin/python"))
    found = module.interpreter_at(other, "--python")
    module.check_studys_python("s", None, None, module.OWN)
    module.check_studys_python("s", other, None, found)  # an active environment
    module.check_studys_python("s", "/another", other, found)
    with pytest.raises(UserError, match=f"study s was measured in {other}. Add --python {other}, or another Python"):
        module.check_studys_python("s", other, None, module.OWN)
    monkeypatch.setenv(module.VARIABLE, "/mine")
    module.check_studys_python("s", other, None, module.OWN)
