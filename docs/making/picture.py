"""The picture at the top of the README and the tutorial's output, recorded from real runs.

`python docs/making/picture.py` runs both studies (three minutes, two CPU ranks). It keeps what they print in `run.txt` and
`tutorial.txt`, and draws the first as docs/images/run.svg, in the colours of a terminal. rich draws it; its link to a web font
is taken out, so that the picture loads nothing.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

HERE = Path(__file__).parent
RECORDED, PICTURE = HERE / "run.txt", HERE.parent / "images" / "run.svg"
# `make run` on a machine without a GPU, for a shorter time
COMMAND = "autotune run --model tiny-gemma-2 --device cpu --gpus 2 --memory-cap 640MiB --budget 100s --study demo"
TUTORIAL = "autotune run --model tiny-llama --device cpu --gpus 2 --budget 60s --study first"
COLUMNS = 130
COLOURS = [
    (72, 79, 88),
    (255, 123, 114),
    (126, 231, 135),
    (240, 180, 60),
    (121, 192, 255),
    (210, 168, 255),
    (120, 220, 232),
]
THEME = TerminalTheme((22, 27, 34), (213, 219, 226), [*COLOURS, (213, 219, 226)])


def drawn(text: str) -> str:
    """The SVG of a recorded run's output."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="autotune", theme=THEME, unique_id="run")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def recorded(command: str) -> str:
    """Runs a study in an empty folder; returns the command and what it printed, with colours."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "autotune", *shlex.split(command)[1:]]
        environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"the run failed with exit code {done.returncode}:\n{done.stderr}")
    return f"$ {command}\n{done.stdout}"


def main() -> None:
    for command, path in ((COMMAND, RECORDED), (TUTORIAL, HERE / "tutorial.txt")):
        text = recorded(command)
        path.write_text("".join(f"{line.plain}\n" for line in Text.from_ansi(text).split()))
        if path == RECORDED:
            PICTURE.write_text(drawn(text))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
