"""Secrets: recognized by the names of options, variables and keys, and masked in every text that leaves the tuner.

Texts leave through few borders, and each masks: the standard streams (`streams.py`), files (`files.write_atomically`), errors
(`errors.py`), JSON on stdout (`options.emit`) and a study's attributes (`search/trials.py`). A value seen once under the
name of a secret (`learn_words`, `learn_data`) is masked in all later texts, including a rank's traceback.
"""

from __future__ import annotations

import html
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

MASK = "***"
NOTE = f"{MASK} stands for a secret that was on the command line or in a file: put your own value in its place"

# -- names ---------------------------------------------------------------------------------------------------------------

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ANYWHERE = re.compile(r"secret|passw(?:or)?d|passphrase|credential|auth(?!or(?!iz|is))")
_MORE = re.compile(r"secret|passw(?:or)?d|passphrase|credential")  # also across two words: passWord
_KEY = re.compile(r"token(?!iz|is|s$)|(?<!^mon)(?<!^don)(?<!^tur)(?<!^hoc)(?<!^joc)(?<!^whis)key$")
_KEYS = re.compile(r"(?:token|key)s?$")
_OF_SERVICES = frozenset(("api", "access", "private", "refresh", "ssh"))
# Words that make `token` or `key` a term of language models: `pad_token`, `num_key_value_heads`, `prompt_key`.
_OF_MODELS = frozenset(
    (
        "pad eos bos unk mask sep cls special added image video audio vision boi eoi begin end start stop prefix suffix "
        "chat think type types level class per max classification min num n vocab position index loss drop next decoder "
        "forced query value values padding dim size head heads norm layer states proj bias cache input output prompt "
        "label chosen rejected text response column"
    ).split()
)


def names_secret(name: str) -> bool:
    """Check that an option, a variable or a key of this name holds a secret: `--wandb_key`, `HF_TOKEN`, `db.passwd`."""
    parts = [part.lower() for part in _PART.findall(name)]
    if any(_ANYWHERE.search(part) for part in parts) or _MORE.search("".join(parts)):
        return True
    if "pwd" in parts and name != "PWD":  # a shell's folder
        return True
    if _OF_SERVICES & set(parts) and any(_KEYS.search(part) for part in parts):
        return True
    return any(_KEY.search(part) for part in parts) and not _OF_MODELS & set(parts)


# -- values ----------------------------------------------------------------------------------------------------------------

_PLAIN = re.compile(r"(?i)true|false|yes|no|on|off|none|null|auto|\*\*\*.*")
_PLACEHOLDER = re.compile(
    r"\$\{?\w+.*|(?:YOUR_?|MY_?)?(?:VALUE|PASSWORD|TOKEN|KEY|SECRET)|<[\w -]+>|\[[\w -]+\]|\.\.\.|…"
)
_learnt: set[str] = set()
_pattern: re.Pattern[str] | None = None


def _is_value(value: str) -> bool:
    """Check that a text under a secret's name can be a secret: no switch, no placeholder, not masked already."""
    return bool(value) and not _PLAIN.fullmatch(value) and not _PLACEHOLDER.fullmatch(value.rstrip(".,:;)"))


def _is_secret(name: str, value: str) -> bool:
    return names_secret(name) and _is_value(value)


def _telling(value: str) -> bool:
    """Check that a value is specific enough to be masked in any text: `step` and `2048` are not."""
    if value.isalpha() and value.isascii():
        return len(value) >= 8
    return len(value) >= (10 if re.fullmatch(r"[-+.\d]+", value) else 4) and not os.path.exists(value)


def learn(value: str) -> None:
    """Mask this value in every later text, in any quoting."""
    global _pattern
    for line in {value, *value.splitlines()}:
        line = line.strip()
        if not _is_value(line) or not _telling(line):
            continue
        forms = {line, json.dumps(line)[1:-1], repr(line)[1:-1], html.escape(line), quote(line, safe=""), unquote(line)}
        forms |= {html.escape(json.dumps(line)[1:-1]), json.dumps(line, ensure_ascii=False)[1:-1], shlex.quote(line)}
        if not forms <= _learnt:
            _learnt.update(forms)
            _pattern = None


def forget() -> None:
    """Forget every learnt value; for tests."""
    global _pattern
    _learnt.clear()
    _pattern = None


def learn_words(words: Sequence[str]) -> None:
    """Learn the secrets of a command's words."""
    for _, name, value in secret_parts(words):
        if value is not None and names_secret(name):
            learn(value)
    for word in words:
        for value in _in_urls(word):
            learn(value)


def learn_data(data: Any, name: str = "") -> None:
    """Learn the secrets of nested data by their keys; texts in it are read as `masked` reads them."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            learn_data(value, str(key))
    elif isinstance(data, list | tuple):
        if all(isinstance(one, str) for one in data):
            learn_words([*data])
        for one in data:
            learn_data(one, name)
    elif isinstance(data, str):
        if _is_secret(name, data):
            learn(data)
        for value in _in_urls(data):
            learn(value)
    elif _is_long_number(data) and names_secret(name):
        learn(str(data))


def learn_environment() -> None:
    """Learn the secrets of this process's environment and command line."""
    import sys

    learn_data(dict(os.environ))
    learn_words(sys.argv[1:])


def _is_long_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) >= 100_000


# -- texts -----------------------------------------------------------------------------------------------------------------

_VALUE = r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\<>])+"""  # a word of a shell
_FLAG = re.compile(rf"(?<![\w-])(--?[A-Za-z][\w.-]*)(=|[ \t]+)(?!\*\*\*|--?[A-Za-z])({_VALUE})")
_ASSIGNED = re.compile(rf"(?<![\w-])(\+{{0,2}}[A-Za-z_][\w.-]*)(=)(?!\*\*\*)({_VALUE})")
_QUOTED = re.compile(r"""((\\?["'])([\w .-]{1,80})\2\s*:\s*)((\\?["'])(?!\*\*\*).*?(?<!\\)\5|\d{6,})""")
_LINE = re.compile(
    r"""(?m)^(\s*(?:- )?([\w.-]+):[ \t]+)(?!\*\*\*|[|>&*!][-+\w]*$)('[^'\n]*'|"(?:\\.|[^"\\\n])*"|[^\s#]+)"""
)
# Tokens by the prefixes that services document. A text of words does not match.
_TOKENS = re.compile(
    r"\b(?:gh[pousr]_|github_pat_|glpat-|nvapi-|xox[abeoprs]-)[\w-]{16,}"
    r"|\b(?:hf|npm)_[A-Za-z\d]{20,}|\bpypi-AgE[\w-]{10,}|\bsk_(?:live|test)_\w{16,}"
    r"|\bsk-(?:[A-Za-z\d]{16,}[\w-]*|(?=[\w-]*[A-Z])(?=[\w-]*\d)[\w-]{16,})"
)
_SHAPES = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z\d]{16}\b|\bAIza[\w-]{30,}|\beyJ[\w-]{2,2000}\.eyJ[\w-]+\.[\w-]+"  # AWS, Google, JSON Web Tokens
    r"|(?i:(?<=\bbearer )[\w.~+/=-]{8,})"
)
_MARKS = ("://", "?", ";")  # one of them is in each text that _URLS match
_URLS = (
    # A word that is a database's URL: the password ends at its last @, with any characters in it.
    re.compile(
        r"^((?:--storage=)?(?:postgres|mysql|mariadb)\w*(?:\+\w+)?://[^:/@\s]*:)(.*)(?=@)", re.IGNORECASE | re.DOTALL
    ),
    re.compile(r"(//[^:/@\s]*:)(\S*)(?=@)"),  # a password that contains an @ is hidden up to the last one
    re.compile(
        r"([?&;](?:[\w.-]*(?:pass|pwd|secret|token|key|auth|credential|signature)[\w.-]*|sig)=)([^&\s\"'<>]*)",
        re.IGNORECASE,
    ),
    # `//joe:secret/db`: the host is missing
    re.compile(r"(\b(?:postgres|mysql|mariadb)\w*(?:\+\w+)?://[^:/@\s]+:)((?!\d+(?:[/?\s]|$))[^@/?\s]+)(?=[/?\s]|$)"),
)


def hide_password(text: str) -> str:
    """Return a URL, or a text with URLs, without their passwords."""
    for secret in _URLS:
        text = secret.sub(lambda found: f"{found[1]}{found[2] if _PLACEHOLDER.fullmatch(found[2]) else MASK}", text)
    return text


def password_in(url: str) -> str:
    """Return the password of a database's URL as typed; empty if it has none."""
    found = _URLS[0].search(url.partition("?")[0])
    return found[2] if found else ""


def _in_urls(text: str) -> Iterator[str]:
    """Yield every password in a URL of the text, as typed and decoded."""
    if any(mark in text for mark in _MARKS):
        for secret in _URLS:
            for found in secret.finditer(text):
                yield from {found[2], unquote(found[2])} - {"", MASK}


def without_secrets(text: str, url: str) -> str:
    """Return a driver's message about a URL without the URL's passwords, in any spelling."""
    for value in _in_urls(url):
        text = text.replace(value, MASK)
    return masked(text)


def _named(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}{MASK}" if _is_secret(found[1], found[3]) else found[0]


def _quoted(found: re.Match[str]) -> str:
    if not _is_secret(found[3], found[4].strip("\\\"'")):
        return found[0]
    mark = found[5] or '"'
    return f"{found[1]}{mark}{MASK}{mark}"


def _on_a_line(found: re.Match[str]) -> str:
    return f'{found[1]}"{MASK}"' if _is_secret(found[2], found[3].strip("'\"")) else found[0]


def masked_values(text: str) -> str:
    """Return the text with known secret values masked, and nothing else changed."""
    global _pattern
    if not _learnt:
        return text
    if _pattern is None:
        longest_first = sorted(_learnt, key=len, reverse=True)
        _pattern = re.compile("|".join(map(_alone, longest_first)))
    return _pattern.sub(MASK, text)


def _alone(value: str) -> str:
    """Return the pattern of a value. A value of letters or digits only must not be part of a longer word."""
    if value.isalpha() or value.isdigit():
        return rf"(?<![^\W_]){re.escape(value)}(?![^\W_])"
    return re.escape(value)


def masked(text: str) -> str:
    """Return a text for display without secrets.

    Masked are known values, `--name value`, `NAME=value`, `"name": "value"`, a line `name: value`, passwords in URLs, and tokens
    of well-known forms.
    """
    text = _TOKENS.sub(MASK, _SHAPES.sub(MASK, masked_values(text)))
    if any(mark in text for mark in _MARKS):
        text = hide_password(text)
    if "=" in text or "-" in text:
        text = _ASSIGNED.sub(_named, _FLAG.sub(_named, text))
    if ":" in text:
        text = _LINE.sub(_on_a_line, _QUOTED.sub(_quoted, text))
    return text


_HEADER = re.compile(r"(([A-Za-z][\w-]*):\s*)(\S.*)")  # as for curl: `--header 'X-Api-Key: VALUE'`


def secret_parts(words: Sequence[str]) -> list[tuple[str, str, str | None]]:
    """Return (text to keep, name of the secret, secret) of each word; (word, "", None) if it has none.

    The name is empty if a secret is inside a word: the whole word is then the secret.
    """
    parts: list[tuple[str, str, str | None]] = []
    flag = ""
    for word in words:
        name, is_assigned, value = word.partition("=")
        plain = re.fullmatch(r"(?:--?|\+{1,2})?[A-Za-z_][\w.-]*", name) is not None
        header = _HEADER.fullmatch(value if is_assigned and name.startswith("-") else word)
        if _is_secret(flag, word) and not re.match(r"--?[A-Za-z]", word):
            parts.append(("", flag.lstrip("-"), word))
        elif is_assigned and plain and _is_secret(name, value):
            parts.append((f"{name}=", name.lstrip("-+"), value))
        elif header is not None and _is_secret(header[2], header[3]):
            parts.append((word.removesuffix(header[3]), header[2], header[3]))
        elif masked(word) != word:
            parts.append(("", "", word))
        else:
            parts.append((word, "", None))
        flag = word if re.fullmatch(r"--?[A-Za-z][\w.-]*", word) else ""
    return parts


def masked_words(words: Sequence[str]) -> list[str]:
    """Return a command's words without secrets."""
    return [
        masked(word) if value is None or not name else f"{kept}{MASK}"
        for word, (kept, name, value) in zip(words, secret_parts(words), strict=True)
    ]


def masked_data(data: Any, name: str = "") -> Any:
    """Return nested data without secrets; keys, numbers and order are kept. A list of texts is read as a command's words."""
    if isinstance(data, Mapping):
        return {key: masked_data(value, str(key)) for key, value in data.items()}
    if isinstance(data, list | tuple):
        texts = bool(data) and all(isinstance(one, str) for one in data)
        if texts and len(data) == 2 and _is_secret(*data):
            return [data[0], MASK]  # (name, value) of a variable
        if texts and not names_secret(name):
            return masked_words(data)
        return [masked_data(one, name) for one in data]
    if isinstance(data, str):
        return MASK if _is_secret(name, data) else masked(data)
    return MASK if _is_long_number(data) and names_secret(name) else data


def shell_text(words: Iterable[str], variables: dict[str, tuple[str, str]]) -> str:
    """Return words in shell syntax, with each secret replaced by a variable that has to be set.

    Args:
        variables: receives (purpose, secret) by the variable's name.
    """
    text, words = [], list(words)
    for before, word, (kept, name, value) in zip(["", *words], words, secret_parts(words), strict=False):
        if value is None:
            text.append(shlex.quote(word))
            continue
        variable = re.sub(r"\W", "_", name or f"SECRET_{len(variables)}").upper().strip("_")
        while variable in variables and variables[variable][1] != value:
            variable += "_"
        variables[variable] = (
            kept.rstrip("=") or (before if before.startswith("-") else "a word of the command"),
            value,
        )
        text.append(f'{shlex.quote(kept) if kept else ""}"${{{variable}}}"')
    return " ".join(text)
