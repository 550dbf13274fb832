"""Each way to change a user's files leaves them as they are, byte for byte, under each protection, for root and an ordinary user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sandbox.conftest import ORDINARY, SYSTEM_PYTHON, run_ways
from tests.sandbox.ways import WAYS

DIFFERS = {  # ways whose commands fail in the sandbox, without a loss
    # ovl_decode_real_fh() of the kernel finds a copied file's first inode number only with CAP_DAC_READ_SEARCH in the first user
    # namespace; index, xino and nfs_export change nothing. git refuses a hard link whose number has changed.
    "sh_git_clone_into": "for an ordinary user"
}
MODES = [(protection, user) for protection in ("overlay", "landlock") for user in (os.getuid(), ORDINARY)]


@pytest.mark.parametrize(("protection", "user"), MODES)
def test_no_way_changes_a_users_file(protection: str, user: int) -> None:
    if user == ORDINARY and os.getuid():
        pytest.skip("only root can become an ordinary user")
    if user == ORDINARY and not Path(SYSTEM_PYTHON).exists():
        pytest.skip("no Python that every user can read")
    found = run_ways(protection, user if user == ORDINARY else 0, WAYS)
    assert len(found) >= 200, "too few tools are installed"
    assert {name: row["changed"] for name, row in found.items() if row["changed"]} == {}
    if protection == "overlay":
        failed = {name: row["printed"] for name, row in found.items() if row["status"] and not row["breaks_out"]}
        assert failed.keys() <= DIFFERS.keys(), failed


@pytest.mark.slow
def test_every_way_changes_a_file_without_a_sandbox() -> None:
    """Keeps the table honest: a way that changes nothing proves nothing."""
    found = run_ways("none", 0, [way for way in WAYS if not way.breaks_out])
    assert {name: row["printed"] for name, row in found.items() if row["status"] or not row["changed"]} == {}
