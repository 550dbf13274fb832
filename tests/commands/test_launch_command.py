"""What a launched command says otherwise than the one that was tuned: refused, said, or left to the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.commands import launch
from autotune.commands.launch import Launched
from autotune.errors import UserError
from autotune.problem.hardware import detect
from autotune.problem.job import ArgumentFile, Job, Script
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.script.parse_command import make_script
from autotune.script.profile import job_of
from autotune.script.source_digests import digests
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from autotune.search.trials import VERIFY
from tests.cli_call import call
from tests.commands.test_launch import NoTraining
from tests.conftest import make_candidate, make_job

CONFIG = {"zero_optimization": {"stage": 1}, "scheduler": {"type": "WarmupLR"}, "gradient_clipping": 0.5}
PROFILE = {
    "config": CONFIG,
    "client_optimizer": False,
    "through_arguments": True,
    "untested_optimizer": False,
    "micro_batch": 2,
    "accumulation": 2,
    "trained": [100],
    "frozen": 0,
    "model_config": {},
    "seq_len": 32,
    "tokens_per_sample": 32.0,
    "saved_bytes_per_sample": None,
    "precision": "bf16",
    "checkpointing": False,
    "checkpointed": False,
    "batch_note": "",
}
MICRO, ACCUMULATION = "--per_device_train_batch_size", "--gradient_accumulation_steps"
TUNED = f"train.py --deepspeed ds.json {MICRO} 2 {ACCUMULATION} 2"


def tuned(folder: Path, words: str = TUNED, config: dict[str, Any] = CONFIG, **profile: Any) -> Job:
    """The job of a study of two ranks: 8 samples an optimizer step, as its command says."""
    (folder / "ds.json").write_text(json.dumps(config))
    script = Script(tuple(words.split()), str(folder), profile={**PROFILE, "config": config, **profile})
    return job_of(script, detect("cpu", 2), None)


def launched(job: Job, words: str, **script: Any) -> Launched:
    """Under a winner of the same 8 samples."""
    assert job.script is not None
    now = replace(job.script, argv=tuple(words.split()), **script)
    return Launched("s", job, make_candidate(1, 4, 1), now, digests(["ds.json"], now.cwd))


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        (f"train.py --deepspeed ds.json {MICRO} 8 {ACCUMULATION} 2", 32),
        (f"train.py --deepspeed ds.json {MICRO}=2 {ACCUMULATION}=3", 12),
        (f"train.py --deepspeed ds.json {MICRO} 2", 4),  # Trainer's own accumulation is 1
        (f"train.py --deepspeed ds.json {ACCUMULATION} 2", 32),  # and its micro-batch 8
    ],
)
def test_another_global_batch_is_refused_in_one_line(tmp_path: Path, words: str, samples: int) -> None:
    job = tuned(tmp_path)
    with pytest.raises(
        UserError, match=rf"sets {samples} samples per optimizer step, and study s was tuned for 8\. .*batch-size 8 "
    ) as no:
        launched(job, words).checked(None)
    assert "\n" not in str(no.value)
    assert launched(job, words).checked(8) == (job, [])
    assert launched(job, words).checked("free") == (job, [])
    with pytest.raises(UserError, match=rf"--global-batch-size {samples}: study s was tuned for 8 samples"):
        launched(job, words).checked(samples)


@pytest.mark.parametrize(
    "words",
    [
        TUNED,
        f"train.py --deepspeed ds.json {MICRO}=2 {ACCUMULATION}=2 --num_train_epochs 3",
        f"train.py --deepspeed ds.json {MICRO} 4 {ACCUMULATION} 1",  # the winner's
        f"train.py --deepspeed ds.json {MICRO} 1 {ACCUMULATION} 4",
    ],
)
def test_the_same_global_batch_is_no_difference(tmp_path: Path, words: str) -> None:
    job = tuned(tmp_path)
    assert launched(job, words).checked(None) == (job, [])


def test_other_parts_of_a_batch_that_the_loop_cuts_are_no_other_batch(tmp_path: Path) -> None:
    job = tuned(tmp_path, "train.py --chunk 2", through_arguments=False, loop_accumulates="cuts")
    assert job.script is not None
    job = replace(job, script=replace(job.script, flags=(("train_micro_batch_size_per_gpu", "--chunk"),)))
    assert launched(job, "train.py --chunk 4").checked(None) == (job, [])


def test_a_batch_that_the_study_was_asked_for_is_trained_by_the_command_it_was_asked_with(tmp_path: Path) -> None:
    def told(words: str) -> Launched:
        job = replace(tuned(tmp_path), global_batch_size=16)
        return replace(launched(job, words), winner=make_candidate(1, 4, 2))

    assert told(TUNED).checked(None)[1] == []
    assert told(f"train.py --deepspeed ds.json {MICRO} 4 {ACCUMULATION} 2").checked(None)[1] == []
    with pytest.raises(UserError, match="sets 12 samples per optimizer step, and study s was tuned for 16"):
        told(f"train.py --deepspeed ds.json {MICRO} 3 {ACCUMULATION} 2").checked(None)


def test_a_batch_in_a_file_of_arguments(tmp_path: Path) -> None:
    job = tuned(tmp_path, "train.py args.json")
    assert job.script is not None

    def of(micro: int) -> tuple[ArgumentFile, ...]:
        data = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": 2, "deepspeed": "ds.json"}
        return (ArgumentFile(1, str(tmp_path / "args.json"), json.dumps(data), data),)

    job = replace(job, script=replace(job.script, files=of(2)))
    assert launched(job, "train.py args.json", files=of(2)).checked(None) == (job, [])
    with pytest.raises(UserError, match="sets 12 samples"):
        launched(job, "train.py args.json", files=of(3)).checked(None)


def test_a_batch_in_the_config_of_a_loop_of_its_own(tmp_path: Path) -> None:
    own = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}}
    words = "train.py --deepspeed_config ds.json"
    made = launched(tuned(tmp_path, words, own, through_arguments=False), words)
    assert made.checked(None)[1] == []
    (tmp_path / "ds.json").write_text(json.dumps({**own, "train_micro_batch_size_per_gpu": 6}))
    with pytest.raises(UserError, match="sets 24 samples per optimizer step, and study s was tuned for 8"):
        made.checked(None)


@pytest.mark.parametrize(
    ("words", "own", "samples"),
    [
        ("--rows 4", {"gradient_accumulation_steps": 1}, 8),
        ("--rows 4", {"gradient_accumulation_steps": 2}, 16),
        ("--rows 1", {"gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 1}, 8),
        ("", {"gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 4}, 8),
        ("--rows 2", {"gradient_accumulation_steps": "auto"}, 8),
    ],
)
def test_a_batch_of_which_words_say_one_half_and_the_config_the_other(
    tmp_path: Path, words: str, own: dict[str, Any], samples: int
) -> None:
    """What one of them has more and the other less is the same batch."""
    command = "train.py --deepspeed_config ds.json"
    config = {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2}
    job = tuned(tmp_path, f"{command} --rows 2", config, through_arguments=False)
    assert job.script is not None
    job = replace(job, script=replace(job.script, flags=(("train_micro_batch_size_per_gpu", "--rows"),)))
    made = launched(job, f"{command} {words}")
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, **own}))
    if samples == 8:
        assert made.checked(None)[1] == []
    else:
        with pytest.raises(UserError, match=f"sets {samples} samples"):
            made.checked(None)


def test_a_flag_of_the_scripts_own_that_is_left_out_says_nothing(tmp_path: Path) -> None:
    """Its default is the script's, not that of a Trainer's argument."""
    job = tuned(tmp_path, "train.py --deepspeed ds.json --bs 2 --gradient-accumulation-steps 2")
    assert job.script is not None
    flags = (
        ("train_micro_batch_size_per_gpu", "--bs"),
        ("gradient_accumulation_steps", "--gradient-accumulation-steps"),
    )
    job = replace(job, script=replace(job.script, flags=flags))
    (line,) = launched(job, "train.py --deepspeed ds.json --gradient-accumulation-steps 2").checked(None)[1]
    assert "no longer sets its batch: 8 samples per optimizer step, as tuned" in line
    with pytest.raises(UserError, match="sets 4 samples"):
        launched(job, "train.py --deepspeed ds.json --bs 2").checked(None)


def test_an_accumulation_that_accelerates_launcher_is_told(tmp_path: Path) -> None:
    def launcher(times: int) -> tuple[str, ...]:
        return ("accelerate", "launch", "--use_deepspeed", "--gradient_accumulation_steps", str(times))

    job = tuned(tmp_path, "train.py", through_arguments=False)
    assert job.script is not None
    job = replace(job, script=replace(job.script, launcher=launcher(2)))
    assert launched(job, "train.py").checked(None)[1] == []
    with pytest.raises(UserError, match="sets 16 samples"):
        launched(job, "train.py", launcher=launcher(4)).checked(None)


def test_a_file_that_nobody_has_edited_is_no_difference(tmp_path: Path) -> None:
    """A script may change what it reads: its engine's config is then another than its file."""
    words = "train.py --deepspeed_config ds.json"
    job = tuned(tmp_path, words, through_arguments=False)
    (tmp_path / "ds.json").write_text(json.dumps({**CONFIG, "train_batch_size": 4, "optimizer": {"type": "Lion"}}))
    assert launched(job, words).checked(None)[1] == []
    assert replace(launched(job, words), sources={}).checked(None)[1] != []


def test_a_batch_that_is_free_held_or_no_longer_said_is_a_line(tmp_path: Path) -> None:
    more = f"train.py --deepspeed ds.json {MICRO} 8 {ACCUMULATION} 2"
    free = replace(tuned(tmp_path), global_batch_size=None)
    (line,) = launched(free, more).checked(None)[1]
    assert "sets 32 samples per optimizer step; the study was free to choose, and 8 are trained" in line
    (line,) = launched(tuned(tmp_path, batch_note="it has its own"), more).checked(None)[1]
    assert "sets 32 samples per optimizer step now, and the study measured 8" in line
    flags = (("train_micro_batch_size_per_gpu", "--batch"),)
    job = tuned(tmp_path, "train.py --deepspeed_config ds.json --batch 2", through_arguments=False)
    assert job.script is not None
    job = replace(job, script=replace(job.script, flags=flags))
    (line,) = launched(job, "train.py --deepspeed_config ds.json").checked(None)[1]
    assert "no longer sets its batch: 8 samples per optimizer step, as tuned" in line


def test_a_study_of_a_model_alone_knows_its_batch_too() -> None:
    job = make_job(global_batch_size=8)
    script = Script(("train.py", MICRO, "8"), ".")
    assert Launched("s", job, make_candidate(1, 4, 1), replace(script, argv=("train.py",)), {}).checked(None)[1] == []
    with pytest.raises(UserError, match="sets 16 samples per optimizer step, and study s was tuned for 8"):
        Launched("s", job, make_candidate(1, 4, 1), script, {}).checked(None)


SHARED, HF = "--micro_batch_size 4", f"{MICRO} 4"


@pytest.mark.parametrize(
    ("words", "own", "samples"),
    [
        (SHARED, {"gradient_accumulation_steps": 2}, 16),
        (f"{SHARED} --gradient-accumulation-steps 1", {"train_batch_size": 16}, 8),
        (SHARED, {"train_batch_size": 16}, 16),
        ("--gradient-accumulation-steps 2", {"train_micro_batch_size_per_gpu": 4}, 16),
        (SHARED, {}, 8),
        (SHARED, {"gradient_accumulation_steps": "auto"}, None),
        (HF, {"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": "auto"}, 16),
        (HF, {"gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": "auto"}, 8),
    ],
)
@pytest.mark.parametrize("by_launcher", [False, True])
def test_a_study_of_a_model_reads_words_and_config_together(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    own: dict[str, Any],
    samples: int | None,
    by_launcher: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, **own}))
    named = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    (tmp_path / "acc.yaml").write_text(json.dumps(named))
    front = (
        "accelerate launch --config_file acc.yaml train.py" if by_launcher else "train.py --deepspeed_config ds.json"
    )
    script = make_script([*front.split(), *words.split()], [])
    for tuned_for in (8, 16):
        made = Launched("s", make_job(global_batch_size=tuned_for), make_candidate(1, 4, tuned_for // 8), script, {})
        if samples in (tuned_for, None):
            assert made.checked(None)[1] == []
        else:
            with pytest.raises(UserError, match=rf"sets {samples} samples .* was tuned for {tuned_for}"):
                made.checked(None)


def test_what_changes_the_arithmetic_is_one_line(tmp_path: Path) -> None:
    made = launched(tuned(tmp_path, config={**CONFIG, "bf16": {"enabled": True}}), TUNED)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    assert made.checked(None)[1] == [], "a scheduler and clipping cost nothing that is measured"
    other = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}, "optimizer": {"type": "Lion"}}
    (tmp_path / "ds.json").write_text(json.dumps(other))
    job, (line,) = made.checked(None)
    assert "(optimizer lion, not of its own; precision fp16, not bf16)" in line
    assert job.precision == "fp16"


def test_a_trainers_arguments_say_its_precision_where_the_config_leaves_it(tmp_path: Path) -> None:
    job = tuned(tmp_path, f"{TUNED} --bf16 True --optim adamw_torch", {**CONFIG, "bf16": {"enabled": "auto"}})
    assert launched(job, f"{TUNED} --optim adamw_torch --bf16").checked(None) == (job, [])
    now, (line,) = launched(job, f"{TUNED} --fp16 --optim adafactor").checked(None)
    assert "--optim adafactor, not adamw_torch; precision fp16, not bf16" in line
    assert now.precision == "fp16"
    assert launched(job, f"{TUNED} --optim adamw_torch --bf16 false").checked(None)[0].precision == "fp32"


def study(folder: Path, job: Job) -> None:
    """The study `s` of a job, with a winner."""
    runs = folder / "runs" / "s"
    runs.mkdir(parents=True)
    space = load_space("cpu_demo")
    store, _ = StudyStore.create_or_resume("s", default_storage(runs), runs, job, detect("cpu", 2), space)
    store.begin_call(60)
    best = store.start(make_candidate(1, 4, 1), space, VERIFY)
    store.finish(best, Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.01, 5, 8.0, 160.0, 300 << 20)))
    store.set_winner(best, "verified")


def test_launch_refuses_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "Supervisor", NoTraining)
    monkeypatch.setattr(NoTraining, "given", {}, raising=False)
    (tmp_path / "train.py").write_text("")
    study(tmp_path, tuned(tmp_path))
    other = ["--", "train.py", "--deepspeed", "ds.json", MICRO, "8", ACCUMULATION, "2"]
    code, _, err = call(monkeypatch, capsys, "launch", "s", *other)
    assert (code, NoTraining.given) == (2, {})
    assert "sets 32 samples per optimizer step, and study s was tuned for 8" in err
    assert len(err.strip().splitlines()) == 1
    code, _, err = call(monkeypatch, capsys, "launch", "s", "--global-batch-size", "8", *other)
    assert code == 0, err
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "optimizer": {"type": "Lion"}}))
    code, _, err = call(monkeypatch, capsys, "launch", "s", "--", *TUNED.split())
    assert code == 0, err
    assert "optimizer lion, not of its own" in err


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("said", "words", "micro", "accumulation"),
    [
        ([], "--bs 2 --gradient-accumulation-steps 2", "--bs", "--gradient-accumulation-steps"),
        ([], "--bs 2 trainer.gradient_accumulation_steps=2", "--bs", "trainer.gradient_accumulation_steps"),
        ([], "--bs 2 --micro_batch_size 7", "--bs", "--gradient-accumulation-steps"),
        (["--map", "train_micro_batch_size_per_gpu=--rows"], "--rows 2", "--rows", "--gradient-accumulation-steps"),
        ([], "x.yaml --bs 2", "--bs", "--gradient-accumulation-steps"),
    ],
    ids=["as tuned", "another name", "a name beside the mapped", "typed now", "a file"],
)
def test_what_the_study_was_told_to_map_holds(
    said: list[str],
    words: str,
    micro: str,
    accumulation: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was forgotten as soon as the command had one flag whose name is known, and a file that it alone tells was not read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "Supervisor", NoTraining)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "x.yaml").write_text("checks: {memory: true}\n")
    command = "train.py --deepspeed_config ds.json"
    job = tuned(tmp_path, f"{command} --bs 2 --gradient-accumulation-steps 2", through_arguments=False)
    assert job.script is not None
    known = (
        ("train_micro_batch_size_per_gpu", "--bs"),
        ("activation_checkpointing", "checks.memory"),
        ("gradient_accumulation_steps", "--gradient-accumulation-steps"),  # by its name
    )
    study(tmp_path, replace(job, script=replace(job.script, flags=known)))
    code, _, err = call(monkeypatch, capsys, "launch", "s", "--trust", *said, "--", *command.split(), *words.split())
    assert code == 0, err
    script = NoTraining.given["job"].script
    assert dict(script.flags) == {
        "train_micro_batch_size_per_gpu": micro,
        "activation_checkpointing": "checks.memory",
        "gradient_accumulation_steps": accumulation,
    }
    assert [Path(file.path).name for file in script.files] == ["x.yaml"] * ("x.yaml" in words)


@pytest.mark.parametrize(("given", "taken"), [(None, "new.json"), ("own.json", "own.json")])
def test_the_launcher_names_its_config_now(
    given: str | None, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one of --ds-config went over the launcher's when the study was made, and does so still."""
    for name in ("old.json", "new.json", "own.json"):
        (tmp_path / name).write_text(json.dumps(CONFIG))
    old = str(tmp_path / "old.json")
    beside = old if given is None else str(tmp_path / given)
    words = ("accelerate", "launch", "--deepspeed_config_file", old)
    known = Script(("train.py",), str(tmp_path), launcher=words, ds_config=beside)
    now = replace(known, launcher=(*words[:-1], "new.json"), ds_config=str(tmp_path / "new.json"))
    assert launch._config_beside(known, now) == str(tmp_path / taken)
