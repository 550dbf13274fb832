"""What lies in gallery/entries, and the page that is made of it. This is what a pull request with an entry has to pass."""

from pathlib import Path

import pydantic
import pytest

from autotune.gallery.entry import schema
from autotune.gallery.folder import checked, entries_folder, shipped_entries
from autotune.gallery.page import PAGE, ROOT, SCHEMA, page, rows

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
