import dataclasses
import json
import sqlite3
from pathlib import Path

import optuna
import pytest

from autotune.errors import UserError
from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect, named_hardware
from autotune.problem.job import Script, ScriptProfile
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import load_space, parse_space
from autotune.script.profile import unknown_job
from autotune.search.proposer import Proposer
from autotune.search.storage import default_storage, open_storage
from autotune.search.study import StudyStore
from autotune.search.trials import VERIFY, Call, constraints
from autotune.util.units import GIB, MIB
from tests.conftest import make_candidate, make_job
from tests.network import mount

SPACE = load_space("cpu_demo")
OK = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.1, 3, 8.0, 256.0, 100 * MIB))


@pytest.fixture(autouse=True, params=["study.db", "study.journal"])
def file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """What the studies of these tests are kept in: on a local disk, and on NFS."""
    if request.param == "study.journal":
        mount(monkeypatch, ("nfs4", tmp_path))
    return str(request.param)


def make_store(folder: Path, name: str = "s", **changes: object) -> tuple[StudyStore, bool]:
    folder.mkdir(exist_ok=True)
    job = make_job(**changes)  # type: ignore[arg-type]
    return StudyStore.create_or_resume(name, default_storage(folder), folder, job, detect("cpu", 2), SPACE)


def test_the_next_call_in_the_same_process_may_hold_it(tmp_path: Path) -> None:
    first, _ = make_store(tmp_path)
    first.lock()
    second, _ = make_store(tmp_path)
    with pytest.raises(UserError, match="another autotune run holds study"):
        second.lock()
    first.leave()
    second.lock()
    second.leave()


def test_a_callback_of_optuna_receives_each_trial_after_it_is_stored(tmp_path: Path) -> None:
    got: list[tuple[int, float | None, str]] = []

    def callback(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        assert study.trials[trial.number].state == trial.state
        got.append((trial.number, trial.value, trial.user_attrs["outcome"]["kind"]))

    job, hardware = make_job(), detect("cpu", 2)
    store, _ = StudyStore.create_or_resume(
        "s", default_storage(tmp_path), tmp_path, job, hardware, SPACE, callbacks=[callback]
    )
    for outcome in (OK, Outcome(OutcomeKind.OOM_DEVICE)):
        store.finish(store.start(make_candidate(0, len(got) + 1), SPACE, "search"), outcome)
    assert got == [(0, 8.0, "ok"), (1, None, "oom_device")]


def test_what_a_study_fixed_and_this_version_knows_to_be_nothing_ends_no_reader_of_it() -> None:
    """An earlier version took Liger's kernels for any model's; of BERT's they replace nothing."""
    text = "knobs: {zero_stage: [1, 2], train_micro_batch_size_per_gpu: [1]}\nfixed: {liger_kernel: true}"
    job = make_job(model="tiny-bert", task="masked-lm", seq_len=64)
    store = StudyStore.in_memory(job, named_hardware("a100-80", 2), parse_space(text))
    assert store.searched_space().knobs.keys() == {"zero_stage", "train_micro_batch_size_per_gpu"}


def test_what_a_study_fixed_at_its_absence_stays_for_its_readers() -> None:
    """Recorded candidates have it: a family without it is none of theirs, and nothing would be left for `launch` to go on with."""
    text = "knobs: {zero_stage: [1, 2], train_micro_batch_size_per_gpu: [1]}\nfixed: {compile: false}"
    store = StudyStore.in_memory(make_job(), named_hardware("a100-80", 2), parse_space(text))
    read = store.searched_space()
    assert "compile" in read.knobs
    assert [{"zero_stage": stage, "compile": False} for stage in (1, 2)] == list(read.families())


def test_nothing_finished_is_lost_and_the_trial_in_flight_is_closed(tmp_path: Path, file: str) -> None:
    store, resumed = make_store(tmp_path)
    assert (tmp_path / file).exists()
    assert not resumed
    store.begin_call(60)
    done = store.start(make_candidate(0), SPACE, note="why")
    store.finish(done, OK)
    store.update_call(12.0)
    flying = store.start(make_candidate(2), SPACE)
    assert store.finished == {"ok": 1}
    del store  # the process is killed here
    again, resumed = make_store(tmp_path)
    assert resumed
    assert not again.finished, "counts one call"
    assert again.close_interrupted() == 1
    records = again.records()
    assert [record.number for record in records] == [done, flying]
    assert records[0].outcome == OK
    assert records[0].note == "why"
    assert records[0].candidate == make_candidate(0)
    assert records[1].outcome is not None
    assert records[1].outcome.kind is OutcomeKind.INTERRUPTED
    assert [call.used_seconds for call in again.calls()] == [12.0]
    assert again.close_interrupted() == 0


def test_calls_of_earlier_and_of_newer_versions_are_read() -> None:
    call = {"started": "then", "budget_seconds": 60, "used_seconds": 12.0}
    calls = [Call.of(one) for one in (call, {**call, "ended": "used", "of_tomorrow": 1})]
    assert [(one.ended, one.confidence) for one in calls] == [("", ""), ("used", "")]


def test_what_killed_the_tuner_twice_is_not_tried_again(tmp_path: Path) -> None:
    """Kubernetes and Slurm end the tuner with its ranks when their memory is full."""
    proposed: list[Candidate] = []
    for _ in range(4):  # calls, each killed in its first trial
        store, _ = make_store(tmp_path)
        store.close_interrupted()
        proposer = Proposer(
            [make_candidate(stage, micro) for stage in (0, 3) for micro in (1, 2)],
            SPACE,
            traced_predictor(store.job, store.hardware),
        )
        for record in store.records():
            assert record.outcome is not None
            proposer.observe(record.candidate, record.outcome)
        proposal = proposer.next()
        proposed.append(proposal.candidate)
        store.start(proposal.candidate, SPACE)
    assert proposed[0] == proposed[1], "once may have been anything"
    assert {one.family for one in proposed[2:]}.isdisjoint({proposed[0].family})
    kinds = [record.outcome.kind for record in make_store(tmp_path)[0].records() if record.outcome]
    assert kinds == [OutcomeKind.INTERRUPTED, OutcomeKind.OOM_HOST, OutcomeKind.INTERRUPTED]


@pytest.mark.few(1)
def test_a_process_killed_between_the_outcome_and_its_state_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = make_store(tmp_path)
    short = Outcome(OutcomeKind.OOM_DEVICE, missing_bytes=GIB)
    numbers = [store.start(make_candidate(stage), SPACE) for stage in (0, 1, 2)]

    def killed(*words: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.study, "tell", killed)
    for number, outcome in zip(numbers, (OK, short, Outcome(OutcomeKind.INFRASTRUCTURE)), strict=True):
        with pytest.raises(KeyboardInterrupt):
            store.finish(number, outcome)
    again, _ = make_store(tmp_path)
    assert again.close_interrupted() == 0, "each was finished"
    assert [r.outcome.kind for r in again.records() if r.outcome] == [
        OutcomeKind.OK,
        OutcomeKind.OOM_DEVICE,
        OutcomeKind.INFRASTRUCTURE,
    ]
    states = [trial.state.name for trial in again.study.get_trials()]
    assert states == ["COMPLETE", "PRUNED", "FAIL"]
    assert again.measured() == {make_candidate(0): OK.measurement}


def test_memory_is_a_graded_constraint_and_never_a_fail(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path)
    short, far = (Outcome(OutcomeKind.OOM_DEVICE, missing_bytes=size) for size in (GIB, 3 * GIB))
    numbers = [store.start(make_candidate(stage), SPACE) for stage in (0, 1)]
    for number, outcome in zip(numbers, (short, far), strict=True):
        store.finish(number, outcome)
    trials = store.study.get_trials()
    assert all(trial.state is optuna.trial.TrialState.PRUNED for trial in trials)
    over = [constraints(outcome, store.hardware)["memory_gib_over"] for outcome in (short, far)]
    assert 0 < over[0] < over[1]
    crashed = store.start(make_candidate(3), SPACE)
    store.finish(crashed, Outcome(OutcomeKind.INFRASTRUCTURE))
    assert store.study.get_trials()[crashed].state is optuna.trial.TrialState.FAIL
    assert constraints(Outcome(OutcomeKind.CRASH), store.hardware)["failed"] == 1.0
    assert constraints(OK, store.hardware)["memory_gib_over"] < 0


def test_another_job_is_refused_with_the_difference(tmp_path: Path) -> None:
    make_store(tmp_path)
    with pytest.raises(UserError, match=r"job\.seq_len: 32 -> 64"):
        make_store(tmp_path, seq_len=64)
    forced, resumed = StudyStore.create_or_resume(
        "s", default_storage(tmp_path), tmp_path, make_job(seq_len=64), detect("cpu", 2), SPACE, force=True
    )
    assert resumed
    assert forced.study.user_attrs["forced"][0]["differences"] == ["job.seq_len: 32 -> 64"]
    assert forced.job.seq_len == 64


def test_a_study_of_somebody_else_is_refused(tmp_path: Path) -> None:
    optuna.create_study(study_name="s", storage=open_storage(default_storage(tmp_path)))
    with pytest.raises(UserError, match="not made by autotune"):
        make_store(tmp_path)
    with pytest.raises(UserError, match="not made by autotune"):
        StudyStore.load("s", default_storage(tmp_path))


def test_two_runs_cannot_hold_one_study(tmp_path: Path) -> None:
    one, _ = make_store(tmp_path)
    other, _ = make_store(tmp_path)
    one.lock()
    with pytest.raises(UserError, match="another autotune run"):
        other.lock()


def test_a_broken_database_is_kept(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_bytes(b"not a database at all" * 100)
    with pytest.raises(UserError, match="kept as it is"):
        make_store(tmp_path)
    assert (tmp_path / "study.db").read_bytes() == b"not a database at all" * 100


def test_a_folder_for_a_database(tmp_path: Path) -> None:
    (tmp_path / "study.db").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        make_store(tmp_path)


def test_loading_by_name_and_by_folder(tmp_path: Path) -> None:
    store, _ = make_store(tmp_path / "s")
    store.set_winner(store.start(make_candidate(0), SPACE, VERIFY), "verified")
    store.note_skips({"too big": 3})
    for name in ("s", str(tmp_path / "s")):
        loaded = StudyStore.load(name, runs=tmp_path)
        assert loaded.name == "s"
        assert loaded.winner.role == VERIFY
        assert loaded.skips == {"too big": 3}
        assert loaded.versions["torch"]
    with pytest.raises(UserError, match="there are s"):
        StudyStore.load("zzz", runs=tmp_path)
    with pytest.raises(UserError, match="did you mean s"):
        StudyStore.load("ss", default_storage(tmp_path / "s"))


def test_a_study_stays_in_what_it_was_begun_in(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_store(tmp_path / "s")
    mount(monkeypatch, ("ext4" if file == "study.journal" else "lustre", tmp_path))
    _, resumed = make_store(tmp_path / "s")
    assert resumed
    assert StudyStore.load(str(tmp_path / "s")).name == "s"
    assert [path.name for path in tmp_path.glob("s/study.*")] == [file]


@pytest.mark.few(1)
def test_calls_and_a_long_fingerprint_fit_into_any_database(tmp_path: Path) -> None:
    labels = {str(number): f"label {number}" for number in range(5000)}
    job = make_job()
    job = dataclasses.replace(
        job, model=dataclasses.replace(job.model, config={**job.model.config, "id2label": labels})
    )
    url = default_storage(tmp_path)
    for used in range(12):
        store, resumed = StudyStore.create_or_resume("s", url, tmp_path, job, detect("cpu", 2), SPACE)
        assert resumed == (used > 0), "the fingerprint is compared whole"
        store.begin_call(60)
        store.update_call(used / 2)
        store.update_call(float(used), "budget used")
    assert store.job == job
    assert [(call.used_seconds, call.ended) for call in store.calls()] == [(float(n), "budget used") for n in range(12)]
    assert max(len(json.dumps(value)) for value in store.study.user_attrs.values()) < 65_535


def test_the_database_opens_in_plain_optuna(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    store, _ = StudyStore.create_or_resume("s", url, tmp_path, make_job(), detect("cpu", 2), SPACE)
    store.finish(store.start(make_candidate(1, 4), SPACE), OK)
    study = optuna.load_study(study_name="s", storage=url)
    assert study.best_value == 8.0
    assert study.best_params["zero_stage"] == 1
    assert study.best_params["train_micro_batch_size_per_gpu"] == 4
    with sqlite3.connect(tmp_path / "study.db") as connection:
        assert connection.execute("select count(*) from trials").fetchone() == (1,)


def test_a_study_of_an_edited_script_is_refused(tmp_path: Path) -> None:
    def begun(force: bool = False, **sources: str) -> StudyStore:
        script = Script(("train.py",), str(tmp_path), profile=ScriptProfile(sources=sources))
        job = unknown_job(script, detect("cpu", 2))
        where = default_storage(tmp_path)
        return StudyStore.create_or_resume("s", where, tmp_path, job, detect("cpu", 2), SPACE, force=force)[0]

    begun()  # by an earlier version, which did not know the files
    begun(train="1", model="1")
    begun(train="1", data="1")  # what is used no more tells nothing, and neither does what is new
    begun(train="1", data="1", model="2")
    with pytest.raises(UserError, match=r"\(data was edited; train was edited\): choose another --study, or --force"):
        begun(train="2", data="2")
    assert begun(force=True, train="2", data="2").study.user_attrs["forced"][0]["differences"] == [
        "data was edited",
        "train was edited",
    ]
    begun(train="2", data="2")
