"""Trials without DeepSpeed after the search: their time, their choice, their place in the study and in the verdict."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.executors.base import MeasureSpec
from autotune.predict.predictor import Predictor
from autotune.predict.trace import trace_job
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job, Lora
from autotune.problem.knobs import LOW_MASTERS, LOW_STATES
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.problem.training_trace import TracedStep, TrainingTrace
from autotune.search.leaderboard import StudyFacts
from autotune.search.proposer import Proposer
from autotune.search.study import StudyStore
from autotune.search.trials import REFERENCE, SEARCH, VERIFY, Record
from autotune.search.tuner import NullObserver, References, SearchSummary, Tuner
from autotune.util.units import GIB
from benchmarks.search.replay import ReplayExecutor, ReplaySession, ReplayTable
from tests.conftest import make_candidate, make_job
from tests.results.report.studies import machine, measured, ran_out
from tests.search import test_tuner

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


class Torch(ReplayExecutor):
    """A replay that also has outcomes of torch alone, each after this many seconds."""

    runs_torch_alone = True

    def __init__(self, replay_table: ReplayTable, outcome: Outcome, seconds: float = 5.0) -> None:
        super().__init__(replay_table)
        self.outcome, self.seconds, self.tried, self.measure_specs = (
            outcome,
            seconds,
            list[Candidate](),
            list[MeasureSpec](),
        )

    def session(
        self, candidate: Candidate, name: str, patience: float = 1.0, *, job: Job | None = None
    ) -> ReplaySession:
        executor = self
        if job is None:
            return super().session(candidate, name, patience)
        assert job.torch_alone

        class Session(ReplaySession):
            def measure(self, candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
                executor.tried.append(candidate)
                executor.measure_specs.append(measure_spec)
                executor.advance(min(executor.seconds, deadline_seconds))
                return executor.outcome

        return Session(self, candidate)


def search(
    executor: Torch, budget: float, *, references: bool = True, observer: NullObserver | None = None
) -> tuple[SearchSummary, StudyStore]:
    result, _, store = test_tuner.search(
        executor.replay_table, budget, executor=executor, observer=observer, references=references
    )
    return result, store


FAST = Outcome(OutcomeKind.OK, Phase.STEP, Measurement(1.0, 0.001, 9, 1e4, 1e6, 12 * GIB))


def test_a_tenth_of_the_budget_measures_ddp_and_fsdp2_with_the_winners_batch(replay_table: ReplayTable) -> None:
    executor = Torch(replay_table, FAST)
    result, store = search(executor, 900)
    winner = result.winner.candidate
    assert [one.stage for one in executor.tried] == [0, 3]
    for one in executor.tried:
        assert one.micro_batch * one.accumulation == winner.micro_batch * winner.accumulation
        assert not one.offloaded
    assert all(measure_spec.full and not measure_spec.certify for measure_spec in executor.measure_specs)
    assert [one.candidate for one in store.references] == executor.tried
    assert not any(record.role == REFERENCE for record in store.records()), "they are no candidates"
    facts = store.facts()
    assert facts.winner.candidate == winner, "a reference never wins"
    assert [one.wins for one in facts.references] == [True, True]


@pytest.mark.parametrize(("budget", "seconds", "tried"), [(59, 1.0, 0), (900, 70.0, 1)])
def test_references_take_no_more_than_a_tenth(
    replay_table: ReplayTable, budget: float, seconds: float, tried: int
) -> None:
    executor = Torch(replay_table, FAST, seconds)
    result, _ = search(executor, budget)
    assert result.verified
    assert len(executor.tried) == tried
    assert executor.now() <= budget


class Dying(Torch):
    """Its fork server is gone when the first session without DeepSpeed begins."""

    def session(self, *words: Any, job: Job | None = None, **more: Any) -> ReplaySession:
        if job is not None:
            raise UserError("the fork server died")
        return super().session(*words, **more)


def test_a_reference_that_cannot_run_costs_a_line_and_no_winner(replay_table: ReplayTable) -> None:
    told = Told()
    result, store = search(Dying(replay_table, FAST), 900, observer=told)
    assert result.verified
    assert store.winner is not None
    assert [call.ended for call in store.calls()] == [result.stop_sentence]
    assert [line for line in told.said if "the fork server died" in line] == [
        "plain DDP was not measured for comparison: the fork server died"
    ]


def test_a_call_without_references_measures_none(replay_table: ReplayTable) -> None:
    executor = Torch(replay_table, FAST)
    _, store = search(executor, 90, references=False)
    assert not executor.tried
    assert not store.references
    assert not ReplayExecutor(replay_table).runs_torch_alone, "a table has no rows of torch alone"


@pytest.mark.slow
def test_an_oom_of_a_reference_is_a_measurement_and_an_interruption_is_not(replay_table: ReplayTable) -> None:
    oom = Outcome(OutcomeKind.OOM_DEVICE, Phase.BACKWARD, reason="CUDA out of memory", peak_bytes=22 * GIB)
    _, store = search(Torch(replay_table, oom), 900)
    (ddp, _) = store.facts().references
    assert ddp.ratio is None
    assert ddp.sentence(make_candidate(2)).endswith("oom_device, CUDA out of memory")
    cut = Outcome(OutcomeKind.INTERRUPTED, reason="cut short", source=Source.BUDGET)
    _, store = search(Torch(replay_table, cut), 900)
    assert not store.references


class Told(NullObserver):
    def __init__(self) -> None:
        self.said = list[str]()

    def print_line(self, text: str) -> None:
        self.said.append(text)


def references(replay_table: ReplayTable, budget: float = 900, **changes: Any) -> tuple[References, list[str]]:
    """References of a job with these changes, and what is said about them."""
    job, hardware, space, told = replay_table.job(), replay_table.hardware(), replay_table.space(), Told()
    job = dataclasses.replace(job, **changes)
    store = StudyStore.in_memory(job, hardware, space)
    proposer = Proposer(list(replay_table.rows), space, Predictor(job, hardware, trace_job(job)))
    parts = (store, Torch(replay_table, FAST), proposer)
    found = Tuner(*parts, budget_seconds=budget, observer=told, references=True).references
    assert found is not None
    return found, told.said


def test_a_reference_of_a_compiled_winner_is_compiled(replay_table: ReplayTable) -> None:
    found, said = references(replay_table)
    for stage in (0, 3):
        chosen = found._chosen(stage, make_candidate(2, 4, compile=True))
        assert isinstance(chosen, Candidate)
        assert chosen.get("compile") is True
    assert not said


@pytest.mark.parametrize(
    ("knob", "why"),
    [
        ({"lora": "r=16,quantize=nf4"}, "4-bit weights are whole on each rank"),
        (
            {LOW_MASTERS: True, LOW_STATES: True},
            f"torch has no counterpart of {LOW_MASTERS}: master weights and gradients are kept in bf16",
        ),
    ],
)
def test_a_winner_that_fsdp2_cannot_train_has_none_and_the_reason_is_said(
    replay_table: ReplayTable, knob: dict[str, Any], why: str
) -> None:
    found, _ = references(replay_table)
    assert found._chosen(3, make_candidate(2, 4, **knob)) == why


@pytest.mark.parametrize(
    ("budget", "changes", "why"),
    [
        (900, {}, {0: "", 3: ""}),
        (59, {}, {}),
        (900, {"precision": "fp16"}, dict.fromkeys((0, 3), "DeepSpeed's loss scale of fp16 is its own")),
        pytest.param(
            900,
            {"lora": Lora(8, quantize="nf4")},
            {0: "", 3: "4-bit weights are whole on each rank"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_references_that_cannot_be_measured_take_no_time_from_the_search(
    replay_table: ReplayTable, budget: float, changes: dict[str, Any], why: dict[int, str]
) -> None:
    found, _ = references(replay_table, budget, **changes)
    assert found._why_not == why
    assert found.budget.following == list(why.values()).count("")


# -- the verdict -------------------------------------------------------------------------------------------------------


def trace(loss: float) -> TrainingTrace:
    step = TracedStep(1, 4, 1.0, loss, loss, 1e-5, (1e-5,))
    return TrainingTrace((step,) * 5, 0, "fp32", 1, initial=(1.0,))


def facts_of(
    speed: float,
    *,
    stage: int = 0,
    loss: float = 2.0,
    peak_gib: float = 12.0,
    batch: int = 4,
    accumulation: int = 1,
    tuner: str = "b",
) -> StudyFacts:
    """A winner of 100 samples/s that tuner b verified, and one reference."""
    winner = make_candidate(2, 4)
    won = dataclasses.replace(measured(100.0, 10.0), trace=trace(2.0))
    mine = dataclasses.replace(measured(speed, peak_gib), trace=trace(loss))
    records = [
        Record(0, winner, won, VERIFY, tuner="a", started="2026-01-01"),
        Record(1, winner, won, SEARCH, tuner="b", started="2026-01-02"),
        Record(2, winner, won, VERIFY, tuner="b", started="2026-01-02"),
    ]
    reference = Record(0, make_candidate(stage, batch, accumulation), mine, REFERENCE, tuner=tuner)
    return StudyFacts(records, make_job(), machine(), winner=2, references=[reference])


def test_the_verdict_says_when_a_reference_is_faster() -> None:
    (line,) = facts_of(118.0).comparison()
    assert line == (
        "plain DDP was 1.18x as fast as the best DeepSpeed config: 118 samples/s, peak 12.00 GiB; "
        "use it if your training allows"
    )
    (line,) = facts_of(118.0, stage=3).comparison()
    assert line.startswith("FSDP2 was 1.18x as fast")
    assert line.endswith("(`autotune export --format fsdp`)")
    (line,) = facts_of(118.0, stage=3, batch=2, accumulation=2).comparison()
    assert line.startswith("FSDP2 (mb2 ga2) was 1.18x as fast")
    assert line.endswith("your training allows"), "the exported config has the winner's batch"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"speed": 80.0},
            "plain DDP, without DeepSpeed: 0.80x the winner's speed (slower), 80 samples/s, peak 12.00 GiB",
        ),
        ({"speed": 100.1}, "(below noise)"),
        ({"speed": 150.0, "peak_gib": 23.9}, "over the ceiling"),
        ({"speed": 150.0, "loss": 3.0}, "plain DDP is not compared: it trains something else: "),
    ],
)
def test_a_reference_that_does_not_win_says_why(changes: dict[str, float], said: str) -> None:
    facts = facts_of(**changes)  # type: ignore[arg-type]
    assert said in facts.comparison()[0]
    assert not facts.references[0].wins
    assert facts.to_json()["references"][0]["line"] == facts.comparison()[0]  # type: ignore[index]


@pytest.mark.parametrize("changes", [{"batch": 2}, {"tuner": "a"}, {"tuner": "unknown"}])
def test_a_reference_of_another_batch_or_an_earlier_call_is_not_compared(changes: dict[str, object]) -> None:
    assert facts_of(118.0, **changes).comparison() == []  # type: ignore[arg-type]


def test_a_reference_that_ran_out_of_memory_is_in_the_verdict() -> None:
    facts = facts_of(118.0)
    assert facts.winner is not None
    reference = dataclasses.replace(facts.references[0], outcome=ran_out(Phase.BACKWARD, 1.0), ratio=None)
    assert reference.sentence(facts.winner.candidate).startswith("plain DDP (z0 mb4")
    assert reference.to_json(facts.winner.candidate)["samples_per_second"] is None
