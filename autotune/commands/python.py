"""Python in which ranks run: the typed one, the one of a study's measurements, or the active environment's."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from autotune import inquiry
from autotune.errors import UserError
from autotune.interpreter import Interpreter, Own, interpreter_at, running_in
from autotune.versions import complaint

OPTION, VARIABLE = "--python", "AUTOTUNE_PYTHON"
ACTIVE = ("VIRTUAL_ENV", "CONDA_PREFIX")  # set on activation of an environment
TRAINING = ("torch", "deepspeed")  # required by every rank
NAMED_MODEL = (*TRAINING, "transformers")


@contextmanager
def ranks_python(
    typed: str | None,
    say: Callable[[str], None],
    *,
    needed: Sequence[str] = (),
    named: Sequence[str] | None = None,
    remembered: str | None = None,
    judge: bool = True,
) -> Iterator[Interpreter]:
    """Select the ranks' Python for the body of the `with`.

    Args:
        typed: `--python`; without it AUTOTUNE_PYTHON counts, then `remembered`, then the tuner's own, then an active one.
        say: receives a line about the chosen Python if the user has not named it.
        needed: packages that are required.
        named: packages that are required if the user has named a Python; None: `needed`.
        remembered: the Python of a study's measurements, if that was not the tuner's own.
        judge: False leaves the checks of packages and versions to the caller, as `autotune doctor` does.

    Raises:
        UserError: it is no Python, does not answer, lacks a package, or has an unsupported version.
    """
    found, said = _found(typed, say, remembered)
    if said and named is not None and not needed and not _was_named(typed):
        try:  # an unnamed active environment is optional: it is skipped if it does not suffice
            _check_packages(found, named, said)
            check_versions(versions_of(found))
        except UserError as error:
            say(f"{error}: it is not used")
            found, said = Own(), ""
    elif said and named is not None:
        needed = named
    if judge and needed:
        _check_packages(found, needed, said)
        try:
            check_versions(versions_of(found))
        except UserError as error:
            raise UserError(f"{said or found.path}: {error}") from None
    with running_in(found):
        yield found


def _was_named(typed: str | None) -> bool:
    return typed is not None or bool(os.environ.get(VARIABLE, "").strip())


def versions_of(interpreter: Interpreter) -> dict[str, str]:
    """Return the version of each relevant package that is installed."""
    return {package: version for package in inquiry.PACKAGES if (version := interpreter.version(package))}


def check_versions(found: Mapping[str, str]) -> None:
    """Check that versions are supported.

    Args:
        found: version by package, without missing packages.

    Raises:
        UserError: a version is not supported; the message names all such versions, and the expected ones.
    """
    if why := complaint(found):
        raise UserError(f"{why}: use another version there, or another environment")


def _found(typed: str | None, say: Callable[[str], None], remembered: str | None) -> tuple[Interpreter, str]:
    """Return the interpreter and the option or variable that named it, empty if none did."""
    for given, name in ((typed, OPTION), (os.environ.get(VARIABLE), VARIABLE)):
        if given is not None and (given.strip() or given is typed):
            if not given.strip():
                raise UserError(f"{name} is empty: expected the Python of the environment that you train in")
            return interpreter_at(given, name), f"{name} {given}"
    if remembered is not None:
        name = "the study's Python"
        try:
            return interpreter_at(remembered, name), f"{name} {remembered}"
        except UserError as error:
            raise UserError(f"{error}; {OPTION} names another") from None
    own = Own()
    if own.version("torch") is None and (active := _active()) is not None:
        say(f"ranks run in {active.path}, of the active environment; {OPTION} names another")
        return active, f"the active environment's {active.path}"
    return own, ""


def _active() -> Interpreter | None:
    """Return the Python of an activated environment that has torch and is not the tuner's, or None."""
    for variable in ACTIVE:
        folder = os.environ.get(variable)
        if not folder or Path(folder).resolve() == Path(sys.prefix).resolve():
            continue
        with suppress(UserError):
            found = interpreter_at(folder, variable)
            if found.version("torch") is not None:
                return found
    return None


def _check_packages(found: Interpreter, needed: Sequence[str], said: str) -> None:
    missing = [package for package in needed if found.version(package) is None and not found.has(package)]
    if not missing:
        return
    lacking = " and no ".join(missing)
    if said:
        raise UserError(
            f"{said}: no {lacking} there; expected the Python of the environment that you train in "
            f"(`{shlex.join([str(found.path), '-m', 'pip', 'install', *missing])}` adds to it)"
        )
    raise UserError(
        f"no {lacking} in autotune's own environment ({sys.prefix}): give {OPTION} PATH of the environment that you train "
        f"in (or set {VARIABLE}), or install it here: pip install 'deepspeed-autotune[train]'"
    )
