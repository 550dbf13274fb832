"""What optuna-dashboard shows of a study, seen in a browser: the same words as a person reads."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, make_server

import optuna
import pytest

from autotune.problem.outcome import Phase
from autotune.search.study import StudyStore
from autotune.search.trials import SEARCH, VERIFY
from tests.conftest import make_candidate
from tests.results.report.conftest import Browser
from tests.results.report.studies import measured, open_study, ran_out, tell

dashboard = pytest.importorskip("optuna_dashboard", reason="optuna-dashboard is not installed")
pytestmark = pytest.mark.slow


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def served(store: StudyStore) -> Iterator[str]:
    """The address of the study's page, of the database as `optuna-dashboard sqlite:///...` opens it."""
    assert store.folder is not None
    storage = optuna.storages.RDBStorage(f"sqlite:///{store.folder / 'study.db'}")
    with make_server("127.0.0.1", 0, dashboard.wsgi(storage), handler_class=Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/dashboard/studies/{store.study._study_id}"
        finally:
            server.shutdown()
            thread.join()


def read(browser: Browser, address: str, expected: str) -> str:
    """The page's text once it says what is expected, or after half a minute what it says then."""
    browser.driver.get(address)
    deadline = time.monotonic() + 30
    while expected not in (text := browser.text("body")) and time.monotonic() < deadline:
        time.sleep(0.2)
    return text


def test_the_best_trial_is_one_that_fits(browser: Browser, tmp_path: Path) -> None:
    store = open_study(tmp_path)
    first = make_candidate(0, 4)
    tell(store, first, measured(100, 11))
    tell(store, make_candidate(0, 16), measured(170, 23.5))  # faster, and above the ceiling of 22.8 GiB
    tell(store, make_candidate(0, 32), ran_out(Phase.FORWARD, 4.0))
    best = tell(store, first, measured(101, 11.2), VERIFY)
    store.set_winner(best, "verified")
    with served(store) as address:
        assert f"Best Trial (number={best})" in read(browser, address, f"Best Trial (number={best})")
        # the plot of the history leaves them out of the best so far
        names = browser.run(
            "return [...document.querySelectorAll('.js-plotly-plot')].flatMap(p => p.data || [])"
            ".map(d => [d.name, (d.y || []).map(Number)])"
        )
        series = {name: values for name, values in names if name}
        assert max(series["Best Value of s"]) == 101
        assert read(browser, f"{address}/trials", "Pruned").count("Pruned") >= 2


def test_where_nothing_fits_no_trial_is_shown_as_best(browser: Browser, tmp_path: Path) -> None:
    store = open_study(tmp_path)
    tell(store, make_candidate(0, 16), measured(170, 23.5), SEARCH)
    tell(store, make_candidate(0, 32), ran_out(Phase.FORWARD, 4.0), SEARCH)
    with served(store) as address:
        shown = read(browser, address, "Best Trial")
        assert "number=" not in shown
