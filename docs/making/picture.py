"""The picture at the top of the README: what a real run printed, as SVG.

`python docs/making/picture.py` draws `run.txt`, a command and what it printed, into docs/images/run.svg. `--record` runs the
study first (two minutes, two CPU ranks) and keeps that. rich draws it; its link to a web font is taken out, so that the
picture loads nothing.
"""

from __future__ import annotations

import argparse
import io
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
COLUMNS = 125
STYLES = [  # the last that matches a line counts
    (r"^\$ ", "bold"),
    (r"->  OOM ", "yellow"),
    (r"->  (interrupted|timeout|foreign)", "dim"),
    (r"^verify|^resume", "cyan"),
    (r"^winner|^  ", "bold green"),
    (r"^wrote", "dim"),
]
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


def shown(text: str) -> list[Text]:
    """The recorded lines as the picture has them: cut at the terminal's width, coloured by what they say."""
    lines = []
    for line in text.splitlines():
        style = [style for pattern, style in STYLES if re.search(pattern, line)][-1:]
        lines.append(Text(line, style[0] if style else ""))
    return lines


def drawn(text: str) -> str:
    """The SVG of a recorded run's output."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), highlight=False)
    for line in shown(text):
        console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    svg = console.export_svg(title="autotune", theme=THEME, unique_id="run")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def record() -> None:
    """Runs the study in an empty folder and keeps what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "autotune", *shlex.split(COMMAND)[1:]]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"the run failed with exit code {done.returncode}:\n{done.stderr}")
    RECORDED.write_text(f"$ {COMMAND}\n{done.stdout}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run the study anew")
    if parser.parse_args().record:
        record()
    PICTURE.write_text(drawn(RECORDED.read_text()))
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
