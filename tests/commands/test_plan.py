import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli.app import app
from autotune.commands import plan as plan_command
from autotune.commands.plan import LONGEST_SECONDS, _advice, make_plan, plans
from autotune.commands.request import Request
from autotune.commands.setup import PlanSetup
from autotune.errors import UserError
from autotune.predict.trace import traced_predictor
from autotune.problem.gpu_specs import cloud_machines, gpu_table, price_table
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.problem.space import parse_space
from autotune.results.plan import fewest_gpus
from autotune.util.interpreter import OWN, Interpreter
from autotune.util.units import GIB
from tests.conftest import make_candidate, make_job

FEW = ("t4", "rtx3090", "rtx4090", "a100-80gb", "h100")


@pytest.fixture(autouse=True)
def few_cards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other machines are predicted for five cards, and for every card of the table in tests that are slow."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(plan_command, "gpu_table", lambda: {name: gpu_table()[name] for name in FEW})


def test_a_plan_shows_what_fits_by_way_of_training() -> None:
    (plan,) = plans(Request(model="gemma-2-9b", gpus=4, space="classic"), ["a100-80gb"])
    assert plan.best
    assert all(one.fits for one in plan.best)
    speeds = [one.samples_per_second for one in plan.best]
    assert speeds == sorted(speeds, reverse=True)
    ways = {(way.stage, way.checkpointing, way.offload): way for way in plan.ways}
    assert ways[0, False, False].largest is None  # 16 bytes for each of 9.2e9 parameters
    assert max(way.fastest.samples_per_second for way in plan.ways if way.fastest) == pytest.approx(speeds[0])
    plain, again = ways[3, False, False], ways[3, True, False]
    assert again.largest
    assert again.largest.candidate.micro_batch > (plain.largest.candidate.micro_batch if plain.largest else 0)
    assert all(way.largest is None or way.largest.sure for way in plan.ways)
    data = json.loads(json.dumps(plan.to_json(whole=True)))
    assert data["best"][0]["ds_config"]["zero_optimization"]["stage"] in (0, 1, 2, 3)
    assert data["best"][0]["fits"] is True
    assert (data["closest"], data["fits_with_host_memory"]) == (None, None)


def test_the_wait_for_a_trace_is_one_line_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Traced(Exception):
        pass

    def traces(*_: object, **__: object) -> None:
        raise Traced

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown, lines = Terminal(), []
    monkeypatch.setattr(plan_command, "traced_predictor", traces)
    monkeypatch.setattr("sys.stderr", shown)
    with pytest.raises(Traced):
        plans(Request(model="llama-3.1-70b", seq_len=999), ["l4"], lines.append)
    assert lines == ["tracing llama-3.1-70b: once for this model, task and length, maybe a minute"]
    assert not shown.getvalue()


def test_a_plan_names_what_leaf_modules_and_cpu_threads_change() -> None:
    def advice(
        stage: int, transformers: str, ranks: int = 8, model: str = "mixtral-8x7b", place: str = "none"
    ) -> list[str]:
        other = Interpreter(
            {"executable": "/other/bin/python", "versions": {"transformers": transformers}, "cuda": None}
        )
        job = Job(resolve_model(model), ranks, 2048, "bf16", interpreter=other)
        candidate = make_candidate(zero_stage=stage, offload_optimizer=place)
        return list(_advice(job, named_hardware("h100", ranks), candidate))

    (line,) = advice(3, "4.57.1")
    assert "transformers 4.57.1" in line
    assert "zero_optimization.leaf_module.classes" in line
    assert advice(3, "5.0.0") == []  # all experts of a layer are one parameter
    assert advice(2, "4.57.1") == advice(3, "4.57.1", ranks=1) == advice(3, "4.57.1", model="qwen3-8b") == []
    (line,) = advice(2, "4.57.1", place="cpu")
    assert "OMP_NUM_THREADS" in line


def test_a_card_has_the_main_memory_of_its_common_cloud_machine() -> None:
    assert set(cloud_machines()) <= set(gpu_table())
    for name, machine in cloud_machines().items():
        assert machine.source
        assert machine.date
        for gpus in (1, 8):
            assert named_hardware(name, gpus).host_memory_bytes == int(machine.gib_per_gpu * gpus * GIB)
    assert named_hardware("rtx3060", 1).host_memory_bytes == 64 * GIB
    assert named_hardware("rtx3060", 16, nodes=2).host_memory_bytes == 256 * GIB  # of one node


@pytest.mark.slow
def test_too_little_main_memory_is_a_condition_and_not_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["plan", "--model", "llama-3.1-8b", "--gpu", "h100", "--seq-len", "2048"]
    small = CliRunner().invoke(app, [*typed, "--host-memory", "64GiB"])
    assert small.exit_code == 3, small.output
    text = " ".join(small.output.split())
    found = re.search(
        r"nothing fits without more main memory: offload needs at least ([\d,]+) GiB a node \(here 64 GiB", text
    )
    assert found, text
    need = int(found[1].replace(",", ""))
    enough = CliRunner().invoke(app, [*typed, "--host-memory", f"{need + 1}GiB"])
    assert enough.exit_code == 0, enough.output
    assert CliRunner().invoke(app, [*typed, "--host-memory", f"{need - 1}GiB"]).exit_code == 3


@pytest.mark.slow
def test_the_nearest_config_is_the_thriftiest_and_its_shortage_adds_up() -> None:
    request = Request(model="llama-3.1-70b", gpus=1, seq_len=65536, host_memory="64GiB")
    (plan,) = plans(request, ["a100-80gb"])
    assert not plan.best
    assert plan.closest is not None
    least = min(way.closest.sure_bytes for way in plan.ways if way.closest)
    closest = json.loads(json.dumps(plan.to_json()))["closest"]
    assert closest["needed_bytes"] == pytest.approx(least, abs=1)
    assert closest["needed_bytes"] - plan.hardware.ceiling_bytes == pytest.approx(closest["short_bytes"], abs=2)
    done = CliRunner().invoke(app, ["plan", "--model", "llama-3.1-70b", "--gpu", "a100-80gb", "--host-memory", "64GiB"])
    assert done.exit_code == 3


@pytest.mark.slow
def test_without_a_batch_a_plausible_one_is_assumed_and_shown(tmp_path: Path) -> None:
    typed = ["plan", "--model", "tiny-llama", "--gpu", "t4", "--gpus", "2", "--seq-len", "2048"]
    text = CliRunner().invoke(app, typed).output
    assert "global batch 128\n262,144 tokens per step (assumed; --global-batch-size)" in text
    free = json.loads(CliRunner().invoke(app, [*typed, "--global-batch-size", "free", "--json"]).output)
    assert (free["global_batch_size"], free["global_batch_assumed"]) == (None, False)
    space = tmp_path / "space.yaml"
    space.write_text("knobs: {zero_stage: [2], train_micro_batch_size_per_gpu: [1], gradient_accumulation_steps: [3]}")
    own = json.loads(CliRunner().invoke(app, [*typed, "--space", str(space), "--json"]).output)
    assert (own["global_batch_size"], own["global_batch_assumed"]) == (None, False)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size 4 splits"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, "expert_parallel.autoep_size 4 splits"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages 2 splits"),
        ({"pipeline": {"stages": "auto"}, "sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 1}}, ""),
    ],
)
def test_a_config_that_splits_the_model_over_ranks_is_refused(
    config: dict[str, object], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config))
    request = Request(model="tiny-llama", gpus=4, ds_config=file)
    if said:
        with pytest.raises(UserError, match=re.escape(f"{file}: {said}")):
            plans(request, ["t4"])
    else:
        assert plans(request, ["t4", "t4"])[0].best


@pytest.mark.slow
def test_a_sequence_that_fits_only_if_gpus_share_it(tmp_path: Path) -> None:
    typed = [
        "plan",
        "--model",
        "llama-3.2-1b",
        "--gpu",
        "rtx4090",
        "--gpus",
        "8",
        "--seq-len",
        "32768",
        "--space",
        "classic",
    ]
    done = CliRunner().invoke(app, typed)
    text = " ".join(done.output.split())
    assert done.exit_code == 3, text
    found = re.search(r"fits if (\d) GPUs share each sequence \(sequence_parallel_size: \1 in --ds-config", text)
    assert found, text
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"sequence_parallel_size": int(found.group(1))}))
    shared = CliRunner().invoke(app, [*typed, "--ds-config", str(file)])
    assert shared.exit_code == 0, shared.output
    assert f"sequences split over {found.group(1)} ranks" in " ".join(shared.output.split())
    run = ["run", "--model", "tiny-llama", "--gpus", "2", "--device", "cpu", "--ds-config", str(file)]
    file.write_text('{"sequence_parallel_size": 2}')
    refused = CliRunner().invoke(app, [*run, "--storage", str(tmp_path / "s.db")])
    assert isinstance(refused.exception, UserError)
    assert "sequence_parallel_size 2: trials of --model give each rank whole sequences" in str(refused.exception)


def test_the_header_names_the_optimizer_of_the_config_and_what_is_not_modelled(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        '{"optimizer": {"type": "Muon"}, "sparse_gradient": true, "activation_checkpointing": {"cpu_checkpointing": true}}'
    )
    done = CliRunner().invoke(app, ["plan", "--model", "tiny-llama", "--gpu", "t4", "--ds-config", str(file)])
    text = " ".join(done.output.split())
    assert "fp16, muon, global batch" in text
    assert "activation_checkpointing.cpu_checkpointing is not modelled: intervals are wider" in text
    assert "DeepSpeed ignores sparse_gradient in your config; did you mean sparse_gradients" in text


@pytest.mark.parametrize("by", ["option", "config"])
def test_muon_needs_a_deepspeed_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    (tmp_path / "ds.json").write_text('{"optimizer": {"type": "Muon"}}')
    own = {"optimizer": "muon"} if by == "option" else {"ds_config": tmp_path / "ds.json"}
    request = Request(model="tiny-llama", **own)  # type: ignore[arg-type]
    assert plans(request, ["h100"])
    monkeypatch.setattr(type(OWN), "origin", lambda self, module: str(tmp_path / "deepspeed" / "__init__.py"))
    with pytest.raises(UserError, match="Muon is not an optimizer of the installed DeepSpeed"):
        plans(request, ["h100"])


@pytest.mark.parametrize(
    ("request_", "names", "said"),
    [
        (Request(model="gemma-2-2b"), ["rtx309"], "rtx3090"),
        (Request(model="gemma-2-2c"), ["rtx3090"], "gemma-2-2b"),
        (Request(model="gemma-2-2b"), [None], "no GPU"),
        (Request(model="gemma-2-2b", gpus=8, nodes=4000), ["rtx3090"], "32000 GPUs, expected at most 4096"),
        (Request(model="gemma-2-2b", tokens="0"), ["rtx3090"], "--tokens 0: expected between"),
        (Request(model="gemma-2-2b", tokens=""), ["rtx3090"], "--tokens : expected a number"),
        (Request(out=Path("ds.json")), ["t4", "l4"], "--out takes the config of one GPU"),
        (Request(model="gemma-2-2b", precision="bf16"), ["v100"], "v100-32gb has no bf16. Use --precision fp16"),
    ],
)
def test_bad_input_is_said_in_one_line(request_: Request, names: list[str | None], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        plans(request_, names)
    assert "\n" not in str(caught.value)


def test_a_variant_that_cannot_be_made_is_left_out_and_said() -> None:
    job, hardware = make_job(precision="fp32"), named_hardware("rtx4090", 2)
    space = parse_space(
        "knobs: {zero_stage: [2], attention: [sdpa, flash_attention_3], train_micro_batch_size_per_gpu: [1]}"
    )
    plan = make_plan(PlanSetup(job=job, hardware=hardware, space=space), traced_predictor(job, hardware))
    assert {one.candidate.get("attention") for one in plan.best} == {"sdpa"}
    assert plan.notes[0].startswith("--attn flash_attention_3 computes in 16 bits")
    assert plan.notes[0].endswith(": left out")


@pytest.mark.slow
def test_gpus_are_counted_in_each_node() -> None:
    one, two = (
        plans(Request(model="llama-3.2-1b", gpus=4, nodes=nodes, seq_len=2048), ["a100"])[0] for nodes in (1, 2)
    )
    assert (one.hardware.count, two.hardware.count, two.hardware.nodes, two.job.ranks) == (4, 8, 2, 8)
    assert one.hardware.host_memory_bytes == two.hardware.host_memory_bytes  # of one node
    assert two.best[0].samples_per_second > one.best[0].samples_per_second


@pytest.mark.slow
def test_the_fewest_gpus_are_exactly_those() -> None:
    (plan,) = plans(Request(model="llama-3.1-8b", gpus=8, seq_len=2048), ["a100"])
    fewest = plan.own.fewest
    assert fewest.prediction.host_bytes == 0
    count = fewest.hardware.count
    assert 1 < count < 8
    batch = fewest.job.global_batch_size
    assert batch is not None
    other = dataclasses.replace(plan.job, global_batch_size=8 * batch)
    assert f"; global batch {batch})" in fewest_gpus(plan.own, other), "it could not be split over so many"
    assert "global batch" not in fewest_gpus(plan.own, fewest.job)
    (exact,) = plans(Request(model="llama-3.1-8b", gpus=count, seq_len=2048), ["a100"])
    (fewer,) = plans(Request(model="llama-3.1-8b", gpus=count - 1, seq_len=2048), ["a100"])
    assert any(not one.host_bytes for one in exact.best)
    assert all(one.host_bytes for one in fewer.best)
    offloading = plan.own.fewest_offloading
    assert offloading.hardware.count < count
    assert offloading.host_bytes <= offloading.hardware.host_memory_bytes


@pytest.mark.slow
def test_beyond_a_machine_gpus_come_in_whole_nodes() -> None:
    (plan,) = plans(Request(model="llama-3.1-8b", gpus=4, seq_len=2048), ["rtx4090"])
    fewest = plan.own.fewest
    assert fewest.hardware.count % 8 == 0 or fewest.hardware.count < 8
    assert fewest.hardware.nodes == max(1, fewest.hardware.count // 8)


@pytest.mark.slow
def test_a_global_batch_leaves_out_counts_that_cannot_share_it() -> None:
    (plan,) = plans(Request(model="llama-3.1-8b", gpus=8, seq_len=2048, global_batch_size=16), ["a100"])
    assert plan.own is not None
    for card in (plan.own, *plan.cards):
        for outlook in (card.fewest, card.fewest_offloading, card.best):
            assert outlook is None or 16 % outlook.hardware.count == 0


@pytest.mark.slow
def test_cards_come_cheapest_first() -> None:
    (plan,) = plans(Request(model="llama-3.2-1b", gpus=2, seq_len=2048, tokens="1B"), ["a100"])
    priced = [card for card in plan.cards if card.best and card.best.usd is not None]
    quick = [card for card in priced if card.best and 3600 * card.best.hours <= LONGEST_SECONDS]
    assert priced[: len(quick)] == quick, "the others come last"
    costs = [card.best.usd for card in quick if card.best and card.best.usd is not None]
    assert costs == sorted(costs)
    assert {card.gpu for card in plan.cards} == set(gpu_table())
    unpriced = [card for card in plan.cards if card.best and card.best.usd is None]
    assert {card.gpu for card in unpriced}.isdisjoint(price_table())
    for card in plan.cards:
        if card.fewest and card.fewest_offloading:
            assert card.fewest_offloading.hardware.count < card.fewest.hardware.count
        for one in filter(None, (card.fewest_offloading, card.best)):
            assert one.host_bytes <= one.hardware.host_memory_bytes, "the same main memory as in a plan of that card"


@pytest.mark.slow
def test_your_own_memory_counts() -> None:
    (plan,) = plans(Request(model="llama-3.2-1b", gpus=2, seq_len=2048, host_memory="1TiB", reserve="59GiB"), ["a100"])
    assert not plan.host_assumed
    assert plan.hardware.host_memory_bytes == 2**40
    assert all(one.peak_bytes <= 21 * 2**30 for one in plan.best)
    mine = next(card for card in plan.cards if card.gpu == "a100-80gb")
    assert mine.best.hardware.capacity_bytes == plan.hardware.capacity_bytes
    assert mine.best.price == plan.price


def test_several_gpus_side_by_side_are_not_told_of_others() -> None:
    both = plans(Request(model="llama-3.2-1b", space="classic"), ["rtx4090", "a100"])
    assert [(bool(one.outlook), one.cards, one.own) for one in both] == [(True, (), None)] * 2


def test_the_command_line_has_it_all(tmp_path: Path) -> None:
    words = "plan --model tiny-llama --gpu t4 --gpus 2 --nodes 2 --tokens 1T --json --out".split()
    done = CliRunner().invoke(app, [*words, str(tmp_path / "new" / "ds.json")])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert json.loads((tmp_path / "new" / "ds.json").read_text()) == data["answer"]["ds_config"]
    assert (data["version"], data["gpus"], data["nodes"], data["answer"]["tokens"]) == (1, 4, 2, 1e12)


@pytest.mark.parametrize(("gpu", "code"), [("t4", 3), ("a100-80gb", 0)])
def test_a_plan_in_which_nothing_fits_exits_with_3(gpu: str, code: int) -> None:
    words = [
        "plan",
        "--model",
        "llama-2-7b",
        "--gpu",
        gpu,
        "--space",
        "classic",
        "--gpus",
        "1",
        "--host-memory",
        "8GiB" if code else "256GiB",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
