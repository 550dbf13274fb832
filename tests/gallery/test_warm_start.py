"""Which entry is near, and what of it a study can begin with."""

import pytest

from autotune.gallery.schema import Entry, entry_of
from autotune.gallery.warm_start import distance, nearest, start_from
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, named_hardware
from autotune.problem.job import parse_lora
from tests.conftest import make_candidate
from tests.gallery.studies import entry_with, job_of, small_study

HERE = named_hardware("rtx4090", 2)


@pytest.fixture(scope="module")
def entry() -> Entry:
    return entry_of(small_study())


def test_the_same_job_on_the_same_machine_is_nearest(entry: Entry) -> None:
    same = distance(entry, job_of(), HERE)
    assert same == pytest.approx(0.0, abs=0.01)
    farther = [
        distance(entry, job_of(seq_len=2048), HERE),
        distance(entry, job_of("qwen2.5-1.5b"), HERE),
        distance(entry, job_of(ranks=4), named_hardware("rtx4090", 4)),
        distance(entry, job_of(), named_hardware("rtx3090", 2)),
        distance(entry, job_of(lora=parse_lora("r=8")), HERE),
        distance(entry, job_of(precision="fp32"), HERE),
    ]
    assert all(away > 0.3 for away in farther)
    assert distance(entry, job_of("qwen2.5-7b"), HERE) > distance(entry, job_of("qwen2.5-1.5b"), HERE)


def test_what_is_far_is_left_alone(entry: Entry) -> None:
    entries = {"e": entry}
    assert [name for _, name in nearest(entries, job_of(), HERE)] == ["e"]
    assert nearest(entries, job_of("qwen2.5-7b"), HERE) == []
    assert nearest(entries, job_of(lora=parse_lora("r=8")), HERE) == []
    cpu = Hardware("cpu", "CPU rank", 2, HERE.memory_bytes, None, HERE.host_memory_bytes)
    assert nearest(entries, job_of(), cpu) == []
    assert nearest({"e": entry.model_copy(update={"winner": None})}, job_of(), HERE) == []


def test_the_nearest_comes_first() -> None:
    longer = entry_with(seq_len=1500, tokens_per_sample=1500.0)
    entries = {"a": longer, "b": entry_with()}
    assert [name for _, name in nearest(entries, job_of(), HERE)] == ["b", "a"]


def test_a_start_is_the_winner_as_the_space_has_it(entry: Entry) -> None:
    wanted = make_candidate(2, 8)
    like = wanted.but(train_micro_batch_size_per_gpu=4, reduce_bucket_size=50_000_000)
    others = [make_candidate(stage, size) for stage in (0, 1, 3) for size in (4, 8)]
    start = start_from({"e": entry}, job_of(), HERE, [*others, like, wanted])
    assert start is not None
    assert (start.candidate, start.entry) == (wanted, "e")
    assert "the best known for qwen2.5-0.5b on 2 x rtx4090" in start.why
    start = start_from({"e": entry}, job_of(), HERE, [*others, like])
    assert start is not None
    assert start.candidate == like
    assert start_from({"e": entry}, job_of(), HERE, others) is None, "none is of its stage"
    assert start_from({"e": entry}, job_of(), HERE, [wanted.but(train_micro_batch_size_per_gpu=64)]) is None
    assert start_from({"e": entry}, job_of(), HERE, []) is None
    only_batch = Candidate.of({"train_micro_batch_size_per_gpu": 8})
    assert start_from({"e": entry}, job_of(), HERE, [only_batch]) is not None, "a script's other settings are its own"
