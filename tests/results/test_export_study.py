"""A study's winner, or another of its trials, as files."""

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.problem.candidate import Value
from autotune.problem.hardware import Hardware, detect, named_hardware
from autotune.problem.job import Script
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.results.console import train_with, usage_lines
from autotune.results.export import FORMATS, environment_of, export_record, export_store, training_arguments
from autotune.search.study import StudyStore
from autotune.search.trials import RESUME, VERIFY
from autotune.workers.jit_ops import FOLDER
from tests.cli_call import call
from tests.conftest import make_candidate, make_job
from tests.studies import study_of_every_kind


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the study `s`: making one takes longer than all these tests."""
    runs = tmp_path_factory.mktemp("export") / "runs"
    study_of_every_kind(runs)
    return runs.parent


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a test, with a copy of `runs/s`."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("style", "names"),
    [
        ("deepspeed", ["s.json", "s.meta.json"]),
        ("hf", ["s.training_arguments.json", "s.training_arguments.meta.json"]),
        ("fsdp", ["s.fsdp.yaml", "s.fsdp.meta.json"]),
        ("accelerate", ["s.accelerate.yaml", "s.accelerate.deepspeed.json", "s.accelerate.meta.json"]),
    ],
)
def test_the_winner_goes_into_the_studys_folder(folder: Path, style: str, names: list[str]) -> None:
    store = StudyStore.load("s")
    assert export_store(store, style, None, None) == [Path("runs/s") / name for name in names]
    winner = store.winner
    assert winner is not None
    told = json.loads((folder / "runs/s" / names[-1]).read_text())
    assert (told["study"], told["trial"], told["verified"]) == ("s", winner.number, True)
    assert told["candidate"] == winner.candidate.as_dict
    assert told["fingerprint"] == store.study.user_attrs["fingerprint"]
    assert told["headroom"] == store.hardware.headroom
    if style == "deepspeed":
        assert json.loads((folder / "runs/s/s.json").read_text()) == winner.candidate.ds_config(store.job)
    if style == "hf":
        arguments = json.loads((folder / "runs/s" / names[0]).read_text())
        assert arguments == training_arguments(winner.candidate, store.job, "cpu"), "the study's device"


@pytest.mark.few(2)
@pytest.mark.parametrize("style", FORMATS)
def test_a_trial_that_is_asked_for_lets_the_winners_files_alone(folder: Path, style: str) -> None:
    store = StudyStore.load("s")
    export_store(store, "deepspeed", None, None)
    before = {path.name: path.read_text() for path in folder.glob("runs/s/*.json")}
    other = next(one for one in store.records() if one.outcome and one.outcome.ok and one.role != VERIFY)
    for number in (other.number, None):
        written = export_store(store, style, None, number)
        assert len({*written}) == len(written)
        if number is not None:
            assert all(path.name.startswith(f"s.trial{number}.") for path in written)
    assert {name: (folder / "runs/s" / name).read_text() for name in before} == before


@pytest.mark.few(2)
@pytest.mark.parametrize("style", FORMATS)
def test_no_two_files_that_are_named_share_one(folder: Path, style: str) -> None:
    names = ["run.1", "run.2"]
    if style in ("deepspeed", "hf"):
        names += ["job.json", "v1.5.json", "v1.6.json"]
    written = [path for name in names for path in export_store(StudyStore.load("s"), style, Path(name), None)]
    assert len({*written}) == len(written)
    assert all(path.is_file() for path in written)


def test_a_trial_by_its_number_and_a_file_by_its_name(folder: Path) -> None:
    store = StudyStore.load("s")
    other = next(one for one in store.records() if one.outcome and one.outcome.ok and one.role != VERIFY)
    assert export_store(store, "deepspeed", Path("here.json"), other.number) == [
        Path("here.json"),
        Path("here.meta.json"),
    ]
    told = json.loads((folder / "here.meta.json").read_text())
    assert (told["trial"], told["verified"]) == (other.number, False)


# -- what a study knows besides ------------------------------------------------------------------------------------------

GPUS = named_hardware("rtx3090", 4, nodes=2)
BUILT = "/home/me/.cache/torch_extensions/autotune-1"


def study_of(hardware: Hardware, **job: object) -> StudyStore:
    return StudyStore.in_memory(make_job(hardware.count, **job), hardware, load_space("cpu_demo"))


@pytest.mark.parametrize(
    ("folder_of_ops", "offload", "optimizer", "named"),
    [
        (BUILT, "cpu", "adamw", True),
        (BUILT, "none", "adamw", False),  # torch's own
        ("", "cpu", "adamw", False),
    ],
)
def test_a_training_finds_the_ops_that_its_config_needs(
    folder_of_ops: str, offload: str, optimizer: str, named: bool
) -> None:
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    store = study_of(dataclasses.replace(GPUS, environment=order), optimizer=optimizer)
    store.note_extensions(folder_of_ops)
    found = environment_of(store, make_candidate(2, offload_optimizer=offload))
    assert found == {**order, **({FOLDER: BUILT} if named else {})}
    assert order == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_ranks_on_cpus_share_memory_by_an_op_whatever_the_config() -> None:
    store = study_of(detect("cpu", 2))
    store.note_extensions(BUILT)
    assert environment_of(store, make_candidate(0)) == {FOLDER: BUILT}


def exported(store: StudyStore, folder: Path, style: str = "deepspeed", **knobs: Value) -> tuple[Path, dict[str, Any]]:
    """A measured trial's file, and what is said beside it; it has also gone on from a checkpoint, at 321 bytes."""
    candidate, space = make_candidate(2, offload_optimizer="cpu", **knobs), load_space("cpu_demo")
    measured = Measurement(2.0, 0.01, 5, 4.0, 128.0, 200)
    number = store.start(candidate, space)
    store.finish(number, Outcome(OutcomeKind.OK, measurement=measured))
    store.finish(store.start(candidate, space, RESUME), Outcome(OutcomeKind.OK, measurement=measured, peak_bytes=321))
    record = next(one for one in store.records() if one.number == number)
    file, *_, about = export_record(store, record, folder / f"x{FORMATS[style]}", style, False)
    return file, json.loads(about.read_text())


def test_the_meta_file_has_what_the_study_measured_with(tmp_path: Path) -> None:
    store = study_of(GPUS)
    store.note_extensions(BUILT)
    _, told = exported(store, tmp_path)
    assert (told["resume_peak_bytes"], told["threads_per_rank"]) == (321, store.threads)
    assert told["environment"][FOLDER] == BUILT
    assert told["environment"]["OMP_NUM_THREADS"] == str(store.threads)
    assert "slice" not in told


THEIRS = {
    "NCCL_ALGO": "Ring",
    "PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,>:4]",
    "LD_PRELOAD": "",  # of the shell that runs these tests
    "MALLOC_ARENA_MAX": "it's $HOME; $(id)",
}


def test_it_is_trained_under_the_variables_that_it_was_measured_under(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not under those of the shell that exports it, nor those that have nothing to do with it."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for name, value in THEIRS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    script = Script(("train.py", "ds.json"), str(tmp_path))
    store = study_of(dataclasses.replace(GPUS, nodes=1), script=script)
    for name in THEIRS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "of:this_shell")
    file, told = exported(store, tmp_path, "sbatch", expandable_segments=True)
    theirs = {name: value for name, value in THEIRS.items() if value}
    joined = {"PYTORCH_CUDA_ALLOC_CONF": f"{THEIRS['PYTORCH_ALLOC_CONF']},expandable_segments:True"}
    wanted = {**theirs, **joined, "OMP_NUM_THREADS": str(store.threads)}
    assert told["environment"] == wanted
    (line,) = [line for line in file.read_text().splitlines() if line.startswith("export ")]
    assert in_a_shell(f"{line}; env") == wanted
    (must,) = [line for line in told["your_training_must"] if line.startswith("start it with ")]
    said = must.removeprefix("start it with ").removesuffix(": it was measured so")
    assert in_a_shell(f"{said} env") == wanted
    (record, *_) = store.records()
    given = (store.threads, environment_of(store, record.candidate))
    _, (_, command) = train_with(record.candidate, store.job, "s", tmp_path / "s.json", *given).commands
    assert in_a_shell(f"{command.partition(' torchrun')[0]} env") == wanted
    assert "hf_secret" not in file.read_text() + json.dumps(told["environment"])


def in_a_shell(text: str) -> dict[str, str]:
    """The variables of a process that a shell starts so, without those that every shell sets."""
    done = subprocess.run(["bash", "-c", text], env={"PATH": os.defpath}, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    return {name: value for name, value in found.items() if name not in ("PATH", "PWD", "SHLVL", "_")}


def test_what_cannot_be_exported(folder: Path) -> None:
    failed = next(one for one in StudyStore.load("s").records() if one.outcome and not one.outcome.ok)
    for style, trial, message in (
        ("yaml", None, "--format yaml: expected one of deepspeed, accelerate, hf, sbatch, fsdp"),
        ("hf", 99, "--trial 99: no measured trial of that number in s (`autotune show s`)"),
        ("hf", failed.number, f"--trial {failed.number}: no measured trial of that number in s (`autotune show s`)"),
    ):
        with pytest.raises(UserError) as caught:
            export_store(StudyStore.load("s"), style, None, trial)
        assert str(caught.value) == message
    with pytest.raises(UserError, match=r"no \.json: name one like NAME\.sbatch"):
        export_store(StudyStore.load("s"), "sbatch", Path("x.json"), None)


def test_a_trial_over_the_ceiling_is_exported_with_a_note() -> None:
    store = study_of(detect("cpu", 2))
    number = store.start(make_candidate(), load_space("cpu_demo"), VERIFY)
    measured = Measurement(1.0, 0.01, 5, 8.0, 160.0, store.hardware.ceiling_bytes + 1)
    store.finish(number, Outcome(OutcomeKind.OK, measurement=measured))
    assert f"trial {number} cannot win: over by 1 B" in usage_lines("hf", [Path("w.json")], store, number)[-1]


def test_a_study_without_a_winner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StudyStore, "winner", None)
    with pytest.raises(UserError) as caught:
        export_store(StudyStore.load("s"), "hf", None, None)
    assert str(caught.value) == "study s has no winner yet: `autotune run --study s …` goes on"


def test_a_place_that_cannot_be_written(folder: Path) -> None:
    store = StudyStore.load("s")
    assert store.winner is not None
    (folder / "file").write_text("")
    with pytest.raises(UserError) as caught:
        export_record(store, store.winner, Path("file/x.json"), "deepspeed", False)
    reason = (
        "file/x.json cannot be written (File exists): name another file; the study keeps the winner: `autotune export`"
    )
    assert str(caught.value) == reason


@pytest.mark.parametrize("words", [("export", "s"), ("report", "s")])
def test_no_file_that_is_named_costs_a_study(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    before = Path("runs/s/study.db").read_bytes()
    code, _, err = call(monkeypatch, capsys, *words, "--out", "runs/s/study.db")
    assert (code, err.count("\n")) == (2, 1), err
    assert Path("runs/s/study.db").read_bytes() == before
