"""Where studies that several tuners share are kept."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.postgres import Postgres, made_postgres, why_not


@pytest.fixture(scope="session")
def _postgres_of_this_worker() -> Iterator[Postgres]:
    if why := why_not():
        pytest.skip(why)
    with ExitStack() as kept:
        yield kept.enter_context(made_postgres())


@pytest.fixture
def postgres(_postgres_of_this_worker: Postgres) -> Postgres:
    """A running server; the database is empty."""
    server = _postgres_of_this_worker
    if not server.answers():
        server.start()
    server.cut()
    server.ask("drop schema public cascade")
    server.ask("create schema public")
    return server


@pytest.fixture(params=["sqlite", "journal", "postgresql"])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a new study's storage, of every kind that several tuners may share."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").url)
    file = tmp_path / f"{secrets.token_hex(3)}.{request.param}"
    return f"sqlite:///{file}" if request.param == "sqlite" else f"journal:{file}"
