"""Values changed in the texts of files, and all else left as it is."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.script.argument_writer import edited, parsed

TEXT = """\
# the model
model: tiny   # a comment
learning_rate: 1e-5
on_start: yes
micro_batch_size: 2  # of a rank
nested:
  # inside
  batch: 4
  list:
  - a
  - b

tail: |
  as it is
last: 1
# end
"""


def test_only_the_value_changes() -> None:
    found = edited(TEXT, {("micro_batch_size",): 8, ("nested", "batch"): 16})
    assert found == TEXT.replace("micro_batch_size: 2 ", "micro_batch_size: 8 ").replace("batch: 4", "batch: 16")


def test_what_is_new_comes_last() -> None:
    found = edited(TEXT, {("deepspeed",): "/runs/best.json", ("nested", "more"): True})
    expected = TEXT.replace("  - b\n\n", "  - b\n\n  more: true\n") + "deepspeed: /runs/best.json\n"
    assert found == expected


def test_what_is_none_goes() -> None:
    found = edited(TEXT, {("micro_batch_size",): None, ("nested", "list"): None, ("nothing",): None})
    assert found == TEXT.replace("micro_batch_size: 2  # of a rank\n", "").replace("  list:\n  - a\n  - b\n\n", "")


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        ("a:\n", {("a",): 1}, "a: 1\n"),
        ("a: {x: 1, y: 2}\n", {("a", "y"): 3, ("a", "z"): "s"}, "a: {x: 1, y: 3, z: s}\n"),
        ("a: {}\n", {("a", "z"): 1}, "a:\n  z: 1\n"),
        ("a: 'x'\n", {("a",): "yes"}, 'a: "yes"\n'),
        ("a: 1\n", {("a",): "b: c"}, 'a: "b: c"\n'),
        ("a: 1\n", {("a",): {"b": [1, True]}}, "a:\n  b:\n  - 1\n  - true\n"),
        ("deepspeed:\n  zero: 2\n  x: 1\n# c\nb: 1\n", {("deepspeed",): "f.json"}, "deepspeed: f.json\nb: 1\n"),
        ("a: 1\nx:\n  y: |\n    text\n", {("x", "y"): 1, ("b",): 2}, "a: 1\nx:\n  y: 1\nb: 2\n"),
        ("a: 1\n", {("new", "below"): 1}, "a: 1\nnew:\n  below: 1\n"),
        ("", {("a",): 1}, "a: 1\n"),
        ("a: 1  # c\na: 2\n", {("b",): 1}, "a: 2\nb: 1\n"),  # a key that is there twice: written anew
        ("a:\n    b: 1  # c\nc: 'x'\n", {("a", "b"): 2}, "a:\n    b: 2  # c\nc: 'x'\n"),
        ("a:\n    - x\nb:\n    c: yes\n", {("a",): 2}, "a: 2\nb:\n    c: yes\n"),
        ("base: &b {m: 1}\nx:\n  <<: *b\n", {("x", "m"): 2}, None),
        ("a: &v 1\nb: *v\n", {("b",): 2}, None),
        ("- 1\n", {("a",): 1}, None),
    ],
)
def test_whatever_the_text_is_written_like(text: str, changes: dict, expected: str | None) -> None:
    found = edited(text, changes)
    if expected is not None:
        assert found == expected
    data = yaml.safe_load(found)
    for place, value in changes.items():
        below = data
        for key in place:
            below = below[key]
        assert below == value


@pytest.mark.parametrize("text", ['{\n  "a": 1,\n  "b": {"c": "x"}\n}\n', '{"a": 1, "b": {"c": "x"}}'])
def test_json_stays_json(text: str) -> None:
    found = edited(text, {("a",): 2, ("b", "c"): "y", ("d",): "z"}, is_json=True)
    assert found == '{\n  "a": 2,\n  "b": {\n    "c": "y"\n  },\n  "d": "z"\n}\n'
    assert json.loads(edited(found, {("a",): None, ("d",): None}, is_json=True)) == {"b": {"c": "y"}}


SCALARS = st.one_of(st.booleans(), st.integers(-9, 9), st.text("ab: #'\"-\n{}[],&*!|>%@`yes", max_size=8))


@given(
    st.dictionaries(st.text("abc_", min_size=1, max_size=3), SCALARS | st.lists(SCALARS, max_size=2), max_size=4),
    st.text("abcd_", min_size=1, max_size=3),
    SCALARS,
    st.booleans(),
)
def test_any_value_in_any_file(data: dict, key: str, value: object, is_json: bool) -> None:
    text = json.dumps(data, indent=2) if is_json else yaml.safe_dump(data, sort_keys=False)
    found = edited(text, {(key,): value}, is_json=is_json)
    assert (json.loads(found) if is_json else yaml.safe_load(found)) == {**data, key: value}


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("a: 1\nb: [1\nc: 2\n", "x.yaml", "x.yaml:3: not YAML (expected ',' or ']', but got ':')"),
        ("a: 1\n\tb: 2\n", "x.yml", "x.yml:2: not YAML (found character '\\t' that cannot start any token)"),
    ],
)
def test_what_does_not_parse(text: str, name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parsed(text, name)
    assert str(caught.value) == message


def test_tags_of_others_are_data() -> None:
    assert parsed("a: !mine {b: 1}\nc: !env HOME\nd: !x [1]\n", "x.yaml") == {"a": {"b": 1}, "c": "HOME", "d": [1]}
