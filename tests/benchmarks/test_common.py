import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.common import RESULTS, WIDTH, command_line, kept_rows, parse, print_table, write_json

BORDERS = re.compile("[─-╿]")


def printed(rows: list[dict[str, object]], keys: int = 1) -> str:
    console = Console(file=io.StringIO(), width=WIDTH)
    print_table("title", rows, keys, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def words_of(text: str) -> set[str]:
    return set(BORDERS.sub(" ", text).split())


def as_tables(data: object) -> list[list[dict[str, object]]]:
    """The tables in a result: lists of rows, or one row of single values."""
    if isinstance(data, list):
        return [data]
    assert isinstance(data, dict)
    # the names of tests that failed are printed as lines; single rows of `published` are not printed
    lists = [
        value
        for name, value in data.items()
        if name not in ("each", "rows") and isinstance(value, list) and value and isinstance(value[0], dict)
    ]
    return lists or [[{name: value for name, value in data.items() if not isinstance(value, list | dict)}]]


@pytest.mark.few(20)
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_no_word_of_a_real_result_is_broken_at_100_columns(path: Path, keys: int) -> None:
    for rows in as_tables(json.loads(path.read_text())):
        text = printed(rows, keys)
        assert max(map(len, text.splitlines())) <= WIDTH
        cells = [
            str(cell) for row in rows for pair in row.items() for cell in pair if not isinstance(cell, float | dict)
        ]
        lines = {word.removesuffix(":") for word in words_of(text)}  # a column in lines of its own has a colon
        assert not set(" ".join(cells).split()) - words_of(text) - lines - {"None"}


def test_what_is_too_wide_becomes_several_tables_with_the_same_keys() -> None:
    row: dict[str, object] = {"landscape": "here", "strategy": "ours", **{f"a_long_heading_{i}": i for i in range(12)}}
    heads = [line for line in printed([row], keys=2).splitlines() if "a_long_heading" in line]
    assert len(heads) > 1
    assert all("landscape" in head and "strategy" in head for head in heads)
    assert words_of(" ".join(heads)) >= set(row)


def test_small_sets_defaults_and_what_is_typed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["benchmark", *words])
        parser = command_line("about")
        parser.add_argument("--seeds", type=int, default=20)
        return int(parse(parser, seeds=1).seeds)

    assert (parsed(), parsed("--small"), parsed("--small", "--seeds", "3")) == (20, 1, 3)


def test_a_small_form_does_not_overwrite_a_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--small", "--json", str(RESULTS / "search.json")])
    with pytest.raises(SystemExit) as ended:
        parse(command_line("about"))
    assert ended.value.code == 2
    assert "does not belong" in capsys.readouterr().err


def test_rows_that_are_not_measured_anew_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert kept_rows(path, "part", ["live"]) == []
    write_json(path, [{"part": "live", "ours": 1}, {"part": "speed", "ours": 2}])
    assert kept_rows(path, "part", ["live"]) == [{"part": "speed", "ours": 2}]
