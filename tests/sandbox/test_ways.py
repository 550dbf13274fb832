"""Each way to change a user's files leaves them as they are, byte for byte, under each protection, for root and an ordinary user."""

from __future__ import annotations

import os
import shutil
from functools import cache
from typing import Any

import pytest

from tests.sandbox.conftest import ORDINARY, run_ways
from tests.sandbox.ways import WAYS

DIFFERS = {  # ways whose commands fail in the sandbox, without a loss
    "sh_chgrp": "an ordinary user's namespace knows one group"
}
MODES = [(protection, user) for protection in ("overlay", "landlock") for user in (os.getuid(), ORDINARY)]


@cache
def results(protection: str, user: int) -> dict[str, dict[str, Any]]:
    if user != os.getuid() and os.getuid():
        pytest.skip("only root can become an ordinary user")
    if user == ORDINARY and not shutil.which("python3", path="/usr/bin"):
        pytest.skip("no Python that every user can read")
    return run_ways(protection, 0 if user == os.getuid() else user, WAYS)


@pytest.mark.parametrize(("protection", "user"), MODES)
def test_no_way_changes_a_users_file(protection: str, user: int) -> None:
    found = results(protection, user)
    assert len(found) >= 200, "too few tools are installed"
    assert {name: row["changed"] for name, row in found.items() if row["changed"]} == {}


@pytest.mark.parametrize("user", [os.getuid(), ORDINARY])
def test_every_way_succeeds_in_an_overlay(user: int) -> None:
    expected = {way.name for way in WAYS if not way.breaks_out and way.name not in DIFFERS}
    failed = {
        name: row["printed"] for name, row in results("overlay", user).items() if row["status"] and name in expected
    }
    assert failed == {}


@pytest.mark.slow
def test_every_way_changes_a_file_without_a_sandbox() -> None:
    """Keeps the table honest: a way that changes nothing proves nothing."""
    found = run_ways("none", 0, [way for way in WAYS if not way.breaks_out])
    assert {name: row["printed"] for name, row in found.items() if row["status"] or not row["changed"]} == {}
