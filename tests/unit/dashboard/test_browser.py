"""The dashboard and the report in a real browser. Screenshots are kept in build/screenshots."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser as Chromium
from playwright.sync_api import expect

from primeslurm.base.files import write_json
from primeslurm.dashboard.report import report
from primeslurm.records.fleet import FleetView
from primeslurm.run.directory import RunDirectory
from tests.support.browser import DRAWN, SCREENSHOTS, Browser, dashboard, needs_chromium, start_chromium
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
def chromium() -> Iterator[Chromium]:
    with start_chromium() as chromium:
        yield chromium


@pytest.fixture
def new_page(chromium: Chromium) -> Iterator[Browser]:
    with contextlib.closing(Browser(chromium)) as browser:
        yield browser


@pytest.fixture
def browser(new_page: Browser, address: str) -> Iterator[Browser]:
    """The list of runs in a browser. After the test, nothing has failed and nothing was asked of other hosts."""
    new_page.open(address)
    new_page.shows("tool-use-lr2")
    yield new_page
    new_page.check_privacy(address.partition("?")[0])
    assert new_page.page.title().endswith("primeslurm")


def test_runs_are_listed_filtered_and_sorted(browser: Browser) -> None:
    names = browser.page.locator("tbody tr td.name")
    expect(names).to_have_count(4)
    browser.screenshot(SCREENSHOTS / "runs.png")
    browser.click(".chips button", "Active")
    expect(names).to_have_text(["active"])
    browser.click(".chips button", "All")
    browser.type("input[type=search]", "TOOL")
    expect(names).to_have_count(2)
    assert sorted(names.all_text_contents()) == ["tool-use", "tool-use-lr2"]
    browser.type("input[type=search]", "")
    browser.click("button.sort", "Progress")
    expect(names.first).to_have_text("tool-use")
    expect(browser.page.locator("[aria-sort=descending]")).to_have_text("Progress")
    browser.click("button.sort", "Progress")
    expect(names.last).to_have_text("tool-use")


def test_curves_are_drawn(browser: Browser) -> None:
    browser.open_run("tool-use")
    browser.until(DRAWN)
    titles = browser.texts(".chart figcaption span")
    assert titles[:3] == ["Reward", "Reward per environment", "KL"] and "KV cache in use" in titles
    browser.screenshot(SCREENSHOTS / "curves.png")
    browser.type("input[type=search]", "entropy")
    expect(browser.page.locator(".chart").filter(visible=True)).to_have_count(1)
    browser.type("input[type=search]", "")
    browser.type("input[type=range]", "0.8")
    browser.click("summary", "more metrics")
    browser.shows("unheard/of")
    browser.until(DRAWN)
    browser.type("input[type=range]", "0")


@pytest.mark.campaign
def test_a_chart_tells_its_values(browser: Browser) -> None:
    browser.open_run("tool-use")
    browser.until(DRAWN)
    canvas = browser.page.locator(".chart .canvas").first
    expect(canvas).to_have_attribute("aria-label", re.compile(r"^Reward, step 30: mean 0\."))
    browser.click(".chart .legend button", "std. deviation")
    expect(browser.page.locator(".legend [aria-pressed=false]").first).to_contain_text("std. dev")


def test_curves_grow_with_the_run(browser: Browser, runs: Path) -> None:
    browser.open_run("active")
    browser.shows("running")
    browser.until(DRAWN)
    browser.shows("step 12")
    write_metrics(RunDirectory(runs / "active"), range(13, 15), "a")
    expect(browser.page.locator(".chart .where").first).to_have_text("step 14")
    expect(browser.page.locator("#connection")).to_have_text("live")


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
    expect(browser.page.locator(".log > div").filter(visible=True)).to_have_text(["the newest line"])


def test_every_tab_shows_hostile_texts_as_they_are(browser: Browser) -> None:
    browser.open_run("tool-use", "Events")
    browser.shows(HOSTILE)
    browser.screenshot(SCREENSHOTS / "events.png")
    browser.click(".tabs a", "Evaluations")
    browser.shows("0.75 ± 0.063")
    browser.click("button", "Samples")
    expect(browser.page.locator(".chip.bad")).to_have_count(16)
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
    browser.page.locator(".toolbar select").select_option("tool-use-lr2")
    browser.shows("The recipes ask for the same.")
    browser.screenshot(SCREENSHOTS / "recipe.png")
    expect(browser.page.locator("#main").locator("img, script, i i")).to_have_count(0)


@pytest.mark.campaign
def test_a_hostile_name_is_a_name(browser: Browser) -> None:
    browser.open_run("a b&c'\"<i>é")
    browser.until(DRAWN)
    for tab in TABS[1:]:
        browser.open_tab(tab)
        browser.check_page()


def test_a_rollout_is_found_and_read(browser: Browser) -> None:
    browser.open_run("tool-use", "Rollouts")
    browser.shows("1 to 12 of 12 rollouts")
    browser.screenshot(SCREENSHOTS / "rollouts.png")
    browser.type("input[name=first_step]", "2")
    browser.shows("1 to 8 of 8 rollouts")
    browser.page.get_by_label("Truncated").select_option("true")
    browser.shows("1 to 2 of 2 rollouts")
    assert "first_step" in browser.page.url and "truncated" in browser.page.url
    browser.click("td.name a", "0002-1")
    browser.shows("The capital of France is Paris")
    browser.shows(HOSTILE)
    text = browser.page.inner_text("body")
    assert "U+202E" in text and "\u202e" not in text, "direction marks are visible"
    expect(browser.page.locator("#main").locator("img, script")).to_have_count(0)
    browser.screenshot(SCREENSHOTS / "rollout.png", whole=True)
    for name, token in (("log-probability", "rare"), ("advantage", "pos"), ("policy version", "ver")):
        browser.click(".colouring button", name)
        expect(browser.page.locator(f".tokens .token[class*={token}]").nth(5)).to_be_visible()
        browser.screenshot(SCREENSHOTS / f"rollout-{token}.png", whole=True)
    browser.page.locator(".tokens .ver0").first.hover()
    browser.shows("log-prob")
    browser.click(".colouring button", "text")
    browser.click("a", "Rollouts")


@pytest.mark.campaign
def test_runs_are_compared(browser: Browser) -> None:
    for name in ("tool-use", "tool-use-lr2"):
        browser.click(f"input[aria-label='compare {name}']")
    browser.click("button", "Compare 2 runs")
    browser.until(DRAWN)
    legend = browser.page.locator(".chart .legend").first
    assert set(legend.locator("span").all_text_contents()) >= {"tool-use", "tool-use-lr2"}
    browser.screenshot(SCREENSHOTS / "compare.png")


@pytest.mark.campaign
def test_the_keyboard_opens_a_run(browser: Browser) -> None:
    link = browser.page.locator("td.name a:focus")
    for _ in range(40):
        browser.page.keyboard.press("Tab")
        if link.count():
            break
    expect(link).to_have_css("outline-style", "solid")
    name = link.inner_text()
    browser.page.keyboard.press("Enter")
    expect(browser.page.locator("h1")).to_have_text(name)


@pytest.mark.campaign
def test_dark_mode_follows_the_system_and_the_switch(browser: Browser) -> None:
    body, theme = browser.page.locator("body"), browser.page.locator("#theme")
    light, dark = "rgb(255, 255, 255)", "rgb(16, 20, 24)"
    expect(body).to_have_css("background-color", light)
    browser.prefer("dark")
    expect(body).to_have_css("background-color", dark)
    browser.open_run("tool-use")
    browser.until(DRAWN)
    browser.screenshot(SCREENSHOTS / "curves-dark.png")
    for color in (light, dark):
        theme.click()
        expect(body).to_have_css("background-color", color)
    theme.click()
    expect(theme).to_have_attribute("aria-label", "Theme: System")


def test_every_page_fits_a_phone(browser: Browser) -> None:
    browser.become_phone()
    browser.shows("tool-use-lr2")
    browser.check_page()
    browser.screenshot(SCREENSHOTS / "phone-runs.png")
    browser.open_run("tool-use")
    browser.until(DRAWN)
    browser.screenshot(SCREENSHOTS / "phone-curves.png")
    for tab in TABS:
        browser.open_tab(tab)
        browser.check_page()


def test_a_report_needs_no_server(new_page: Browser, runs: Path, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    html.write_text(report(RunDirectory(runs / "tool-use"), lambda job: None, T0 + 8000))
    new_page.open(f"file://{html}")
    new_page.until(DRAWN)
    new_page.screenshot(SCREENSHOTS / "report.png")
    tabs = new_page.texts(".tabs a")
    assert tabs == ["Curves", "Rollouts", "Evaluations", "Fleet", "Events", "Plan", "Recipe"]
    for tab in tabs:
        new_page.open_tab(tab)
        new_page.check_page()
    new_page.open_tab("Events")
    new_page.shows(HOSTILE)
    new_page.check_privacy(f"file://{html}")


def test_check_of_privacy_fails(new_page: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for html, said in (
        ("<script>console.warn('a warning')</script>", "a warning"),
        ("<script>throw new Error('this failed')</script>", "this failed"),
        ("<meta http-equiv=Content-Security-Policy content=script-src><script>1</script>", "script-src"),
        ("<img src=http://127.0.0.2:1/x.png>", r"asked \['http://127.0.0.2:1/x.png'\]"),
    ):
        page.write_text(html)
        new_page.open(f"file://{page}")
        with pytest.raises(AssertionError, match=said):
            new_page.check_privacy(f"file://{page}")
        new_page.messages.clear()
