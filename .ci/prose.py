"""Fail if too many sentences are inverted, use a banned word or are long.

Usage: `python .ci/prose.py [--all] [FOLDER]`. The script reads the documents, docstrings and comments of a git checkout. Code,
tables, generated parts, links, and Python files of tests and benchmarks do not count. `--all` lists all offences; the default is
the first of each share that exceeds its limit.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONG = 30  # words
INVERTED, BANNED, OVERLONG = "inverted start", "banned word", f"over {LONG} words"
# Largest share of sentences with each offence, in percent: some inversions are plain, and some long lists are one sentence.
LIMITS = {
    "documents": {INVERTED: 5.0, BANNED: 0.2, OVERLONG: 8.0},
    "docstrings": {INVERTED: 2.5, BANNED: 0.2, OVERLONG: 3.0},
    "comments": {INVERTED: 2.5, BANNED: 0.2, OVERLONG: 3.0},
}
SHOWN = 20  # offences of a share that is exceeded

_STARTS = re.compile(
    r"(What|Whatever|Whether|Who|Whoever|Whom|Whose|Whichever|Where|Of|That|As|It|Upon|Beside|The same)\b",
    re.IGNORECASE,  # comments after a field begin in lower case
)
_WORDS = re.compile(
    r"\b(anew|amid|upon|beside|meanwhile|whence|whoever|nobody|is of|are of|as it is|of (its|their) own)\b",
    re.IGNORECASE,
)
_GENERATED = re.compile(r"<!-- *(?:made|benchmark)\b.*?<!-- *end *-->|<!--.*?-->", re.DOTALL)
_FENCED = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
# paragraph or list item, up to the next item, table or heading
_BLOCK = re.compile(r"^(?!\s*$).*\n?(?:(?!\s*$| *(?:[-*+] |\d+[.)] |[|#])).*\n?)*", re.MULTILINE)
_NO_PROSE = re.compile(r" *[|#<!]|    (?! *[-*+] )")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$", re.MULTILINE)
_DIRECTIVE = re.compile(r"#[!:]|# *(noqa|type:|pragma|fmt:|mypy:|ruff:)")


class Sentence(NamedTuple):
    """A sentence and its place."""

    path: Path
    line: int
    text: str

    def offences(self) -> list[str]:
        """Return the names of the offences."""
        inverted = _STARTS.match(self.text) and not self.text.endswith("?")
        found = {INVERTED: inverted, BANNED: _WORDS.search(self.text), OVERLONG: len(self.text.split()) > LONG}
        return [name for name, holds in found.items() if holds]


def _blank(found: re.Match[str], filler: str = "") -> str:
    """Return a filler with the match's line breaks, so that line numbers stay."""
    return filler + "\n" * found[0].count("\n")


def sentences(path: Path, text: str, first_line: int = 1) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown text with at least four words. Each code span and URL is one word."""
    text = _FENCED.sub(_blank, _GENERATED.sub(_blank, text))
    for block in _BLOCK.finditer(text):
        if _NO_PROSE.match(block[0]):
            continue
        prose = re.sub(r"`+[^`]*`+|https?://\S+", lambda found: _blank(found, "X"), block[0])
        prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|\*\*", lambda found: found[1] or "", prose)
        start = 0
        for end in [*(one.end() for one in re.finditer(r"(?<!e\.g)(?<!i\.e)[.!?][)\"']*\s+", prose)), len(prose)]:
            raw = prose[start:end]
            line = first_line + text.count("\n", 0, block.start()) + prose.count("\n", 0, start)
            words = raw.strip(" \n-*").split()
            if len(words) >= 4:
                yield Sentence(path, line, " ".join(words))
            start = end


def docstrings(path: Path, source: str) -> Iterator[Sentence]:
    """Yield the sentences of a module's docstrings, without their sections."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield from sentences(path, _SECTION.split(text)[0], node.body[0].lineno)


def comments(path: Path, source: str) -> Iterator[Sentence]:
    """Yield the sentences of a module's comments. Comments on consecutive lines are one text."""
    last, first, texts = (-1, -1), 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        row, column = token.start
        if (row - 1, column) != last or token.line[:column].strip():
            yield from sentences(path, "\n".join(texts), first)
            first, texts = row, []
        texts.append(token.string.lstrip("# "))
        last = (row, column)
    yield from sentences(path, "\n".join(texts), first)


def read(root: Path) -> dict[str, list[Sentence]]:
    """Return the sentences of a git checkout by kind of text."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md", "*.py"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    found: dict[str, list[Sentence]] = {kind: [] for kind in LIMITS}
    for path in sorted(path for name in names if name and (path := root / name).is_file()):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            found["documents"] += sentences(path.relative_to(root), text)
        elif not {"tests", "benchmarks"} & set(path.relative_to(root).parts):
            found["docstrings"] += docstrings(path.relative_to(root), text)
            found["comments"] += comments(path.relative_to(root), text)
    return found


def main() -> int:
    """Print the shares and the offences; return 1 if a share exceeds its limit."""
    words = [word for word in sys.argv[1:] if word != "--all"]
    exceeded = False
    for kind, found in read(Path(words[0] if words else ".").resolve()).items():
        for offence, limit in LIMITS[kind].items():
            places = [one for one in found if offence in one.offences()]
            share = 100 * len(places) / max(1, len(found))
            print(f"{kind}: {len(places)} of {len(found)} sentences, {share:.2f} %: {offence} (at most {limit:g} %)")
            exceeded = exceeded or share > limit
            shown = len(places) if "--all" in sys.argv else SHOWN if share > limit else 0
            if offence == OVERLONG:
                places.sort(key=lambda one: len(one.text), reverse=True)
            for one in places[:shown]:
                print(f"  {one.path}:{one.line}: {one.text[:150]}")
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
