"""What ranks train without a script: adapters, lengths of a data set, functions of the user's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import set_z3_leaf_modules

from autotune.executors.base import MeasureSpec
from autotune.predict.trace import trace_job
from autotune.predict.tracer import trace_model
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job, Lora
from autotune.problem.models import workload_spec
from autotune.problem.outcome import Outcome
from autotune.rank import model_builder, versions
from autotune.rank.model_builder import draw_weights, fill_weights, task_model, transformers_config
from autotune.rank.workload import loss_of, own_workload, synthetic_batches
from autotune.util.units import MIB
from tests.conftest import SCRIPTS, Bench, make_candidate, make_job
from tests.predict.passes import act_bytes_per_sequence

MEASURE_SPEC = MeasureSpec(min_seconds=0.0, min_steps=2, max_steps=2)


def measure(bench: Bench, job: Job, *candidates: Candidate) -> list[Outcome]:
    """On the shared fork server, which any job can use."""
    bench.executor.job = job
    return [bench.run(one, measure_spec=MEASURE_SPEC) for one in candidates]


@pytest.mark.slow
def test_adapters_and_packing_are_knobs(bench: Bench) -> None:
    job = make_job(seq_len=64, lengths=((8, 90), (64, 10)), lora=Lora(2))
    outcomes = measure(
        bench, job, make_candidate(2, 2, 1, packing=True), make_candidate(0, 2, 1, lora="none"), make_candidate(0, 2, 1)
    )
    packed, whole, plain = (outcome.measurement for outcome in outcomes)
    assert packed is not None
    assert whole is not None
    assert plain is not None
    assert packed.tokens_per_second * packed.step_seconds == pytest.approx(2 * 2 * 64), "no padding"
    assert packed.samples_per_second * packed.step_seconds == pytest.approx(2 * 2 * 64 / 13.6)
    assert plain.samples_per_second * plain.step_seconds == pytest.approx(2 * 2)
    assert whole.peak_bytes > plain.peak_bytes + 5 * MIB, "all weights train: their gradients and states are 10 MiB"


@pytest.mark.parametrize("older", [False, True], ids=["by position ids", "by a mask"])
def test_packed_sequences_do_not_see_each_other(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if older:  # transformers before 4.53; newer ones take such a mask, too
        monkeypatch.setattr(versions, "masks_module", lambda: None)
    job = make_job(seq_len=64, lengths=((8, 1), (24, 1)), packed=True)
    batch = next(synthetic_batches(job, 3, torch.device("cpu"), 0))
    starts = batch["position_ids"] == 0
    assert starts[:, 0].all()
    assert (batch["labels"] == torch.where(starts, -100, batch["input_ids"])).all()
    assert ("attention_mask" in batch) == (versions.masks_module() is None)
    steps = batch["position_ids"].diff()
    assert ((steps == 1) | starts[:, 1:]).all()
    lengths = starts[0].nonzero().flatten().diff().tolist()
    assert set(lengths) <= {8, 24}
    model = task_model(transformers_config(job.model), job).eval()
    fill_weights(model, torch.device("cpu"))
    model.config.use_cache = False
    with torch.no_grad():
        together = model(**{name: value[:1] for name, value in batch.items() if name != "labels"}).logits[0]
        first = lengths[0]
        alone = model(input_ids=batch["input_ids"][:1, first : first + lengths[1]]).logits[0]
    torch.testing.assert_close(together[first : first + lengths[1]], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_weights_do_not_depend_on_their_partition(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_builder, "_MOST_DRAWN", 16)
    elements, cpu = 100, torch.device("cpu")
    whole = torch.zeros(elements)
    draw_weights(whole, 1, 0, elements, cpu)
    assert len(whole.unique()) == elements
    other = torch.zeros(elements)
    draw_weights(other, 2, 0, elements, cpu)
    assert not torch.isclose(whole, other).any()
    size = -(-elements // ranks)
    parts = [torch.zeros(size) for _ in range(ranks)]
    for rank, part in enumerate(parts):
        draw_weights(part, 1, rank * size, elements, cpu)
    joined = torch.cat(parts)
    assert torch.equal(joined[:elements], whole)
    assert not joined[elements:].any(), "padding"


def test_what_tells_packed_sequences_apart_before_4_53(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "masks_module", lambda: None)
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert versions.packed_mask(positions, "flash_attention_2", torch.bfloat16) is None
    numbers = versions.packed_mask(positions, "flex_attention", torch.bfloat16)
    assert numbers.tolist() == [[1, 1, 1, 2, 2]]
    mask = versions.packed_mask(positions, "eager", torch.bfloat16)
    assert (mask.shape, mask.dtype) == ((1, 1, 5, 5), torch.bfloat16)
    assert (mask[0, 0] == 0).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


@pytest.mark.slow
def test_attention_is_traced_as_it_is() -> None:
    eager, fused = (trace_model(make_job(seq_len=256, attention=name)) for name in ("eager", "sdpa"))
    assert act_bytes_per_sequence(eager.plain) > 1.15 * act_bytes_per_sequence(fused.plain)


def test_batches_of_a_data_sets_lengths() -> None:
    job = make_job(seq_len=64, lengths=((8, 90), (16, 9), (64, 1)))
    made = synthetic_batches(job, 2, torch.device("cpu"), 0)
    widths = [next(made)["input_ids"].shape[1] for _ in range(40)]
    assert widths[:2] == [64, 64], "the longest first"
    assert set(widths[2:]) <= {8, 16, 64}
    assert sorted(widths)[20] < 64


@pytest.mark.parametrize("more", [{}, {"global_batch_size": 16}, {"task": "masked-lm", "model": "tiny-bert"}])
def test_rows_are_the_same_for_every_micro_batch(more: dict[str, Any]) -> None:
    job = make_job(2, seq_len=16, **more)

    def first_rows(micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        batches = [
            next(made) for made in [synthetic_batches(job, micro_batch, torch.device("cpu"), 0)] for _ in range(80)
        ]
        ids, labels = (torch.cat([one[name] for one in batches])[:80] for name in ("input_ids", "labels"))
        return ids, labels

    of_one, of_eight = first_rows(1), first_rows(8)
    assert all(map(torch.equal, of_one, of_eight))
    assert len(of_one[0].unique(dim=0)) > 8, "steps have rows of their own"


def test_lengths_are_trained(bench: Bench) -> None:
    job = make_job(seq_len=64, lengths=((8, 90), (64, 1)))
    (outcome,) = measure(bench, job, make_candidate(1, 2, 1))
    assert outcome.ok
    assert outcome.measurement.tokens_per_second < 0.2 * 64 * outcome.measurement.samples_per_second


@pytest.mark.slow
@pytest.mark.usefixtures("tracer_process")
def test_a_workload_of_ones_own(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its trace nor its trials change a file."""
    keep, text = tmp_path / "keep.txt", (SCRIPTS / "own.py").read_text()
    keep.write_text("keep")
    (tmp_path / "own.py").write_text(f"{text}\nopen({str(keep)!r}, 'w').write('changed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    job = Job(workload_spec("own:build"), 2, 32, "fp32", workload="own:build")
    trace = trace_job(job)
    assert trace.exact
    assert sum(trace.parameters) == 32 * 256 + 256 + 256 + 1
    assert trace.checkpointed is None
    for outcome in measure(bench, job, make_candidate(1, 8, 2), make_candidate(3, 8, 2)):
        assert outcome.ok, outcome
    assert keep.read_text() == "keep"
    with pytest.raises(ValueError, match="expected it to return"):
        own_workload("own:wrong")


def test_where_a_loss_is() -> None:
    loss = torch.ones(())
    assert loss_of({"loss": loss}) is loss_of((loss, 2)) is loss_of(loss) is loss


def test_blocks_with_a_module_per_expert_are_leaf_modules_of_stage_3() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = (
                torch.nn.Linear(2, 2),
                torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2)),
            )

    class Joined(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Linear(2, 4)

    model = torch.nn.Sequential(Block(), Joined(), Block())
    assert model_builder.expert_blocks(model) == [Block]
    leaves = set_z3_leaf_modules(model, model_builder.expert_blocks(model))
    assert leaves == [model[0], model[2]]
    assert model_builder.expert_blocks(torch.nn.Sequential(Joined())) == []
