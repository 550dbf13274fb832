"""The paths that a command which a script starts would change, as far as its words say so.

A process that is started sees links as any other does: `rm -rf out/*` would go through one. What a program does with its words is
known of few.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from enum import Enum, auto


class Change(Enum):
    """What a command does at a path."""

    MOVED = auto()  # it is made, removed or moved, or something in it is
    CONTENT = auto()  # its content is changed, or added to
    LOST = auto()  # what is there is removed, moved away or overwritten


_REMOVING = {"rm", "rmdir", "mv", "mkdir", "cd", "unlink", "find"}
_WRITING = {"touch", "tee", "truncate", "sed", "dd", "chmod", "chown", "shred"}
_LAST = {"cp", "install", "ln", "rsync", "scp"}  # all but the last word are read
_TAKING = {"rm", "unlink", "shred"}  # all that they name
_OVERWRITING = {"truncate", "tee", "cp", "install", "rsync", "scp"}
_KEEPING = {"-a", "--append", "-n", "--no-clobber"}
_BEFORE = {"sudo", "nohup", "exec", "env", "time", "command"}
_BETWEEN = re.compile(r"(?:&&|\|\||[;&|\n()])+")  # a shell's commands
_WORDS = re.compile(r"""\d*>>?&?|"[^"]*"|'[^']*'|[^\s"'<>]+""")


def changed_by(words: Iterable[str]) -> Iterator[tuple[str, Change]]:
    """Paths, wildcards expanded, and what is done there.

    Args:
        words: a program's; one word is a shell's command, as is what follows `-c`.
    """
    given = list(words)
    if len(given) == 1 or "-c" in given[1:2]:
        for one in _BETWEEN.split(given[-1]):
            yield from _of_one([word.strip("\"'") for word in _WORDS.findall(one)])
    else:
        yield from _of_one(given)


def _of_one(words: list[str]) -> Iterator[tuple[str, Change]]:
    plain: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if (redirected := before.lstrip("0123456789")) in (">", ">>"):
            yield from _expanded(word, Change.CONTENT)
            if redirected == ">":
                yield from _lost(word)
        elif ">" not in word:
            plain.append(word)
    for at, word in enumerate(plain):  # `sudo rm …`, `A=b rm …`, `/bin/rm …`
        name = os.path.basename(word)
        rest = plain[at + 1 :]
        if name in _LAST:
            rest = rest[-1:]
        elif name not in _REMOVING | _WRITING or (name == "find" and not {"-delete", "-exec", "-execdir"} & set(rest)):
            continue
        change = Change.MOVED if name in _REMOVING else Change.CONTENT
        for one in rest:
            yield from _expanded(one.partition("=")[2] if one.startswith(("of=", "-")) else one, change)
        keeps = name in _OVERWRITING and _KEEPING & set(plain[at + 1 :])
        if not keeps and all(one in _BEFORE or "=" in one for one in plain[:at]):  # else another program's word
            yield from _losses(name, rest)
        return


def _losses(name: str, rest: list[str]) -> Iterator[tuple[str, Change]]:
    """Of a command's words, those whose files it takes away or overwrites."""
    paths = [one for one in rest if not one.startswith("-")]
    if name in _TAKING or name == "mv":
        for one in paths[: -1 if name == "mv" else None]:
            yield from _expanded(one, Change.LOST)
    if name == "mv" or name in _OVERWRITING:
        for one in paths[-1:] if name == "mv" else paths:
            yield from _lost(one)
    elif name == "dd":
        for one in paths:
            yield from _lost(one.partition("=")[2] if one.startswith("of=") else "")


def _lost(word: str) -> Iterator[tuple[str, Change]]:
    """Where it is written over: a folder is not."""
    for path, _ in _expanded(word, Change.LOST):
        if not path.endswith("/") and not os.path.isdir(path):
            yield path, Change.LOST


def _expanded(word: str, change: Change) -> Iterator[tuple[str, Change]]:
    word = os.path.expandvars(word)
    if word:
        yield word, change
        for one in glob.iglob(word) if glob.has_magic(word) else ():
            yield one, change
