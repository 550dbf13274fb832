"""Check that a tag may be published: `python .github/release.py v0.2.0`. Needs nothing but Python.

The tag is the package's version. The changelog's first section has that version and a date, and the citation names it.
Documents and printed hints install from PyPI. Before the first release they install from a checkout, and the repository has no
address: `--switch https://github.com/OWNER/NAME` changes documents, hints and the project's URLs. It also makes README's links
absolute, since PyPI shows README.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "deepspeed-autotune"
VERSION_FILE = ROOT / "autotune" / "_version.py"
UNRELEASED = re.compile(r"<!-- unreleased -->.*?<!-- released -->\n*", re.DOTALL)
RELATIVE = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#|mailto:)([^)]+)\)")
CHECKOUT = re.compile(r"((?:pipx?|uv tool) install |uvx --from )('?)\.(?=\[\w+\]|[\s`&]|$)", re.MULTILINE)


def documents() -> list[Path]:
    """Return the texts that say how to install the package."""
    found = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return [*sorted(found), *sorted((ROOT / "examples").rglob("*.ipynb"))]


def switched(text: str) -> str:
    """Return a document that installs from PyPI."""
    return CHECKOUT.sub(rf"\1\2{NAME}", UNRELEASED.sub("", text))


def with_absolute_links(text: str, address: str) -> str:
    """Return README with links and images at the repository's address."""

    def absolute(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        return f"{mark}{label}({address}/{'raw' if mark else 'blob'}/main/{target})"

    return RELATIVE.sub(absolute, text)


def with_urls(pyproject: str, address: str) -> str:
    """Return pyproject.toml with the project's URLs."""
    urls = {
        "Homepage": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    rows = "".join(f'{name} = "{address}{place}"\n' for name, place in urls.items())
    return pyproject.replace("[project.scripts]", f"[project.urls]\n{rows}\n[project.scripts]")


def switch(address: str) -> None:
    """Change documents, printed hints and metadata, so that they install from PyPI and link to the repository."""
    for path in documents():
        text = switched(path.read_text(encoding="utf-8"))
        if path == ROOT / "README.md":
            text = with_absolute_links(text, address)
        path.write_text(text, encoding="utf-8")
    project = ROOT / "pyproject.toml"
    project.write_text(with_urls(project.read_text(encoding="utf-8"), address), encoding="utf-8")
    VERSION_FILE.write_text(VERSION_FILE.read_text().replace("ON_PYPI = False", "ON_PYPI = True"))


def troubles(
    tag: str, version_file: str, changelog: str, citation: str, pyproject: str, texts: dict[str, str]
) -> list[str]:
    """Return the reasons why the tag may not be published, a line each.

    Args:
        texts: the documents, by name.
    """
    version = (re.findall(r'__version__ = "([^"]+)"', version_file) or ["none"])[0]
    heading = (re.findall(r"^## (.+)$", changelog, re.MULTILINE) or ["none"])[0]
    cited = (re.findall(r"^version: (.+)$", citation, re.MULTILINE) or ["none"])[0]
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, and autotune/_version.py has {version}")
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        found.append(f"CHANGELOG.md begins with {heading!r}; expected '{version} (YYYY-MM-DD)'")
    if cited != version:
        found.append(f"CITATION.cff has version {cited}; expected {version}")
    old = [name for name, text in texts.items() if switched(text) != text]
    if "ON_PYPI = True" not in version_file:
        old.insert(0, "autotune/_version.py")
    remedy = "run `python .github/release.py --switch ADDRESS` and commit"
    if old:
        found.append(f"{', '.join(old)}: installs from a checkout; {remedy}")
    if "[project.urls]" not in pyproject or RELATIVE.search(texts.get("README.md", "")):
        found.append(f"pyproject.toml has no URLs, or README.md has relative links; {remedy}")
    return found


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--switch":
        return switch(sys.argv[2].rstrip("/"))
    tag = sys.argv[1] if len(sys.argv) == 2 else sys.exit("expected one tag, like v0.2.0")
    files = ("autotune/_version.py", "CHANGELOG.md", "CITATION.cff", "pyproject.toml")
    texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in documents()}
    found = troubles(tag, *((ROOT / name).read_text() for name in files), texts)
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
