"""What a rank does differently by the versions around it."""

import sys
from pathlib import Path

import pytest

from autotune.rank.hooks import accelerate, transformers
from autotune.rank.versions import import_or_none
from tests.rank.hooks.conftest import make_context


@pytest.mark.parametrize("text", ["raise ImportError('no numpy')", "raise RuntimeError('Failed to import')", "1 / 0"])
def test_a_library_that_breaks_while_it_is_imported_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "broken_library.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert import_or_none("broken_library", "Trainer") is None
    assert import_or_none("broken_library.inner", "Trainer") is None


def test_hooks_of_libraries_that_do_not_import_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = ("transformers", "accelerate", "accelerate.utils.deepspeed", "accelerate.state")
    for name in gone:
        monkeypatch.setitem(sys.modules, name, None)
    context, _ = make_context(str(tmp_path))
    wrapped: list[tuple[object, ...]] = []
    monkeypatch.setattr(context.patches, "wrap", lambda *about: wrapped.append(about))
    for hook in (accelerate, transformers, transformers):
        hook.install(context)
        assert wrapped == [], f"nothing of {hook.__name__} is there to be replaced"
    accelerate.begin_anew()
    assert all(sys.modules[name] is None for name in gone), "nor was any imported for it"
