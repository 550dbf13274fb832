"""A study that version 0.1 made is shown, exported and resumed as if nothing had changed.

tests/data/study_v0_1.db.gz: `autotune run --model tiny-llama --device cpu --gpus 2 --seq-len 32 --memory-cap 700MiB` of
commit b92ed20, to which that commit's own code has added a failure of each sort and a trial that was never finished.
"""

import gzip
import json
from pathlib import Path

import pytest

from autotune.problem.outcome import OutcomeKind, Source
from autotune.problem.space import parse_space
from autotune.search import fingerprint
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from autotune.search.trials import VERIFY
from tests.cli_call import call

STORED = Path(__file__).parents[1] / "data" / "study_v0_1.db.gz"


@pytest.fixture
def old_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyStore:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "v01"
    folder.mkdir(parents=True)
    (folder / "study.db").write_bytes(gzip.decompress(STORED.read_bytes()))
    return StudyStore.load("v01")


def resumed(store: StudyStore, monkeypatch: pytest.MonkeyPatch, force: bool = False) -> StudyStore:
    assert store.folder is not None
    storage = default_storage(store.folder)
    space = parse_space(store.space_text)
    found, was_there = StudyStore.create_or_resume(
        "v01", storage, store.folder, store.job, store.hardware, space, force=force
    )
    assert was_there
    return found


def test_its_records_say_what_decided_them(old_study: StudyStore) -> None:
    records = old_study.records()
    assert [r.number for r in records] == list(range(12))
    assert old_study.winner is not None
    assert old_study.winner.role == VERIFY
    failed = {r.outcome.kind: r.outcome.source for r in records if r.outcome and not r.outcome.ok and r.number != 7}
    assert failed == {
        OutcomeKind.OOM_DEVICE: Source.EXCEPTION,
        OutcomeKind.CRASH: Source.SIGNAL,
        OutcomeKind.TIMEOUT: Source.SILENCE,
        OutcomeKind.INTERRUPTED: Source.BUDGET,
    }
    of_an_exception = records[7].outcome
    assert of_an_exception is not None
    assert of_an_exception.source is Source.EXCEPTION
    assert records[11].outcome is None, "it was running when the tuner was killed"


def test_the_same_job_goes_on_with_it(old_study: StudyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = old_study.versions
    monkeypatch.setattr(fingerprint, "package_versions", lambda: versions)
    assert old_study.threads >= 1, "what 0.1 measured with"
    store = resumed(old_study, monkeypatch)
    assert "forced" not in store.study.user_attrs
    assert store.study.user_attrs["fingerprint"]["threads_per_rank"] == store.threads, "known from now on"
    assert store.close_interrupted() == 1
    assert [r.outcome.kind for r in store.records() if r.outcome][-1] is OutcomeKind.INTERRUPTED
    assert {c.as_dict["train_micro_batch_size_per_gpu"] for c in store.failed()} == {4, 256}


def test_it_is_shown_and_exported(
    old_study: StudyStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, "show", "v01", "--json")
    assert code == 0
    shown = json.loads(out)
    assert len(shown["trials"]) == 12
    assert shown["winner"]["number"] == 5
    code, _, _ = call(monkeypatch, capsys, "export", "v01", "--out", "ds.json")
    assert code == 0
    assert old_study.winner is not None
    config = json.loads(Path("ds.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == old_study.winner.candidate.micro_batch


@pytest.mark.slow
def test_the_command_resumes_it_with_real_ranks(
    old_study: StudyStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], built_ops: None
) -> None:
    Path("s.yaml").write_text(old_study.space_text)
    words = (
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
        "v01",
        "--max-trials",
        "1",
        "--budget",
        "120s",
        "--yes",
        "--force",
    )
    code, out, err = call(monkeypatch, capsys, "run", *words)
    assert code == 0, err
    assert "goes on: 10 trials" in out
    assert "1 closed as interrupted" in out
    assert len(StudyStore.load("v01").records()) >= 12
