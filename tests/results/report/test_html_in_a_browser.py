"""The pages as people see them: in a real browser, at the widths of a telephone and of a desk, by day and by night."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import make_candidate, wait_until
from tests.results.report.conftest import Browser
from tests.results.report.kinds import KINDS
from tests.results.report.studies import EVIL

Pages = Callable[[str], Path]
_PAINTED = """return [...document.querySelectorAll('main p, main td, main li, main h2, svg text')].filter(e =>
  e.getClientRects().length && e.innerText !== '').slice(0, 200).map(e => getComputedStyle(document.body).backgroundColor)[0]"""

# the richest always, the others in `make test-all`
EVERY_KIND = [pytest.param(kind, marks=() if kind == "everything" else pytest.mark.slow) for kind in KINDS]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("width", [400, 1600])
def test_a_page_is_readable_at_every_width(kind: str, width: int, browser: Browser, pages: Pages) -> None:
    browser.open(pages(kind), width)
    assert browser.run("return document.documentElement.scrollWidth") <= width, "the page scrolls to the side"
    small = """return [...document.querySelectorAll('main *, svg text')].filter(e => e.getClientRects().length &&
        [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && parseFloat(getComputedStyle(e).fontSize) < 11)
        .map(e => e.outerHTML.slice(0, 120))"""
    assert browser.run(small) == []
    squeezed = (
        "return [...document.querySelectorAll('svg.plot')].filter(e => e.getBoundingClientRect().width < 200).length"
    )
    assert browser.run(squeezed) == 0
    assert browser.complaints() == []


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_keeps_people_out(kind: str, dark: bool, browser: Browser, pages: Pages) -> None:
    browser.open(pages(kind), 1200, dark)
    assert browser.run(_PAINTED) == ("rgb(15, 19, 24)" if dark else "rgb(255, 255, 255)")
    assert browser.serious() == []


def test_the_sections_are_there(browser: Browser, pages: Pages) -> None:
    browser.open(pages("everything"))
    assert str(make_candidate(0, 8)) in browser.text("#verdict")
    assert "the winner is 1.60x yours" in browser.text("#verdict")
    browser.click("#verdict summary")
    assert "resumes from a checkpoint" in browser.text("#verdict")
    assert "trial 1: " in browser.run("return document.querySelector('svg a[href=\"#trial-1\"] title').textContent")
    browser.click("#mattered summary")
    assert browser.shown("#speed svg.plot use[data-t]") == 10, "seven measured and three that ran out"
    assert "micro-batch" in browser.text("#mattered")
    assert browser.shown("#trials-table tbody tr") == 14
    browser.click("#reproduce summary")
    assert "autotune run --study an error" in browser.text("#reproduce")


def test_one_filter_is_for_the_table_and_the_chart(browser: Browser, pages: Pages) -> None:
    browser.open(pages("everything"))
    before = browser.shown("#speed svg [data-t]")
    browser.click("#filters input[value='s:OOM']")
    assert browser.shown("#trials-table tbody tr") == 11
    assert browser.text("#count") == "11 of 14 trials"
    assert browser.shown("#speed svg [data-t]") == before - 3
    browser.type("#search", "timeout")
    assert browser.shown("#trials-table tbody tr") == 1
    browser.click("#filters button[type=reset]")
    wait_until(lambda: browser.text("#count") == "14 trials", "everything is shown again")
    assert browser.shown("#trials-table tbody tr") == 14


def test_a_column_is_sorted_by_its_values_and_gaps_stay_last(browser: Browser, pages: Pages) -> None:
    browser.open(pages("everything"))
    column = "return [...document.querySelectorAll('#trials-table tbody tr')].map(r => r.cells[6].innerText)"
    head = "#trials-table th:nth-child(7)"
    browser.click(f"{head} button")
    first, second = browser.run(column)[:2]
    assert (first, second) == ("9.00 GiB", "11.00 GiB"), "by size, not by letters"
    assert browser.run(f"return document.querySelector('{head}').ariaSort") == "ascending"
    browser.click(f"{head} button")
    assert browser.run(column)[0] == "23.50 GiB"
    assert not browser.run(column)[-1][:1].isdigit(), "what has no peak stays last"


DARK, LIGHT = "rgb(15, 19, 24)", "rgb(255, 255, 255)"


def _is_kept(browser: Browser) -> bool:
    """Whether the page is dark once it is loaded anew. Chromium writes what a page stores a moment later, and loses it where the
    page is loaded anew before: then it is chosen once more."""
    browser.driver.refresh()
    if browser.run(_PAINTED) == DARK:
        return True
    browser.click("#theme")
    time.sleep(0.2)
    return False


@pytest.mark.slow
def test_the_theme_is_chosen(browser: Browser, pages: Pages) -> None:
    browser.open(pages("one trial"), dark=False)
    browser.click("#theme")
    assert browser.run(_PAINTED) == DARK
    wait_until(lambda: _is_kept(browser), "it is kept")
    browser.click("#theme")
    assert browser.run(_PAINTED) == LIGHT
    browser.run("localStorage.clear()")


def test_the_data_is_saved_as_csv_and_json(browser: Browser, pages: Pages) -> None:
    browser.open(pages("evil"))
    browser.run(
        "window.saved = []; URL.createObjectURL = b => { b.text().then(t => saved.push(t)); return '#'; };"
        "HTMLAnchorElement.prototype.click = function () {}"
    )
    browser.click("#save-csv")
    browser.click("#save-json")
    wait = "const done = arguments[0]; const look = () => saved.length > 1 ? done(saved) : setTimeout(look, 20); look()"
    csv, stored = sorted(browser.driver.execute_async_script(wait), key=lambda text: text.startswith("{"))
    assert csv.startswith("number,label,")
    assert EVIL.replace('"', '""') in csv
    assert '"trials"' in stored


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["evil"])
def test_names_that_look_like_a_script_are_text(kind: str, browser: Browser, pages: Pages) -> None:
    browser.open(pages(kind))
    assert "owned" not in browser.driver.title.replace("document.title='owned'", "")
    assert browser.run("return document.querySelectorAll('img, iframe, object').length") == 0
    assert "<script>document.title" in browser.text("body"), "it is shown as it was written"
    assert browser.complaints() == []


def test_the_page_works_without_scripts(browser: Browser, pages: Pages) -> None:
    """As a mail's preview shows it: no button that does nothing, and everything that is said."""
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(pages("everything"))
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        assert browser.shown(".needs-js") == 0
        assert browser.shown("#trials-table tbody tr") == 14
        assert browser.shown("#speed use[data-t]") == 10
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.slow
def test_on_paper_nothing_is_folded_or_cut(browser: Browser, pages: Pages) -> None:
    browser.open(pages("500 trials"))
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        browser.run("dispatchEvent(new Event('beforeprint'))")
        assert browser.run("return document.querySelectorAll('details:not([open])').length") == 0
        assert browser.shown("button") == 0
        box = "const b = document.querySelector('#trials-box'); return b.scrollHeight - b.clientHeight"
        assert browser.run(box) <= 2
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
