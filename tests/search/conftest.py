"""Where studies that several tuners share are kept."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.search.replay import ReplayTable, load_replay_table
from tests.postgres import Postgres, made_postgres, why_not

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


@pytest.fixture(scope="session")
def whole_table() -> ReplayTable:
    """A table of 2,124 candidates."""
    return load_replay_table(TABLE)


@pytest.fixture(scope="session")
def replay_table(whole_table: ReplayTable) -> ReplayTable:
    """A third of it, with every stage, batch and offload: searches of it take half as long."""
    kept = {"reduce_bucket_size": (500_000_000, 500_000, None), "sub_group_size": (10**9, None)}
    rows = {
        one: row
        for one, row in whole_table.rows.items()
        if all(one.get(knob) in values for knob, values in kept.items())
    }
    return dataclasses.replace(whole_table, rows=rows)


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


@pytest.fixture(params=["sqlite", "journal", pytest.param("postgresql", marks=pytest.mark.slow)])
def shared_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a new study's storage, of every kind that several tuners may share."""
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").url)
    file = tmp_path / f"{secrets.token_hex(3)}.{request.param}"
    return f"sqlite:///{file}" if request.param == "sqlite" else f"journal:{file}"
