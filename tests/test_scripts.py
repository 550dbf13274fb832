"""Scripts of users, unchanged, in real ranks: learnt from, tuned, watched, and brought back from out-of-memory."""

import inspect
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.executors.base import MeasureSpec
from autotune.problem.candidate import ALLOCATOR_VARIABLES, Candidate
from autotune.problem.job import Script, ScriptProfile
from autotune.problem.outcome import OutcomeKind, Source
from autotune.problem.space import for_job, load_space
from autotune.rank.versions import deepspeed_release
from autotune.recovery.ladder import Rung
from autotune.recovery.supervisor import LaunchSummary, Supervisor
from autotune.script.profile import job_of, other_batch, own_candidate, unknown_job
from autotune.script.script import command_sets_all, training_command
from autotune.util.units import MIB
from autotune.workers.jit_ops import FOLDER
from benchmarks.reliability.recovery import seen_samples
from tests.conftest import (
    SCRIPTS,
    Scripts,
    capped_ranks,
    free_port,
    make_candidate,
    pid_lives,
    processes_in,
    read_json_lines,
)

CONVERTS = pytest.mark.skipif(deepspeed_release() < (0, 18), reason="no conversion before deepspeed 0.18")
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000},
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
}
MEASURE_SPEC = MeasureSpec(min_seconds=0.0, min_steps=2, max_steps=3)
TRAINER = [
    "--deepspeed",
    "ds.json",
    "--per_device_train_batch_size",
    "2",
    "--gradient_accumulation_steps",
    "2",
    "--max_steps",
    "60",
    "--output_dir",
    "out",
    "--average_tokens_across_devices",  # by default since transformers 5; without it the loss depends on the cut
    "True",
]


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(textwrap.dedent(text))
    return name


def entries(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "runs" not in path.parts}


@pytest.mark.main_path
@pytest.mark.parametrize(
    ("name", "arguments", "config", "flags"),
    [
        ("plain", ["--deepspeed_config", "ds.json"], CONFIG, (("train_micro_batch_size_per_gpu", "--batch_size"),)),
        pytest.param("trainer", TRAINER, AUTO, (), marks=pytest.mark.slow),
        pytest.param(
            "accelerated",
            ["--config", "ds.json"],
            {**AUTO, "gradient_accumulation_steps": 2},
            (),
            marks=pytest.mark.slow,  # `test_what_accelerate_makes_of_a_batch` runs its way
        ),
    ],
)
def test_a_script_is_tuned_as_it_is(
    scripts: Scripts, tmp_path: Path, name: str, arguments: list[str], config: dict, flags: tuple
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config))
    before = entries(tmp_path)
    found = scripts.probe([str(SCRIPTS / f"{name}.py"), *arguments], tmp_path, flags)
    assert found.baseline.measurement is not None
    seen = found.script.profile
    micro_batch = 4 if name == "accelerated" else 2  # of its own loader
    assert (seen.micro_batch, seen.accumulation) == (micro_batch, 2)
    assert seen.precision == "fp32"
    assert seen.rows_per_sample == 1
    assert seen.causal
    assert 8 <= seen.seq_len <= 32
    assert seen.batch_note == ""
    assert own_candidate(found.script).stage == config["zero_optimization"]["stage"]
    for stage, micro, accumulation in ((2, 1, 3), (3, 4, 1)):
        outcome = scripts.measure(
            found, make_candidate(stage, micro, accumulation, activation_checkpointing=stage == 3)
        )
        assert outcome.ok, outcome
        measured = outcome.measurement
        assert measured.samples_per_second * measured.step_seconds == pytest.approx(2 * micro * accumulation)
    assert entries(tmp_path) == before, "nothing is left behind"


@pytest.mark.slow
def test_two_ranks_that_share_sequences_train_on_one_batch(scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    script = [str(SCRIPTS / "shared_sequences.py"), *TRAINER[:10], "--use_cpu", "--report_to", "none"]
    found = scripts.probe(script, tmp_path, ())
    assert (found.script.profile.sequence_ranks, found.script.profile.batch_note) == (2, "")
    assert job_of(found.script, scripts.hardware, None).global_batch_size == 2 * 2
    outcome = scripts.measure(found, make_candidate(1, 4, 1))
    assert outcome.measurement is not None, outcome
    assert outcome.measurement.samples_per_second * outcome.measurement.step_seconds == pytest.approx(4)


IMAGES = [str(SCRIPTS / "images.py"), *TRAINER[:10], "--use_cpu", "--report_to", "none"]


@pytest.mark.slow
def test_a_rank_without_an_image_at_stage_3_is_named_as_the_cause(scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({**AUTO, "zero_optimization": {"stage": 3}}))
    with pytest.raises(UserError, match="the batch of a rank has no image"):
        scripts.probe([*IMAGES, "--images_of_first_rank"], tmp_path, ())


@pytest.mark.slow
def test_samples_with_more_images_are_the_worst_case_of_a_vision_language_model(
    scripts: Scripts, tmp_path: Path
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    found = scripts.probe_script(Script(tuple(IMAGES), str(tmp_path), worst_case=True))
    (largest,) = found.script.profile.largest.values()
    assert largest["index"] % 2 == 1, "of two images"
    outcome = scripts.measure(found, make_candidate(3, 4, 1))
    assert outcome.measurement is not None, outcome
    assert outcome.measurement.samples_per_second * outcome.measurement.step_seconds == pytest.approx(2 * 4)


@pytest.mark.slow
def test_a_grpo_training_of_trl_is_tuned(scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    rollouts = ["--num_generations", "2", "--max_completion_length", "4", "--use_cpu", "--report_to", "none"]
    found = scripts.probe([str(SCRIPTS / "grpo.py"), *TRAINER[:10], *rollouts], tmp_path, ())
    assert found.script.profile.batch_note == ""
    outcome = scripts.measure(found, make_candidate(1, 4, 1))
    assert outcome.measurement is not None, outcome
    assert outcome.measurement.samples_per_second * outcome.measurement.step_seconds == pytest.approx(2 * 4)


MODEL = """
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))

        def forward(self, x):
            return self.layers(x)

    data = torch.utils.data.TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))
    measure = torch.nn.CrossEntropyLoss()
"""
WAYS = {
    # the config a dict in the code, DeepSpeed's own loader, the rank as the `deepspeed` launcher gives it
    "training_data": """
        import argparse, deepspeed
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, default=-1)
        parser.add_argument("--gradient_checkpointing", action="store_true")
        parser = deepspeed.add_config_arguments(parser)
        args = parser.parse_args()
        assert args.local_rank >= 0
        deepspeed.init_distributed()
        net = Net()
        config = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
                  "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
                  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
        engine, _, loader, _ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters(),
                                                    training_data=data, config=config)
        for _ in range(3):
            for x, y in loader:
                loss = measure(engine(x.to(engine.local_rank) if torch.cuda.is_available() else x), y)
                engine.backward(loss)
                engine.step()
        """,
    # the module is called and not the engine; the batch is given as Hydra gives it
    "name=value": """
        import sys, deepspeed
        given = dict(word.split("=") for word in sys.argv[1:])
        net = Net()
        engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=given["ds"])
        loader = torch.utils.data.DataLoader(data, batch_size=int(given["data.batch"]))
        for x, y in loader:
            engine.backward(measure(engine.module(x), y))
            engine.step()
        """,
    # accelerate with its plugin in the code, the accumulation given twice
    "plugin": """
        from accelerate import Accelerator, DeepSpeedPlugin
        accelerator = Accelerator(gradient_accumulation_steps=2,
                                  deepspeed_plugin=DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=2))
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(measure(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
        """,
    # Trainer's arguments from a file
    "arguments in a file": """
        import sys
        from transformers import HfArgumentParser, Trainer, TrainingArguments
        (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file(sys.argv[1])

        class Ours(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
                return measure(model(inputs["x"]), inputs["y"])

        rows = [{"x": x, "y": y} for x, y in data]
        collate = lambda some: {key: torch.stack([one[key] for one in some]) for key in ("x", "y")}
        Ours(model=Net(), args=arguments, train_dataset=rows, data_collator=collate).train()
        """,
}


def steps_in_no_sync() -> bool:
    """Whether accelerate (1.3) calls `engine.step` inside `no_sync` where a loop accumulates, which DeepSpeed refuses, with
    autotune and without."""
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper

    return "sync_gradients" not in inspect.signature(DeepSpeedEngineWrapper.backward).parameters


@pytest.mark.main_path
@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["training_data", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "training_data")]
)
def test_other_ways_to_write_a_training(scripts: Scripts, tmp_path: Path, way: str) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    arguments = {
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "remove_unused_columns": False,
        "max_steps": 60,
        # said, since Trainer before transformers 5 takes inputs for half where nothing is
        "deepspeed": {**AUTO, "fp16": {"enabled": "auto"}},
    }
    (tmp_path / "args.json").write_text(json.dumps(arguments))
    words = {"name=value": ["ds=ds.json", "data.batch=2"], "arguments in a file": ["args.json"]}.get(way, [])
    flags = (("train_micro_batch_size_per_gpu", "data.batch"),) if way == "name=value" else ()
    script = write(tmp_path, "train.py", textwrap.dedent(MODEL) + textwrap.dedent(WAYS[way]))
    if way == "plugin" and steps_in_no_sync():
        with pytest.raises(UserError, match="the script fails by itself, before anything is tuned"):
            scripts.probe([script, *words], tmp_path, flags)
        return
    found = scripts.probe([script, *words], tmp_path, flags)
    seen = found.script.profile
    assert (seen.micro_batch, seen.accumulation, seen.batch_note) == (2, 2, "")
    assert ("--local_rank" in seen.flags) == (way == "training_data")
    switch = "--gradient_checkpointing"
    assert seen.spellings == ({switch: [None, switch]} if way == "training_data" else {})
    assert command_sets_all(found.script) == (way in ("name=value", "arguments in a file"))
    outcome = scripts.measure(found, make_candidate(2, 4, 3))
    assert outcome.ok, outcome
    measured = outcome.measurement
    assert measured.samples_per_second * measured.step_seconds == pytest.approx(2 * 4 * 3)


LOOP = """
    import contextlib, sys
    from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config="ds.json"),
                              dataloader_config=DataLoaderConfiguration(split_batches="split" in sys.argv))
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loaders = [torch.utils.data.DataLoader(data, batch_size=size) for size in (8, 4)]
    net, optimizer, loader, _ = accelerator.prepare(net, optimizer, *loaders[:1 + ("split" not in sys.argv)],
                                                    *[None] * ("split" in sys.argv))
    for x, y in loader:
        with accelerator.accumulate(net) if "accumulate" in sys.argv else contextlib.nullcontext():
            accelerator.backward(measure(net(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "accumulation", "batch", "obeys"),
    [
        pytest.param(["accumulate"], 1, (8, 1), True),  # accelerate takes the least of the two loaders for the config
        pytest.param([], 4, (8, 1), False, marks=pytest.mark.slow),  # no `accumulate()`: every backward is a step
        pytest.param(["accumulate", "split"], 1, (4, 1), True, marks=pytest.mark.slow),
    ],
)
def test_what_accelerate_makes_of_a_batch(
    scripts: Scripts, tmp_path: Path, words: list[str], accumulation: int, batch: tuple[int, int], obeys: bool
) -> None:
    if obeys and steps_in_no_sync():
        pytest.skip("this accelerate cannot accumulate under DeepSpeed")
    (tmp_path / "ds.json").write_text(json.dumps({**AUTO, "gradient_accumulation_steps": accumulation}))
    script = write(tmp_path, "train.py", textwrap.dedent(MODEL) + textwrap.dedent(LOOP))
    found = scripts.probe([script, *words], tmp_path)
    seen = found.script.profile
    assert (seen.micro_batch, seen.accumulation, not seen.batch_note) == (*batch, obeys)
    own = own_candidate(found.script)
    for candidate in (own.but(reduce_bucket_size=200_000), *([own.but(train_micro_batch_size_per_gpu=16)] * obeys)):
        outcome = scripts.measure(found, candidate)
        assert outcome.ok, outcome
        samples = outcome.measurement.samples_per_second * outcome.measurement.step_seconds
        assert samples == pytest.approx(2 * candidate.micro_batch * candidate.accumulation)


@pytest.mark.main_path
@pytest.mark.slow
def test_out_of_memory_of_a_script_is_a_measurement(scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    argv = [str(SCRIPTS / "plain.py"), "--deepspeed_config", "ds.json", "--longest", "1024"]
    found = scripts.probe(argv, tmp_path, (("train_micro_batch_size_per_gpu", "--batch_size"),))
    outcome = scripts.measure(found, make_candidate(1, 2048))
    assert outcome.kind is OutcomeKind.OOM_DEVICE, outcome


@pytest.mark.main_path
@pytest.mark.slow
def test_a_batch_that_the_script_ignores_is_noticed(scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    text = (SCRIPTS / "plain.py").read_text()
    without_flag = text.replace('add_argument("--batch_size", type=int, default=2)', "set_defaults(batch_size=2)")
    assert without_flag != text
    found = scripts.probe([write(tmp_path, "train.py", without_flag), "--deepspeed_config", "ds.json"], tmp_path)
    assert "--map train_micro_batch_size_per_gpu" in found.script.profile.batch_note
    space = for_job(load_space("cpu_demo"), job_of(found.script, scripts.hardware, None))
    assert space.knobs["train_micro_batch_size_per_gpu"].values == (2,)
    outcome = scripts.measure(found, make_candidate(1, 8, 2))
    assert (outcome.kind, outcome.source) == (OutcomeKind.INVALID, Source.BATCH)
    assert "--map train_micro_batch_size_per_gpu" in outcome.reason


@pytest.mark.main_path
@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("print('hello')", "without calling deepspeed.initialize"),
        ("raise ZeroDivisionError('my own fault')", "my own fault"),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--data', required=True)\np.parse_args()",
            "arguments are required: --data",
        ),
        (
            """
         import torch
         model = torch.nn.Linear(4, 4)
         optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
         for _ in range(9):
             model(torch.ones(1, 4)).sum().backward()
             optimizer.step()
         """,
            "trains without calling deepspeed.initialize",
        ),
        (
            """
         import subprocess, sys, time
         subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
         """,
            "without calling deepspeed.initialize",
        ),
        (
            """
         import deepspeed, torch
         from deepspeed.pipe import PipelineModule
         deepspeed.init_distributed()
         net = PipelineModule([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], num_stages=2, loss_fn=torch.nn.MSELoss())
         config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}}
         deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
         """,
            "a pipeline",
        ),
    ],
    ids=["no DeepSpeed", "crash", "needs arguments", "plain torch", "workers outlive it", "pipeline"],
)
def test_scripts_that_cannot_be_tuned(scripts: Scripts, tmp_path: Path, text: str, says: str) -> None:
    name = write(tmp_path, "bad.py", text)
    with pytest.raises(UserError, match=says):
        scripts.probe([name], tmp_path)
    assert processes_in(tmp_path) == [], "what a script starts ends with it"


def test_a_script_that_ends_too_early(scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    with pytest.raises(UserError, match="ended after 2 optimizer steps"):
        scripts.probe([str(SCRIPTS / "plain.py"), "--deepspeed_config", "ds.json", "--steps", "2"], tmp_path)


def test_a_script_that_catches_our_out_of_memory(scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    name = write(
        tmp_path,
        "stubborn.py",
        """
        import deepspeed, torch
        class Hungry(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(8, 8)
            def forward(self, x):
                torch.zeros(2**33)
                return self.layer(x).sum()
        model = Hungry()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
        while True:
            try:
                engine.backward(engine(torch.ones(2, 8)))
            except RuntimeError:
                pass
        """,
    )
    with pytest.raises(UserError, match="does not fit, even with the config of the least memory"):
        scripts.probe([name], tmp_path)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.slow
def test_workers_that_leave_their_process_group_are_ended_too(scripts: Scripts, tmp_path: Path, dies: bool) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    pids = tmp_path / "seen" / "pids"
    pids.parent.mkdir()
    name = write(
        tmp_path,
        "workers.py",
        f"""
        import os, subprocess, sys
        worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open({str(pids)!r}, "a") as file:
            print(worker.pid, file=file)
        if {dies}:
            os.kill(os.getpid(), 9)
        sys.path.insert(0, {str(SCRIPTS)!r})
        import plain
        plain.main()
        """,
    )
    with pytest.raises(UserError) if dies else nullcontext():
        scripts.probe([name, "--deepspeed_config", "ds.json"], tmp_path)
    started = [int(line) for line in pids.read_text().split()]
    assert len(started) >= 2
    assert not [pid for pid in started if pid_lives(pid)]


# -- launch ----------------------------------------------------------------------------------------------------------


LONG_BATCHES = [
    str(SCRIPTS / "long_batches.py"),
    "--deepspeed",
    "ds.json",
    "--output_dir",
    "out",
    "--save_steps",
    "5",
    "--report_to",
    "none",
    "--seen",
    "seen",
]


def rung(candidate: Candidate) -> Rung:
    return Rung(candidate, 1e9, 1.0, True)


def launch(
    folder: Path,
    argv: list[str],
    ladder: list[Candidate],
    cap: int = 3000,
    says: list[str] | None = None,
    convert: bool = False,
    scripts: Scripts | None = None,
    silent_seconds: float = 300.0,
    max_restarts: int = 6,
) -> LaunchSummary:
    """A training; its ranks are forked from the server of `scripts`, or without it start cold, as users' do."""
    flags = (("train_micro_batch_size_per_gpu", "--batch_size"),) if "--deepspeed_config" in argv else ()
    script = Script(tuple(argv), str(folder), flags)
    profile = {"rows_per_sample": 1.0}
    hardware = capped_ranks(cap)
    job = unknown_job(Script(script.argv, script.cwd, script.flags, profile=ScriptProfile.from_json(profile)), hardware)
    job = type(job)(job.model, 2, 32, "fp32", script=job.script)
    lines = says if says is not None else []
    if scripts is not None and (log := scripts.executor.launcher.log) is not None:
        log.write_bytes(b"")  # what a rank of another test has written there says nothing of this one's
    supervisor = Supervisor(
        job,
        hardware,
        [rung(c) for c in ladder],
        folder,
        max_restarts=max_restarts,
        silent_seconds=silent_seconds,
        convert=convert,
        print_line=lines.append,
        machine=scripts.executor.target if scripts is not None else None,
    )
    return supervisor.run()


PAUSES = """
    import json, os, sys, time
    import torch, torch.distributed, deepspeed

    def pause(what, rank):
        if what == "evaluates" and rank == 0:
            until = time.monotonic() + 5
            while time.monotonic() < until:
                torch.randn(64, 64) @ torch.randn(64, 64)
        if what == "saves" and rank == 0:
            with open(os.devnull, "wb", 0) as slow_disk:
                for _ in range(50):
                    slow_disk.write(bytes(2**20))
                    time.sleep(0.1)
        if what == "hangs":
            time.sleep(3600)

    net = torch.nn.Linear(16, 4)
    config = {"train_batch_size": 4, "zero_optimization": {"stage": 1},
              "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    rank = torch.distributed.get_rank()
    for step in range(4):
        loss = engine(torch.randn(2, 16)).square().mean()
        engine.backward(loss)
        engine.step()
        if step == 2:
            pause(sys.argv[1], rank)
        torch.distributed.barrier()
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["evaluates", "saves", "hangs"])
def test_a_long_pause_of_a_healthy_training_is_no_hang(scripts: Scripts, tmp_path: Path, what: str) -> None:
    name = write(tmp_path, "pauses.py", PAUSES)
    top, says = make_candidate(1, 2, 1), list[str]()
    ended = launch(tmp_path, [name, what], [top], says=says, scripts=scripts, silent_seconds=2.5, max_restarts=1)
    if what == "hangs":
        assert ended.code == 1
        assert [one.ended.split(":")[0] for one in ended.attempts] == ["timeout", "timeout"], "it was started again"
        assert any("pauses.py" in line for line in says), "where it hangs is said"
    else:
        assert ended.code == 0, says
        assert len(ended.attempts) == 1


def test_tuning_does_not_change_what_is_learnt(scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    losses = {}
    for stage, micro, accumulation in ((0, 2, 2), (2, 4, 1)):
        argv = [str(SCRIPTS / "plain.py"), "--deepspeed_config", "ds.json", "--steps", "20", "--losses", f"loss{stage}"]
        assert launch(tmp_path, argv, [make_candidate(stage, micro, accumulation)], scripts=scripts).code == 0
        losses[stage] = [entry["loss"] for entry in read_json_lines(tmp_path / f"loss{stage}")]
    assert len(losses[0]) == 20
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


@pytest.fixture(scope="module")
def short_peak_bytes(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> int:
    """What the script below needs without its long batches."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "ds.json").write_text(json.dumps(AUTO))
    argv = [*LONG_BATCHES, "--per_device_train_batch_size", "4", "--max_steps", "24", "--long_steps", ""]
    baseline = scripts.probe(argv, folder).baseline
    assert baseline.peak_bytes is not None
    return baseline.peak_bytes


@pytest.mark.main_path
@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "convert", "steps"),
    [
        (make_candidate(2, 1, 4, offload_optimizer="cpu"), False, 10),  # Trainer takes another class of Adam for it
        pytest.param(make_candidate(3, 1, 4), True, 12, marks=CONVERTS),
    ],
    ids=["offloaded", "converted"],
)
def test_training_survives_its_longest_batches(
    scripts: Scripts, tmp_path: Path, short_peak_bytes: int, after: Candidate, convert: bool, steps: int
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    argv = [*LONG_BATCHES, "--max_steps", str(steps), "--long_steps", "7,10"]
    says: list[str] = []
    ladder = [make_candidate(1, 4, 1), after]
    cap = short_peak_bytes // MIB + 150
    summary = launch(tmp_path, argv, ladder, cap=cap, says=says, convert=convert, scripts=scripts)
    assert summary.code == 0, says
    assert len(summary.attempts) == 2, says
    assert summary.attempts[0].ended.startswith(OutcomeKind.OOM_DEVICE.value)
    assert "checkpoint-5" in summary.attempts[1].resumed_from
    assert seen_samples(tmp_path) == {step: set(range(8 * step, 8 * step + 8)) for step in range(steps)}


def test_a_killed_rank_is_started_again(scripts: Scripts, tmp_path: Path) -> None:
    config = {**CONFIG, "zero_optimization": {"stage": 2}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    name = write(
        tmp_path,
        "killed.py",
        f"""
        import os, pathlib, signal, sys
        import deepspeed
        from deepspeed.runtime.engine import DeepSpeedEngine
        sys.path.insert(0, {str(SCRIPTS)!r})
        import plain
        step = DeepSpeedEngine.step
        def killing(engine, *args, **kwargs):
            if engine.global_steps == 6 and os.environ["RANK"] == "1" and not pathlib.Path("killed").exists():
                pathlib.Path("killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return step(engine, *args, **kwargs)
        DeepSpeedEngine.step = killing
        plain.main()
        """,
    )
    argv = [name, "--deepspeed_config", "ds.json", "--steps", "10", "--save_every", "4", "--losses", "losses"]
    summary = launch(tmp_path, argv, [make_candidate(2, 2, 2)], scripts=scripts)
    assert summary.code == 0
    assert len(summary.attempts) == 2
    assert summary.attempts[1].resumed_from
    steps = [entry["step"] for entry in read_json_lines(tmp_path / "losses")]
    assert steps == [*range(1, 7), *range(5, 11)]


@pytest.mark.main_path
@pytest.mark.parametrize(
    ("before", "after", "convert"),
    [
        pytest.param(make_candidate(1, 2, 2), make_candidate(3, 1, 4), True, marks=[pytest.mark.slow, CONVERTS]),
        (make_candidate(2, 2, 2), make_candidate(1, 2, 2, offload_optimizer="cpu"), False),
    ],
)
def test_a_rung_loads_what_another_one_saved(
    scripts: Scripts, tmp_path: Path, before: Candidate, after: Candidate, convert: bool
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    users = [tmp_path / "out" / file for file in ("global_step4_universal/mine", "latest_universal")]
    for path in users:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("global_step4_universal")
    name = write(
        tmp_path,
        "starved.py",
        f"""
        import pathlib, sys
        import torch
        from deepspeed.runtime.engine import DeepSpeedEngine
        sys.path.insert(0, {str(SCRIPTS)!r})
        import plain
        forward = DeepSpeedEngine.forward
        def starving(engine, *args, **kwargs):
            if engine.global_steps == 6 and not pathlib.Path("starved").exists():
                torch.distributed.barrier()
                pathlib.Path("starved").touch()
                torch.empty(1 << 55)
            return forward(engine, *args, **kwargs)
        DeepSpeedEngine.forward = starving
        plain.main()
        """,
    )
    argv = [name, "--deepspeed_config", "ds.json", "--steps", "10", "--save_every", "4", "--losses", "losses"]
    says: list[str] = []
    summary = launch(tmp_path, argv, [before, after], says=says, convert=convert, scripts=scripts)
    assert summary.code == 0, says
    assert [one.rung for one in summary.attempts] == [0, 1]
    assert any("converting" in line for line in says) == convert
    entries = read_json_lines(tmp_path / "losses")
    assert [entry["step"] for entry in entries] == [*range(1, 7), *range(5, 11)]
    losses = [entry["loss"] for entry in entries]  # steps 5 and 6 are trained twice, before and after
    assert losses[6:8] == pytest.approx(losses[4:6], rel=1e-4)
    assert losses[8] != pytest.approx(losses[7], rel=1e-4)
    assert {path.name for path in (tmp_path / "out").glob("*universal*")} == {
        "global_step4_universal",
        "latest_universal",
    }
    assert [path.read_text() for path in users] == ["global_step4_universal"] * 2


def test_a_script_of_its_own_failure_keeps_its_exit_code(scripts: Scripts, tmp_path: Path) -> None:
    name = write(tmp_path, "fails.py", "import sys; sys.exit(7)")
    summary = launch(tmp_path, [name], [make_candidate()], scripts=scripts)
    assert summary.code == 7
    assert len(summary.attempts) == 1


@pytest.mark.slow
def test_a_crash_on_the_way_out_is_no_failure_of_the_training(tmp_path: Path) -> None:
    name = write(tmp_path, "aborts.py", "import atexit, os; os.environ['RANK'] == '1' and atexit.register(os.abort)")
    says: list[str] = []
    summary = launch(tmp_path, [name], [make_candidate()], says=says)
    assert summary.code == 0, says
    assert len(summary.attempts) == 1
    assert any("rank 1 died by SIGABRT" in line for line in says)


@pytest.mark.slow
def test_a_training_has_the_users_environment_and_its_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM")
    for name in (*quiet, *ALLOCATOR_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "9")
    script = write(
        tmp_path,
        "tells.py",
        """
        import json, os, torch
        told = {**os.environ, "threads": torch.get_num_threads()}
        with open(f"told{os.environ['RANK']}.json", "w") as file:
            json.dump(told, file)
        """,
    )
    assert launch(tmp_path, [script], [make_candidate(expandable_segments=True)]).code == 0
    for rank in "01":
        told = json.loads((tmp_path / f"told{rank}.json").read_text())
        assert told["threads"] == 3
        assert told["OMP_NUM_THREADS"] == "3"
        assert told["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:64,expandable_segments:True"
        assert {name for name in told if name.startswith("MALLOC_")} == {"MALLOC_ARENA_MAX"}
        assert not {*quiet} & told.keys()


@pytest.mark.main_path
@pytest.mark.slow
def test_the_command_line_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO))
    (tmp_path / "space.yaml").write_text(
        "knobs:\n  zero_stage: [1, 2]\n  train_micro_batch_size_per_gpu: [1, 2, 4, 8]\n"
        "  gradient_accumulation_steps: {from: 1, to: 64}\n  reduce_bucket_size: [500000]\n"
    )
    script = [str(SCRIPTS / "trainer.py"), *TRAINER]

    def autotune(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "autotune", *words]
        env = {**os.environ, "NCCL_ALGO": "Ring"}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400)

    run = ["run", "--device", "cpu", "--gpus", "2", "--budget", "5m", "--space", "space.yaml", "--study", "mine"]
    done = autotune(*run, "--max-trials", "1", "--out", "best.json", "--", *script)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = "" if FOLDER in os.environ else rf"{FOLDER}=\S+ "  # a user's own needs no saying
    plain = rf"without autotune: .*\bNCCL_ALGO=Ring .*{folder}OMP_NUM_THREADS=1 torchrun"
    assert re.search(plain, autotune("show", "mine").stdout)
    assert (tmp_path / "best.json").exists()
    # in the study's folder wherever the winner goes: `launch` reads it there
    ladder = json.loads((tmp_path / "runs/mine/mine.ladder.json").read_text())
    assert all(one["config"]["train_batch_size"] == 8 for one in ladder)
    began = time.monotonic()
    trained = autotune("launch", "mine", "--json", "--", *script, "--max_steps", "6")
    took = time.monotonic() - began
    assert trained.returncode == 0, trained.stderr
    assert "variables" not in trained.stderr, "it was measured under the same"
    summary = json.loads(trained.stdout[trained.stdout.index('{\n  "version"') :])
    assert summary["attempts"][0]["steps"] >= 3
    assert took > summary["attempts"][0]["seconds"]
    wrong = autotune("launch", "mine", "--", str(SCRIPTS / "plain.py"))
    assert wrong.returncode == 2
    assert "is of" in wrong.stderr


@pytest.mark.slow
def test_a_free_batch_is_tried_in_other_sizes_and_still_checked(scripts: Scripts, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    flags = (("train_micro_batch_size_per_gpu", "--batch_size"),)
    found = scripts.probe([str(SCRIPTS / "plain.py"), "--deepspeed_config", "ds.json"], tmp_path, flags)
    job = job_of(found.script, scripts.hardware, None, free=True)
    candidates = for_job(load_space("cpu_demo"), job).candidates(job)
    totals = {one.micro_batch * one.accumulation * job.ranks for one in candidates}
    assert {2, 8, 64} <= totals
    assert job_of(found.script, scripts.hardware, None).global_batch_size == 8, "else its own is kept"
    larger = own_candidate(found.script).but(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=4)
    outcome = scripts.measure(found, larger)
    assert outcome.measurement.samples_per_second * outcome.measurement.step_seconds == pytest.approx(32)
    assert "its steps are of 32 samples, the script's own of 8: the learning rate" in other_batch(larger, job)
    assert other_batch(own_candidate(found.script), job) == ""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('input("which run? ")', "asks for input"),
        ("breakpoint()", "stops at a breakpoint"),
        (
            'import socket, time; held = socket.create_server(("127.0.0.1", PORT)); time.sleep(600)',
            "opens a port that is taken",
        ),
        ('open("nowhere.json")', "reads what is not there"),
        ('import urllib.request; urllib.request.urlopen("http://127.0.0.1:9/ds.json")', "over the network"),
    ],
)
def test_what_a_script_may_not_do_is_said_in_one_line(scripts: Scripts, tmp_path: Path, line: str, said: str) -> None:
    name = write(tmp_path, "mine.py", line.replace("PORT", str(free_port())))
    with pytest.raises(UserError, match=said) as refused:
        scripts.probe([name], tmp_path)
    assert str(refused.value).startswith("mine.py ")
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_script_that_never_calls_deepspeed_in_its_time(scripts: Scripts, tmp_path: Path) -> None:
    name = write(tmp_path, "idle.py", "import time\nwhile True:\n    time.sleep(0.05)\n")
    with pytest.raises(UserError, match=r"^idle\.py had not called deepspeed\.initialize after"):
        scripts.probe([name], tmp_path, seconds=3.0)


@pytest.mark.slow
def test_a_script_that_starts_its_ranks_by_a_function(scripts: Scripts, tmp_path: Path) -> None:
    """Its ranks would meet at a port of its own choice, which somebody else listens at: another job of the same script."""
    (tmp_path / "ds.json").write_text(f"// comments, as DeepSpeed reads them\n{json.dumps(CONFIG)}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        name = write(
            tmp_path,
            "spawning.py",
            f"""
            import os, sys
            import deepspeed, torch

            def train(rank, world):
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{taken.getsockname()[1]}")
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
                torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
                deepspeed.init_distributed("gloo", distributed_port={taken.getsockname()[1]})
                assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (rank, world)
                sys.path.insert(0, {str(SCRIPTS)!r})
                import plain
                plain.main()

            if __name__ == "__main__":
                torch.multiprocessing.spawn(train, args=(2,), nprocs=2)
            """,
        )
        flags = (("train_micro_batch_size_per_gpu", "--batch_size"),)
        found = scripts.probe([name, "--deepspeed_config", "ds.json"], tmp_path, flags)
        assert scripts.measure(found, make_candidate(2, 4, 3)).ok
    assert found.script.profile.relaunched == 2
    assert training_command(found.script, make_candidate(2, 4, 3), 2, "best.json") == [
        *("python", name, "--deepspeed_config", "best.json", "--batch_size", "4")
    ]
