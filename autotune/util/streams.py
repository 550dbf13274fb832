"""Output streams that survive the end of their reader, such as a `tee` killed by Ctrl-C or a terminal whose connection is cut.

Later output is lost, but a study still has its winner, and a training continues.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from autotune.errors import UserError
from autotune.masking import masked

# C0, DEL and C1 (ISO 6429) except tab and newline, and the characters that reorder text (Unicode's property Bidi_Control).
_HIDDEN = [*range(32), *range(127, 160), 0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_SHOWN = {one: f"\\u{one:04x}" for one in _HIDDEN if chr(one) not in "\t\n"}
_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)  # a pipe without reader, a terminal that hung up


def printable(text: str) -> str:
    r"""Return the text with characters escaped, like `\u001b`, that move a cursor, recolour a terminal or reorder text."""
    return text.replace("\r\n", "\n").translate(_SHOWN)


class Command(str):
    """Line with a command, which no terminal folds, so that it can be copied."""

    __slots__ = ()


def folded(text: str, stream: Any) -> str:
    """Return a text as the stream shows it: a terminal has its lines folded at words."""
    if isinstance(text, Command) or not is_watched(stream):
        return text
    columns, _ = shutil.get_terminal_size()
    wrapper = textwrap.TextWrapper(columns, "", "    ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(map(wrapper.fill, text.split("\n")))


class UnclosedStream:
    """Text stream that ignores the end of its reader: later output is discarded.

    Control characters are escaped, since printed text may come from another user's study.

    Args:
        styled: do not escape them; rich writes its own into texts that are already printable (`options.console`).
    """

    def __init__(self, stream: TextIO, *, styled: bool = False) -> None:
        self._stream, self._shown = stream, (lambda text: text) if styled else printable

    @property
    def styled(self) -> UnclosedStream:
        """This stream for rich, with its control characters."""
        return UnclosedStream(self._stream, styled=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text with secrets masked; return its length. A closed reader is ignored."""
        text = self._shown(masked(text))
        with self._outlasting():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:  # `±` on an ASCII stream: the rest of the line is kept
                self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write all lines."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream. A closed reader is ignored."""
        with self._outlasting():
            self._stream.flush()

    @contextmanager
    def _outlasting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())  # buffered output and that of children goes there, too
                os.close(nowhere)
            if error.errno not in _GONE:  # a full disk is reported, once
                raise


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Replace standard output and standard error by such streams for the body of the `with`.

    The traceback of an exception that leaves the body is printed here, with secrets masked: the interpreter would print it
    to the plain stream. The process then ends with exit code 1.

    Raises:
        SystemExit: the body raised an exception.
    """
    before = sys.stdout, sys.stderr
    # A process may have been started without them.
    sys.stdout, sys.stderr = (cast(TextIO, UnclosedStream(stream)) if stream else stream for stream in before)
    try:
        yield
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        # otherwise the interpreter flushes the plain streams at exit, and complains
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with suppress(OSError, ValueError):
                    stream.flush()
        sys.stdout, sys.stderr = before


# -- log -----------------------------------------------------------------------------------------------------------------


class _Masking(logging.Filter):
    """Filter that masks secrets in a record, for every handler."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(masked(record.getMessage())), None
        return True


LOG = logging.getLogger("autotune")
LOG.addFilter(_Masking())
LOG.addHandler(logging.NullHandler())  # a library prints nothing by itself


class _ToFile(logging.FileHandler):
    """Handler that appends to a file. The first failed write is printed, and no failed write ends the command."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._failed:
            self._failed = True
            with suppress(OSError):
                print(f"autotune: --log-file is incomplete: {sys.exc_info()[1]}", file=sys.stderr, flush=True)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


@contextmanager
def logging_to(file: Path | None) -> Iterator[None]:
    """Write the log of this package for the body of the `with`.

    Args:
        file: receives every record with its time, at its end; None: no file.

    Raises:
        UserError: the file cannot be written.
    """
    if file is None:
        yield
        return
    try:
        handler = _ToFile(file, encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"--log-file {file} cannot be written ({error.strerror}). Choose another file.") from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = LOG.level
    LOG.setLevel(logging.DEBUG)
    LOG.addHandler(handler)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        handler.close()
        LOG.setLevel(before)


def is_watched(stream: Any) -> bool:
    """Check that the stream is an interactive terminal that can move its cursor.

    A notebook is not: it prints each update of a live view below the last, and offers no input.
    """
    return bool(stream and stream.isatty()) and "JPY_PARENT_PID" not in os.environ
