"""Check that a tag may be published: `python .github/release.py v0.2.0`. Needs nothing but Python.

The tag is the package's version. The changelog's first section has that version and a date, and the citation names it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def troubles(tag: str, version_file: str, changelog: str, citation: str) -> list[str]:
    """Return the reasons why the tag may not be published, a line each."""
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
    return found


def main() -> None:
    tag = sys.argv[1] if len(sys.argv) == 2 else sys.exit("expected one tag, like v0.2.0")
    files = ("autotune/_version.py", "CHANGELOG.md", "CITATION.cff")
    found = troubles(tag, *((ROOT / name).read_text() for name in files))
    sys.exit("\n".join(found) if found else 0)


if __name__ == "__main__":
    main()
