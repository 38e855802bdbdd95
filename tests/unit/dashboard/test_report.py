"""The report: all pages of a run in one file, which loads nothing and executes nothing that a run has written."""

from __future__ import annotations

import base64
import hashlib
import html as entities
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from primeslurm.base.files import write_json
from primeslurm.dashboard.report import report
from primeslurm.records.evaluation import BestCheckpoint
from primeslurm.run.directory import RunDirectory
from primeslurm.run.status.summary import summarise
from tests.support.cli import primeslurm
from tests.support.recorded_runs import HOSTILE, T0, recorded_run, write_evaluations, write_rollouts


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = recorded_run(tmp_path / "runs" / "r")
    write_evaluations(made)
    write_rollouts(made)
    return made


class Page(HTMLParser):
    """Collects elements, links and the texts of script and style elements."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in self.texts and data.strip():
            self.texts[self.tags[-1]].append(data)


def page(run: RunDirectory) -> str:
    return report(run, lambda job: None, T0 + 8000)


def answers(html: str) -> dict[str, Any]:
    """Return the data of a report by path, without the run's own part of the path."""
    data = json.loads(Page(html).texts["script"][0])
    return {path.removeprefix(f"runs/{data['run']}/"): answer for path, answer in data["answers"].items()}


def test_every_page_has_its_data(run: RunDirectory) -> None:
    found = answers(page(run))
    assert set(found) == {
        *("status", "curves", "curves?other=1", "fleet", "events", "evaluations", "evaluations/20/held-out"),
        *("plan", "recipe", "rollouts", *(f"rollouts/{each['id']}" for each in found["rollouts"]["rollouts"])),
    }
    assert len(found["rollouts"]["rollouts"]) == 12
    assert found["status"]["phase"] == "completed" and found["status"]["metrics"]["step"] == 30
    assert [attempt["outcome"] for attempt in found["events"]] == ["failed", "completed"]


def test_a_name_is_encoded_as_the_browser_asks_for_it(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "a b&c'é")
    data = json.loads(Page(page(run)).texts["script"][0])
    assert "runs/a%20b%26c'%C3%A9/status" in data["answers"]


def test_nothing_is_loaded_and_nothing_of_a_run_is_executed(run: RunDirectory) -> None:
    html = page(run)
    found = Page(html)
    assert found.links == ["data:,"] and found.tags.count("script") == 2
    assert not {"img", "iframe", "object", "embed", "form"} & set(found.tags)
    assert HOSTILE not in html and answers(html)["events"][0]["reason"] == HOSTILE
    style, script = "".join(found.texts["style"]), "".join(found.texts["script"][1:])
    assert not re.search(r"url\(|@import", style)
    policy = entities.unescape(re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)[0])
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; img-src data:"
    )


def test_an_sft_run_has_the_curve_of_its_loss(run: RunDirectory) -> None:
    latest = run.latest()
    latest.plan_file.write_text(latest.plan().model_copy(update={"task": "sft"}).to_json())
    rows = [{"step": i, "time": T0, "loss": 3.0 - i / 30, "tokens_per_s": 70.0} for i in range(1, 31)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    charts = {chart["title"]: chart for chart in answers(page(run))["curves"]["charts"]}
    assert set(charts) == {"Loss", "Tokens"} and charts["Loss"]["values"][0][-1] == 2.0


def test_a_run_that_has_not_trained_has_a_page(run: RunDirectory) -> None:
    (run.path / "metrics.jsonl").unlink()
    assert answers(page(run))["curves"]["charts"] == []


def test_evaluations_are_summarised(run: RunDirectory, tmp_path: Path) -> None:
    found = answers(page(run))["evaluations"]
    assert found["best"] == {"step": 10, "metric": "held-out/pass@4", "value": 0.75}
    achieved = summarise(run)
    assert [record.step for record in achieved.evaluations] == [0, 10, 20]
    assert achieved.best == BestCheckpoint(10, "held-out/pass@4", 0.75)
    done = primeslurm("summary", str(run.path), cwd=run.path)
    assert "evaluation of step 10: held-out 0.750 ± 0.062, pass@4 0.750" in done.out
    assert "best: step 10, held-out/pass@4 0.750" in done.out


def test_the_verb_writes_it_into_the_run_or_where_it_is_told(run: RunDirectory, tmp_path: Path) -> None:
    result = primeslurm("report", "r", cwd=tmp_path)
    assert (result.code, result.out) == (0, f"{run.path}/report.html\n"), result.err
    assert primeslurm("report", "r", "-o", tmp_path / "page.html", cwd=tmp_path).code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    result = primeslurm("report", "r", "-o", tmp_path / "none" / "page.html", cwd=tmp_path)
    assert result.code == 2 and "--output" in result.err
    os.mkfifo(tmp_path / "pipe")
    result = primeslurm("report", "r", "-o", tmp_path / "pipe", cwd=tmp_path)
    assert result.code == 2 and "it is a device or a pipe" in result.err and (tmp_path / "pipe").is_fifo()


def test_a_damaged_run_has_no_report(run: RunDirectory, tmp_path: Path) -> None:
    write_json(run.path / "attempts" / "2" / "plan.json", {"nodes": 1})
    result = primeslurm("report", "r", cwd=tmp_path)
    assert result.code == 4 and not (run.path / "report.html").exists(), result.err
