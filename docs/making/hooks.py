"""Hooks that convert documents when mkdocs builds the site (`hooks:` in mkdocs.yml).

They are written to be read on GitHub, too. So `docs/search.md` in backticks is a link here and a path there, and pages
that are made from the code are a marker there.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
MADE = re.compile(r"<!-- made: (?P<name>[\w-]+) -->")
NAMED = re.compile(r"(?<!\[)`docs/(?P<page>[\w-]+)\.md`")


def _pages() -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("reference", HERE / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.PAGES)


def filled(markdown: str) -> str:
    """A document with every marker replaced by the page that it names.

    Raises:
        KeyError: a marker names no page.
    """
    return MADE.sub(lambda found: _pages()[found["name"]](), markdown)


def linked(markdown: str) -> str:
    """A document with every `docs/NAME.md` in backticks as a link to that page."""
    return NAMED.sub(lambda found: f"[{found['page'].replace('-', ' ')}]({found['page']}.md)", markdown)


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    return linked(filled(markdown))
