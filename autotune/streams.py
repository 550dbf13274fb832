"""Who reads what we say may go: `tee` that Ctrl-C ends too, a terminal whose connection is cut. What is said then is lost, and
nothing else: a study still has its winner, a training goes on."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from autotune.masking import masked

# C0, DEL and C1 (ISO 6429), but for tab and newline, and the characters that reorder text (Unicode's property Bidi_Control).
_HIDDEN = [*range(32), *range(127, 160), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {one: f"\\u{one:04x}" for one in _HIDDEN if chr(one) not in "\t\n"}
_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)  # a pipe without reader, a terminal that hung up


def printable(text: str) -> str:
    """Return the text with each character that moves a cursor, recolours a terminal or reorders text as its escape, `\\u001b`."""
    return text.replace("\r\n", "\n").translate(_SHOWN)


class Lasting:
    """A text stream of which a reader that has gone is no error: from then on it writes to nowhere. It passes no control
    characters on: what is printed may come from a stranger's study.

    Args:
        styled: pass them on; rich writes its own, into texts that it has made printable (`cli_parts.console`).
    """

    def __init__(self, stream: TextIO, *, styled: bool = False) -> None:
        self._stream, self._shown = stream, (lambda text: text) if styled else printable

    @property
    def styled(self) -> Lasting:
        """The same stream for rich."""
        return Lasting(self._stream, styled=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        text = self._shown(masked(text))
        with self._outlasting():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:  # `±` where only ASCII is written: the rest of the line counts
                self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._outlasting():
            self._stream.flush()

    @contextmanager
    def _outlasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())  # what is buffered goes there, too, and what children write
                os.close(nowhere)
            if error.errno not in _GONE:  # a full disk is said, once
                raise


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Standard output and standard error are such streams meanwhile."""
    before = sys.stdout, sys.stderr
    # a process may have been started without them
    sys.stdout, sys.stderr = (cast(TextIO, Lasting(stream)) if stream else stream for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):  # else the interpreter flushes the plain ones at its end, and complains
            if stream is not None:
                with suppress(OSError, ValueError):
                    stream.flush()
        sys.stdout, sys.stderr = before


def is_watched(stream: Any) -> bool:
    """Whether somebody looks at the stream as it is written, at a terminal that moves its cursor: a notebook shows every
    picture of a live view below the one before, and nobody can answer there."""
    return bool(stream and stream.isatty()) and "JPY_PARENT_PID" not in os.environ
