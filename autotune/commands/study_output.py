"""Report of a study, and its form in Python."""

from __future__ import annotations

import html
from pathlib import Path, PurePath

from autotune.commands.request import python_errors
from autotune.errors import readable
from autotune.results.export import export_store
from autotune.results.output_files import check_out
from autotune.results.report.build import study_report, without_secrets
from autotune.results.report.html import study_page
from autotune.search.storage import failures_in_one_line, output_file
from autotune.search.study import StudyStore
from autotune.search.trials import Record
from autotune.util.files import cannot_write, write_atomically
from autotune.util.streams import printable
from autotune.util.units import counted

# -- report ------------------------------------------------------------------------------------------------------------


def report_study(study: str, storage: str | None, out: Path | None) -> Path:
    """Write the page of a study to `out`, or as `NAME.html` into the study's folder, and return its path.

    Raises:
        UserError: there is no such study, or the file cannot be written.
    """
    return _report(StudyStore.load(study, storage), out)


def _report(store: StudyStore, out: Path | None) -> Path:
    out = out or output_file(store.folder, f"{store.name}.html")
    check_out(out, ".html")
    with failures_in_one_line():
        write_study(store, out)
    return out


def write_study(store: StudyStore, out: Path) -> None:
    """Write the page of an open study.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        # a name may hold bytes that are no text, or move a terminal's cursor
        write_atomically(out, printable(_study_html(store).encode(errors="replace").decode()))
    except OSError as error:
        raise cannot_write(out, error, "name another file") from None


def _study_html(store: StudyStore) -> str:
    return study_page(without_secrets(study_report(store)))


# -- Python --------------------------------------------------------------------------------------------------------------


class Study(StudyStore):
    """A stored study: `best`, `trials`, and what notebooks show of it. `autotune.open_study` returns it."""

    def __repr__(self) -> str:
        """Return the study's name, size and winner in one line."""
        return f"<Study {self.name!r}: {counted(len(self.trials), 'trial')}, best: {self.best}>"

    def _repr_html_(self) -> str:
        """Return the study's report in a frame, which a notebook shows from its first screen on."""
        with readable("the study"):
            page = _study_html(self)
        frame = 'width="100%" height="720" style="border: 1px solid #8884" sandbox="allow-scripts"'
        return f'<iframe title="autotune study" {frame} srcdoc="{html.escape(page)}"></iframe>'

    @property
    def trials(self) -> list[Record]:
        """Return all trials in order."""
        return self.records()

    @property
    def best(self) -> Record | None:
        """Return the winner's trial, or None."""
        return self.winner

    def export(
        self, style: str = "deepspeed", *, out: str | PurePath | None = None, trial: int | None = None
    ) -> list[Path]:
        """Write the winner, or one trial, as `autotune export` does, and return the files.

        Args:
            style: `deepspeed`, `accelerate`, `hf`, `fsdp` or `sbatch`.
            out: file to write; default: in the study's folder.
            trial: a trial's number instead of the winner.

        Raises:
            BadArgument: there is no winner, no such trial or style, or the file cannot be written.
        """
        with python_errors():
            return export_store(self, style, Path(out) if out is not None else None, trial)

    def report(self, out: str | PurePath | None = None) -> Path:
        """Write the study as one HTML page, as `autotune report` does, and return its path.

        Raises:
            BadArgument: the file cannot be written.
        """
        with python_errors():
            return _report(self, Path(out) if out is not None else None)
