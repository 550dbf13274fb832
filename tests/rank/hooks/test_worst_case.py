import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import PreTrainedTokenizerFast

from autotune.errors import Unusable
from autotune.problem.job import ScriptProfile
from autotune.problem.outcome import Phase
from autotune.rank.hooks import worst_case
from autotune.rank.hooks.deepspeed import _watched
from autotune.rank.hooks.worst_case import pad_to, padded
from autotune.rank.patches import Call

IDS = torch.arange(14).view(2, 7)


def make(**settings: Any) -> Any:
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", **settings)


@pytest.mark.parametrize(("settings", "allowed"), [({"model_max_length": 17}, [17]), ({}, [])])
def test_a_tokenizers_limit_is_noted(context: Callable, settings: dict[str, int], allowed: list[int]) -> None:
    made, _ = context()
    worst_case.install(made)
    assert make(**settings)("a b a")["input_ids"] == [0, 1, 0], "it still works"
    assert made.allowed_tokens == allowed


def test_padding_is_computed_and_not_learnt() -> None:
    batch = {"input_ids": IDS, "labels": IDS, "attention_mask": 0 * IDS, "weight": torch.ones(3), "name": "x"}
    found = pad_to((), batch, 9, "a stream")
    assert {name: found[name][0, 7:].tolist() for name in ("input_ids", "labels", "attention_mask")} == {
        "input_ids": [0, 0],
        "labels": [-100, -100],
        "attention_mask": [1, 1],
    }
    assert (found["input_ids"][:, :7] == IDS).all()
    assert found["weight"] is batch["weight"]
    assert pad_to((), batch, 7, "a stream") == pad_to((), batch, 5, "a stream") == batch, "as long as it is, or longer"


@pytest.mark.parametrize(
    ("args", "kwargs", "longest", "says"),
    [
        ((IDS,), {}, 9, "cannot be padded"),
        ((), {"input_ids": IDS[0]}, 9, "cannot be padded"),
        ((), {"x": IDS}, 9, "cannot be padded"),
        ((), {"input_ids": IDS, "position_ids": IDS}, 9, "cannot be padded"),
        ((), {"input_ids": IDS}, 0, "how long"),
    ],
)
def test_what_cannot_be_padded(args: tuple[Any, ...], kwargs: dict[str, Any], longest: int, says: str) -> None:
    with pytest.raises(Unusable, match=says):
        pad_to(args, kwargs, longest, "a stream")


class Pictures(Dataset[Any]):
    """Samples of several tensors: number 3 has the most pixels in one image, number 5 in all of its images together."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, at: int) -> list[torch.Tensor]:
        self.read += 1
        sides = {3: [9], 5: [7, 7]}.get(at, [at % 3 + 1] * (at % 2))
        return [torch.full((3, side, side), float(at)) for side in sides]


def collate(samples: list[list[torch.Tensor]]) -> dict[str, Any]:
    return {"pixel_values": [image.flatten() for sample in samples for image in sample]}


def numbers(loader: Any) -> list[list[int]]:
    return [sorted({int(image[0]) for image in batch["pixel_values"]}) for batch in loader]


@pytest.mark.parametrize("workers", [0, 1])
def test_every_row_is_the_sample_with_most_pixels_over_all_its_images(context: Callable, workers: int) -> None:
    made, _ = context(worst_case=True)
    worst_case.install(made)
    pictures = Pictures()
    loader = DataLoader(pictures, batch_size=3, collate_fn=collate, num_workers=workers, shuffle=True)
    torch.manual_seed(0)
    assert numbers(loader) == [[5]] * len(loader) == [[5]] * 3
    assert pictures.read == (0 if workers else 8), "the script's own data set was not read to find it"
    ((key, found),) = made.largest.items()
    assert found == {"index": 5, "bytes": 4 * 3 * 2 * 49, "read": 8, "tokens": 0, "samples": 8}
    made.patches.close()
    assert len(numbers(DataLoader(pictures, batch_size=3, collate_fn=collate))) == 3
    trial, _ = context(worst_case=True, profile=ScriptProfile(largest={key: {**found, "index": 3}}))
    worst_case.install(trial)
    assert numbers(loader) == [[3]] * 3, "what the first run found"


class Few(Pictures):
    """As many samples as `Pictures` has, with another largest one."""

    def __getitem__(self, at: int) -> list[torch.Tensor]:
        return [torch.full((3, at + 1, 1), float(at))]


def test_other_data_of_the_same_length_have_their_own_largest_sample(context: Callable) -> None:
    made, _ = context(worst_case=True)
    worst_case.install(made)
    train, evaluation = (DataLoader(data, 4, collate_fn=collate) for data in (Pictures(), Few()))
    assert (numbers(train), numbers(evaluation)) == ([[5]] * 2, [[7]] * 2)
    made.patches.close()
    trial, _ = context(worst_case=True, profile=ScriptProfile(largest=dict(list(made.largest.items())[:1])))
    worst_case.install(trial)
    assert numbers(DataLoader(Few(), 4, collate_fn=collate)) == [[7]] * 2, "the data have changed since the first run"


@pytest.mark.parametrize(("profile", "seen"), [({"micro_batch": 4}, [5]), ({"largest": {}}, [1, 3, 5, 7])])
def test_a_study_without_largest_samples_reads_them_unless_the_first_run_could_not(
    context: Callable, profile: dict[str, Any], seen: list[int]
) -> None:
    made, _ = context(worst_case=True, profile=ScriptProfile.from_json(profile))
    worst_case.install(made)
    found = numbers(DataLoader(Pictures(), 4, collate_fn=collate))
    assert sorted({one for batch in found for one in batch}) == seen


class Stuck(Pictures):
    """Sample 5 takes a lock that this process holds: a forked worker waits for it for ever, or it ends its process."""

    def __init__(self, ends: bool) -> None:
        super().__init__()
        self.ends, self.lock, self.pid = ends, threading.Lock(), os.getpid()

    def __getitem__(self, at: int) -> list[torch.Tensor]:
        if at == 5 and os.getpid() != self.pid:
            if self.ends:
                os._exit(1)
            self.lock.acquire()
        return super().__getitem__(at)


@pytest.mark.few(1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("ends", "why"), [(True, "exited unexpectedly"), (False, "timed out")])
def test_a_worker_that_dies_or_hangs_ends_the_reading(
    context: Callable, monkeypatch: pytest.MonkeyPatch, ends: bool, why: str
) -> None:
    monkeypatch.setattr(worst_case, "_SCAN_SECONDS", 1.0)
    made, _ = context(worst_case=True)
    worst_case.install(made)
    data = Stuck(ends)
    data.lock.acquire()
    numbers(DataLoader(data, 4, collate_fn=collate))
    assert why in made.unread
    assert made.largest == {}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(Pictures()[at] for at in range(8))


class Alike(Pictures):
    def __getitem__(self, at: int) -> list[torch.Tensor]:
        return [torch.full((1, 1, 1), float(at))]


@pytest.mark.parametrize(("data", "seen", "known"), [(Stream(), [1, 3, 5, 7], []), (Alike(), [*range(8)], [8])])
def test_a_stream_and_samples_alike_stay_as_they_are(
    context: Callable, data: Any, seen: list[int], known: list[int]
) -> None:
    made, _ = context(worst_case=True)
    worst_case.install(made)
    found = numbers(DataLoader(data, batch_size=2, collate_fn=collate))
    assert sorted({one for batch in found for one in batch}) == seen
    assert [one["samples"] for one in made.largest.values()] == known
    made.engine = torch.nn.Identity()
    made.engine.module = made.engine
    images = {"pixel_values": torch.ones(2)}
    if known:
        assert worst_case.longest(made, (), images) == images, "the largest is among the script's own"
    else:
        for batch in (images, {"input_ids": IDS, "pixel_values": torch.ones(2, 3)}):
            with pytest.raises(Unusable, match="a stream"):
                worst_case.longest(made, (), batch)


def test_sequences_are_padded_to_the_longest_of_the_data_if_nothing_else_allows_less(context: Callable) -> None:
    made, _ = context(worst_case=True)
    made.engine = torch.nn.Identity()
    made.engine.module, made.engine.config = made.engine, type("", (), {"max_position_embeddings": 4096})
    made.largest = {"64": {"index": 1, "bytes": 9, "read": 64, "tokens": 11}}
    assert worst_case.longest(made, (), {"input_ids": IDS})["input_ids"].shape == (2, 11)
    made.allowed_tokens.append(9)
    assert worst_case.longest(made, (), {"input_ids": IDS})["input_ids"].shape == (2, 9)


@pytest.mark.parametrize(("quiet", "tokens"), [(True, 5), (False, 3)])
def test_rows_that_grow_are_padded_in_measurements_only(context: Callable, quiet: bool, tokens: int) -> None:
    made, _ = context(quiet=quiet, profile=ScriptProfile(pads_to=5))
    made.engine = SimpleNamespace(module=torch.nn.Linear(1, 1))
    ids = torch.ones(2, 3, dtype=torch.long)
    assert _watched(made, Phase.FORWARD, Call(lambda _, ids: ids.shape, (made.engine, ids), {})) == (2, tokens)


def test_forwards_are_padded_to_the_length_to_which_rows_grow() -> None:
    ids = torch.ones(2, 3, dtype=torch.long)
    (padded_ids,), named = padded((ids,), {"labels": ids, "weights": torch.ones(2)}, ids, 5)
    assert padded_ids.tolist() == [[1, 1, 1, 0, 0]] * 2
    assert named["labels"].tolist() == [[1, 1, 1, -100, -100]] * 2
    assert named["weights"].shape == (2,)
