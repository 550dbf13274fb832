"""Flags that carry the batch, found from the steps of a script that runs with other values of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.commands.script_probe import ShortRuns, _mapped, _profile, carriers_found, of_loop
from autotune.executors.base import MeasureSpec
from autotune.problem.candidate import ACCUMULATION, BATCH_KEYS, MICRO_BATCH, Candidate
from autotune.problem.faults import accumulation_facts, job_facts
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.problem.outcome import Outcome, OutcomeKind
from autotune.script.argument_writer import winners_files
from autotune.script.carriers import STEP, can_set_knob, settings
from autotune.script.profile import batch_seen
from autotune.script.recorded import is_data
from autotune.script.script import carries_knob, command, typed_words, variables_for
from tests.conftest import make_candidate, make_job

RANKS, TOKENS = 2, 32
Values = dict[str, int]
Batch = tuple[int, int]  # (micro-batch, accumulation) of a rank


class Executor:
    """Runs a script of which only the batch is computed, from its flags."""

    def __init__(self, batch: Callable[[Values], Batch], values: Values, *, by_loop: bool = False) -> None:
        self.by_loop = by_loop  # the script's loop accumulates, in an engine without accumulation
        self.job, self.hardware = make_job(), SimpleNamespace(count=RANKS)
        self.batch, self.values, self.runs = batch, values, 0
        self.facts: dict[str, Any] = {}

    def session(self, candidate: Candidate, name: str, *, job: Job) -> Executor:
        assert job.script is not None
        self.runs += 1
        words, tried = list(job.script.argv), job.script.profile.tried_values
        self.now = {
            name: int(words[words.index(name) + 1]) if name in words else tried.get(name, value)
            for name, value in self.values.items()
        }
        return self

    def measure(self, candidate: Candidate, measure_spec: MeasureSpec, seconds: float) -> Outcome:
        micro_batch, accumulation = self.batch(self.now)
        if not micro_batch or not accumulation:
            return Outcome(OutcomeKind.CRASH, reason="a batch of 0")
        self.facts = {"rows": micro_batch * accumulation, "micros": accumulation}
        self.facts["accumulation"] = 1 if self.by_loop else accumulation
        return Outcome(OutcomeKind.OK)

    def close(self) -> None:
        pass


def per_gpu(now: Values) -> Batch:
    return now["--batch_size"], now["--update_freq"]


def of_a_file(now: Values) -> Batch:
    return now["train.batch"], now["train.accumulate"]


def over_ranks(now: Values) -> Batch:
    return now["--batch-size"] // RANKS, now["--iter-size"]


def of_a_step(now: Values) -> Batch:
    return now["--global_batch_size"] // RANKS // now["--accum"], now["--accum"]


def derived(now: Values) -> Batch:
    return now["--micro_train_batch_size"], now["--train_batch_size"] // RANKS // now["--micro_train_batch_size"]


def accumulates_over_ranks(now: Values) -> Batch:
    return now["--batch_size"], now["--accumulate"] // RANKS if now["--accumulate"] % RANKS == 0 else 0


def cut_by_loop(now: Values) -> Batch:
    return now["--chunk"], now["--total_batch"] // now["--chunk"]


def known_name_over_ranks(now: Values) -> Batch:
    return accumulates_over_ranks({**now, "--accumulate": now["--gradient_accumulation_steps"]})


def of_tokens(now: Values) -> Batch:
    return now["--max_tokens"] // TOKENS, 1


@pytest.mark.parametrize(
    ("batch", "values", "step", "words"),
    [
        (per_gpu, {"--batch_size": 4, "--update_freq": 4, "--workers": 4}, "", {"--batch_size": 8, "--update_freq": 2}),
        (over_ranks, {"--batch-size": 8, "--iter-size": 4, "--workers": 4}, "", {"--batch-size": 16, "--iter-size": 2}),
        (of_a_step, {"--global_batch_size": 32, "--accum": 4}, "--global_batch_size", {"--accum": 2}),
        (of_tokens, {"--max_tokens": 256, "--warmup": 64}, "", {"--max_tokens": 1024}),
        (derived, {"--train_batch_size": 32, "--micro_train_batch_size": 4, "--workers": 4}, "--train_batch_size", {}),
        (
            accumulates_over_ranks,
            {"--batch_size": 6, "--accumulate": 8, "--workers": 4, "--heads": 8},
            "",
            {"--accumulate": 4},
        ),
        (
            known_name_over_ranks,
            {"--batch_size": 6, "--gradient_accumulation_steps": 8},
            "",
            {"--batch_size": 12, "--gradient_accumulation_steps": 4},
        ),
    ],
)
def test_flags_of_a_rank_of_all_ranks_of_a_step_and_of_tokens_are_found(
    batch: Callable[[Values], Batch], values: Values, step: str, words: Values, tmp_path: Path
) -> None:
    micro_batch, accumulation = batch(values)
    total = micro_batch * accumulation
    typed = [word for flag, value in values.items() for word in (flag, str(value))]
    profile = ScriptProfile(config={}, micro_batch=micro_batch, accumulation=accumulation)
    script = Script(("train.py", *typed), str(tmp_path), profile=profile)
    facts = {"rows": total, "micros": accumulation, "accumulation": accumulation, "integers": values, "widest": TOKENS}
    executor: Any = Executor(batch, values)
    learnt = carriers_found(ShortRuns(executor, 60.0), script, facts)
    assert executor.runs == 1
    assert learnt.found_flags.get(STEP, "") == step
    known = _mapped(script, learnt)
    other = make_candidate(1, total, 1) if accumulation == 1 else make_candidate(1, 2 * micro_batch, accumulation // 2)
    if accumulation == 1:
        other = make_candidate(1, 4 * micro_batch, 1)  # a larger batch, as `--global-batch-size` asks for
    assert settings(known, other).items() >= words.items()
    printed = command(known, other, "ds.json")
    assert all(printed[printed.index(flag) + 1] == str(value) for flag, value in words.items())
    assert carries_knob(known, MICRO_BATCH)
    now = batch({**values, **{flag: int(printed[printed.index(flag) + 1]) for flag in values}})
    assert now == (other.micro_batch, other.accumulation)
    if step:  # another global batch changes the whole step
        larger = make_candidate(1, micro_batch, 2 * accumulation)
        assert batch({**values, **settings(known, larger)}) == (larger.micro_batch, larger.accumulation)  # type: ignore[dict-item]
    over = batch in (over_ranks, of_tokens, accumulates_over_ranks, known_name_over_ranks)
    assert (max({**learnt.flag_times, STEP: 1}.values()) > 1) is over


@pytest.mark.parametrize("batch", [per_gpu, accumulates_over_ranks])
def test_a_flag_of_the_loops_own_accumulation_is_found(batch: Callable[[Values], Batch], tmp_path: Path) -> None:
    times = RANKS if batch is accumulates_over_ranks else 1
    values = {"--batch_size": 2, "--accumulate" if times > 1 else "--update_freq": 4 * times, "--layers": 2}
    typed = [word for flag, value in values.items() for word in (flag, str(value))]
    said: dict[str, list[int]] = {MICRO_BATCH: [2], ACCUMULATION: []}
    facts: dict[str, Any] = {"rows": 8, "sequences": 8, "micros": 4, "micro_batch": 2, "accumulation": 1, "said": said}
    facts["config"] = {}
    profile = _profile(facts, own=True)
    assert profile.accumulated_by_hand == 4
    script = Script(("train.py", *typed), str(tmp_path), profile=profile)
    executor: Any = Executor(batch, values, by_loop=True)
    learnt = carriers_found(ShortRuns(executor, 60.0), script, {**facts, "integers": values})
    seen = _profile({**facts, "said": {**said, ACCUMULATION: [4]}}, own=True)
    assert replace(learnt, found_flags={}, flag_times={}, attempts=()) == seen, "as if the flag's name were known"
    known, other = _mapped(script, learnt), make_candidate(1, 4, 2)
    now = settings(known, other)
    assert batch({**values, **now}) == (4, 2)  # type: ignore[dict-item]
    config = other.ds_config(make_job(script=known))
    assert [config[key] for key in BATCH_KEYS] == [4 * RANKS, 4, 1], "the engine stays without accumulation"
    assert accumulation_facts(make_job(script=known), 4) == {"accumulation": 1, "backwards_per_step": 4}
    unsynced = _mapped(script, replace(known.profile, unsynced=True))
    assert accumulation_facts(make_job(script=unsynced), 4) == {"accumulation": 1, "backwards_per_step": 1}
    known = _mapped(script, replace(known.profile, boundary_by_hand=True))
    assert accumulation_facts(make_job(script=known), 4) == {"accumulation": 4}
    assert job_facts(make_job(script=known))["backwards_per_step"] == 1


def test_a_flag_of_a_loop_that_cuts_its_engines_batch_is_found(tmp_path: Path) -> None:
    values = {"--total_batch": 16, "--chunk": 4, "--layers": 4}
    facts: dict[str, Any] = {"rows": 16, "sequences": 16, "micros": 4, "micro_batch": 16, "accumulation": 1}
    profile = ScriptProfile(config={}, **batch_seen(facts))
    script = Script(
        ("train.py", "--chunk", "4", "--layers", "4", "--total_batch", "16"), str(tmp_path), profile=profile
    )
    executor: Any = Executor(cut_by_loop, values, by_loop=True)
    learnt = carriers_found(ShortRuns(executor, 60.0), script, {**facts, "integers": values})
    assert (learnt.micro_batch, learnt.accumulation) == (4, 4)
    known, other = _mapped(script, learnt), make_candidate(1, 8, 2)
    assert cut_by_loop({**values, **settings(known, other)}) == (8, 2)  # type: ignore[dict-item]
    larger = settings(known, make_candidate(1, 4, 8))
    assert cut_by_loop({**values, **larger}) == (4, 8), "another global batch"  # type: ignore[dict-item]
    config = other.ds_config(make_job(script=known))
    assert [config[key] for key in BATCH_KEYS] == [16 * RANKS, 16, 1], "the engine's batch stays a whole step's"
    for changed in ({"micros": 1}, {"rows": 32}, {"micros": 3}):
        assert of_loop(profile, {**facts, **changed}) == profile


def test_values_of_an_argument_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(
        "# mine\nmodel: {layers: 4}\ntrain: {batch: 4, accumulate: 2, deep: [4]}\nseed: 2\n"
    )
    values = {"train.batch": 4, "train.accumulate": 2, "model.layers": 4, "seed": 2}
    profile = ScriptProfile(config={}, micro_batch=4, accumulation=2)
    script = Script(("train.py", "--config", "x.yaml"), str(tmp_path), profile=profile)
    assert not script.files, "nothing in the file is known by name"
    executor: Any = Executor(of_a_file, values)
    learnt = carriers_found(ShortRuns(executor, 60.0), script, {"rows": 8, "micros": 2, "accumulation": 2})
    assert executor.now.keys() == values.keys()
    assert len({executor.now[place] / value for place, value in values.items()}) == len(values), "each role shows"
    known = _mapped(script, learnt)
    assert dict(known.flags) == {MICRO_BATCH: "train.batch", ACCUMULATION: "train.accumulate"}
    (line,) = known.profile.attempts
    assert line.startswith("tried ")
    assert line.endswith("; taken: train.batch, train.accumulate")
    assert can_set_knob(known, MICRO_BATCH)
    config = tmp_path / "best.json"
    ((path, text),) = winners_files(known, make_candidate(1, 8, 1), config).items()
    assert command(known, make_candidate(1, 8, 1), str(config)) == ["train.py", "--config", str(path)]
    assert text == "# mine\nmodel: {layers: 4}\ntrain: {batch: 8, accumulate: 1, deep: [4]}\nseed: 2\n"
    assert is_data(known.profile, script), "the next call uses what was found"


def test_a_batch_of_all_ranks_in_a_file_and_a_short_flag_are_found(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("train:\n  batch: 8  # of all ranks\n")
    values = {"train.batch": 8, "-g": 4}
    profile = ScriptProfile(config={}, micro_batch=4, accumulation=4)
    script = Script(("train.py", "x.yaml", "-g", "4"), str(tmp_path), profile=profile)
    executor: Any = Executor(lambda now: (now["train.batch"] // RANKS, now["-g"]), values)
    facts = {"rows": 16, "micros": 4, "accumulation": 4}
    known = _mapped(script, carriers_found(ShortRuns(executor, 60.0), script, facts))
    assert known.profile.found_flags == {MICRO_BATCH: "train.batch", ACCUMULATION: "-g"}
    ((path, text),) = winners_files(known, make_candidate(1, 16, 1), tmp_path / "best.json").items()
    assert text == "train:\n  batch: 32 # of all ranks\n"
    assert command(known, make_candidate(1, 16, 1), str(tmp_path / "best.json")) == ["train.py", str(path), "-g", "1"]


def test_telling_names_are_tried_first_and_without_a_larger_micro_batch(tmp_path: Path) -> None:
    values = {"--global_batch": 16, "--acc": 2, "--layers": 2}
    profile = ScriptProfile(config={}, micro_batch=4, accumulation=2)
    script = Script(("train.py",), str(tmp_path), profile=profile)
    facts = {"rows": 8, "micros": 2, "accumulation": 2, "integers": values}
    executor: Any = Executor(lambda now: (now["--global_batch"] // RANKS // now["--acc"], now["--acc"]), values)
    learnt = carriers_found(ShortRuns(executor, 60.0), script, facts)
    assert executor.now == {"--global_batch": 32, "--acc": 8, "--layers": 2}
    assert learnt.found_flags == {ACCUMULATION: "--acc", STEP: "--global_batch"}
    executor = Executor(lambda now: (4, now["--layers"]), values)  # another name than the telling one carries it
    learnt = carriers_found(ShortRuns(executor, 60.0), script, facts)
    assert (executor.runs, learnt.found_flags) == (2, {ACCUMULATION: "--layers"})
    assert [line.rpartition("; ")[2] for line in learnt.attempts] == [
        "taken: nothing, no value explains it",
        "taken: --layers",
    ]


def test_a_script_that_no_flag_changes_takes_two_runs_at_most(tmp_path: Path) -> None:
    values = {"--workers": 4, "--layers": 4, "--hidden": 8}
    profile = ScriptProfile(config={}, micro_batch=4, accumulation=1)
    facts = {"rows": 4, "micros": 1, "accumulation": 1, "integers": values}
    for batch in (lambda now: (4, 1), lambda now: (4, 1 if now == values else 0)):
        executor: Any = Executor(batch, values)
        runs = ShortRuns(executor, 60.0)
        argv = ("train.py", "--gradient_accumulation_steps=1")
        learnt = carriers_found(runs, Script(argv, str(tmp_path), profile=profile), facts)
        assert replace(learnt, attempts=()) == profile
        assert learnt.attempts[0] == "accumulation 1: a flag or file of a known name carries it"
        assert executor.runs == 2 - runs.left <= 2


def test_variables_that_the_script_reads_carry_the_batch_like_flags(tmp_path: Path) -> None:
    """A variable of another name with the same value stays as it is while a telling name explains the batch."""
    values = {"$BATCH_SIZE": 2, "$GRAD_ACC": 8, "$ZERO_STAGE": 2, "$UNREAD": 2}
    profile = ScriptProfile(config={}, micro_batch=2, accumulation=8, environment={"BATCH_SIZE": "2", "GRAD_ACC": None})
    script = Script(("train.py",), str(tmp_path), profile=profile)
    executor: Any = Executor(lambda now: (now["$BATCH_SIZE"], now["$GRAD_ACC"]), values)
    facts = {"rows": 16, "micros": 8, "accumulation": 8, "environment_integers": values}
    facts["environment"] = dict.fromkeys(("BATCH_SIZE", "GRAD_ACC", "ZERO_STAGE"))
    learnt = carriers_found(ShortRuns(executor, 60.0), script, facts)
    assert executor.runs == 1
    assert (executor.now["$ZERO_STAGE"], executor.now["$UNREAD"]) == (2, 2)
    known, other = _mapped(script, learnt), make_candidate(1, 4, 4)
    assert dict(known.flags) == {MICRO_BATCH: "$BATCH_SIZE", ACCUMULATION: "$GRAD_ACC"}
    assert command(known, other, "ds.json") == ["train.py"]
    assert variables_for(known, other, RANKS) == {"BATCH_SIZE": "4", "GRAD_ACC": "4"}
    assert typed_words(known) == ["BATCH_SIZE=2", "train.py"], "the user's own values, which `launch` replaces"
    assert carries_knob(known, MICRO_BATCH)
