"""The dashboard and the report in a real browser. Screenshots are kept in build/screenshots."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from primeslurm.base.files import write_json
from primeslurm.dashboard.report import report
from primeslurm.records.fleet import FleetView
from primeslurm.run.directory import RunDirectory
from tests.support.browser import DRAWN, SCREENSHOTS, Browser, dashboard, needs_chromium
from tests.support.recorded_runs import (
    HOSTILE,
    PROCESSES,
    T0,
    recorded_run,
    write_evaluations,
    write_metrics,
    write_rollouts,
)

pytestmark = needs_chromium

TABS = ("Curves", "Rollouts", "Evaluations", "Fleet", "Events", "Logs", "Plan", "Recipe")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that have completed, failed and are active. One has a hostile name."""
    directory = tmp_path_factory.mktemp("browser") / "runs"
    run = recorded_run(directory / "tool-use")
    write_evaluations(run)
    write_rollouts(run)
    recorded_run(directory / "tool-use-lr2", 24, outcome="failed")
    recorded_run(directory / "a b&c'\"<i>é", 3)
    active = recorded_run(directory / "active", 12, outcome="")
    states = {name: "HEALTHY" for name, _ in PROCESSES} | {"decode-r0-0": "RESTARTING"}
    # The head's next heartbeat is due in hours, so it stays responsive.
    view = FleetView(time.time(), states=states, heartbeat_s=1000.0)
    write_json(active.attempt(2).fleet_file, msgspec.to_builtins(view))
    return directory


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """Address of a dashboard with its token."""
    with dashboard(runs) as address:
        yield address


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(chromium: Browser, address: str) -> Iterator[Browser]:
    """The list of runs in a browser. After the test, nothing has failed and nothing was asked of other hosts."""
    chromium.resize(1440, 900)
    chromium.prefer("light")
    chromium.requests.clear()
    chromium.messages.clear()
    chromium.open(address)
    chromium.shows("tool-use-lr2")
    yield chromium
    chromium.check_privacy(address.partition("?")[0])
    assert chromium.run("document.title").endswith("primeslurm")


def test_runs_are_listed_filtered_and_sorted(browser: Browser) -> None:
    rows = "[...document.querySelectorAll('tbody tr td.name')].map(e => e.textContent)"
    assert len(browser.run(rows)) == 4
    browser.screenshot(SCREENSHOTS / "runs.png")
    browser.click(".chips button", "Active")
    assert browser.run(rows) == ["active"]
    browser.click(".chips button", "All")
    browser.type("input[type=search]", "TOOL")
    assert sorted(browser.run(rows)) == ["tool-use", "tool-use-lr2"]
    browser.type("input[type=search]", "")
    browser.click("button.sort", "Progress")
    assert browser.run(rows)[0] == "tool-use"
    assert browser.run("document.querySelector('[aria-sort=descending]').textContent") == "Progress"
    browser.click("button.sort", "Progress")
    assert browser.run(rows)[-1] == "tool-use"


def test_curves_are_drawn(browser: Browser) -> None:
    browser.open_run("tool-use")
    browser.until(DRAWN)
    titles = browser.run("[...document.querySelectorAll('.chart figcaption span')].map(e => e.textContent)")
    assert titles[:3] == ["Reward", "Reward per environment", "KL"] and "KV cache in use" in titles
    browser.screenshot(SCREENSHOTS / "curves.png")
    browser.type("input[type=search]", "entropy")
    visible = "[...document.querySelectorAll('.chart')].filter(e => e.checkVisibility()).length"
    assert browser.run(visible) == 1
    browser.type("input[type=search]", "")
    browser.type("input[type=range]", "0.8")
    browser.click("summary", "more metrics")
    browser.shows("unheard/of")
    browser.until(DRAWN)
    browser.type("input[type=range]", "0")


def test_a_chart_tells_its_values(browser: Browser) -> None:
    browser.open_run("tool-use")
    browser.until(DRAWN)
    label = "document.querySelector('.chart .canvas').getAttribute('aria-label')"
    browser.until(f"{label}.startsWith('Reward, step 30: mean 0.')")
    browser.click(".chart .legend button", "std. deviation")
    assert browser.run("document.querySelector('.legend [aria-pressed=false]').textContent").startswith("std. dev")


def test_curves_grow_with_the_run(browser: Browser, runs: Path) -> None:
    browser.open_run("active")
    browser.shows("running")
    browser.until(DRAWN)
    browser.shows("step 12")
    write_metrics(RunDirectory(runs / "active"), range(13, 15), "a")
    browser.until("document.querySelector('.chart .where').textContent === 'step 14'")
    assert browser.run("document.getElementById('connection').textContent") == "live"


def test_a_log_is_followed(browser: Browser, runs: Path) -> None:
    browser.open_run("active", "Logs")
    browser.click(".log-names button", "trainer-rank-0")
    browser.shows("line 49 of trainer-rank-0")
    log = runs / "active" / "attempts" / "2" / "logs" / "trainer" / "trainer-rank-0.log"
    with log.open("a") as file:
        file.write(f"\x1b[31m{HOSTILE}\x1b[0m\nthe newest line\n")
    browser.shows("the newest line")
    browser.shows(HOSTILE)
    assert browser.run("(e => e.scrollHeight - e.scrollTop - e.clientHeight)(document.querySelector('.log'))") < 40
    browser.screenshot(SCREENSHOTS / "logs.png")
    browser.type(".log-pane input[type=search]", "newest")
    lines = "[...document.querySelectorAll('.log > div')].filter(e => !e.hidden).map(e => e.textContent)"
    assert browser.run(lines) == ["the newest line"]


def test_every_tab_shows_hostile_texts_as_they_are(browser: Browser) -> None:
    browser.open_run("tool-use", "Events")
    browser.shows(HOSTILE)
    browser.screenshot(SCREENSHOTS / "events.png")
    browser.click(".tabs a", "Evaluations")
    browser.shows("0.75 ± 0.063")
    browser.click("button", "Samples")
    browser.until("document.querySelectorAll('.chip.bad').length === 16")
    browser.screenshot(SCREENSHOTS / "evaluations.png")
    browser.click(".tabs a", "Fleet")
    browser.shows("n002")
    browser.screenshot(SCREENSHOTS / "fleet.png")
    browser.click(".tabs a", "Plan")
    browser.click("button.chip", "orchestrator")
    browser.shows('"argv"')
    browser.screenshot(SCREENSHOTS / "plan.png")
    browser.click(".tabs a", "Recipe")
    browser.shows(HOSTILE)
    browser.type(".toolbar select", "tool-use-lr2")
    browser.shows("The recipes ask for the same.")
    browser.screenshot(SCREENSHOTS / "recipe.png")
    assert browser.run("document.querySelectorAll('#main img, #main script, #main i i').length") == 0


def test_a_hostile_name_is_a_name(browser: Browser) -> None:
    browser.open_run("a b&c'\"<i>é")
    browser.until(DRAWN)
    for tab in TABS[1:]:
        browser.open_tab(tab)
        assert browser.run("document.querySelector('#panel > .note.error')") is None


def test_a_rollout_is_found_and_read(browser: Browser) -> None:
    browser.open_run("tool-use", "Rollouts")
    browser.shows("1 to 12 of 12 rollouts")
    browser.screenshot(SCREENSHOTS / "rollouts.png")
    browser.type("input[type=number]", "2")
    browser.shows("1 to 8 of 8 rollouts")
    browser.click(".filters label", "Truncated")
    browser.run(
        "(e => { e.value = 'true'; e.dispatchEvent(new Event('change')); })"
        "([...document.querySelectorAll('.filters label')].find(l => l.textContent.startsWith('Truncated')).lastChild)"
    )
    browser.shows("1 to 2 of 2 rollouts")
    assert "first_step" in browser.run("location.hash") and "truncated" in browser.run("location.hash")
    browser.click("td.name a", "0002-1")
    browser.shows("The capital of France is Paris")
    browser.shows(HOSTILE)
    assert "U+202E" in browser.text() and "\u202e" not in browser.text(), "direction marks are visible"
    assert browser.run("document.querySelectorAll('#main img, #main script').length") == 0
    browser.screenshot(SCREENSHOTS / "rollout.png", whole=True)
    for name, token in (("log-probability", "rare"), ("advantage", "pos"), ("policy version", "ver")):
        browser.click(".colouring button", name)
        browser.until(f"document.querySelectorAll('.tokens .token[class*={token}]').length > 5")
        browser.screenshot(SCREENSHOTS / f"rollout-{token}.png", whole=True)
    browser.run("document.querySelector('.tokens .ver0').dispatchEvent(new Event('pointerover', {bubbles: true}))")
    browser.shows("log-prob")
    browser.click(".colouring button", "text")
    browser.click("a", "Rollouts")


def test_runs_are_compared(browser: Browser) -> None:
    for name in ("tool-use", "tool-use-lr2"):
        browser.click(f"input[aria-label='compare {name}']")
    browser.click("button", "Compare 2 runs")
    browser.until(DRAWN)
    labels = browser.run(
        "[...document.querySelector('.chart .legend').querySelectorAll('span')].map(e => e.textContent)"
    )
    assert set(labels) >= {"tool-use", "tool-use-lr2"}
    browser.screenshot(SCREENSHOTS / "compare.png")


def test_the_keyboard_opens_a_run(browser: Browser) -> None:
    for _ in range(40):
        browser.press("Tab")
        if browser.run("document.activeElement.closest('td.name') !== null"):
            break
    name = browser.run("document.activeElement.textContent")
    assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    browser.press("Enter")
    browser.until(f"document.querySelector('h1').textContent === {json.dumps(name)}")


def test_dark_mode_follows_the_system_and_the_switch(browser: Browser) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    assert browser.run(back) == "rgb(255, 255, 255)"
    browser.prefer("dark")
    assert browser.run(back) == "rgb(16, 20, 24)"
    browser.open_run("tool-use")
    browser.until(DRAWN)
    browser.screenshot(SCREENSHOTS / "curves-dark.png")
    browser.click("#theme")
    browser.until(f"{back} === 'rgb(255, 255, 255)'")
    browser.click("#theme")
    browser.until(f"{back} === 'rgb(16, 20, 24)'")
    browser.click("#theme")
    assert browser.run("document.getElementById('theme').getAttribute('aria-label')") == "Theme: System"


def test_every_page_fits_a_phone(browser: Browser) -> None:
    browser.resize(390, 844, phone=True)
    wide = "document.documentElement.scrollWidth > innerWidth"
    assert not browser.run(wide)
    browser.screenshot(SCREENSHOTS / "phone-runs.png")
    browser.open_run("tool-use")
    browser.until(DRAWN)
    browser.screenshot(SCREENSHOTS / "phone-curves.png")
    for tab in TABS:
        browser.open_tab(tab)
        assert not browser.run(wide), tab


def test_a_report_needs_no_server(chromium: Browser, runs: Path, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    html.write_text(report(RunDirectory(runs / "tool-use"), lambda job: None, T0 + 8000))
    chromium.resize(1440, 900)
    chromium.requests.clear()
    chromium.messages.clear()
    chromium.open(f"file://{html}")
    chromium.until(DRAWN)
    chromium.screenshot(SCREENSHOTS / "report.png")
    tabs = chromium.run("[...document.querySelectorAll('.tabs a')].map(e => e.textContent)")
    assert tabs == ["Curves", "Rollouts", "Evaluations", "Fleet", "Events", "Plan", "Recipe"]
    for tab in tabs:
        chromium.open_tab(tab)
        assert chromium.run("document.querySelector('#panel > .note.error')") is None
    chromium.click(".tabs a", "Events")
    chromium.shows(HOSTILE)
    assert chromium.messages == [] and set(chromium.requests) == {f"file://{html}"}
