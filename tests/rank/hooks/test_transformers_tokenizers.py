from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from autotune.rank.hooks import transformers


def make(**settings: Any) -> Any:
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", **settings)


@pytest.mark.parametrize(("settings", "allowed"), [({"model_max_length": 17}, [17]), ({}, [])])
def test_a_tokenizers_limit_is_noted(context: Callable, settings: dict[str, int], allowed: list[int]) -> None:
    made, _ = context()
    transformers.install_tokenizers(made)
    assert make(**settings)("a b a")["input_ids"] == [0, 1, 0], "it still works"
    assert made.allowed_tokens == allowed


def test_undone_nothing_is_noted(context: Callable) -> None:
    made, _ = context()
    transformers.install_tokenizers(made)
    made.patches.undo()
    make(model_max_length=17)
    assert made.allowed_tokens == []
