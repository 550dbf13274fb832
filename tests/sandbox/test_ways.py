"""Each way to change a user's files leaves them as they are under each protection, for root and an ordinary user."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.sandbox.conftest import ORDINARY, SYSTEM_PYTHON, available, run_ways
from tests.sandbox.ways import WAYS, Way

DIFFERS = {  # ways whose commands fail in the sandbox, without a loss
    # ovl_decode_real_fh() of the kernel finds a copied file's first inode number only with CAP_DAC_READ_SEARCH in the first user
    # namespace; index, xino and nfs_export change nothing. git refuses a hard link whose number has changed.
    "sh_git_clone_into": "for an ordinary user"
}
MODES = [(protection, user) for protection in ("overlay", "landlock") for user in (os.getuid(), ORDINARY)]


def ways_of(number: int) -> list[Way]:
    """Return a quarter of the ways."""
    return WAYS[number :: len(MODES)]


QUICK = ways_of(0)[::3]


@pytest.mark.slow
@pytest.mark.main_path
def test_a_sample_of_ways_changes_no_users_file() -> None:
    check(*MODES[0], QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MODES)))
def test_no_way_changes_a_users_file(number: int) -> None:
    check(*MODES[number], [way for way in ways_of(number) if number or way not in QUICK])


@pytest.mark.slow
@pytest.mark.parametrize(("protection", "user"), MODES)
def test_no_way_changes_a_users_file_in_any_mode(protection: str, user: int) -> None:
    check(protection, user, WAYS)


def test_the_table_has_200_ways_and_12_tools() -> None:
    found = [way for way in WAYS if available(way, sys.executable)]
    assert len(found) >= 200, "too few tools are installed"
    assert len({tool for way in found if way.kind == "sh" for tool in way.needs}) >= 12


def check(protection: str, user: int, ways: list[Way]) -> None:
    """Check that the ways change nothing, and succeed under an overlay."""
    if user == ORDINARY and os.getuid():
        pytest.skip("only root can become an ordinary user")
    if user == ORDINARY and not Path(SYSTEM_PYTHON).exists():
        pytest.skip("no Python that every user can read")
    found = run_ways(protection, user if user == ORDINARY else 0, ways)
    assert {name: row["changed"] for name, row in found.items() if row["changed"]} == {}
    if protection == "overlay":
        failed = {name: row["printed"] for name, row in found.items() if row["status"]}
        assert failed.keys() <= DIFFERS.keys(), failed


@pytest.mark.slow
def test_every_way_changes_a_file_without_a_sandbox() -> None:
    """Keeps the table honest: a way that changes nothing proves nothing."""
    found = run_ways("none", 0, WAYS)
    assert {name: row["printed"] for name, row in found.items() if row["status"] or not row["changed"]} == {}
