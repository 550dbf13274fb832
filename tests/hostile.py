"""A study and a space of a stranger: each place that could name a program names one that leaves a mark."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from autotune.problem.outcome import OutcomeKind
from tests.studies import study_of_every_kind

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x7f\u202etxt.exe\u2066"
TAGS = "<img src=x onerror=owned()><script>owned()</script></script><svg onload=owned()>'\" javascript:owned() {{7*7}}"
TEXT = f"{TAGS}{ESCAPES}[red]markup[/red]:boom:"
# of modules that the tuner imports: one in the current folder must not stand in for them
SHADOWS = (
    "yaml",
    "typer",
    "rich",
    "jinja2",
    "optuna",
    "numpy",
    "sitecustomize",
    "torch",
    "transformers",
    "conftest",
    "json",
)
# Logs each process that is started and each planted file that is compiled or opened for running.
_HOOK = """
import sys
def hook(event, arguments, log={log!r}, planted={planted!r}):
    text = ""
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "os.startfile"):
        text = f"{{event}} {{arguments[0]!r}} {{arguments[1] if len(arguments) > 1 else ''!r}}"
    elif event in ("pickle.find_class", "sqlite3.load_extension", "sqlite3.enable_load_extension"):
        text = f"{{event}} {{arguments!r}}"
    elif event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(planted):
        text = f"exec {{arguments[0].co_filename}}"
    if text:
        with open(log, "a") as file:
            file.write(text + "\\n")
sys.addaudithook(hook)
"""


@dataclass
class Trap:
    """A folder of a stranger, with the study `runs/s` in it."""

    folder: Path
    marks: Path  # a folder: each planted program that runs leaves a file there
    hooks: Path  # a folder for PYTHONPATH
    log: Path  # of processes started
    study: Path

    @property
    def executed(self) -> list[str]:
        """Names of planted programs that ran."""
        return sorted(path.name for path in self.marks.iterdir())

    def started(self) -> list[str]:
        """Processes, planted files and unpickled classes that the latest call of the tuner ran."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def call(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        """`python -m autotune words…` from the stranger's folder."""
        env = {**os.environ, "PYTHONPATH": str(self.hooks)}
        env["AUTOTUNE_CACHE"] = str(self.hooks / "cache")
        env |= more.pop("env", {})
        self.log.unlink(missing_ok=True)
        return subprocess.run(
            [sys.executable, "-m", "autotune", *words],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            stdin=subprocess.DEVNULL,
            timeout=200,
            **more,
        )


def program(path: Path, marks: Path) -> Path:
    """A shell program that leaves a mark, then is no Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ntouch {marks}/{path.name}\nexit 1\n")
    path.chmod(0o755)
    return path


def module(path: Path, marks: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"open({str(marks / path.stem)!r}, 'w')\n")
    return path


def lay(folder: Path) -> Trap:
    """Lays the trap below a folder."""
    theirs, marks, hooks = folder / "theirs", folder / "marks", folder / "hooks"
    for one in (theirs, marks, hooks):
        one.mkdir()
    log = hooks / "log"
    (hooks / "usercustomize.py").write_text("")
    (hooks / "sitecustomize.py").write_text(_HOOK.format(log=str(log), planted=str(theirs)))
    for name in SHADOWS:
        module(theirs / f"{name}.py", marks)
    study_of_every_kind(theirs / "runs", (OutcomeKind.OK, OutcomeKind.CRASH, OutcomeKind.OOM_DEVICE))
    trap = Trap(theirs, marks, hooks, log, theirs / "runs" / "s")
    poison(trap)
    return trap


def poison(trap: Trap) -> None:
    """Writes programs, tags and escapes into every text of the study's database."""
    marks, folder = trap.marks, trap.folder
    module(folder / "evil_workload.py", marks)
    model = folder / "evil_model"
    module(model / "modeling_evil.py", marks)
    rung = {
        "candidate": {"zero_stage": 0, "csv_monitor.output_path": str(marks / "rung")},
        "peak_bytes": 1,
        "host_bytes": 0,
    }
    (trap.study / "s.ladder.json").write_text(json.dumps([{**rung, "samples_per_second": 1.0, "measured": True}]))
    auto = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    for name in ("study.pkl", "pytorch_model.bin", "journal.pickle"):
        (trap.study / name).write_bytes(f"cposix\nsystem\n(S'touch {marks}/{name}'\ntR.".encode())
    with sqlite3.connect(trap.study / "study.db") as base:
        told = dict(base.execute("select key, value_json from study_user_attributes").fetchall())
        mark = json.loads(told["fingerprint"])
        job = mark["job"]
        job["workload"] = "evil_workload:build"
        job["model"] |= {
            "name": f"m{TEXT}",
            "source": f"{folder}/evil_workload.py 000000000000",
            "trust_remote_code": True,
        }
        job["model"]["config"] |= {
            "_name_or_path": str(model),
            "auto_map": auto,
            "attn_implementation": "evil/kernel",
            "x": TEXT,
        }
        job["base_config"] = {"tensorboard": {"output_path": str(marks / "tensorboard"), "job_name": TEXT}}
        mark["environment"] = {"LD_PRELOAD": str(marks / "evil.so"), "NCCL_X": TEXT}
        mark["versions"] |= {"torch": TEXT}
        hardware = json.loads(told["hardware"])
        hardware["name"] = f"card{TEXT}"
        forced = [{"at": TEXT, "differences": [TEXT]}]
        new = {
            "fingerprint": mark,
            "hardware": hardware,
            "python": str(program(folder / "evil" / "python", marks)),
            "commands": [f"autotune run {TEXT}"],
            "skips": {TEXT: 3},
            "forced": forced,
            "objective": TEXT,
            "extensions": str(folder / "evil"),
        }
        which = base.execute("select study_id from studies").fetchone()[0]
        for key, value in new.items():
            base.execute("delete from study_user_attributes where key = ?", (key,))
            base.execute(
                "insert into study_user_attributes(study_id, key, value_json) values (?, ?, ?)",
                (which, key, json.dumps(value)),
            )
        base.execute("update study_user_attributes set value_json = ? where key = 'space'", (json.dumps(space(marks)),))
        for row, text in base.execute(
            "select trial_user_attribute_id, value_json from trial_user_attributes"
        ).fetchall():
            base.execute(
                "update trial_user_attributes set value_json = ? where trial_user_attribute_id = ?",
                (json.dumps(_poisoned(json.loads(text))), row),
            )


def _poisoned(value: Any) -> Any:
    """The value with the text in place of what people read: notes, reasons, evidence."""
    if isinstance(value, dict):
        return {
            key: f"{one}{TEXT}"
            if key in ("reason", "evidence", "note", "log") and isinstance(one, str)
            else _poisoned(one)
            for key, one in value.items()
        }
    return f"{value}{TEXT}" if value == "a note" else value


def space(marks: Path) -> str:
    """A space file that would run a program if a loader made objects."""
    return f"# {TAGS}\nname: evil\nknobs:\n  zero_stage: !!python/object/apply:os.system ['touch {marks}/space']\n"


# -- what is looked for ----------------------------------------------------------------------------------------------------

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def controls(text: str) -> list[str]:
    """Control characters in a text, but for tabs and ends of lines."""
    return _CONTROLS.findall(text)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))


def live(html: str) -> Iterator[str]:
    """Tags and attributes of a page that could run or fetch something."""
    parser = _Tags()
    parser.feed(html)
    if (scripts := sum(tag == "script" for tag, _ in parser.found)) > 3:
        yield f"{scripts} scripts: expected the theme, the data and ours"
    for tag, attributes in parser.found:
        named = dict(attributes)
        own = (tag == "link" and (named.get("href") or "").startswith("data:")) or (
            tag == "form" and "action" not in named
        )
        if tag in ("img", "iframe", "object", "embed", "base", "form", "link") and not own:
            yield tag
        for name, value in attributes:
            if name.startswith("on") or "javascript:" in (value or "").replace(" ", "")[:11]:
                yield f"{tag} {name}={value}"
