import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.candidate import ACCUMULATION, ALLOCATOR_VARIABLES, MICRO_BATCH, Candidate
from autotune.problem.hardware import detect, named_hardware
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.results.console import (
    code_legend,
    config_sentence,
    detail_lines,
    no_winner_lines,
    train_with,
    verdict_lines,
)
from autotune.results.export import lossy_settings, training_changes
from autotune.script.script import wrong_batch_warning
from autotune.search.leaderboard import StudyFacts
from autotune.search.stopping import StopReason
from autotune.search.trials import AS_IS, NO_CALL, SEARCH, VERIFY, Record
from autotune.util.units import MIB
from tests.conftest import make_candidate, make_job
from tests.studies import study_of_every_kind


def verdict(winner: Record, records: list[Record], job: Job | None = None) -> list[str]:
    job, hardware = job or make_job(), detect("cpu", 2)
    facts = StudyFacts(records, job, hardware, winner=winner.number)
    return [*verdict_lines(facts, job, hardware), *detail_lines(facts, records, job, hardware)]


def measured(number: int, role: str, micro_batch: int, rate: float, note: str = "", **more: float) -> Record:
    step_seconds, peak_bytes = 10.0 / rate, int(more.get("peak_mib", 300) * MIB)
    spread = more.get("spread", 0.001) * step_seconds
    outcome = Outcome(OutcomeKind.OK, measurement=Measurement(step_seconds, spread, 5, rate, rate, peak_bytes))
    return Record(number, make_candidate(0, micro_batch), outcome, role, note)


def test_the_margin_compares_what_was_measured_alike() -> None:
    searched = [measured(0, SEARCH, 1, 400.0), measured(1, SEARCH, 2, 380.0), measured(2, SEARCH, 4, 100.0)]
    slowed = measured(3, VERIFY, 1, 300.0)  # the machine is slower by now
    second = make_candidate(0, 2)
    tied, last = verdict(slowed, [*searched, slowed])[-2:]
    assert tied == f"  tied with 1 other (difference below noise): {second}; chosen because it measured fastest"
    alike = f"{make_candidate(0, 4)}: 400 against 100 samples/s, measured alike"
    assert last == f"  +300.0 % against the next best that is not tied ({alike})"
    displaced = measured(4, VERIFY, 2, 290.0)
    last = verdict(slowed, [*searched, slowed, displaced])[-1]
    assert last == f"  +3.4 % against the next best ({second})"
    own = measured(5, SEARCH, 8, 200.0, AS_IS)
    first = verdict(slowed, [*searched, slowed, own])[0]
    assert first == (
        "yours (ZeRO-0, micro-batch 8 x 1): the winner is 2.00x yours (400 against 200 samples/s, measured alike; its steps are "
        "of 16 samples, the winner's of 2)"
    )
    compiled = dataclasses.replace(measured(6, SEARCH, 1, 600.0), candidate=make_candidate(0, compile=True))
    first = verdict(compiled, [*searched, own, compiled])[0]
    assert "3.00x yours: 2.00x by micro-batch, 1.50x by compile (600" in first
    over = measured(5, SEARCH, 8, 200.0, AS_IS, peak_mib=2**30)
    assert "; yours cannot win: over by " in verdict(slowed, [*searched, slowed, over])[0]
    kept = measured(6, SEARCH, 1, 400.0, AS_IS)
    assert verdict(slowed, [kept, slowed])[0].endswith("has this config already")
    assert not any("next best" in line for line in verdict(slowed, [slowed]))


def test_a_config_rejected_in_verification_is_not_the_next_best() -> None:
    """It was, with a margin of -31.8 %."""
    out = Outcome(OutcomeKind.OOM_DEVICE, Phase.SAVE, reason="ran out", missing_bytes=MIB)
    fast = measured(0, SEARCH, 8, 587.0)
    records = [
        fast,
        measured(1, SEARCH, 1, 400.0),
        measured(2, SEARCH, 2, 350.0),
        replace(fast, number=3, outcome=out, role=VERIFY),
    ]
    records.append(measured(4, VERIFY, 1, 401.0))
    facts = StudyFacts(records, make_job(), detect("cpu", 2), winner=4)
    assert facts.next_best.candidate == make_candidate(0, 2)
    assert facts.remarks == {0: "rejected: oom_device: ran out"}


def test_turns_of_two_close_verifications_count_as_their_mean() -> None:
    """The tuner chooses the winner by the mean of its turns."""
    first, second = measured(0, VERIFY, 1, 102.0), measured(1, VERIFY, 2, 98.5)
    again = measured(2, VERIFY, 1, 96.0)
    facts = StudyFacts([first, second, again], make_job(), detect("cpu", 2), winner=2)
    assert facts.winner.outcome.measurement.samples_per_second == pytest.approx(98.95, abs=0.1)
    assert [rival.candidate for rival in facts.tied] == [second.candidate], "the turns differ by more"
    apart = [replace(one, tuner=tuner) for one, tuner in zip((first, second, again), ("a", "a", "b"), strict=True)]
    apart = [replace(one, started=f"2026-01-0{at}T00:00:00+00:00") for at, one in enumerate(apart, 1)]
    facts = StudyFacts(apart, make_job(), detect("cpu", 2), winner=2)
    assert facts.winner.outcome.measurement == again.outcome.measurement if again.outcome else False


def test_only_what_one_call_measured_is_compared() -> None:
    """The machine was loaded during the first call: "7.84x yours" was printed."""
    own = replace(measured(0, SEARCH, 8, 20.0, AS_IS), tuner="a", started="1")
    won = replace(measured(1, VERIFY, 1, 157.0), tuner="b", started="2")
    apart = replace(measured(2, SEARCH, 2, 170.0), tuner="a", started="1")
    assert verdict(won, [own, won])[0] == (
        "yours (ZeRO-0, micro-batch 8 x 1): 20 samples/s, of another call than the winner's: not compared"
    )
    facts = StudyFacts([own, apart, won], make_job(), detect("cpu", 2), winner=1)
    assert facts.not_compared.keys() == {0, 2}
    assert facts.own_ratio is None
    assert [*facts.tied, *facts.slower, *facts.faster] == []
    assert facts.comparison() == ["not compared with 2 other configs, which no call measured together with the winner"]
    beside = replace(measured(3, SEARCH, 1, 25.0), tuner="c", started="1")  # a peer tuner at the same time
    later = replace(apart, started="3")  # its call went on after the peer's trial
    facts = StudyFacts([own, beside, won, later], make_job(), detect("cpu", 2), winner=1)
    assert facts.own_ratio.times == pytest.approx(25 / 20)


@pytest.mark.parametrize(
    ("rate", "peak_mib", "why"),
    [(99.0, 300, "it measured fastest"), (101.0, 400, "it needs least memory"), (101.0, 200, "it is verified")],
)
def test_a_difference_below_noise_is_a_tie(rate: float, peak_mib: int, why: str) -> None:
    won = measured(0, VERIFY, 1, 100.0, spread=0.17)
    other = measured(1, VERIFY, 2, rate, spread=0.17, peak_mib=peak_mib)
    clear = measured(2, VERIFY, 4, 50.0)
    lines = verdict(won, [won, other, clear])
    saving = " (100.0 MiB less memory)" if peak_mib == 200 else ""
    tie = f"  tied with 1 other (difference below noise): {other.candidate}{saving}; chosen because {why}"
    assert tie in lines
    assert f"  +100.0 % against the next best that is not tied ({clear.candidate})" in lines


def test_a_verdict_is_a_sentence_with_the_codes_below() -> None:
    job, hardware = make_job(), detect("cpu", 2)
    candidate = make_candidate(1, 8, 4, activation_checkpointing=False)
    assert config_sentence(candidate, job, hardware) == (
        "ZeRO-1, micro-batch 8, accumulation 4, 2 CPU ranks (global batch 64), no offload, no checkpointing"
    )
    offloaded = make_candidate(3, 1, offload_optimizer="cpu", offload_param="nvme", activation_checkpointing=True)
    assert config_sentence(offloaded, job, hardware).endswith(
        "optimizer offloaded to CPU, parameters offloaded to NVMe, checkpointing"
    )
    legend = code_legend(candidate)
    assert legend.startswith("z: ZeRO stage, mb: micro-batch, ga: accumulation")
    assert "rbs: reduce bucket size" in legend
    assert all(part.split(": ")[0] in str(candidate) for part in legend.split(", "))


def test_the_users_own_config_that_ran_out_is_the_first_line() -> None:
    out = Outcome(OutcomeKind.OOM_DEVICE, Phase.INIT, reason="ran out", missing_bytes=16 * MIB)
    own, won = Record(0, make_candidate(2, 4, 2), out, SEARCH, AS_IS), measured(1, VERIFY, 1, 68.9)
    first = verdict(won, [own, won])[0]
    assert first == "yours (ZeRO-2, micro-batch 4 x 2): OOM in setup, 16.0 MiB short; winner: 68.9 samples/s"


def test_a_reduce_bucket_that_was_refused_is_named_with_a_size_that_fits() -> None:
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 2000000000 bytes. Error code 12"
    out = Outcome(
        OutcomeKind.OOM_DEVICE,
        Phase.BACKWARD,
        reason=f"RuntimeError: {text}",
        missing_bytes=2 * 10**9,
        capacity_bytes=1950 * MIB,
        peak_bytes=1823 * MIB,
        rank=0,
    )
    own, won = (
        Record(0, Candidate.of({"zero_stage": 1, MICRO_BATCH: 4}), out, SEARCH, AS_IS),
        measured(1, VERIFY, 1, 9.0),
    )
    first = verdict(won, [own, won])[0]
    assert first.startswith(
        "yours (ZeRO-1, micro-batch 4 x 1): OOM in backward on rank 0: the bucket in which gradients are reduced (1.86 GiB = "
        "reduce_bucket_size 500,000,000 x 4 bytes) did not fit beside 1.78 GiB: set reduce_bucket_size to 1e7; winner: "
    ), "0.37 GiB of 1e8 elements are more than what is free"
    roomy = replace(own, outcome=replace(out, peak_bytes=484 * MIB))
    assert "beside 484.0 MiB: set reduce_bucket_size to 1e8; winner: " in verdict(won, [roomy, won])[0]
    another = replace(own, outcome=replace(out, reason=text.replace("2000000000", "10000000")))
    assert "bucket" not in verdict(won, [another, won])[0]


@pytest.mark.parametrize(("spread", "doubtful"), [(0.4, False), (0.6, True), (3.97, True)])
def test_a_figure_that_may_be_anything_is_no_winner_without_a_word(spread: float, doubtful: bool) -> None:
    record = measured(0, VERIFY, 1, 9.0, spread=spread)
    assert any("doubtful: its steps differ so much" in line for line in verdict(record, [record])) is doubtful


def no_winner(records: list[Record], **call: Any) -> list[str]:
    hardware = detect("cpu", 2)
    facts = StudyFacts(records, make_job(), hardware, call=replace(NO_CALL, **call))
    return no_winner_lines(facts, make_job(), hardware)


def test_what_came_closest(tmp_path: Path) -> None:
    records = [record for record in study_of_every_kind(tmp_path).records() if record.outcome]
    oom = [one for one in records if one.outcome and one.outcome.kind.is_oom]
    first, closest, changes = no_winner(oom, ended=StopReason.ALL_TRIED.value)
    assert first == "nothing fits"
    assert no_winner(oom, ended=StopReason.BUDGET_USED.value)[0] == "nothing fits yet"
    assert closest.startswith("closest: ")
    assert "cheapest changes" in changes


def test_only_changes_that_no_trial_refuted_are_advised() -> None:
    def changes(device: str, phase: Phase, *tried: Candidate) -> str:
        out = Outcome(OutcomeKind.OOM_DEVICE, phase, missing_bytes=MIB)
        earlier = Outcome(OutcomeKind.OOM_DEVICE, Phase.INIT, missing_bytes=MIB)
        records = [Record(at, one, out if at == 0 else earlier, SEARCH) for at, one in enumerate(tried)]
        hardware = detect("cpu", 2) if device == "cpu" else named_hardware("h100", 2)
        return no_winner_lines(StudyFacts(records, make_job(), hardware), make_job(), hardware)[-1]

    closest, second, third = (make_candidate(stage, 2) for stage in (1, 2, 3))
    first = changes("cuda", Phase.BACKWARD, closest)
    assert (
        "try: micro-batch 2 -> 1; activation checkpointing on; ZeRO stage 1 -> 2; ZeRO stage 1 -> 3; optimizer" in first
    )
    assert "ZeRO stage 1 -> 3" in changes("cuda", Phase.BACKWARD, closest, second)
    assert "ZeRO stage" not in changes("cuda", Phase.BACKWARD, closest, second, third)
    thrifty = make_candidate(1, 1, activation_checkpointing=True)
    assert "try: ZeRO stage 1 -> 2; ZeRO stage 1 -> 3; opt" in changes("cuda", Phase.BACKWARD, closest, thrifty)
    assert "offload" not in changes("cpu", Phase.BACKWARD, closest), "a CPU rank keeps what it offloads"
    in_step = changes("cuda", Phase.STEP, closest)
    assert "try: ZeRO stage 1 -> 2; ZeRO stage 1 -> 3; optimizer offload" in in_step, "no activations are held"
    assert "--seq-len" not in in_step


def test_what_ran_over_the_headroom_names_the_headroom_that_lets_it_win() -> None:
    capacity = detect("cpu", 2).capacity_bytes
    record = measured(0, SEARCH, 1, 9.0, peak_mib=0.982 * capacity / MIB)
    told = no_winner([record])[2]
    assert told.startswith("it ran with ")
    assert told.endswith("the same command with --headroom 1% may let it win")


def test_a_bucket_larger_than_the_missing_memory_is_named_first() -> None:
    capacity = detect("cpu", 2).capacity_bytes
    plain = measured(0, SEARCH, 2, 9.0, peak_mib=0.982 * capacity / MIB)
    large, small = (
        no_winner([replace(plain, candidate=make_candidate(2, 2, **knobs))])[3]
        for knobs in ({"reduce_bucket_size": 5 * 10**8}, {"reduce_bucket_size": 500_000})
    )
    assert ": smaller reduce_bucket_size, whose buffers take 1.86 GiB; micro-batch 2 -> 1; " in large
    assert "reduce_bucket_size" not in small


def test_nothing_fits_is_only_said_about_memory(tmp_path: Path) -> None:
    records = study_of_every_kind(tmp_path).records()
    crashed = [record for record in records if record.outcome and record.outcome.kind is OutcomeKind.CRASH]
    assert no_winner(crashed)[0].startswith("no candidate ran: crash")
    cut = Outcome(OutcomeKind.INTERRUPTED, reason="its share of the budget ended in forward", source=Source.BUDGET)
    lines = no_winner([Record(0, make_candidate(0, 64, 4), cut, SEARCH)], budget_seconds=30.0, used_seconds=31.0)
    assert lines[0] == "no trial ended within the budget of 30.0 s, so nothing is known of memory; use --budget 2m"
    started = no_winner([], ended=StopReason.BUDGET_USED.value, budget_seconds=12.0, used_seconds=31.0)
    assert started == [
        "no trial ran: start-up took 31.0 s, too much for a trial in the budget of 12.0 s; use --budget 1m"
    ]
    assert no_winner([], ended="interrupted") == ["no trial ran: interrupted"]


def test_the_printed_command_has_the_environment_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    script = Script(("train.py", "ds.json"), str(tmp_path))
    job, config = make_job(script=script), tmp_path / "won.json"
    watched, plain = train_with(make_candidate(2, 4), job, "s", config, 5).lines()
    assert watched == "  train with: autotune launch s -- train.py ds.json"
    assert plain == f"  or without autotune: OMP_NUM_THREADS=5 torchrun --nproc-per-node 2 train.py {config}"
    (odd,) = train_with(make_candidate(2, 4), job, "lr #2", config, 5).lines(1)
    assert odd == "  train with: autotune launch 'lr #2' -- train.py ds.json"
    *_, hint = train_with(make_candidate(2, 4, compile=True), job, "s", config, 5).lines()
    assert hint == "    compile the model by engine.compile(), as `autotune launch` does: it was measured so"
    grown = make_candidate(2, 4, expandable_segments=True)
    _, plain = train_with(grown, job, "s", config, 5).lines()
    assert "OMP_NUM_THREADS=5 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torchrun" in plain
    own = {"NCCL_ALGO": "Ring", "PYTORCH_ALLOC_CONF": "a:b c"}
    _, plain = train_with(grown, job, "s", config, 5, own).lines()
    joined = "PYTORCH_CUDA_ALLOC_CONF='a:b c,expandable_segments:True'"
    assert f"autotune: NCCL_ALGO=Ring PYTORCH_ALLOC_CONF='a:b c' OMP_NUM_THREADS=5 {joined} torchrun" in plain
    named = train_with(grown, make_job(), "s", config, 5).lines()
    assert named[0] == f"  train with: autotune launch s -- train.py --deepspeed {config}"


def test_lightnings_accumulation_is_in_no_config(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    profile = {"loader_prepared": False, "through_arguments": False, "flags": ["--accumulate"], "lightning": True}
    script = Script(("train.py", "ds.json"), str(tmp_path), profile=ScriptProfile.from_json(profile))
    lines = train_with(make_candidate(2, 4, 8), make_job(script=script), "s", tmp_path / "s.json", 5).lines()
    assert lines[0] == "  train with: autotune launch s -- train.py ds.json"
    assert lines[-1] == "    with accumulate_grad_batches=8 in its Trainer, which takes it from no config"
    told = dataclasses.replace(script, flags=((ACCUMULATION, "--accumulate"),))
    _, plain = train_with(make_candidate(2, 4, 8), make_job(script=told), "s", tmp_path / "s.json", 5).lines()
    assert plain.endswith("--accumulate 8")
    (tmp_path / "train.py").write_text("from lightning.fabric import Fabric")  # its loop is the script's
    script = Script(("train.py",), str(tmp_path))
    assert ACCUMULATION not in make_candidate(2, 4, 8).ds_config(make_job(script=script)), "nothing is known yet"
    probed = dataclasses.replace(script, profile=ScriptProfile(micro_batch=4))
    assert make_candidate(2, 4, 8).ds_config(make_job(script=probed))[ACCUMULATION] == 8


@pytest.mark.parametrize(
    ("on", "winner", "flags", "says"),
    [
        (False, False, [], None),
        (False, True, [], "call model.gradient_checkpointing_enable"),
        (False, True, ["--gradient_checkpointing"], None),
        (True, False, [], "take it out"),
        (True, False, ["--gradient_checkpointing"], None),
    ],
)
def test_checkpointing_that_no_command_carries_is_said(
    tmp_path: Path, on: bool, winner: bool, flags: list[str], says: str | None
) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    profile = {"loader_prepared": False, "through_arguments": False, "flags": flags, "checkpointed": on}
    argv = ("train.py", "ds.json", *flags)
    script = Script(argv, str(tmp_path), profile=ScriptProfile.from_json(profile))
    candidate = make_candidate(2, 4, activation_checkpointing=winner)
    hints = train_with(candidate, make_job(script=script), "s", tmp_path / "s.json", 5).hints
    assert len(hints) == (says is not None)
    assert says is None or says in hints[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_no_engine_below_stage_3_trains_is_said(tmp_path: Path, stage: int) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    profile = {"loader_prepared": False, "through_arguments": False, "flags": [], "zero_init": True}
    script = Script(("train.py", "ds.json"), str(tmp_path), profile=ScriptProfile.from_json(profile))
    hints = train_with(make_candidate(stage, 4), make_job(script=script), "s", tmp_path / "s.json", 5).hints
    assert ["take deepspeed.zero.Init out" in hint for hint in hints] == [True] * (stage < 3)


def test_a_loaders_batch_is_said_as_the_script_has_it(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    profile = {"loader_prepared": True, "through_arguments": False, "flags": []}

    def last(**more: object) -> str:
        script = Script(("train.py", "ds.json"), str(tmp_path), profile=ScriptProfile.from_json({**profile, **more}))
        return train_with(make_candidate(2, 4), make_job(2, script=script), "s", tmp_path / "s.json", 5).lines()[-1]

    assert "with batch_size=4 in its data loader" in last()
    assert "with batch_size=8 in its data loader" in last(loader_split=True), "accelerate splits it over two ranks"
    assert "data loader" not in last(batch_note="it has its own")
    assert "data loader" not in last(flags=["--per_device_train_batch_size"]), "the printed command carries it"


def test_a_config_in_code_needs_the_mapped_flags_too(tmp_path: Path) -> None:
    profile = {"loader_prepared": False, "through_arguments": False, "flags": []}
    flags = ((MICRO_BATCH, "--batch_size"), (ACCUMULATION, "--update_freq"))
    for mapped, words in ((flags, "train.py --batch_size 8 --update_freq 2"), ((), "train.py --batch_size 4")):
        script = Script(
            ("train.py", "--batch_size", "4"), str(tmp_path), mapped, profile=ScriptProfile.from_json(profile)
        )
        _, line, *_ = train_with(make_candidate(1, 8, 2), make_job(script=script), "s", tmp_path / "s.json", 5).lines()
        assert line.startswith(f"  or put {tmp_path / 's.json'} where the script has its own config, and train with: ")
        assert line.endswith(words)
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    named = Script(("train.py", "ds.json"), str(tmp_path), profile=ScriptProfile(through_arguments=True))
    lines = train_with(make_candidate(1), make_job(script=named), "s", tmp_path / "s.json", 5).lines()
    assert lines[1].startswith("  or without autotune: "), "the command names it"


def test_a_schedule_that_is_computed_of_half_a_batch_is_said(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}}')
    accumulates = ["--gradient_accumulation_steps"]
    profile = {"loader_prepared": True, "through_arguments": False, "flags": accumulates, "micro_batch": 2}

    def said(micro_batch: int = 8, map: tuple[tuple[str, str], ...] = (), **more: object) -> bool:
        script = Script(
            ("train.py", "ds.json"), str(tmp_path), map, profile=ScriptProfile.from_json({**profile, **more})
        )
        candidate = make_candidate(1, micro_batch)
        found = train_with(candidate, make_job(script=script), "s", tmp_path / "s.json", 5).lines()[-1]
        assert ("of its own micro-batch of 2" in found) is bool(wrong_batch_warning(script, candidate))
        return "length of a schedule" in found

    assert said()
    assert not said(2), "its own"
    assert not said(flags=[]), "both are told at prepare"
    assert not said(map=((MICRO_BATCH, "--batch_size"),)), "both are told by flags"
    assert not said(through_arguments=True, flags=["--gradient_accumulation_steps", "--per_device_train_batch_size"])


def test_a_winner_of_another_batch_asks_for_a_look_at_the_learning_rate(tmp_path: Path) -> None:
    script = Script(("train.py",), str(tmp_path), profile=ScriptProfile(micro_batch=2, accumulation=2))
    job = make_job(script=script)  # on two ranks
    outcome = Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.01, 5, 10.0, 10.0, 300 * MIB))
    own = Record(0, make_candidate(0, 2, 2), outcome, SEARCH, AS_IS)
    for micro_batch, accumulation, warns in ((4, 1, False), (1, 4, False), (4, 2, True), (1, 1, True)):
        won = Record(1, make_candidate(1, micro_batch, accumulation), outcome, VERIFY)
        told = [line for line in verdict(won, [own, won], job) if "the learning rate" in line]
        assert bool(told) == warns
    assert told[0].startswith("  its steps are of 2 samples, the script's own of 8: ")


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
    lines = verdict(record, [record], job)
    assert [line for line in lines if "losses may differ" in line] == [
        f"  it {one}" for one in lossy_settings(lossy, job)
    ]
    assert sum("losses may differ" in line for line in training_changes(lossy, job, {})) == 2
    assert lossy_settings(make_candidate(2), job) == []


def test_what_the_users_own_config_has_already_is_no_change() -> None:
    own = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    job = make_job(precision="bf16", base_config=own)
    assert lossy_settings(make_candidate(2, **{MASTERS: True, STATES: True}), job) == []


def test_a_winner_that_no_trial_has_verified_is_said_to_be_unverified() -> None:
    searched, verified = measured(0, SEARCH, 1, 400.0), measured(1, VERIFY, 1, 390.0)
    assert "  certainty: not verified, run again to verify it, ±0.1 % (95 %)" in verdict(searched, [searched])
    assert not any("not verified" in line for line in verdict(verified, [searched, verified]))
