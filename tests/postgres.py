"""A PostgreSQL server of a test's own, at a port of this machine."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import free_port, wait_until


def _found(tool: str) -> str | None:
    debians = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{tool}"))
    return shutil.which(tool) or (str(debians[-1]) if debians else None)


POSTGRES, INITDB = _found("postgres"), _found("initdb")


def why_not() -> str:
    """What is missing on this machine; empty where nothing is."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        return f"no psycopg that works ({error}): pip install 'psycopg[binary]'"
    return "" if POSTGRES and INITDB else "no PostgreSQL on this machine: `make cluster-tests` installs one"


class Postgres:
    """It runs once `start` was called. Its one user has a password that would be seen wherever it is printed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.password = f"s3cret-{secrets.token_hex(4)}"
        # PostgreSQL refuses to run as root
        self._as: dict[str, Any] = {"user": "postgres"} if os.geteuid() == 0 else {}
        self._process: subprocess.Popen[bytes] | None = None
        if self._as:
            os.chown(folder, pwd.getpwnam("postgres").pw_uid, -1)
        word = folder / "word"
        word.write_text(self.password)
        word.chmod(0o644)
        subprocess.run(
            [str(INITDB), "-D", str(folder / "data"), "-U", "joe", f"--pwfile={word}", "-A", "scram-sha-256", "--no-sync"],
            check=True, capture_output=True, timeout=120, cwd=folder, **self._as,
        )  # fmt: skip
        word.unlink()

    @property
    def url(self) -> str:
        return f"postgresql://joe:{self.password}@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        settings = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        words = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(POSTGRES), "-D", str(self.folder / "data"), *words],
                stdout=log, stderr=log, cwd=self.folder, **self._as,
            )  # fmt: skip
        wait_until(self.answers, "PostgreSQL")

    def answers(self) -> bool:
        import psycopg

        try:
            self.ask("select 1")
        except psycopg.OperationalError:
            return False
        return True

    def ask(self, query: str) -> list[Any]:
        import psycopg

        with closing(psycopg.connect(self.url, autocommit=True, connect_timeout=5)) as connection:
            answer = connection.execute(query.encode())
            return answer.fetchall() if answer.description else []

    def cut(self) -> int:
        """Cuts the connections of all clients; returns how many."""
        own = "pid <> pg_backend_pid() and backend_type = 'client backend'"
        return len(self.ask(f"select pg_terminate_backend(pid) from pg_stat_activity where {own}"))

    def stop(self) -> None:
        """At once, as when its machine is restarted."""
        if self._process is not None:
            self._process.send_signal(3)  # "immediate shutdown": pg_ctl(1)
            self._process.wait(60)
            self._process = None


@contextmanager
def made_postgres() -> Iterator[Postgres]:
    """A server, running, which is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="autotune-postgres-", dir="/tmp"))  # pytest's own are for this user alone
    server = Postgres(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
