"""A rank that measures a user's script, heard as its parent hears it."""

import json
import textwrap
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.errors import Cause, Unusable
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.problem.outcome import Phase
from autotune.rank.base import EXIT_REPORTED
from autotune.rank.measure import LONGER, MeasureRequest
from autotune.rank.sandbox import Protection, Sandbox
from autotune.rank.script_rank import (
    WARMUP_STEPS,
    Batch,
    SavedTensors,
    ScriptRank,
    check_auxiliary_engine,
    check_batch,
    check_tokens,
    growth,
    own_steps,
    typical_rows,
)
from autotune.rank.step_statistics import pace_of
from tests.conftest import make_candidate, make_job
from tests.rank.conftest import Parent, Rank, make_spec

REQUEST = {"micro_batch": 2, "accumulation": 2, "min_steps": 3, "max_steps": 3, "min_seconds": 0.0, "max_seconds": 60.0}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
LOOP = """
    import sys, torch, deepspeed
    net = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 1))
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=sys.argv[1])
    for _ in range(engine.gradient_accumulation_steps() * {steps}):
        ids = torch.randint(0, 64, (engine.train_micro_batch_size_per_gpu(), 8))
        engine.backward(engine(ids).mean())
        engine.step()
    """


def spec_of(folder: Path, job: Job, **more: Any) -> dict[str, Any]:
    """With a study in the folder, and a folder whose files a test reads."""
    for name in ("runs", "seen"):
        (folder / name).mkdir()
    sandbox = Sandbox(folder / "runs" / "scratch", folder, Protection.OVERLAY, (str(folder / "seen"),))
    sandbox.create(folder / "runs")
    return make_spec(folder, job, sandbox=sandbox.to_json(), **more)


def start(parent: Parent, folder: Path, text: str, candidate: Candidate | None = None, **profile: Any) -> Rank:
    (folder / "train.py").write_text(textwrap.dedent(text))
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    job = replace(
        make_job(1), script=Script(("train.py", "ds.json"), str(folder), profile=ScriptProfile.from_json(profile))
    )
    knobs = candidate.as_dict if candidate else {}
    (rank,) = parent.start("autotune.rank.script_rank", spec_of(folder, job, candidate=knobs))
    return rank


def test_a_script_finds_its_groups_port_and_the_kernel_takes_it_before_the_tuner(
    parent: Parent, tmp_path: Path
) -> None:
    asked = "import os\nprint('seen', os.environ['MASTER_PORT'], open('/proc/self/oom_score_adj').read())\n"
    (tmp_path / "train.py").write_text(asked + textwrap.dedent(LOOP.format(steps=100)))
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    job = replace(make_job(1), script=Script(("train.py", "ds.json"), str(tmp_path)))
    (rank,) = parent.start("autotune.rank.script_rank", spec_of(tmp_path, job, candidate={}, port=28765))
    rank.wait_for("phase", phase="ready")
    assert "seen 28765 1000" in (tmp_path / "rank.log").read_text().splitlines()


@pytest.mark.main_path
@pytest.mark.few(1)
@pytest.mark.parametrize("candidate", [None, make_candidate(2, 4, 3)], ids=["as it is", "under a candidate"])
def test_a_life_from_hello_to_bye(parent: Parent, tmp_path: Path, candidate: Candidate | None) -> None:
    rank = start(parent, tmp_path, LOOP.format(steps=100), candidate)
    rank.wait_for("phase", phase="ready")
    assert [message["phase"] for message in rank.heard if message["type"] == "phase"] == ["start", "init", "ready"]
    micro_batch, accumulation = (4, 3) if candidate else (2, 2)
    told = [message for message in rank.heard if message["type"] == "facts"]
    assert len(told) == (1 if candidate else 2), "the batch of a script as it is is told before memory can run out"
    assert all((fact["micro_batch"], fact["accumulation"]) == (micro_batch, accumulation) for fact in told)
    assert told[-1]["config"] == CONFIG, "its own, not the candidate's"
    assert told[-1]["trained"] == [64 * 16, 16, 1]
    rank.channel.send("measure", **REQUEST)
    measured = rank.wait_for("measured")
    assert 3 <= len(measured["step_seconds"]) <= LONGER * 3
    assert measured["warmup_steps"] == WARMUP_STEPS
    rows = micro_batch * accumulation
    assert measured["tokens"] == 8 * rows
    facts = measured["facts"]
    assert (facts["tokens"], facts["widest"]) == (8 * rows, 8)
    assert ("saved_bytes" in facts) == (candidate is None)
    if candidate is None:
        assert (facts["micros"], facts["rows"]) == (accumulation, rows)
        assert facts["saved_bytes"] >= 2 * 8 * 16 * 4, "the embedding's output, which the linear layer keeps"
    rank.channel.send("certify", micro_batch=micro_batch)
    assert rank.wait_for("measured", certified=True)["saved"], "though the script's own saves do nothing"
    rank.channel.send("stop")
    rank.wait_for("bye")
    assert rank.exit_status() == 0
    assert max(message["steps"] for message in rank.heard if message["type"] == "progress") <= WARMUP_STEPS + LONGER * 3


LOADS = """
    from deepspeed.ops.op_builder.builder import OpBuilder
    class TinyBuilder(OpBuilder):
        def absolute_name(self): return "tiny"
        def sources(self): return []
        def is_compatible(self, verbose=False): raise SystemExit("asked to be built")
    from deepspeed.accelerator import get_accelerator
    get_accelerator().get_op_builder = lambda name: TinyBuilder
    import os, sys
    os.environ["TORCH_EXTENSIONS_DIR"] = sys.argv[1]  # from now on: the process group has its ops from the usual one
    TinyBuilder("tiny").load(verbose=False)
    """


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("candidate", "tried", "leaves"),
    [({}, [], True), ({}, ["TinyBuilder"], False), (make_candidate(1, 2).as_dict, [], False)],
    ids=["first run", "what the tuner could not build", "trial"],
)
def test_a_first_run_has_built_what_it_is_about_to_build(
    parent: Parent, tmp_path: Path, candidate: dict[str, Any], tried: list[str], leaves: bool
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(LOADS))
    folder = tmp_path / "ops"
    job = replace(make_job(2), script=Script(("train.py", str(folder)), str(tmp_path)))
    more = {"candidate": candidate, "ops": tried}
    ranks = parent.start("autotune.rank.script_rank", spec_of(tmp_path, job, **more), world=2)
    assert [rank.exit_status() for rank in ranks] == [EXIT_REPORTED, EXIT_REPORTED]
    for rank in ranks:  # each: one may have a folder of its own, or be the only one that needs it
        assert [message["op"] for message in rank.heard if message["type"] == "unbuilt"] == ["TinyBuilder"] * leaves
        said = next(message["text"] for message in rank.heard if message["type"] == "error")
        assert ("asked to be built" in said) is not leaves
    assert not folder.exists() or [path.name for path in folder.iterdir()] == [".tiny.lock"], "and no build is left"


def test_what_it_starts_leaves_no_folder_where_it_is_killed(parent: Parent, tmp_path: Path) -> None:
    asked = """
    import multiprocessing, multiprocessing.util as util
    def child(told): told.put(util.get_temp_dir())
    told = multiprocessing.Queue()
    process = multiprocessing.Process(target=child, args=(told,))
    process.start()
    print("seen", util.get_temp_dir() == told.get(), util.get_temp_dir())
    """
    start(parent, tmp_path, asked).exit_status()
    _, same, folder = next(
        line for line in (tmp_path / "rank.log").read_text().splitlines() if line.startswith("seen")
    ).split()
    assert same == "True"
    assert Path(folder).name.startswith("autotune-"), "its parent's, who removes it when all have ended"


@pytest.mark.parametrize(
    ("calls", "micro_batches"), [("F B S F B S", 2), ("F F B S B S", 2), ("F F B B S", 1), ("F B F B S", 2)]
)
def test_micro_batches_are_told_apart_by_what_comes_between_their_backwards(calls: str, micro_batches: int) -> None:
    """A forward, or a step within the accumulation; a micro-batch may have several forwards and losses."""
    rank, looked = object.__new__(ScriptRank), list[Phase]()
    rank.spec, rank.steps, rank.phase, rank._last_progress = {}, 0, Phase.INIT, float("inf")
    rank.request, rank.batch, rank.saved_tensors = MeasureRequest.of({**REQUEST, "micro_batch": 1}), Batch(), None
    rank.device = SimpleNamespace(note=lambda: looked.append(rank.phase))  # type: ignore[assignment]
    for call in calls.split():
        rank.entered({"F": Phase.FORWARD, "B": Phase.BACKWARD, "S": Phase.STEP}[call])
    assert rank.batch.micro_batches == micro_batches
    assert looked == calls.count("B") * [Phase.BACKWARD], "where most is alive"


OWN_OPTIMIZER = """
    import sys, torch, deepspeed
    class FusedAdam(torch.optim.AdamW):
        __module__ = "deepspeed.ops.adam.fused_adam"
    class Mine(FusedAdam):
        pass
    net = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(model=net, optimizer={optimizer}, config=sys.argv[1])
    while True:
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
    """


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        ("Mine(net.parameters())", ["FusedAdam", "FusedAdam"]),
        ("lambda parameters: Mine(parameters)", [None, "FusedAdam"]),  # not made yet
        ("torch.optim.AdamW(net.parameters())", [None, ""]),
    ],
)
def test_the_class_of_the_scripts_own_optimizer_is_told_before_memory_can_run_out(
    parent: Parent, tmp_path: Path, optimizer: str, told: list[str | None]
) -> None:
    rank = start(parent, tmp_path, OWN_OPTIMIZER.format(optimizer=optimizer))
    rank.wait_for("phase", phase="ready")
    assert [message.get("optimizer") for message in rank.heard if message["type"] == "facts"] == told
    rank.channel.send("stop")
    rank.wait_for("bye")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("text", "cause", "says"),
    [
        (LOOP.format(steps=3), Cause.STEPS, "train.py ended after 3 optimizer steps"),
        ("import sys; sys.exit(3)", None, "train exited with 3"),
        ("import sys; sys.exit(0)", Cause.SCRIPT, "train.py ended without calling deepspeed.initialize"),
    ],
    ids=["too short", "exits", "ends well"],
)
def test_a_script_that_is_not_measured(
    parent: Parent, tmp_path: Path, text: str, cause: Cause | None, says: str
) -> None:
    rank = start(parent, tmp_path, text)
    rank.channel.send("measure", **REQUEST)
    assert rank.exit_status() == 13
    error = rank.heard[-1]
    assert error["type"] == "error"
    assert says in error["text"]
    assert error["cause"] == cause
    assert "bye" not in rank.kinds()


BEGINNING = """
    import sys, torch, deepspeed
    net = torch.nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=sys.argv[1])
    def step(rows=2):
        engine.backward(engine(torch.ones(rows, 4)).mean())
        engine.step()
    """
SWALLOWED = {
    "and ends": """
        try:
            while True: step()
        except Exception as error: print(error)
        """,
    "and exits": """
        try:
            while True: step()
        except Exception: sys.exit(1)
        """,
    "and goes on": """
        while True:
            try: step()
            except Exception: continue
        """,
    "for another of its own": """
        try:
            while True: step()
        except Exception: raise SystemError("the training failed")
        """,
}


@pytest.mark.few(2)
@pytest.mark.parametrize("way", SWALLOWED)
def test_a_verdict_is_not_the_scripts_to_catch(parent: Parent, tmp_path: Path, way: str) -> None:
    text = textwrap.dedent(BEGINNING) + textwrap.dedent(SWALLOWED[way])
    profile = {"micro_batch": 2, "accumulation": 2}
    rank = start(parent, tmp_path, text, make_candidate(1, 4, 2), **profile)
    rank.channel.send("measure", **REQUEST)
    assert rank.exit_status() == 13
    error = rank.heard[-1]
    assert (error["type"], error["cause"]) == ("error", Cause.BATCH)
    assert "gave 4 rows a step where 8 were asked for" in error["text"]


@pytest.mark.few(2)
@pytest.mark.parametrize("way", SWALLOWED)
def test_what_the_engine_raises_is_why(parent: Parent, tmp_path: Path, way: str) -> None:
    broken = SWALLOWED[way].replace("step()", "step() if engine.global_steps < 2 else engine(torch.ones(2, 5))")
    rank = start(parent, tmp_path, textwrap.dedent(BEGINNING) + textwrap.dedent(broken))
    rank.channel.send("measure", **REQUEST)
    assert rank.exit_status() == 13
    errors = [message for message in rank.heard if message["type"] == "error"]
    assert len(errors) == 1
    assert "shapes cannot be multiplied" in errors[0]["text"]
    assert (errors[0]["phase"], errors[0]["cause"]) == ("forward", None)


def test_a_failure_that_the_script_gets_over_is_none(parent: Parent, tmp_path: Path) -> None:
    text = """
        for place in range(80):
            try:
                engine(torch.ones(2, 5)) if place % 2 == 0 else step()
            except RuntimeError:
                step()
        """
    rank = start(parent, tmp_path, textwrap.dedent(BEGINNING) + textwrap.dedent(text))
    rank.channel.send("measure", **REQUEST)
    assert len(rank.wait_for("measured")["step_seconds"]) >= 3
    rank.channel.send("stop")
    rank.wait_for("bye")


def test_a_config_that_deepspeed_refuses_is_no_script_without_deepspeed(parent: Parent, tmp_path: Path) -> None:
    text = f"""
        try:
            exec({textwrap.dedent(BEGINNING)!r})
        except Exception as error:
            print(error)
        """
    candidate = make_candidate(1, **{"zero_optimization.reduce_bucket_size": -5})
    rank = start(parent, tmp_path, text, candidate)
    assert rank.exit_status() == 13
    error = rank.heard[-1]
    assert (error["phase"], error["cause"]) == ("init", None)
    assert "reduce_bucket_size" in error["text"]


CHECKPOINTED = """
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16}
    net = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    net.gradient_checkpointing_enable()
    import sys, torch, deepspeed
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=sys.argv[1])
    engine.module.gradient_checkpointing_enable()
    for _ in range(100):
        engine.backward(engine(input_ids=torch.ones(2, 8, dtype=torch.long)).logits.mean())
        engine.step()
    """
STUBBORN = "for layer in engine.module.model.layers: layer.gradient_checkpointing = True\n"


@pytest.mark.few(1)
@pytest.mark.parametrize("told", [None, True, False])
def test_checkpointing_is_the_candidates(parent: Parent, tmp_path: Path, told: bool | None) -> None:
    candidate = None if told is None else make_candidate(0, 2, 2, activation_checkpointing=told)
    rank = start(parent, tmp_path, CHECKPOINTED, candidate, micro_batch=2, accumulation=2)
    rank.wait_for("phase", phase="ready")
    facts = [message for message in rank.heard if message["type"] == "facts"][-1]
    assert (facts["checkpointing"], facts["checkpointed"]) == (True, told is not False)
    rank.channel.send("measure", **REQUEST)
    assert not rank.wait_for("measured")["facts"]["evaluating"]
    rank.channel.send("stop")
    rank.wait_for("bye")


def test_checkpointing_that_the_script_switches_by_hand_is_no_trial_without(parent: Parent, tmp_path: Path) -> None:
    text = textwrap.dedent(CHECKPOINTED).replace("for _ in", f"{STUBBORN}for _ in")
    candidate = make_candidate(0, 2, 2, activation_checkpointing=False)
    rank = start(parent, tmp_path, text, candidate, micro_batch=2, accumulation=2)
    assert rank.exit_status() == 13
    assert "switches activation checkpointing on where it was told off" in rank.heard[-1]["text"]


def test_a_training_in_evaluation_mode_says_so(parent: Parent, tmp_path: Path) -> None:
    rank = start(parent, tmp_path, LOOP.format(steps=100).replace("engine, *_", "net.eval()\n    engine, *_"))
    rank.channel.send("measure", **REQUEST)
    measured = rank.wait_for("measured")
    assert measured["facts"]["evaluating"]
    assert (measured["facts"]["rows"], measured["facts"]["micros"]) == (4, 2)
    assert measured["facts"]["saved_bytes"] >= 2 * 8 * 16 * 4
    rank.channel.send("stop")
    rank.wait_for("bye")


@pytest.mark.parametrize(
    ("batch", "profile", "says"),
    [
        (Batch(3, 12, 12, 96), {}, None),
        (Batch(3, 24, 24, 96), {"rows_per_sample": 2}, None),
        (Batch(3, 9, 9, 96), {}, None),  # the data set's end: one micro-batch is smaller
        (Batch(0, 12, 12, 96), {}, None),  # an old DeepSpeed, whose backward nobody sees
        (Batch(3, 3, 12, 96), {}, None),  # laid end to end in one
        (Batch(3, 3, 12, 96), {"counted": "sequences"}, None),
        (Batch(6, 12, 12, 96), {"micros_per_accumulation": 2}, None),
        (Batch(2, 8, 8, 64), {}, None),  # an epoch's last step: fewer micro-batches
        (Batch(2, 12, 12, 96), {}, "accumulated 2 micro-batches where 3 were asked for"),
        (Batch(4, 12, 12, 96), {}, "accumulated 4 micro-batches"),
        (Batch(3, 8, 8, 96), {}, "gave 8 rows a step where 12 were asked for"),
        (Batch(0, 2, 2, 96), {}, "gave 2 rows"),
        (Batch(3, 3, 3, 96), {}, "gave 3 sequences"),
        (Batch(3, 0, 0, 0), {"counted": ""}, "cannot be counted"),
    ],
)
def test_the_batch_is_the_candidates(batch: Batch, profile: dict[str, Any], says: str | None) -> None:
    candidate, own = make_candidate(1, 4, 3), ScriptProfile(micro_batch=2, accumulation=6, **profile)
    if says is None:
        assert bool(check_batch(batch, candidate, own)) == (batch.sequences < 12)
    else:
        with pytest.raises(Unusable, match=says) as caught:
            check_batch(batch, candidate, own)
        assert caught.value.cause is Cause.BATCH


def test_a_batch_that_is_its_own_needs_no_counting() -> None:
    profile = ScriptProfile(micro_batch=4, accumulation=3, counted="")
    assert not check_batch(Batch(3, 0, 0, 0), make_candidate(1, 4, 3), profile)


HELD = {
    "micro_batch": 4,
    "accumulation": 2,
    "batch_note": "it has its own",
    "counted": "rows",
    "held": {"micros": 2, "rows": 6},  # no multiple of what its config says
}


@pytest.mark.parametrize(
    ("batch", "asked", "changes", "says"),
    [
        (Batch(2, 6, 6, 48), (4, 2), {}, ""),
        (Batch(2, 5, 5, 40), (4, 2), {}, "gave 5 rows a step where 6"),  # as an epoch's last
        (Batch(1, 3, 3, 24), (4, 2), {}, "accumulated 1 micro-batches where 2"),
        (Batch(2, 7, 7, 56), (4, 2), {}, None),
        (Batch(3, 6, 6, 48), (4, 2), {}, None),
        (Batch(2, 6, 6, 48), (8, 1), {}, None),
        (Batch(2, 99, 99, 48), (4, 2), {"held": {}}, ""),  # its own was never seen
    ],
)
def test_a_batch_that_is_held_is_what_it_was(
    batch: Batch, asked: tuple[int, int], changes: dict[str, Any], says: str | None
) -> None:
    candidate, profile = make_candidate(1, *asked), ScriptProfile(**{**HELD, **changes})
    if says is None:
        with pytest.raises(Unusable) as caught:
            check_batch(batch, candidate, profile)
        assert caught.value.cause is Cause.BATCH
    else:
        found = check_batch(batch, candidate, profile)
        assert says in found
        assert bool(says) == bool(found)


@pytest.mark.parametrize(
    ("rows", "own", "fits"),
    [
        ([8, 8], 8, True),
        ([16, 16], 8, True),  # twice as much, as is asked for
        ([16, 16, 3, 16], 8, True),  # the last of its data
        ([16, 3, 3, 16], 8, False),
        ([8], None, False),
        ([99, 1], 0, True),  # not counted: the batch is held
    ],
)
def test_an_engine_beside_the_first_is_counted(rows: list[int], own: int | None, fits: bool) -> None:
    beside = {"1": 8} if own is None else {"0": own}
    profile = ScriptProfile(micro_batch=2, accumulation=2, beside=beside)
    with nullcontext() if fits else pytest.raises(Unusable, match="beside the first") as caught:
        check_auxiliary_engine(rows, "0", make_candidate(1, 4, 2), profile)
    assert fits or caught.value.cause is Cause.BATCH


@pytest.mark.parametrize(("rows", "usually"), [([8] * 5, 8), ([8, 8, 3, 8], 8), ([8, 9, 8], 0), ([8, 3, 8, 3], 0)])
def test_a_script_whose_batch_changes(rows: list[int], usually: int) -> None:
    assert typical_rows(rows) == usually


def packed(*tokens: int, sequences: tuple[int, ...] = (9, 7, 11, 8, 12)) -> list[Batch]:
    """Steps of two forwards, each of one row."""
    return [Batch(2, 2, many, one, packed=2) for one, many in zip(tokens, sequences[: len(tokens)], strict=True)]


def test_rows_that_are_packed_end_to_end_are_known_by_their_tokens() -> None:
    found = own_steps(packed(1000, 980, 1010, 990), 4, 2)
    assert found["packed_tokens"] == pytest.approx(497.5)
    assert (found["micros"], found["rows"]) == (2, 2)
    assert own_steps(packed(1000, 200, 1900, 700), 4, 2)["packed_tokens"] == 0, "not full"
    steady = packed(1000, 900, 950, sequences=(8, 8, 8))
    assert own_steps(steady, 4, 2) == {"micros": 2, "rows": 2, "sequences": 8}, (
        "as many sequences each: these are counted"
    )
    one_unpacked = [*packed(1000, 980, 1010), Batch(2, 2, 9, 990, packed=1)]
    assert "packed_tokens" not in own_steps(one_unpacked, 4, 2)


PACKED = ScriptProfile(micro_batch=4, accumulation=2, counted="tokens", rows_per_sample=125.0)


@pytest.mark.parametrize(
    ("asked", "tokens", "fits"),
    [
        ((4, 2), (1000, 960), True),
        ((2, 2), (1000, 960), False),  # the own, whatever it is told
        ((11, 2), (2500, 2500), False),  # of ten: within a tenth, and nearer to another
        ((11, 2), (2700, 2740), True),
        ((3, 2), (660, 660), False),
    ],
)
def test_tokens_are_those_of_as_many_rows_as_asked_for(
    asked: tuple[int, int], tokens: tuple[int, ...], fits: bool
) -> None:
    steps, candidate = packed(*tokens), make_candidate(1, *asked)
    assert [check_batch(step, candidate, PACKED) for step in steps] == ["", ""]
    with nullcontext() if fits else pytest.raises(Unusable, match="tokens a micro-batch where about") as caught:
        check_tokens(steps, candidate, PACKED)
    assert fits or caught.value.cause is Cause.BATCH
    check_tokens([replace(step, packed=1) for step in steps], candidate, PACKED)  # by rows, as these are
    check_tokens(steps, candidate, replace(PACKED, batch_note="it has its own"))
    check_tokens(steps, candidate, replace(PACKED, counted="rows"))


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (Batch(2, 8, 20, 1000), ""),  # packed, in as many rows
        (Batch(1, 1, 5, 500, packed=1), "accumulated 1 micro-batches where 2"),  # an epoch's last
        (Batch(3, 3, 12, 1000, packed=3), None),
        (Batch(2, 3, 12, 1000, packed=1), None),
    ],
)
def test_rows_that_should_be_packed_end_to_end(batch: Batch, says: str | None) -> None:
    if says is None:
        with pytest.raises(Unusable, match=r"where .* were asked for"):
            check_batch(batch, make_candidate(1, 4, 2), PACKED)
    else:
        found = check_batch(batch, make_candidate(1, 4, 2), PACKED)
        assert says in found
        assert bool(says) == bool(found)


def varying(**rows: tuple[int, ...]) -> list[Batch]:
    """Steps of two forwards whose texts differ in number, and rows of other tensors."""
    return [
        Batch(
            2,
            texts,
            texts,
            100,
            rows_by_name=Counter({"input_ids": texts, **{name: of[at] for name, of in rows.items()}}),
        )
        for at, texts in enumerate((9, 12, 8, 11))
    ]


def test_where_rows_differ_a_tensor_that_has_as_many_is_counted() -> None:
    steps = varying(offsets=(9, 9, 9, 9), pairs=(16, 16, 16, 16), images=(8, 8, 8, 8), masks=(8, 4, 16, 8))
    found = own_steps(steps, 4, 2)
    assert (found["counted_by"], found["rows"], found["sequences"]) == ("images", 8, 8)
    for other in ({"offsets": (9, 9, 9, 9)}, {"images": (8, 8, 8, 0)}, {}):
        held = own_steps(varying(**{"masks": (8, 4, 16, 8), **other}), 4, 1)
        assert (held["rows"], "counted_by" in held) == (0, False)
        assert "change from step to step" in held["uncounted"]
    last = varying(images=(8, 8, 8, 4))
    assert own_steps(last, 4, 2)["counted_by"] == "images"


def test_what_a_forward_keeps_is_counted_once_and_without_parameters() -> None:
    net = torch.nn.Linear(16, 4, bias=False)
    engine: Any = SimpleNamespace(module=net)
    inputs = torch.ones(8, 16, requires_grad=True)
    saved = SavedTensors(engine)
    for _ in range(2):
        net(inputs)  # keeps its inputs and its weight
    assert saved.bytes == 8 * 16 * 4
    saved.close()
    net(torch.ones(8, 16, requires_grad=True))
    assert saved.bytes == 8 * 16 * 4, "nothing after it is closed"
    saved.close()


def test_a_function_of_the_script_reads_attributes_of_the_parameters_that_it_saved() -> None:
    """TRL reads ZeRO-3's `ds_status` of its head in a backward, and Megatron `main_grad`."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(Inner.apply(x), weight)
            return x @ weight.T

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            return grad @ weight, grad.T @ x * weight.factor

    net = torch.nn.Linear(16, 4, bias=False)
    net.weight.factor = 2.0  # type: ignore[assignment]
    before = vars(torch.autograd.Function)["apply"]
    saved = SavedTensors(SimpleNamespace(module=net))
    loss = Product.apply(torch.ones(8, 16), net.weight).sum()
    saved.close()
    assert saved.bytes == 8 * 16 * 4
    loss.backward()
    assert net.weight.grad is not None
    assert net.weight.grad[0, 0] == 16.0
    assert vars(torch.autograd.Function)["apply"] is before


EVERY_FOURTH = """
    import sys, time, torch, deepspeed
    net = torch.nn.Linear(16, 1)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=sys.argv[1])
    for at in range(400):
        if at % 8 == 0:  # every fourth step of two micro-batches
            time.sleep(0.3)
        engine.backward(engine(torch.ones(engine.train_micro_batch_size_per_gpu(), 16)).mean())
        engine.step()
    """


@pytest.mark.slow
def test_work_that_recurs_is_measured_as_often_as_it_does(parent: Parent, tmp_path: Path) -> None:
    rank = start(parent, tmp_path, EVERY_FOURTH)
    rank.wait_for("phase", phase="ready")
    rank.channel.send("measure", **{**REQUEST, "max_steps": 30})
    seconds = rank.wait_for("measured")["step_seconds"]
    assert sum(one > 0.3 for one in seconds) >= 3, "two whole periods"
    assert pace_of(seconds).seconds >= 0.3 / 4


def test_a_measurement_ends_where_the_script_changes_its_batch(parent: Parent, tmp_path: Path) -> None:
    grows = "    if engine.global_steps == 6:\n            engine.set_train_batch_size(8)\n"
    rank = start(parent, tmp_path, LOOP.format(steps=40) + grows)
    rank.wait_for("phase", phase="ready")
    rank.channel.send("measure", **{**REQUEST, "max_steps": 30})
    assert len(rank.wait_for("measured")["step_seconds"]) == 6 - WARMUP_STEPS


OVERFLOWS = """
    import sys, torch, deepspeed
    from deepspeed.accelerator import get_accelerator
    get_accelerator().is_fp16_supported = lambda: True  # asks whether the CPU is fast at it; torch computes in it on any
    net = torch.nn.Linear(16, 1)
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=sys.argv[1])
    for _ in range(400):
        rows = torch.ones(engine.train_micro_batch_size_per_gpu(), 16, device=engine.device).half()
        engine.backward(engine(rows).float().mean() * {times})
        engine.step()
        open("seen/skipped.txt", "a").write(str(engine.skipped_steps) + "\\n")
    """


def fp16(parent: Parent, folder: Path, monkeypatch: pytest.MonkeyPatch, times: str) -> Rank:
    scaled = {"enabled": True, "initial_scale_power": 24, "hysteresis": 2}
    monkeypatch.setitem(CONFIG, "gradient_accumulation_steps", 1)
    monkeypatch.setitem(CONFIG, "zero_optimization", {"stage": 1})
    monkeypatch.setitem(CONFIG, "fp16", {**scaled, **({"loss_scale": 2**24} if times == "1e9" else {})})
    rank = start(parent, folder, OVERFLOWS.format(times=times))
    rank.wait_for("phase", phase="ready")
    rank.channel.send("measure", **REQUEST)
    return rank


def test_steps_that_deepspeed_skips_are_neither_warm_up_nor_measured(
    parent: Parent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = fp16(parent, tmp_path, monkeypatch, "1e3")
    measured = rank.wait_for("measured")
    rank.channel.send("stop")
    rank.wait_for("bye")
    counts = [int(line) for line in (tmp_path / "seen" / "skipped.txt").read_text().split()]
    assert max(counts) > 2 * WARMUP_STEPS
    counted = WARMUP_STEPS + len(measured["step_seconds"])
    assert len(counts) - max(counts) == counted - 1, "all but the last, in which the rank has answered"
    assert counts[0] == 1, "it began with those that were skipped"


def test_a_script_all_of_whose_steps_are_skipped_says_nothing(
    parent: Parent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = fp16(parent, tmp_path, monkeypatch, "1e9")
    assert rank.exit_status() == 13
    assert "DeepSpeed skipped 40 steps in a row, since gradients overflow in fp16" in rank.heard[-1]["text"]


@pytest.mark.parametrize(
    ("lengths", "grows"),
    [
        ([{16}, {16}, {24}, {24}, {32}], [16, 32]),
        ([{16}, {16}, {16}], []),
        ([{16}, {24}, {16}], []),
        ([{16, 20}, {24}, {32}], []),
        ([], []),
    ],
)
def test_rows_that_grow_from_step_to_step_are_told_from_random_lengths(
    lengths: list[set[int]], grows: list[int]
) -> None:
    assert growth(lengths) == grows
