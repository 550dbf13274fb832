import dataclasses
from pathlib import Path

import pytest

from autotune.problem.candidate import ACCUMULATION, ALLOCATOR_VARIABLES, MICRO_BATCH
from autotune.problem.hardware import detect
from autotune.problem.job import Script
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.results.console import closest_lines, train_with, winner_lines
from autotune.results.export import lossy_settings, needs
from autotune.results.report.build import _gains
from autotune.script.script import CONFIG_FLAG, KNOWN_FLAGS, half_told
from autotune.search.trials import AS_IS, SEARCH, VERIFY, Record
from autotune.util.units import MIB
from tests.conftest import make_candidate, make_job
from tests.studies import study_of_every_kind


def test_the_margin_compares_what_was_measured_alike() -> None:
    def record(number: int, role: str, micro_batch: int, rate: float, note: str = "") -> Record:
        outcome = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.01, 5, rate, rate, 300 * MIB))
        return Record(number, make_candidate(0, micro_batch), outcome, role, note)

    searched = [record(0, SEARCH, 1, 400.0), record(1, SEARCH, 2, 380.0), record(2, SEARCH, 4, 100.0)]
    slowed = record(3, VERIFY, 1, 300.0)  # the machine is slower by now
    hardware = detect("cpu", 2)
    last = winner_lines(slowed, [*searched, slowed], make_job(), hardware)[-1]
    assert last == "  +5.3 % against the next best, 4.0x the slowest of 3 that fit"
    displaced = record(4, VERIFY, 2, 290.0)
    last = winner_lines(slowed, [*searched, slowed, displaced], make_job(), hardware)[-1]
    assert last == "  +3.4 % against the next best, 4.0x the slowest of 3 that fit"
    beside = _gains(slowed, [*searched, slowed, displaced], make_job(), hardware)
    assert [(gain.over, round(gain.times, 3)) for gain in beside] == [
        ("the next best", 1.034),
        ("the slowest of 3 that fit", 4.0),
    ], "the page says the same"
    own = record(5, SEARCH, 8, 200.0, AS_IS)
    last = winner_lines(slowed, [*searched, slowed, own], make_job(), hardware)[-1]
    other = "(in tokens/s: its steps are of 16 samples, the winner's of 2)"
    assert (
        last
        == f"  2.00x the script as it is: {make_candidate(0, 8)} {other} (in the search: 400 against 200 samples/s)"
    )
    alike = Record(5, make_candidate(1, 1), own.outcome, SEARCH, AS_IS)
    last = winner_lines(slowed, [*searched, slowed, alike], make_job(), hardware)[-1]
    assert last == f"  2.00x the script as it is: {make_candidate(1, 1)} (in the search: 400 against 200 samples/s)"
    kept = record(6, SEARCH, 1, 400.0, AS_IS)
    assert winner_lines(slowed, [kept, slowed], make_job(), hardware)[-1].endswith("has this config already")
    assert "next best" not in winner_lines(slowed, [slowed], make_job(), hardware)[-1]


@pytest.mark.parametrize(("spread", "doubtful"), [(0.4, False), (0.6, True), (3.97, True)])
def test_a_figure_that_may_be_anything_is_no_winner_without_a_word(spread: float, doubtful: bool) -> None:
    outcome = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, spread, 5, 9.0, 9.0, 300 * MIB))
    record = Record(0, make_candidate(0, 1), outcome, VERIFY)
    lines = winner_lines(record, [record], make_job(), detect("cpu", 2))
    assert any("doubtful: its steps differ so much" in line for line in lines) is doubtful


def test_what_came_closest(tmp_path: Path) -> None:
    study = study_of_every_kind(tmp_path)
    lines = closest_lines(study.records(), detect("cpu", 2), [])
    assert lines[0].startswith("closest: ")
    assert "cheapest changes" in lines[1]
    crashed = [record for record in study.records() if record.outcome and record.outcome.kind is OutcomeKind.CRASH]
    assert closest_lines(crashed, detect("cpu", 2), [])[0].startswith("no candidate ran: crash")


def test_the_printed_command_has_the_environment_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    profile = {"loader_prepared": False, "through_arguments": False, "flags": []}
    script = Script(("train.py", "ds.json"), str(tmp_path), profile=profile)
    job, config = make_job(script=script), tmp_path / "won.json"
    first, watched = train_with(make_candidate(2, 4), job, "s", config, 5).lines()
    assert first == f"  train with: OMP_NUM_THREADS=5 torchrun --nproc-per-node 2 train.py {config}"
    assert watched == "  or watched: autotune launch s -- train.py ds.json"
    odd = train_with(make_candidate(2, 4), job, "lr #2", config, 5).lines()[1]
    assert odd == "  or watched: autotune launch 'lr #2' -- train.py ds.json"
    grown = make_candidate(2, 4, expandable_segments=True)
    first, _ = train_with(grown, job, "s", config, 5).lines()
    assert "OMP_NUM_THREADS=5 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torchrun" in first
    own = {"NCCL_ALGO": "Ring", "PYTORCH_ALLOC_CONF": "a:b c"}
    first, _ = train_with(grown, job, "s", config, 5, own).lines()
    joined = "PYTORCH_CUDA_ALLOC_CONF='a:b c,expandable_segments:True'"
    assert f"train with: NCCL_ALGO=Ring PYTORCH_ALLOC_CONF='a:b c' OMP_NUM_THREADS=5 {joined} torchrun" in first
    assert train_with(grown, make_job(), "s", config, 5).lines() == []


def test_lightnings_accumulation_is_in_no_config(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    profile = {"loader_prepared": False, "through_arguments": False, "flags": ["--accumulate"], "lightning": True}
    script = Script(("train.py", "ds.json"), str(tmp_path), profile=profile)
    lines = train_with(make_candidate(2, 4, 8), make_job(script=script), "s", tmp_path / "s.json", 5).lines()
    assert lines[0] == "  train with: autotune launch s -- train.py ds.json"
    assert lines[-1] == "    with accumulate_grad_batches=8 in its Trainer, which takes it from no config"
    told = dataclasses.replace(script, flags=((ACCUMULATION, "--accumulate"),))
    first, _ = train_with(make_candidate(2, 4, 8), make_job(script=told), "s", tmp_path / "s.json", 5).lines()
    assert "train.py" in first
    assert first.endswith("--accumulate 8")


@pytest.mark.parametrize(
    ("on", "winner", "flags", "says"),
    [
        (False, False, [], None),
        (False, True, [], "call model.gradient_checkpointing_enable"),
        (False, True, ["--gradient_checkpointing"], None),
        (True, True, [], None),
        (True, False, [], "take it out"),
        (
            True,
            False,
            ["--gradient_checkpointing"],
            "take it out",
        ),  # which changes nothing of what the code does itself
    ],
)
def test_checkpointing_that_no_command_carries_is_said(
    tmp_path: Path, on: bool, winner: bool, flags: list[str], says: str | None
) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    profile = {"loader_prepared": False, "through_arguments": False, "flags": flags, "checkpointed": on}
    script = Script(("train.py", "ds.json"), str(tmp_path), profile=profile)
    candidate = make_candidate(2, 4, activation_checkpointing=winner)
    hints = train_with(candidate, make_job(script=script), "s", tmp_path / "s.json", 5).hints
    assert len(hints) == (says is not None)
    assert says is None or says in hints[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_no_engine_below_stage_3_trains_is_said(tmp_path: Path, stage: int) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    profile = {"loader_prepared": False, "through_arguments": False, "flags": [], "zero_init": True}
    script = Script(("train.py", "ds.json"), str(tmp_path), profile=profile)
    hints = train_with(make_candidate(stage, 4), make_job(script=script), "s", tmp_path / "s.json", 5).hints
    assert ["take deepspeed.zero.Init out" in hint for hint in hints] == [True] * (stage < 3)


def test_a_loaders_batch_is_said_as_the_script_has_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    profile = {"loader_prepared": True, "through_arguments": False, "flags": []}

    def last(**more: object) -> str:
        script = Script(("train.py", "ds.json"), str(tmp_path), profile={**profile, **more})
        return train_with(make_candidate(2, 4), make_job(2, script=script), "s", tmp_path / "s.json", 5).lines()[-1]

    assert "with batch_size=4 in its data loader" in last()
    assert "with batch_size=8 in its data loader" in last(loader_split=True), "accelerate splits it over two ranks"
    assert "data loader" not in last(batch_note="it has its own")
    assert "data loader" not in last(flags=["--per_device_train_batch_size"]), "the printed command carries it"


def test_a_config_in_code_needs_the_mapped_flags_too(tmp_path: Path) -> None:
    profile = {"loader_prepared": False, "through_arguments": False, "flags": []}
    flags = ((MICRO_BATCH, "--batch_size"), (ACCUMULATION, "--update_freq"))
    for mapped, words in ((flags, ", and give it --update_freq 2 --batch_size 8"), ((), "")):
        script = Script(("train.py", "--batch_size", "4"), str(tmp_path), mapped, profile=profile)
        lines = train_with(make_candidate(1, 8, 2), make_job(script=script), "s", tmp_path / "s.json", 5).lines()
        assert lines[1] == f"  or put {tmp_path / 's.json'} where the script has its own config{words}"


def test_the_printed_command_gets_the_gpus_that_the_study_had(tmp_path: Path) -> None:
    flags = tuple({**KNOWN_FLAGS, "config": CONFIG_FLAG}.values())
    profile = {"loader_prepared": False, "through_arguments": True, "flags": flags}
    script = Script(("train.py", CONFIG_FLAG, "ds.json"), str(tmp_path), profile=profile)
    for given in ({}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}):
        line, _ = train_with(make_candidate(), make_job(1, script=script), "s", tmp_path / "s.json", 3, given).lines()
        order = "CUDA_DEVICE_ORDER=PCI_BUS_ID " if given else ""
        expected = f"  train with: {order}OMP_NUM_THREADS=3 torchrun"
        assert line.startswith(expected)


def test_a_schedule_that_is_computed_of_half_a_batch_is_said(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    accumulates = ["--gradient_accumulation_steps"]
    profile = {"loader_prepared": True, "through_arguments": False, "flags": accumulates, "micro_batch": 2}

    def said(micro_batch: int = 8, map: tuple[tuple[str, str], ...] = (), **more: object) -> bool:
        script = Script(("train.py", "ds.json"), str(tmp_path), map, profile={**profile, **more})
        candidate = make_candidate(1, micro_batch)
        found = train_with(candidate, make_job(script=script), "s", tmp_path / "s.json", 5).lines()[-1]
        assert ("of its own micro-batch of 2" in found) is bool(half_told(script, candidate))
        return "length of a schedule" in found

    assert said()
    assert not said(2), "its own"
    assert not said(flags=[]), "both are told at prepare"
    assert not said(map=((MICRO_BATCH, "--batch_size"),)), "both are told by flags"
    assert not said(through_arguments=True, flags=["--gradient_accumulation_steps", "--per_device_train_batch_size"])


def test_a_winner_of_another_batch_asks_for_a_look_at_the_learning_rate(tmp_path: Path) -> None:
    script = Script(("train.py",), str(tmp_path), profile={"micro_batch": 2, "accumulation": 2})
    job = make_job(script=script)  # on two ranks
    outcome = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.01, 5, 10.0, 10.0, 300 * MIB))
    own = Record(0, make_candidate(0, 2, 2), outcome, SEARCH, AS_IS)
    for micro_batch, accumulation, warns in ((4, 1, False), (1, 4, False), (4, 2, True), (1, 1, True)):
        won = Record(1, make_candidate(1, micro_batch, accumulation), outcome, VERIFY)
        last = winner_lines(won, [own, won], job, detect("cpu", 2))[-1]
        assert ("the learning rate" in last) == warns
    assert last.startswith("  its steps are of 2 samples, the script's own of 8: ")


STATES, MASTERS = "bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"


def test_a_winner_says_what_it_changes_of_what_is_computed() -> None:
    job = make_job(precision="bf16")
    lossy = make_candidate(2, **{MASTERS: True, STATES: True})
    assert lossy_settings(lossy, job) == [
        f"changes what is computed by {MASTERS}=True: master weights and gradients are kept in bf16; losses may differ from a "
        "training without it",
        f"changes what is computed by {STATES}=True: the optimizer's states are kept in bf16; losses may differ from a "
        "training without it",
    ]
    outcome = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.01, 5, 10.0, 10.0, 300 * MIB))
    record = Record(0, lossy, outcome, VERIFY)
    lines = winner_lines(record, [record], job, detect("cpu", 2))
    assert [line for line in lines if "losses may differ" in line] == [
        f"  it {one}" for one in lossy_settings(lossy, job)
    ]
    assert sum("losses may differ" in line for line in needs(lossy, job, {})) == 2
    assert lossy_settings(make_candidate(2), job) == []


def test_what_the_users_own_config_has_already_is_no_change() -> None:
    own = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    job = make_job(precision="bf16", base_config=own)
    assert lossy_settings(make_candidate(2, **{MASTERS: True, STATES: True}), job) == []
