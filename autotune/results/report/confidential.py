"""Remove names of models, machines and places from a page.

Free text from ranks and people is left out. Then every remaining text is searched for names.
"""

from __future__ import annotations

import dataclasses
import json
import re
import socket
from collections.abc import Callable, Iterable
from functools import cache
from importlib import resources
from pathlib import Path, PurePath
from typing import Any, TypeVar

from autotune import masking
from autotune.masking import masked_data
from autotune.problem.candidate import KNOBS, Candidate
from autotune.problem.job import Job
from autotune.results.report.model import Code, StudyReport, Trial
from autotune.script.source_digests import SOURCES

MODEL, STUDY, PATH, HOST, SCRIPT = "[model]", "[study]", "[path]", "[host]", "[script]"
LEFT_OUT = "left out (--confidential)"
Report = TypeVar("Report")

_URL = r"\b[a-z][a-z0-9+.-]{1,20}://[^\s'\"<>]+"
_ABSOLUTE = r"(?<![\w.)\]])(?:~|\.{1,2})?/(?:[^\s'\"<>:,;|()]+/?)+|\b[A-Za-z]:\\[^\s'\"<>]+"
_FILE = (
    r"\b[\w.@+-]*[\w@+-]/[\w.@+/-]+\.\w{1,12}\b|\b[\w@+-][\w.@+-]*\."
    r"(?:py|ipynb|sh|json|jsonl|ya?ml|toml|cfg|ini|log|txt|csv|tsv|parquet|arrow|bin|pt|pth|safetensors|db|journal|gz|so)\b"
)
_ADDRESS = r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|(?<![\w:])(?:[0-9a-fA-F]{0,4}:){3,7}[0-9a-fA-F]{1,4}(?![\w:])"
_HOST_PORT = r"\b[\w-]+(?:\.[\w-]+)*:\d{4,5}\b|\[[\w.:-]+\]:\d+"
_DOMAIN = r"\b(?:[\w-]+\.)+(?:com|net|org|edu|gov|io|ai|dev|cloud|local|internal|lan|corp|cluster|[a-z]{2})\b(?!\.\w)"
_NODE = r"\b(?:ip|node|host|gpu|dgx|hgx|worker|compute|login|server|slurm|cn|nid)[-_]?\w*-?\d[\w-]*\b(?=[\s:,)\]]|$)"
_MAIL = r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*"
_UUID = r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"
_SIZES = {"tiny", "small", "base", "large", "mini", "medium", "nano", "chat", "instruct", "model", "causal", "config"}


def masker(job: Job, study: str, folder: Path | None = None) -> Callable[[str], str]:
    """Return a function that replaces names of the study's job in a text."""
    named = [(_any_of(words), stands_for) for words, stands_for in _names(job, study, folder) if words]
    shapes = [
        *((pattern, PATH) for pattern in (_URL, _ABSOLUTE, _FILE)),
        *((pattern, HOST) for pattern in (_MAIL, _UUID, _ADDRESS, _HOST_PORT, _DOMAIN)),
    ]
    replaced = [(re.compile(pattern), stands_for) for pattern, stands_for in shapes]
    replaced.append((re.compile(_NODE, re.IGNORECASE), HOST))

    def mask(text: str) -> str:
        for pattern, stands_for in (*named, *replaced):
            text = pattern.sub(stands_for, text)
        return text

    return mask


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Build a pattern for any of the words, the longest first.

    Words of letters also match inside others, as `gemma` does in `Gemma2DecoderLayer`. Words that occur in config keys match
    only alone: a model named `train` must not make `train_batch_size` unreadable.
    """
    own = _vocabulary()
    parts = [
        rf"\w*{re.escape(word)}\w*"
        if word.isalpha() and len(word) > 3 and word.lower() not in own
        else rf"(?<!\w){re.escape(word)}(?!\w)"
        for word in sorted(words, key=len, reverse=True)
    ]
    return re.compile("|".join(parts), re.IGNORECASE)


@cache
def _vocabulary() -> frozenset[str]:
    """Return the words of knobs and of DeepSpeed's keys."""
    keys = (resources.files("autotune") / "data" / "deepspeed_keys.json").read_text(encoding="utf-8")
    return frozenset(re.findall(r"[a-z]{4,}", f"{keys} {' '.join(KNOBS)}".lower()))


_ORDINARY = {
    "none",
    "auto",
    "true",
    "false",
    "yes",
    "no",
    "on",
    "off",
    "cpu",
    "cuda",
    "nvme",
    "bf16",
    "fp16",
    "fp32",
    "adam",
    "adamw",
    "lion",
    "sgd",
    "adagrad",
    "eager",
    "sdpa",
    "steps",
    "epoch",
}


def _names_something(word: str) -> bool:
    """Check that a script's argument may be a name: no flag, no number, and no word that occurs on every page."""
    plain = word.lower()
    return not (word.startswith("-") or re.fullmatch(r"[-+.\de]+", plain) or plain in _ORDINARY | _vocabulary())


def _names(job: Job, study: str, folder: Path | None) -> list[tuple[set[str], str]]:
    script: set[str] = set()
    places = {str(Path.home()), str(folder.resolve()) if folder else "", str(Path.cwd())}
    if job.script is not None:
        words = (word for word in job.script.arguments if _names_something(word))
        script = {job.script.target, PurePath(job.script.target).name, *words}
        places |= {job.script.cwd, job.script.ds_config or ""}
    if job.workload:
        script |= {job.workload, *job.workload.split(":")}
    source = job.model.source if " " not in job.model.source.strip() else ""  # a sentence is no name
    model = {job.model.name, *job.model.name.split("/"), source}
    model |= {str(job.model.config.get(key, "")) for key in ("_name_or_path", "name_or_path", "model_type")}
    model |= {str(one) for one in job.model.config.get("architectures") or ()}
    model |= {word for name in list(model) for word in re.findall(r"[A-Za-z]{4,}", PurePath(name).name)}
    hosts = {socket.gethostname(), socket.gethostname().split(".")[0], Path.home().name}
    named = [
        (places, PATH),
        ({study}, STUDY),
        ({word for word in model if word.lower() not in _SIZES}, MODEL),
        (script, SCRIPT),
        (hosts - {"root"}, HOST),
    ]
    return [({word for word in words if len(word) > 1}, stands_for) for words, stands_for in named]


def masked(data: Report, mask: Callable[[str], str]) -> Report:
    """Return the data with every text masked, keys of mappings included. Values of our own enums are kept."""
    return _masked(data, mask)  # type: ignore[no-any-return]


def _masked(data: Any, mask: Callable[[str], str]) -> Any:
    if type(data) is str:
        return mask(data)
    if isinstance(data, dict):
        return {_masked(key, mask): _masked(value, mask) for key, value in data.items()}
    if isinstance(data, tuple | list):
        return type(data)(_masked(one, mask) for one in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return type(data)(**{f.name: _masked(getattr(data, f.name), mask) for f in dataclasses.fields(data)})
    return data


def without_secrets(report: StudyReport) -> StudyReport:
    """Return the page without tokens and passwords from a command line, a config or a rank's text."""
    job = report.fingerprint.get("job", {})
    if job.get("script"):
        # An argument file's text and data may hold anything.
        script = {name: value for name, value in job["script"].items() if name != "files"}
        report = dataclasses.replace(report, fingerprint={**report.fingerprint, "job": {**job, "script": script}})
    return masked(dataclasses.replace(report, fingerprint=masked_data(report.fingerprint)), masking.masked)


def confidential(report: StudyReport, job: Job, folder: Path | None) -> StudyReport:
    """Return a study's page without paths, host names and the model's name.

    Ranks' messages are left out, as they may hold any name; kinds, phases and sizes stay.
    """
    mask = masker(job, report.study, folder)
    trials = tuple(_without_free_text(trial) for trial in report.trials)
    winner = report.verdict.winner
    bare = dataclasses.replace(job, base_config={})  # the user's own config may name anything
    shown = json.dumps(Candidate.of(winner.knobs).ds_config(bare), indent=2) if winner else LEFT_OUT
    verdict = dataclasses.replace(
        report.verdict,
        winner=next((trial for trial in trials if winner and trial.number == winner.number), None),
        lines=tuple(_own(line) for line in report.verdict.lines),
        checks=tuple(_own(line) for line in report.verdict.checks),
        own=_own(report.verdict.own),
        run_now=tuple(
            Code(code.name, shown if code.text.startswith("{") else LEFT_OUT) for code in report.verdict.run_now
        ),
        instead="",
    )
    known = {name: value for name, value in report.fingerprint.items() if name != SOURCES}
    fingerprint = {**known, "job": _without_names(report.fingerprint.get("job", {}))}
    return masked(
        dataclasses.replace(
            report,
            model=MODEL,
            trials=trials,
            verdict=verdict,
            skips=tuple((_own(reason), count) for reason, count in report.skips),
            no_forecast=_own(report.no_forecast),
            commands=(),
            forced=tuple(LEFT_OUT for _ in report.forced),
            space="\n".join(line.partition("#")[0].rstrip() for line in report.space.splitlines()),
            fingerprint=fingerprint,
            confidential=True,
        ),
        mask,
    )


def _without_free_text(trial: Trial) -> Trial:
    said = f"what it said is {LEFT_OUT}" if trial.happened else ""
    return dataclasses.replace(trial, log="", happened=said, remark=_own(trial.remark))


_FREE = (
    "no candidate ran: ",
    "rejected: ",
    "crash in ",
    "invalid in ",
    "crashes: ",
    "DeepSpeed refuses: ",
    "given up: ",
    "is not known: ",
    "There is no prediction: ",
    "not traced (",
)  # prefixes of text that a rank wrote


def _own(text: str) -> str:
    """Return the part of a line that autotune wrote."""
    for head in _FREE:
        before, found, _ = text.partition(head)
        if found:
            return f"{before}{head}{LEFT_OUT}"
    return text


def _without_names(job: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in job.items() if key not in ("script", "workload", "base_config")}
    model = job.get("model") or {}
    return {**kept, "model": {"parameters": model.get("parameters")}}
