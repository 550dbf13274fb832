"""Tasks and images on the command line: what is refused, and a study of an encoder from the first trial to its files."""

import pytest

from autotune.commands.request import Request
from autotune.commands.setup import plan_setups
from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.results.export import training_changes
from tests.conftest import make_job


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"model": "tiny-bert", "task": "seq2seq"},
            "--task seq2seq: transformers has no such head for tiny-bert (bert); it has causal-lm, ",
        ),
        ({"model": "tiny-bert", "task": "x"}, "--task x: expected one of causal-lm, "),
        ({"model": "qwen2.5-vl-7b"}, "the configuration of qwen2.5-vl-7b names no image size: give --image-size"),
        (
            {"model": "tiny-llava", "image_size": 224},
            "--image-size 224: tiny-llava has a fixed image size of 56 pixels",
        ),
        (
            {"model": "tiny-llama", "image_size": 224},
            "--image-size 224: tiny-llama has no image input with --task causal-lm",
        ),
        ({"model": "roberta-base", "seq_len": "514"}, "--seq-len 514: roberta-base takes at most 512 tokens"),
        ({"workload": "json:loads", "task": "causal-lm"}, "--task cannot be combined with --workload"),
    ],
)
def test_what_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan_setups(Request(**asked), ["a100-80gb"])  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


def test_what_the_training_must_do() -> None:
    candidate = Candidate.of({"zero_stage": 0})
    assert any(
        "head for seq2seq" in line
        for line in training_changes(candidate, make_job(model="tiny-t5", task="seq2seq"), {})
    )
    assert not any("head for" in line for line in training_changes(candidate, make_job(), {}))
