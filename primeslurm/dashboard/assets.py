"""The files of the front end, and the one HTML page that loads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from primeslurm.base.templating import environment

STATIC = Path(__file__).parent / "static"
STYLES = ("vendor/uPlot.min.css", "dashboard.css")
# Scripts in the order in which they run. They share one scope, so a report can hold all of them as one script.
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    *("dom.js", "source.js", "plots.js", "tables.js"),
    *("runs_page.js", "curves_tab.js", "fleet_tab.js", "events_tab.js", "logs_tab.js"),
    *("transcript.js", "rollouts_tab.js", "evaluations_tab.js", "plan_tab.js", "recipe_tab.js"),
    *("run_page.js", "compare_page.js"),
    "main.js",
)


def text(names: Iterable[str]) -> str:
    """Return the content of files of the front end, one after the other."""
    return "\n".join((STATIC / name).read_text(encoding="utf-8") for name in names)


def page(title: str = "primeslurm", report: Mapping[str, str] | None = None) -> str:
    """Render the page.

    Args:
        report: `style`, `script`, `data` and `policy` of a page that contains everything; None: the page loads its
            files and data from the server.
    """
    template = environment(autoescape=True).get_template("dashboard.html.j2")
    return template.render(title=title, report=report, styles=STYLES, scripts=SCRIPTS)
