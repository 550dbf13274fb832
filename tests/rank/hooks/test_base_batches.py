from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.rank.hooks.base import batch_of, sizes_of

MICRO, STEPS, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({MICRO: 2, STEPS: 3}, (2, 3)),
        ({MICRO: 2}, (2, 1)),
        ({TOTAL: 32, MICRO: 2}, (2, 4)),
        ({TOTAL: 32, STEPS: 4}, (2, 4)),
        ({TOTAL: 32}, (8, 1)),
        ({STEPS: 4}, None),
        ({MICRO: "auto", STEPS: 4, TOTAL: "auto"}, None),
        ({MICRO: 0, TOTAL: 8}, (2, 1)),
    ],
)
def test_the_batch_of_a_config_on_four_ranks(config: dict[str, Any], found: tuple[int, int] | None) -> None:
    assert batch_of(config, 4) == found


IDS = torch.ones(3, 7, dtype=torch.long)


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        ((), {"input_ids": IDS, "labels": IDS}, (3, 3, 21)),
        ((IDS,), {}, (3, 3, 21)),
        ((), {"x": torch.ones(4, 16)}, (4, 4, 4)),  # of an image or a vector a row is a token
        (({"input_ids": IDS},), {"other": torch.ones(9)}, (3, 3, 21)),
        ((), {"mask": torch.ones(9, 1), "input_ids": IDS}, (3, 3, 21)),
        ((SimpleNamespace(name="a batch", ids=IDS),), {}, (3, 3, 21)),
        ((UserDict(input_ids=IDS),), {}, (3, 3, 21)),
        (([IDS, IDS[:1]],), {}, (3, 3, 21)),  # inputs and something else
        (([IDS[0], IDS[0, :2], IDS[0, :4]],), {}, (3, 3, 13)),  # sequences of unlike lengths
        (([torch.ones(3, 5, 6), torch.ones(3, 7, 4)], [{"boxes": torch.ones(9, 4)}]), {}, (2, 2, 2)),  # images
        (([torch.ones(5, 16), torch.ones(9, 16)],), {}, (2, 2, 2)),  # features of unlike lengths
        (([torch.ones(5, 16), torch.ones(5, 8)],), {}, (5, 5, 5)),  # parts of a batch
        ((1, "text"), {}, (0, 0, 0)),
        # three sequences, packed
        ((), {"input_ids": IDS[:1], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 1]])}, (1, 3, 7)),
        ((), {"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 3, 5, 7])}, (1, 3, 7)),
        ((IDS[:1],), {"cu_seqlens": torch.tensor([0, 3, 5, 7, 7])}, (1, 3, 7)),  # padded with their last
        ((IDS[0],), {"cu_seqlens": torch.tensor([0, 3, 7])}, (1, 2, 7)),  # tokens without a row
        ((), {"input_ids": IDS, "position_ids": torch.arange(7).expand(3, 7)}, (3, 3, 21)),
        (
            (),
            {"input_ids": IDS, "position_ids": torch.arange(7).expand(3, 3, 7)},
            (3, 3, 21),
        ),  # of a picture: three axes
    ],
)
def test_what_a_forward_is_given(args: tuple[Any, ...], kwargs: dict[str, Any], found: tuple[int, int, int]) -> None:
    sizes = sizes_of(args, kwargs)
    assert (sizes.rows, sizes.sequences, sizes.tokens) == found


def test_a_batch_that_is_like_an_earlier_one_is_counted_anew_where_values_count() -> None:
    ids = torch.zeros(1, 6, dtype=torch.long)
    one, three = torch.arange(6)[None], torch.tensor([[0, 1, 0, 1, 0, 1]])
    for _ in range(2):
        assert [sizes_of((), {"input_ids": ids, "position_ids": at}).sequences for at in (one, three)] == [1, 3]
        borders = [torch.tensor([0, 6, 6]), torch.tensor([0, 3, 6])]
        assert [sizes_of((), {"input_ids": ids, "cu_seqlens": at}).sequences for at in borders] == [1, 2]
        assert [sizes_of((), {"x": torch.zeros(n, 2), "y": None}).rows for n in (2, 3)] == [2, 3]
        assert [sizes_of((), {"x": torch.zeros(2, 3), "y": torch.zeros(4)}, by).rows for by in ("", "y")] == [2, 4]
        assert [sizes_of((), {"x": torch.zeros(2, 3, dtype=kind)}).tokens for kind in (torch.int, torch.float)] == [
            6,
            2,
        ]


def test_rows_of_all_that_a_forward_is_given() -> None:
    graphs = SimpleNamespace(_store=UserDict(x=torch.ones(9, 4), ptr=torch.tensor([0, 4, 9])))
    given = {"input_ids": IDS, "images": torch.ones(2, 3, 8, 8), "masks": [torch.ones(5, 2), torch.ones(4, 2)]}
    sizes = sizes_of((IDS[:1], IDS[:2]), {**given, "data": graphs})
    assert sizes.rows_by_name == {
        "": 1,
        "#2": 2,
        "input_ids": 3,
        "images": 2,
        "masks": 2,  # a list of samples
        "x": 9,
        "ptr": 2,  # borders of two graphs
    }
    assert (sizes.rows, sizes.tokens) == (3, 21)
    by_image = sizes_of((), given, "images")
    assert (by_image.rows, by_image.sequences, by_image.tokens) == (2, 2, 21)
    assert sizes_of((IDS,), {}, "images").rows == 0, "never taken for another"


@pytest.mark.parametrize(
    ("kwargs", "packed"),
    [
        ({"input_ids": IDS[:1], "position_ids": torch.tensor([[0, 1, 0, 1, 2, 0, 1]])}, True),
        ({"input_ids": IDS[:1], "cu_seqlens": torch.tensor([0, 4, 7])}, True),
        ({"input_ids": IDS, "position_ids": torch.zeros(3, 7)}, False),
        ({"input_ids": IDS[:1]}, False),
    ],
)
def test_one_row_whose_sequences_are_told_apart_is_packed(kwargs: dict[str, Any], packed: bool) -> None:
    assert sizes_of((), kwargs).packed is packed
