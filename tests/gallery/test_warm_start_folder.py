"""What lies in gallery/entries, and the page that is made of it. This is what a pull request with an entry has to pass."""

from pathlib import Path

import pydantic
import pytest

from autotune.errors import UserError
from autotune.gallery import warm_start
from autotune.gallery.page import PAGE, ROOT, SCHEMA, page, rows
from autotune.gallery.schema import Entry, schema
from autotune.gallery.warm_start import checked, entries_folder, shipped_entries
from tests.gallery.studies import changed

FILES = sorted(entries_folder().iterdir())


@pytest.mark.parametrize("file", FILES, ids=[file.name for file in FILES])
def test_every_entry_is_of_the_form_and_can_be(file: Path) -> None:
    assert file.suffix == ".json"
    checked(file)
    assert "/home" not in file.read_text()


def test_every_entry_is_read_and_no_two_are_of_one_study() -> None:
    assert set(shipped_entries()) == {file.stem for file in FILES}
    texts = [entry.model_copy(update={"origin": None}).text for entry in shipped_entries().values()]
    assert len(set(texts)) == len(texts)
    assert {entry.origin.kind for entry in shipped_entries().values()} >= {"recorded", "published"}


def test_an_entry_that_breaks_in_any_way_is_left_out_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.json").write_text(changed(lambda entry: entry["job"]["shape"].update(num_attention_heads=0)))
    (tmp_path / "folder.json").mkdir()
    for name in ("good", "odd"):
        (tmp_path / f"{name}.json").write_text(changed(lambda entry: None))

    def check(entry: Entry) -> None:
        read.append(entry)
        if len(read) > 1:
            raise RuntimeError("nobody thought of it")

    read: list[Entry] = []
    monkeypatch.setattr(warm_start, "entries_folder", lambda: tmp_path)
    monkeypatch.setattr(warm_start, "check", check)
    assert list(shipped_entries.__wrapped__()) == ["good"]
    assert len(read) == 2


def test_figures_that_cannot_be_computed_with_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "e.json").write_text(changed(lambda entry: None))
    monkeypatch.setattr(warm_start, "check", lambda entry: 1 // 0)
    with pytest.raises(UserError, match=r"e\.json: its figures cannot be: .* by zero$"):
        checked(tmp_path / "e.json")


def test_the_page_is_what_make_gallery_writes() -> None:
    text = (ROOT / PAGE).read_text()
    assert page(text) == text, "run `make gallery`"
    assert len(rows()) == len(FILES)
    assert all(f"| {row['model']} | {row['machine']} |" in text for row in rows())


@pytest.mark.skipif(
    [int(n) for n in pydantic.VERSION.split(".")[:2]] < [2, 14],
    reason="older versions of pydantic write the same schema otherwise",
)
def test_the_schema_is_what_make_gallery_writes() -> None:
    assert (ROOT / SCHEMA).read_text() == schema(), "run `make gallery`"
