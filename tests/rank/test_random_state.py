"""Random state of a rank: default seeds come from the study's seed, and draws of a script's own generators are seen."""

import json
import os
import pickle
import random
import secrets
import string
import tempfile
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch

from autotune.rank.patches import Patches
from autotune.rank.random_state import RandomState

SOURCES: dict[str, Callable[[], object]] = {
    "random.Random()": lambda: random.Random().random(),
    "random.seed()": lambda: (random.seed(), random.random())[1],
    "SystemRandom": lambda: random.SystemRandom().randrange(1 << 40),
    "secrets": lambda: secrets.randbits(64),
    "os.urandom": lambda: os.urandom(8),
    "default_rng()": lambda: numpy.random.default_rng().integers(1 << 40),
    "numpy.random.seed()": lambda: (numpy.random.seed(), numpy.random.randint(1 << 30))[1],
    "RandomState()": lambda: numpy.random.RandomState().randint(1 << 30),
    "torch.seed()": lambda: (torch.seed(), torch.rand(1).item())[1],
    "Generator.seed()": lambda: torch.Generator().seed(),
}


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches()
    yield made
    made.close()


@pytest.mark.parametrize("source", SOURCES)
def test_default_seeds_are_those_of_the_study_and_the_rank(patches: Patches, source: str) -> None:
    def drawn(seed: int, rank: int) -> list[object]:
        state = RandomState(rank)
        state.install(patches)
        state.seed(seed)
        found = [SOURCES[source]() for _ in range(3)]
        patches.close()
        return found

    first = drawn(1, 0)
    assert len({str(one) for one in first}) == 3
    assert drawn(1, 0) == first
    assert drawn(2, 0) != first
    assert drawn(1, 1) != first


@pytest.mark.parametrize(
    "name",
    [
        lambda: uuid.uuid4(),
        lambda: secrets.token_hex(8),
        lambda: secrets.choice(seq=range(1 << 60)),
        lambda: "".join(secrets.choice(string.ascii_letters) for _ in range(16)),  # as Weights & Biases names runs
    ],
)
def test_names_differ_between_trials(patches: Patches, name: Callable[[], object]) -> None:
    state, found = RandomState(), set()
    state.install(patches)
    for _ in range(2):
        state.seed(1)
        found.add(name())
    assert len(found) == 2


def test_generators_keep_their_class(patches: Patches) -> None:
    before = torch.Generator().manual_seed(3)
    RandomState().install(patches)
    made = torch.Generator(device="cpu").manual_seed(3)
    assert isinstance(before, torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    assert torch.equal(torch.randn(4, generator=made), torch.randn(4, generator=before))


def test_draws_of_a_scripts_own_generators_are_seen(patches: Patches) -> None:
    state = RandomState()
    state.install(patches)
    mine, theirs = torch.Generator().manual_seed(1), numpy.random.default_rng(1)
    draws: tuple[Callable[[], object], ...] = (
        lambda: torch.randn(1, generator=mine),
        lambda: theirs.normal(),
        random.random,
        lambda: torch.Generator().seed(),
        numpy.random.default_rng,
    )
    for draw in draws:
        state.mark()
        assert not state.has_drawn()
        torch.randn(1, generator=torch.Generator().manual_seed(7))  # by a row's number, the same in every run
        assert not state.has_drawn()
        draw()
        assert state.has_drawn()


def test_workers_of_a_loader_draw_what_they_drew_before(patches: Patches) -> None:
    class Rows(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, at: int) -> int:
            return random.Random().randrange(1 << 30)

    def rows() -> list[int]:
        state = RandomState()
        state.install(patches)
        state.seed(1)
        found = [int(one) for one in torch.utils.data.DataLoader(Rows(), batch_size=None, num_workers=2)]
        patches.close()
        return found

    first = rows()
    assert len(set(first)) == 8
    assert rows() == first


def test_a_seed_that_a_script_names_is_kept(patches: Patches) -> None:
    RandomState().install(patches)
    for seed in (lambda: random.seed(3), lambda: random.seed(a=3), lambda: random.seed(3, version=2)):
        seed()
        assert random.random() == random.Random(3).random()
    for seed in (lambda: numpy.random.seed(3), lambda: numpy.random.seed(seed=3)):
        seed()
        assert numpy.random.random() == numpy.random.RandomState(3).random()


NAMED: dict[str, Callable[[int], float]] = {
    "torch.manual_seed": lambda seed: (torch.manual_seed(seed), torch.rand(1).item())[1],
    "random.seed": lambda seed: (random.seed(seed), random.random())[1],
    "numpy.random.seed": lambda seed: (numpy.random.seed(seed=seed), numpy.random.random())[1],
    "random.Random": lambda seed: random.Random(seed).random(),
    "default_rng": lambda seed: float(numpy.random.default_rng(seed).random()),
    "Generator": lambda seed: torch.rand(1, generator=torch.Generator().manual_seed(seed)).item(),
}


@pytest.mark.parametrize("way", NAMED)
def test_seeds_of_the_time_are_those_of_the_first_run(patches: Patches, way: str) -> None:
    def drawn(seed: int, known: list[list[Any]]) -> tuple[list[float], RandomState]:
        state = RandomState(0, known)
        state.install(patches)
        state.seed(0)
        found = [NAMED[way](seed + more) for more in range(2)]
        patches.close()
        return found, state

    first, state = drawn(1000, [])
    known = json.loads(json.dumps(state.named))
    assert drawn(2000, [])[0] != first
    assert not drawn(1000, known)[1].repeats
    again, state = drawn(2000, known)
    assert again == first
    assert state.repeats


@pytest.mark.parametrize("module", ["tempfile", "datasets.fingerprint"])
def test_names_of_files_differ_between_trials(patches: Patches, module: str) -> None:
    state, found = RandomState(), set()
    state.install(patches)
    for _ in range(2):
        state.seed(1)
        made: dict[str, object] = {"__name__": module}
        exec("import random; drawn = random.Random().random()", made)
        found.add(made["drawn"])
        found.add(next(tempfile._RandomNameSequence()))  # type: ignore[attr-defined]  # also of semaphores
    assert len(found) == 4


def test_replaced_functions_and_generators_can_be_sent_to_spawned_processes(patches: Patches) -> None:
    RandomState().install(patches)
    for one in (numpy.random.seed, numpy.random.default_rng, random.seed, os.urandom, torch.seed, torch.random.seed):
        assert pickle.loads(pickle.dumps(one)) is one
    made = torch.Generator().manual_seed(3)
    sent = pickle.loads(pickle.dumps(made))
    assert torch.equal(torch.randn(4, generator=sent), torch.randn(4, generator=made))


def test_generators_that_ranks_have_in_common_stay_in_common(patches: Patches) -> None:
    def drawn(rank: int) -> list[float]:
        state = RandomState(rank)
        state.install(patches)
        state.seed(1)
        mine, theirs = torch.Generator().manual_seed(1), numpy.random.default_rng(1)
        random.seed(1)
        numpy.random.seed(1)
        state.reseed(2)
        found = [torch.rand(1, generator=mine).item(), theirs.random(), random.random(), numpy.random.random()]
        patches.close()
        return found

    before = [torch.rand(1, generator=torch.Generator().manual_seed(1)).item(), numpy.random.default_rng(1).random()]
    assert drawn(0) == drawn(1)
    assert not {*drawn(0)} & {*before, random.Random(1).random(), numpy.random.RandomState(1).random()}


def test_seeds_of_rows_are_not_repeated(patches: Patches) -> None:
    def drawn(index: int, known: list[list[Any]]) -> tuple[list[float], list[list[Any]]]:
        state = RandomState(0, known)
        state.install(patches)
        state.seed(0)
        state.note_engine()
        once = random.Random(index).random()
        rows = [random.Random(index + at).random() for at in range(2)]
        state.mark()
        later = random.Random(index).random()
        patches.close()
        return [once, *rows, later], state.named

    first, known = drawn(10, [])
    again, _ = drawn(20, known)
    assert [one == other for one, other in zip(first, again, strict=True)] == [True, False, False, False]


def test_a_seed_that_torch_passes_on_to_devices_is_named_once(patches: Patches) -> None:
    state = RandomState()
    state.install(patches)
    state.note_engine()
    torch.manual_seed(11)
    torch.cuda.manual_seed_all(12)
    assert [seed for _, seed in state.named] == [11, 12]
    state.leave_seeds()
    assert [seed for _, seed in state.named] == [11, 12], "each place names one seed after the engine was made"
