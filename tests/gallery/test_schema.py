"""The form of an entry: what is in it, and what has no place in it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.gallery.schema import Entry, entry_of, read_entry
from tests.conftest import make_candidate
from tests.gallery.studies import changed, small_study


def test_an_entry_is_read_as_it_was_written(tmp_path: Path) -> None:
    entry = entry_of(small_study())
    file = tmp_path / "e.json"
    file.write_text(entry.text())
    assert read_entry(file) == entry
    assert entry.best is not None
    assert entry.best.candidate == make_candidate(2, 8)
    assert len(entry.text().splitlines()) < 20, "a candidate is a line"


BROKEN: list[tuple[str, Callable[[dict[str, Any]], object], str]] = [
    ("no card", lambda e: e["machine"].pop("count"), "machine.count: field required"),
    ("a word", lambda e: e["machine"].update(count="two"), "machine.count: input should be a valid integer"),
    (
        "unknown card",
        lambda e: e["machine"].update(gpu="rtx9999"),
        "machine: gpu: 'rtx9999' is not in autotune's table",
    ),
    ("nodes", lambda e: e["machine"].update(nodes=3), "machine: count: 2 devices cannot be split over 3 nodes"),
    ("a path", lambda e: e["job"].update(model="/home/me/model"), "job.model: string should match pattern"),
    (
        "a host",
        lambda e: e["machine"].update(name="node-17.cluster:8080/x"),
        "machine.name: string should match pattern",
    ),
    ("free text", lambda e: e.update(comment="my notes"), "comment: extra inputs are not permitted"),
    ("deeper", lambda e: e["job"].update(script="train.py"), "job.script: extra inputs are not permitted"),
    ("size", lambda e: e["job"]["shape"].update(secret_width=5), "job.shape: 'secret_width' is no size of a model"),
    ("size's text", lambda e: e["job"]["shape"].update(hidden_size="wide"), "job.shape.hidden_size"),
    ("knob", lambda e: e["candidates"][1]["knobs"].update(magic=1), "candidates[1].knobs: magic: is no knob"),
    (
        "knob's text",
        lambda e: e["candidates"][0]["knobs"].update({"zero_optimization.offload_optimizer.nvme_path": "/data/me"}),
        "candidates[0].knobs: zero_optimization.offload_optimizer.nvme_path: is a text",
    ),
    (
        "share's text",
        lambda e: e["candidates"][0]["knobs"].update(
            {"zero_optimization.offload_optimizer.ratio": "/home/alice/secret"}
        ),
        "candidates[0].knobs: zero_optimization.offload_optimizer.ratio: expected a number from 0 to 1, found",
    ),
    (
        "share",
        lambda e: e["candidates"][0]["knobs"].update({"zero_optimization.offload_optimizer.ratio": 1.5}),
        "ratio: expected a number from 0 to 1, found 1.5",
    ),
    (
        "no stage",
        lambda e: e["candidates"][0]["knobs"].update(zero_stage=4),
        "zero_stage: expected a whole number from 0 to 3, found 4",
    ),
    (
        "huge",
        lambda e: e["candidates"][0]["knobs"].update(train_micro_batch_size_per_gpu=10**400),
        "train_micro_batch_size_per_gpu: expected a whole number of at least 1, found",
    ),
    (
        "share in the space",
        lambda e: e.update(space={"zero_optimization.offload_optimizer.ratio": ["/home/alice"]}),
        "space: zero_optimization.offload_optimizer.ratio: expected a number",
    ),
    (
        "lora twice",
        lambda e: e["job"].update(lora="r=8,targets=acme_proj,targets=q_proj"),
        "job.lora: says a part of itself twice",
    ),
    ("lora's number", lambda e: e["candidates"][0]["knobs"].update(lora=8), "lora: expected none, or r=16"),
    (
        "no heads",
        lambda e: e["job"]["shape"].update(num_attention_heads=0),
        "job.shape: num_attention_heads: expected a whole number from 1 to 1000000000, found 0",
    ),
    ("less than no layers", lambda e: e["job"]["shape"].update(num_hidden_layers=-2), "num_hidden_layers: expected"),
    ("layers without end", lambda e: e["job"]["shape"].update(first_k_dense_replace=10**9), "from 0 to 10000"),
    ("half a size", lambda e: e["job"]["shape"].update(hidden_size=895.5), "hidden_size: expected a whole number"),
    ("a size that is a switch", lambda e: e["job"]["shape"].update(hidden_size=True), "hidden_size: expected a whole"),
    ("tower", lambda e: e["job"].update(vision={"patch_size": 0}), "job.vision: patch_size: expected a whole number"),
    (
        "stage",
        lambda e: e["candidates"][0]["knobs"].update(zero_stage="three"),
        "candidates[0].knobs: zero_stage: expected a whole number",
    ),
    (
        "lora",
        lambda e: e["job"].update(lora="r=8,targets=acme_proj"),
        "job.lora: names layers of no public architecture: acme_proj",
    ),
    ("unread", lambda e: e["candidates"][0]["knobs"].update(zero_stage=0), "is not read beside the others"),
    (
        "half a row",
        lambda e: e["candidates"][0]["knobs"].update(train_micro_batch_size_per_gpu=1.5),
        "expected a whole number",
    ),
    ("nan", lambda e: e["machine"].update(headroom=float("nan")), "machine.headroom: input should be a finite number"),
    (
        "below 0",
        lambda e: e["candidates"][0].update(step_seconds=-1.0),
        "candidates[0].step_seconds: input should be greater than 0",
    ),
    (
        "no speed",
        lambda e: e["candidates"][0].pop("step_seconds"),
        "candidates[0]: step_seconds: expected of what is ok",
    ),
    (
        "interrupted",
        lambda e: e["candidates"][0].update(outcome="interrupted"),
        "candidates[0].outcome: expected one of",
    ),
    ("winner", lambda e: e.update(winner=77), "winner: 77 is no place among"),
    ("failed winner", lambda e: e.update(winner=2), "winner: candidate 2 is not ok"),
    (
        "version",
        lambda e: e["versions"].update(torch="2.5.0+acme.internal"),
        "versions.torch: string should match pattern",
    ),
    ("source", lambda e: e["origin"].update(source="example.org/x"), "origin.source: string should match pattern"),
    ("nowhere", lambda e: e["origin"].update(kind="published"), "origin: source: expected where it is published"),
    ("format", lambda e: e.update(format=2), "format: input should be 1"),
    ("nothing", lambda e: e.update(candidates=[]), "candidates: list should have at least 1 item"),
]


@pytest.mark.parametrize(("change", "said"), [one[1:] for one in BROKEN], ids=[one[0] for one in BROKEN])
def test_what_breaks_the_schema_is_named_with_its_field(
    change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "e.json"
    file.write_text(changed(change))
    with pytest.raises(UserError) as caught:
        read_entry(file)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "the entry: "),
        ('{"format": 1}', "origin: field required"),
        ("[" * 5000, "e.json"),
        ('{"x": "' + "y" * 500_000 + '"}', "has at most"),
        ("\x00\xff", "not JSON"),
    ],
)
def test_what_is_no_entry_at_all_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"e\.json") as caught:
        read_entry(file)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    with pytest.raises(UserError, match="no gallery entry"):
        read_entry(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot be read"):
        read_entry(tmp_path)


def test_the_schema_says_what_the_models_check() -> None:
    schema = Entry.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(schema["required"]) == {"origin", "machine", "job", "candidates"}
    assert json.loads(changed(lambda entry: None)).keys() <= schema["properties"].keys()
