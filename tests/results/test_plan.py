import dataclasses
import io
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from autotune.commands import plan as plan_command
from autotune.commands.plan import make_plan, plans
from autotune.commands.request import Request
from autotune.commands.run import RunSummary
from autotune.commands.setup import PlanSetup
from autotune.predict.predictor import Predictor
from autotune.predict.trace import traced_predictor
from autotune.predict.trace_cache import closed_form_trace
from autotune.predict.what_if import loading_bytes_per_node
from autotune.problem.gpu_specs import gpu_table
from autotune.problem.hardware import named_hardware
from autotune.problem.job import parse_lora
from autotune.problem.space import load_space, parse_space
from autotune.results.console import exported_json, study_json
from autotune.results.plan import WIDTH, Plan, PlanTable, cards_table, comparison_table, knobs_text, show_plan
from autotune.util.units import GIB
from tests.conftest import make_candidate, make_job
from tests.documents import ROOT
from tests.studies import study_of_every_kind


def shown(plan: Plan) -> str:
    out = Console(record=True, width=140, file=io.StringIO())
    show_plan(plan, out, whole=True)
    comparison_table([plan]).show(out)
    return out.export_text()


def test_what_is_shown() -> None:
    job = make_job(model="llama-3.2-1b", precision="bf16", seq_len=2048)
    hardware = named_hardware("rtx4090", 2)
    setup = PlanSetup(job=job, hardware=hardware, space=load_space("classic"))
    plan = make_plan(setup, traced_predictor(job, hardware))
    text = shown(plan)
    assert "what surely fits, by stage" in text
    rows = [line.split()[:1] for line in text.splitlines() if " plain " in line]
    assert rows == [["0"], ["1"], ["2"], ["3"]]
    assert "+ both" in text
    assert "logits and loss " in text
    parts = re.search(r"weights \d+\.\d(, [a-z ]+ \d+\.\d)*", " ".join(text.split()))
    assert parts is not None
    assert sum(map(float, re.findall(r"\d+\.\d", parts[0]))) == pytest.approx(plan.best[0].peak_bytes / GIB, abs=0.5)


@pytest.fixture(scope="module")
def whole() -> Plan:
    """A plan with everything in it: several nodes, offload, a global batch, tokens."""
    request = Request(
        model="llama-3.2-1b", space="classic", gpus=2, seq_len=2048, nodes=2, tokens="2B", global_batch_size=64
    )
    (plan,) = plans(request, ["rtx4090"])
    return plan


def test_a_whole_plan_is_readable_in_100_columns(whole: Plan) -> None:
    text = shown(whole)
    assert all(len(line.rstrip()) <= WIDTH for line in text.splitlines())
    for said in (
        "4 x rtx4090",
        "2 in each",
        "tokens/s (",
        "MFU",
        "2 B tokens",
        "at $0.59 a GPU and hour (RunPod, 2026-01)",
        "limited by",
        "ZeRO",
        "of a GPU and of a node's main memory",
        "fewest rtx4090:",
        "cheapest cards for 2 B tokens",
        "Rough prices on demand",
    ):
        assert said in " ".join(text.split()), said


def test_no_card_is_advised_in_fewer_gpus_than_it_fits_from(whole: Plan) -> None:
    table = cards_table(whole)
    assert table is not None
    best = {card.gpu: card.best for card in whole.cards}
    for cells, _ in table.rows:
        fits_from, advised = (math.prod(map(int, re.findall(r"\d+", cell))) for cell in cells[1:3])
        assert fits_from <= advised, cells
        outlook = best[cells[0].split(" ")[0].rstrip("*")]
        assert ("+cpu" in cells[2]) == bool(outlook.prediction.candidate.offloaded)


def test_programs_are_told_the_same(whole: Plan) -> None:
    data = json.loads(json.dumps(whole.to_json(whole=True)))
    assert (data["gpus"], data["nodes"], data["gpus_per_node"]) == (4, 2, 2)
    outlook = data["answer"]
    small = json.loads(json.dumps(whole.to_json()))
    assert small.items() <= data.items()
    assert small["answer"]["ds_config"] == data["best"][0]["ds_config"]
    assert len(json.dumps(small)) < 5_000
    assert outlook["tokens_per_second"] == pytest.approx(data["best"][0]["tokens_per_second"])
    assert outlook["hours"] == pytest.approx(2e9 / outlook["tokens_per_second"] / 3600)
    assert outlook["usd"] == pytest.approx(outlook["hours"] * 4 * 0.59)
    for name in ("tokens_per_second", "mfu", "hours", "usd"):
        low, high = outlook[f"{name}_interval"]
        assert low < outlook[name] < high
    assert data["fewest_gpus"]["gpu"] == "rtx4090"
    assert {card["gpu"] for card in data["cards"]} >= {"h100", "t4"}
    assert {way["stage"] for way in data["ways"] if way["offload"]} == {1, 2, 3}


def test_an_outlook_without_a_price_or_a_known_card(whole: Plan) -> None:
    outlook = whole.outlook
    unknown = dataclasses.replace(outlook, price=None, hardware=dataclasses.replace(outlook.hardware, facts=None))
    assert (unknown.usd, unknown.by_time(unknown.usd), unknown.usd_per_hour) == (None, None, None)
    assert (unknown.mfu, unknown.by_speed(unknown.mfu)) == (None, None)
    assert json.dumps(unknown.to_json())
    assert "no price known" in shown(dataclasses.replace(whole, price=None))


def test_what_does_not_fit_says_what_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: gpu_table()[name] for name in ("rtx3060", "a100-80gb", "h100")}
    monkeypatch.setattr(plan_command, "gpu_table", lambda: few)
    space = tmp_path / "without-offload.yaml"
    space.write_text("knobs: {zero_stage: [2, 3], train_micro_batch_size_per_gpu: [1, 2]}")
    (plan,) = plans(Request(model="llama-3.1-8b", gpus=1, space=space), ["rtx3060"])
    assert plan.outlook is None
    text = " ".join(shown(plan).split())
    assert "nothing of the space is predicted to fit" in text
    found = re.search(
        r"nearest: (z3 .*?): needs ([\d.]+) GiB a GPU to fit surely \([\d.]+ expected, ([\d.]+) may be used\)"
        r".*?: short of ([\d.]+) GiB",
        text,
    )
    assert found, text
    assert float(found[2]) - float(found[3]) == pytest.approx(float(found[4]), abs=0.11)
    assert "fewest rtx3060: " in text
    assert "cheapest cards for 1 B tokens" in text


@pytest.mark.parametrize("width", [40, 100, 140])
def test_no_cell_of_a_table_is_cut_off(width: int) -> None:
    cells = (
        "rtx6000ada *",
        "2 x 8 +cpu",
        "16 x 8 +cpu",
        "1.67k",
        "117.84",
        "6.9 days",
        "$13,870 ($11,030 to $114,500)",
    )
    names = ("card", "fits from", "GPUs", "tokens/s", "$/h", "time", "cost")
    out = Console(record=True, width=width, file=io.StringIO())
    PlanTable("cards", names, frozenset(names[1:]), ((cells, ""),)).show(out)
    text = out.export_text()
    assert not Counter("".join(cells).replace(" ", "")) - Counter(text), "all letters are there"
    if width > 40:  # narrower columns fold their words, too
        assert {word for cell in cells for word in cell.split()} <= set(text.split())


@pytest.mark.slow
def test_a_loss_in_chunks_is_planned_beside_one_with_all_logits() -> None:
    request = Request(model="qwen3-0.6b", gpus=1, seq_len=4096, global_batch_size=8)
    (plan,) = plans(request, ["rtx3090"])
    fastest, whole = plan.best[0], plan.whole_loss
    assert whole.memory["logits and loss"] == pytest.approx(10 * 151936 * 4096 * whole.candidate.micro_batch, rel=0.02)
    assert fastest.memory["logits and loss"] < 0.5 * whole.memory["logits and loss"]
    assert fastest.samples_per_second > 1.05 * whole.samples_per_second
    text = " ".join(shown(plan).split())
    assert (
        "in chunks, in a script by TRL's chunked loss or Liger's fused_linear_cross_entropy; with all logits z" in text
    )
    assert plan.to_json(whole=True)["fastest_with_all_logits"]["peak_bytes"] == round(whole.peak_bytes)
    (typed,) = plans(request.model_copy(update={"loss": "chunked"}), ["rtx3090"])
    assert typed.whole_loss is None


@pytest.mark.parametrize(("gather", "stage"), [(True, 3), (False, 3), (True, 2)])
def test_zero_3_moves_the_whole_model_to_each_gpu_and_gathers_it_for_a_save(gather: bool, stage: int) -> None:
    """A 14B model with adapters fits two cards of 24 GiB once it is partitioned, and dies before unless it is made in parts."""
    job = make_job(
        2,
        model="qwen2.5-14b",
        precision="bf16",
        seq_len=256,
        lora=parse_lora("r=8"),
        base_config={"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": gather}},
    )
    hardware = named_hardware("rtx4090", 2, headroom=0.0)
    space = parse_space(
        f"knobs: {{zero_stage: [{stage}], activation_checkpointing: [true], train_micro_batch_size_per_gpu: [1]}}"
    )
    frozen = 14_770_000_000
    trace = dataclasses.replace(
        closed_form_trace(job, "no trace", ([10**6], frozen)), frozen_sizes=[frozen // 500] * 500
    )
    predictor = Predictor(job, hardware, trace)
    plan = make_plan(PlanSetup(job=job, hardware=hardware, space=space), predictor)
    text = " ".join(shown(plan).split())
    assert plan.whole_bytes == pytest.approx(2 * frozen * (stage == 3), rel=0.01)
    assert plan.save_bytes == pytest.approx(2 * frozen * (stage == 3 and gather), rel=0.01)
    assert ("28 GiB a GPU at first, more than it may use, unless zero.Init" in text) is (stage == 3)
    assert ("28 GiB more main memory on the first node" in text) is (stage == 3 and gather)


@pytest.mark.slow
def test_loading_a_checkpoint_needs_a_copy_per_rank() -> None:
    few, many = (
        plans(Request(model="llama-3.1-8b", gpus=gpus, seq_len=2048, host_memory="128GiB"), ["a100-80gb"])[0]
        for gpus in (2, 8)
    )
    weights = 2 * 8.03e9
    assert few.loading_bytes == pytest.approx(2 * weights + 4 * 2**30, rel=0.01)  # 4 GiB for the processes
    assert many.loading_bytes == pytest.approx(8 * weights + 16 * 2**30, rel=0.01)
    said = " ".join(shown(many).split())
    assert many.zero_init_bytes == pytest.approx(weights + 16 * 2**30, rel=0.01)
    assert "8 ranks load a full copy each, more than there is; 31 GiB with zero.Init (ZeRO 3)" in said
    assert "2 ranks load a full copy each; 19 GiB with zero.Init (ZeRO 3)" in " ".join(shown(few).split())
    quantized = dataclasses.replace(few.job, lora=parse_lora("r=8,quantize=nf4"))
    assert loading_bytes_per_node(quantized, 10**10, few.hardware) == 0, "each weight goes to the GPU as it is read"
    told = few.to_json(whole=True)
    assert told["loading_bytes_per_node"] == round(few.loading_bytes)
    assert told["loading_bytes_with_zero_init"] == round(few.zero_init_bytes)


def test_a_short_name_has_the_knobs_that_decide(whole: Plan) -> None:
    candidate = whole.best[0].candidate
    assert str(candidate).startswith(knobs_text(candidate))
    assert "rbs=" not in knobs_text(candidate)
    split = make_candidate(3, offload_optimizer="cpu", **{"zero_optimization.offload_optimizer.ratio": 0.5})
    assert knobs_text(split) == "z3 mb1 ga1 opt=cpu ratio=0.5"


def test_every_key_of_json_is_documented(whole: Plan, tmp_path: Path) -> None:
    rows = re.findall(r"^\| (`.*?) \|.*\| (.*?) \|$", (ROOT / "docs" / "json.md").read_text(), re.MULTILINE)

    def keys(command: str) -> set[str]:
        return {key for names, commands in rows if command in commands for key in re.findall(r"`(\w+)`", names)}

    study = study_of_every_kind(tmp_path)
    assert keys("run") == {field.name for field in dataclasses.fields(RunSummary)}
    assert keys("show") == study_json(study).keys()
    assert keys("export") == exported_json(study, [tmp_path / "s.json"], "deepspeed", None).keys()
    assert keys("plan") == whole.to_json(whole=True).keys()
    assert keys("plan") - keys("plan --all") == whole.to_json().keys()
