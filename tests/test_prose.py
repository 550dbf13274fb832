"""`.ci/prose.py`: prose offences that it finds, and the prose of this checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLAIN = "The tuner measures each candidate in new ranks.\n\n"


def checked(folder: Path, *options: str) -> tuple[int, list[str]]:
    """Return the exit code and the output of the script."""
    command = [sys.executable, str(ROOT / ".ci" / "prose.py"), *options, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert not ended.stderr
    return ended.returncode, ended.stdout.splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Git checkout whose prose has no offence."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "README.md").write_text(PLAIN)
    (tmp_path / "code.py").write_text(f'"""{PLAIN}"""\n\nx = 1  # The tuner reads this value once.\n')
    return tmp_path


@pytest.mark.slow
def test_prose_of_this_checkout_stays_within_the_limits() -> None:
    code, lines = checked(ROOT)
    assert code == 0, "\n".join(lines)
    assert all(
        int(line.split(" of ")[1].split()[0]) > 1000 for line in lines
    )  # it reads documents, docstrings, comments


@pytest.mark.parametrize(
    ("sentence", "offence"),
    [
        ("Whether a candidate fits is predicted.", "inverted start"),
        ("The same holds for every rank.", "inverted start"),
        ("The trial starts anew after it.", "banned word"),
        ("A figure that is\nof the whole node.", "banned word"),
        (" ".join(["word"] * 31) + ".", "over 30 words"),
    ],
)
def test_planted_offences_are_found_with_file_and_line(checkout: Path, sentence: str, offence: str) -> None:
    indented, more = sentence.replace("\n", "\n    "), sentence.count("\n")
    (checkout / "README.md").write_text(f"# Title\n\n{PLAIN}- An item of a list.\n- {PLAIN.strip()} {sentence}\n")
    (checkout / "code.py").write_text(
        f'def f():\n    """{PLAIN.strip()}\n\n    {indented}\n    """\n\n\n'
        + "# The tuner reads this value once.\n"
        + "".join(f"# {line}\n" for line in sentence.splitlines())
    )
    code, lines = checked(checkout)
    assert code == 1
    found = {line.split(": ")[0]: lines[at + 1 : at + 2] for at, line in enumerate(lines) if line.find(offence) > 0}
    assert {kind: places[0].split(": ")[0].strip() for kind, places in found.items()} == {
        "documents": "README.md:6",
        "docstrings": "code.py:4",
        "comments": f"code.py:{9 + more}",
    }


@pytest.mark.parametrize(
    "text",
    [
        "```\nWhat starts anew here is code.\n```\n",
        "    What starts anew here is code.\n",
        "| What starts anew | is of a table |\n| --- | --- |\n",
        "<!-- made: options -->\nWhat starts anew here is generated.\n<!-- end -->\n",
        "Figures: <!-- benchmark: x -->what starts anew is generated<!-- end -->\n",
        "The file `upon/anew.py` and https://anew.example/upon do not count.\n",
        "What is a rung of the ladder?\n",
        "- e.g. what the tuner reads\n",
    ],
)
def test_code_tables_generated_parts_names_and_questions_do_not_count(checkout: Path, text: str) -> None:
    (checkout / "README.md").write_text(PLAIN + text)
    code, lines = checked(checkout, "--all")
    assert code == 0, "\n".join(lines)
