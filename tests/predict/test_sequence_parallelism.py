"""Ranks that share sequences (DeepSpeed's Ulysses), in memory, time and batch."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from autotune.commands.setup import kept_batch
from autotune.errors import UserError
from autotune.predict.features import columns_of
from autotune.predict.step_time import step_work
from autotune.predict.trace import trace_job
from autotune.predict.zero_memory import estimate_memory
from autotune.problem.candidate import samples
from autotune.problem.ds_config import global_batch_of
from autotune.problem.job import SEQUENCE_RANKS, Job
from autotune.problem.models import AttentionHeads, attention_heads
from tests.conftest import make_candidate, make_job
from tests.predict.passes import peaks_of

BYTES, SEQ_LEN = 2, 2048


def job(size: int = 1, ranks: int = 8, **also: Any) -> Job:
    """llama-3.2-1b: 16 layers, 32 heads of 64, 8 of keys."""
    also = {"model": "llama-3.2-1b", "precision": "bf16", "seq_len": SEQ_LEN, **also}
    return make_job(ranks, base_config={SEQUENCE_RANKS: size} if size > 1 else {}, **also)


def test_a_rank_computes_its_part_of_each_sequence() -> None:
    """Four sequences that four ranks share are one for each, and what they exchange."""
    trace = trace_job(job())
    shared, whole = job(4), dataclasses.replace(job(), base_config={"communication_data_type": "fp32"})
    for checkpointing in (False, True):
        columns = [
            columns_of([make_candidate(3, batch, activation_checkpointing=checkpointing)], one)
            for one, batch in ((shared, 4), (whole, 1))
        ]
        ours, theirs = (estimate_memory(one, trace, c, "cuda") for one, c in zip((shared, whole), columns, strict=True))
        exchanged = BYTES * SEQ_LEN * 2 * 64 * (32 + 8)
        np.testing.assert_allclose(peaks_of(ours).max(axis=0) - peaks_of(theirs).max(axis=0), exchanged)
        mine, plain = (step_work(one, trace, c, "cuda") for one, c in zip((shared, whole), columns, strict=True))
        assert mine.products == pytest.approx(plain.products)
        assert (mine.gathered, mine.reduced) == (plain.gathered, plain.reduced)


def test_repeated_keys_and_values_are_kept_in_each_layer() -> None:
    heads = attention_heads(job().model.config)
    assert heads == AttentionHeads(16, 32, 8, 64)
    assert (heads.exchanged(8), heads.exchanged(16)) == (2 * 64 * (32 + 8), 2 * 64 * (32 + 16))
    trace, one = trace_job(job()), make_candidate(3, 16)
    peaks = [
        estimate_memory(of, trace, columns_of([one], of), "cuda").terms["activations"].max()
        for of in (job(8, 16), job(16, 16))
    ]
    # as many tokens on each of 16 ranks, but for the keys: 8 heads more in 16 layers, and in the exchange
    rows = BYTES * SEQ_LEN
    of_eight = peaks[0] - 2 * rows * heads.exchanged(8)
    of_sixteen = peaks[1] - rows * (heads.exchanged(16) + 16 * 2 * 64 * 8)
    assert of_eight == pytest.approx(2 * of_sixteen, rel=0.01)


def test_a_group_counts_as_one_in_the_global_batch() -> None:
    shared, one = job(4, global_batch_size=6), make_candidate(3, 3)
    assert (shared.data_ranks, samples(shared, one)) == (2, 6)
    assert one.ds_config(shared)["train_batch_size"] == 6
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2, SEQUENCE_RANKS: 4}
    assert global_batch_of(config, 8) == (12, "micro-batch 3 x accumulation 2 x 2 groups of 4 ranks")
    assert global_batch_of(config, 4) == (6, "micro-batch 3 x accumulation 2 x 1 group of 4 ranks")
    with pytest.raises(UserError, match="train_batch_size 9 cannot be split evenly over 2 groups of 4 ranks"):
        kept_batch(None, {"train_batch_size": 9, SEQUENCE_RANKS: 4}, 8, None)
    with pytest.raises(UserError, match="cannot be split evenly over 2 groups of 4 ranks: try 6 or 8"):
        job(4, global_batch_size=7)


@pytest.mark.parametrize("value", ["8", 8.0, 0, -2, True, None, "auto"])
def test_a_size_that_is_no_number_of_ranks_is_refused(value: object) -> None:
    """Regression: the plan ignored it, and printed figures of whole sequences."""
    with pytest.raises(UserError, match=f"sequence_parallel_size {value!r}: expected a whole number of ranks"):
        dataclasses.replace(job(), base_config={SEQUENCE_RANKS: value})


@pytest.mark.parametrize(
    ("size", "also", "said"),
    [
        (3, {}, "sequence_parallel_size 3: does not divide the 8 ranks"),
        (8, {"ranks": 8, "seq_len": 2044}, "does not divide the 2044 tokens"),
        (64, {"ranks": 64}, "32 attention heads and 8 of keys, which 64 ranks cannot share"),
        (4, {"attention": "eager"}, "does not run with --attn eager"),
        (2, {"model": "gpt2"}, "causal models with attention in each layer"),
    ],
)
def test_sequences_that_cannot_be_split_are_refused(size: int, also: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        job(size, **also)
