"""A plan recommends what surely fits, says how surely, and says of a stage nothing that its own headline denies."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from autotune.cli.app import app
from autotune.commands import launch
from autotune.commands import plan as commands_plan
from autotune.commands.plan import Machines, make_plan
from autotune.commands.request import Request
from autotune.commands.setup import PlanSetup, plan_setups
from autotune.predict.predictor import SURE, SURE_SIGMAS, Predictor
from autotune.predict.trace_cache import closed_form_trace
from autotune.predict.trace_data import Trace
from autotune.predict.what_if import OtherHardware
from autotune.problem.hardware import Hardware, named_hardware
from autotune.problem.space import SearchSpace, parse_space
from autotune.results.plan import Outlook, Plan, Shortage, links_text, machine_line, show_plan, ways_table
from autotune.util.units import GIB
from tests.conftest import make_candidate, make_job

JOB = make_job(ranks=4, precision="bf16", model="llama-3.2-1b", seq_len=2048)
SPACE = parse_space(
    "knobs: {zero_stage: [0, 3], activation_checkpointing: [false, true], train_micro_batch_size_per_gpu: [1, 2, 4, 8, 16], "
    "gradient_accumulation_steps: [4]}"
)
LLAMA_13B = {"model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40}
LLAMA_13B |= {"intermediate_size": 13824, "vocab_size": 32000}
CARD = named_hardware("a100-80gb", 4, headroom=0.0)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return closed_form_trace(JOB, "no trace")


def planned(trace: Trace, hardware: Hardware, space: SearchSpace = SPACE) -> tuple[Plan, PlanSetup, Predictor]:
    setup = PlanSetup(job=JOB, hardware=hardware, space=space)
    predictor = Predictor(JOB, hardware, trace)
    return make_plan(setup, predictor), setup, predictor


def text_of(plan: Plan) -> str:
    out = Console(record=True, width=140, file=io.StringIO())
    show_plan(plan, out)
    return out.export_text()


def where(trace: Trace, space: SearchSpace, sigmas: float) -> Hardware:
    """A card on which the fastest candidate of the space is so many standard deviations below the ceiling."""
    predictor = Predictor(JOB, CARD, trace)
    candidates = space.candidates(JOB)
    table = predictor.table(candidates)
    place = int(table.samples.argmax())
    return dataclasses.replace(CARD, memory_bytes=int(table.needed[place] + sigmas * table.peak_sigma[place]))


def first_rung(setup: PlanSetup, trace: Trace, patch: pytest.MonkeyPatch) -> object:
    patch.setattr(launch, "traced_predictor", lambda job, hardware, **_: Predictor(job, hardware, trace))
    return launch._planned_ladder(setup, convert=False)[0].candidate


def test_the_headline_is_the_fastest_that_surely_fits(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, setup, predictor = planned(trace, where(trace, SPACE, 0.3))
    assert all(one.sure and one.chance >= SURE - 1e-3 for one in plan.best)
    table = predictor.table(setup.space.candidates(JOB))
    at_even_odds = table.samples[predictor.margins(table) >= 0].max()
    assert plan.best[0].samples_per_second < at_even_odds, "there is a faster one at a coin toss"
    assert "fastest " in text_of(plan)
    assert "; fits: 9" in text_of(plan)
    assert first_rung(setup, trace, monkeypatch) == plan.best[0].candidate


def test_where_nothing_surely_fits_the_likeliest_is_said_to_be_that(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = parse_space("knobs: {zero_stage: [3], train_micro_batch_size_per_gpu: [1, 2]}")
    card = CARD
    for _ in range(3):  # the need depends a little on the card's memory
        table = Predictor(JOB, card, trace).table(one.candidates(JOB))
        least = int(table.needed.argmin())
        card = dataclasses.replace(card, memory_bytes=int(table.needed[least] + 0.5 * table.peak_sigma[least]))
    plan, setup, _ = planned(trace, card, one)
    assert plan.best[0].chance == pytest.approx(0.69, abs=0.01)
    assert (plan.best[0].candidate.micro_batch, plan.best[0].sure, plan.best[0].fits) == (1, False, True)
    text = text_of(plan)
    assert "likeliest" in text
    assert "fits: only 69%" in text
    assert plan.best[0].peak_interval[1] > card.capacity_bytes, "it is not cut at the card"
    assert first_rung(setup, trace, monkeypatch) == plan.best[0].candidate


def test_a_plan_below_the_chance_asked_for_exits_with_3(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan && sbatch` starts no training that is likely to run out of memory."""
    likely, *_ = planned(trace, CARD)
    words = ["plan", "--model", "llama-3.2-1b", "--gpu", "a100", "--json"]
    for chance, more, code in ((0.79, (), 3), (0.81, (), 0), (0.81, ("--sure", "90%"), 3), (0.6, ("--sure", "0.5"), 0)):
        best = [dataclasses.replace(likely.best[0], chance=chance)]
        found = dataclasses.replace(likely, best=best)
        monkeypatch.setattr(commands_plan, "plans", lambda *_, found=found: [found])
        assert CliRunner().invoke(app, [*words, *more]).exit_code == code


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("a100", "NVLink 300 GB/s (assumed), network 1600 Gbit/s a node"),
        ("rtx4090", "PCIe 12 GB/s (assumed), network 100 Gbit/s a node"),
    ],
)
def test_the_assumed_network_is_printed_with_the_machine(name: str, rate: str, trace: Trace) -> None:
    plan, *_ = planned(trace, CARD)
    of = dataclasses.replace(plan, hardware=named_hardware(name, 16, nodes=2))
    assert f"8 in each, {rate} (assumed)" in " ".join(machine_line(of).split())
    assert links_text(of.hardware.with_rates(ring_gb_per_s=2.345)) == ", all-reduce 2.35 GB/s (measured)"
    assert "network" not in machine_line(plan)


def test_the_typed_network_decides_the_step_of_single_gpus(tmp_path: Path) -> None:
    """13B parameters on 16 machines with one A10G each and 25 Gbit/s: 66.6 s were published."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_13B))
    candidate = make_candidate(3, 2, 2, offload_optimizer="cpu", offload_param="cpu", activation_checkpointing=True)
    seconds = []
    for nodes in ("16", "16x25Gbit"):
        request = Request(model=str(tmp_path), nodes=nodes, seq_len="512", global_batch_size="64")
        (setup,) = plan_setups(request, ["a10g"])
        predictor = Predictor(setup.job, setup.hardware, closed_form_trace(setup.job, "no trace"))
        seconds.append(predictor.predict(candidate).step_seconds)
    assert seconds[1] == pytest.approx(66.6, rel=0.05)
    assert seconds[0] < seconds[1] / 3, "the network that is assumed is four times as fast"


def test_a_high_mfu_is_shown_beside_what_was_published(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, *_ = planned(trace, CARD)
    for share, checked in ((0.5, False), (0.7, True)):
        monkeypatch.setattr(Outlook, "mfu", share)
        assert ("published runs reach up to 78%" in text_of(plan)) is checked


def test_nothing_is_recommended_at_less_than_even_odds(trace: Trace) -> None:
    plan, *_ = planned(trace, dataclasses.replace(CARD, memory_bytes=3 * 2**30))
    assert plan.best == []
    assert all(way.largest is None and way.fastest is None for way in plan.ways)
    assert "tokens/s" not in "".join(line for line in text_of(plan).splitlines() if "none" in line)


def test_every_row_of_the_stages_agrees_with_the_headline(trace: Trace) -> None:
    for sigmas in (-1.0, 0.0, 0.5, 1.0, 2.0):
        plan, setup, predictor = planned(trace, where(trace, SPACE, sigmas))
        candidates = setup.space.candidates(JOB)
        table = predictor.table(candidates)
        sure = predictor.margins(table) >= SURE_SIGMAS
        fastest = [way.fastest.samples_per_second for way in plan.ways if way.fastest]
        assert max(fastest) == pytest.approx(plan.best[0].samples_per_second)
        usable_gib = round(plan.hardware.ceiling_bytes / GIB, 1)
        for cells, style in ways_table(plan).rows:
            if style == "none":
                assert "short" in cells[3] + cells[5], cells
            else:
                assert float(cells[3].replace(",", "")) <= usable_gib, "the title names what may be used"
        for way in plan.ways:
            mine = [
                i
                for i, c in enumerate(candidates)
                if (c.stage, c.checkpointing, bool(c.offloaded)) == (way.stage, way.checkpointing, way.offload)
            ]
            fitting = [candidates[i].micro_batch for i in mine if sure[i]]
            assert (way.largest.candidate.micro_batch if way.largest else None) == max(fitting, default=None)
            if way.largest:
                assert Shortage.of(way.largest, plan.hardware).gpu_short_bytes == 0
            if way.closest:
                need = Shortage.of(way.closest, plan.hardware)
                assert need.gpu_needed_bytes == pytest.approx(min(table.sure[i] for i in mine))
                assert need.gpu_short_bytes > 0


def test_other_machines_are_those_on_which_it_surely_fits(trace: Trace) -> None:
    _, setup, predictor = planned(trace, where(trace, SPACE, 0.3))
    candidates = setup.space.candidates(JOB)
    machines = Machines(setup, OtherHardware(setup.space, predictor, candidates, predictor.table(candidates)))
    found = [card.fewest for card in (*machines.cards(), machines.fewest_of_own()) if card]
    assert sum(one is not None for one in found) > 5
    assert all(one.prediction.sure for one in found if one)
    for card in machines.cards():
        for one in filter(None, (card.fewest_offloading, card.best)):
            assert one.host_bytes <= one.hardware.host_memory_bytes, "as in a plan of that card"


@pytest.mark.parametrize("typed", [False, True])
def test_a_card_without_bf16_is_taken_with_fp16_unless_bf16_was_typed(trace: Trace, typed: bool) -> None:
    _, setup, predictor = planned(trace, CARD)
    setup = dataclasses.replace(setup, precision_typed=typed)
    candidates = setup.space.candidates(JOB)
    machines = Machines(setup, OtherHardware(setup.space, predictor, candidates, predictor.table(candidates)))
    volta = machines.tried("v100-32gb", 4, 1)
    assert (volta and volta.job.precision) == (None if typed else "fp16")
