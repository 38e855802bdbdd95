"""The HTML page about a run: complete, self-contained, and safe with any text of a run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from primeslurm.base.files import write_json
from primeslurm.plan.model import Process
from primeslurm.records.attempt import EndRecord
from primeslurm.records.evaluation import BestCheckpoint, Estimated, EvaluationRecord, LabelResult, step_dir
from primeslurm.run.directory import RunDirectory
from primeslurm.run.report.page import report
from primeslurm.run.status.summary import summarise
from tests.support.cli import primeslurm
from tests.support.plans import plan_of, python

T0 = 1_790_000_000.0
HOSTILE = "<script>document.title='executed'</script>\"'&"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run with two attempts, thirty steps, and a restarted engine whose reason contains HTML."""
    directory = RunDirectory(tmp_path / "runs" / "r")
    engine = Process(name="decode-r0-0", role="decode", node=0, argv=python("pass"), log="x.log", gpus=(0, 1))
    for number in (1, 2):
        attempt = directory.attempt(number)
        attempt.prepare(plan_of(directory.path, (engine,)))
        begin = T0 + 4000 * (number - 1)
        events = [
            {"time": begin, "process": "head", "kind": "seated", "nodes": ["n1"]},
            {
                "time": begin + 900,
                "process": "agent-0",
                "kind": "start_failed",
                "name": "decode-r0-0",
                "error": HOSTILE,
            },
            {"time": begin + 950, "process": "agent-0", "kind": "started", "name": "decode-r0-0", "restarts": 1},
        ]
        (attempt.path / "events" / "head.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        outcome = "failed" if number == 1 else "completed"
        attempt.record_end(EndRecord(outcome, HOSTILE, "", 9, number == 1, "", begin + 3600))
    write_json(directory.path / "lock.json", {"run_id": "r-1", "created_at": T0, "packages": {"vllm": "0.32"}})
    write_json(directory.path / "recipe.resolved.json", {"max_steps": 30, "orchestrator": {"batch_size": 8}})
    rows = [
        {"step": i, "time": T0, "reward/mean": i / 30, "staleness/mean": 1.0, "trainer/loss": -0.1, "queue/inflight": 9}
        for i in range(1, 31)
    ]
    (directory.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


class Page(HTMLParser):
    """Counts elements and collects texts and links."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.texts.append(data.strip())


def page(run: RunDirectory) -> str:
    return report(run, lambda job: None, T0 + 8000)


def test_page_has_numbers_plots_attempts_and_placement(run: RunDirectory) -> None:
    found = Page(page(run))
    captions = [text for text in ("Reward", "Staleness", "Loss", "In flight") if text in found.texts]
    assert captions == ["Reward", "Staleness", "Loss", "In flight"] and "Entropy" not in found.texts
    assert found.tags.count("svg") == 5, "four plots and the time line"
    assert "mean, step 30: 1" in found.texts and "30 of 30" in found.texts
    assert "0.100 → 0.933" in found.texts and "decode-r0-0" in found.texts and "0.32" in found.texts
    assert sum(text.startswith("attempt 1: failed") for text in found.texts) == 1
    assert found.texts.count("restarted (restart 1)") == 2


def test_evaluations_have_a_table_and_a_plot(run: RunDirectory) -> None:
    write_json(run.path / "recipe.resolved.json", {"max_steps": 30, "evaluation": {"keep_best": "held-out/pass@4"}})
    for step, reward in ((0, 0.25), (10, 0.75), (20, 0.5)):
        result = LabelResult("held-out", 16, 4, Estimated(reward, 0.0625), {1: Estimated(0.1), 4: Estimated(reward)})
        record = EvaluationRecord(step, step, step, step + 2, T0, 61.0, [result])
        step_dir(run.path, step).mkdir(parents=True)
        write_json(step_dir(run.path, step) / "summary.json", msgspec.to_builtins(record, str_keys=True))
    text = page(run)
    found = Page(text)
    assert "Evaluation: held-out" in found.texts and "Evaluations" in found.texts
    assert found.texts.count("16 x 4") == 3 and "0.750 ± 0.062" in found.texts
    assert found.texts.count("best by held-out/pass@4") == 1
    assert "1: 0.100, 4: 0.750" in found.texts and "10 to 12" in found.texts
    achieved = summarise(run)
    assert [record.step for record in achieved.evaluations] == [0, 10, 20]
    assert achieved.best == BestCheckpoint(10, "held-out/pass@4", 0.75)
    done = primeslurm("summary", str(run.path), cwd=run.path)
    assert "evaluation of step 10: held-out 0.750 ± 0.062, pass@4 0.750" in done.out
    assert "best: step 10, held-out/pass@4 0.750" in done.out


def test_sft_run_has_a_loss_plot(run: RunDirectory) -> None:
    latest = run.latest()
    latest.plan_file.write_text(latest.plan().model_copy(update={"task": "sft"}).to_json())
    rows = [{"step": i, "time": T0, "loss": 3.0 - i / 30, "tokens_per_s": 70.0} for i in range(1, 31)]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Page(page(run))
    assert {"Loss", "Trained tokens", "2.9000 → 2.0667", "70 tokens/s"} <= set(found.texts)
    assert not {"Reward", "largest staleness", "sampled"} & set(found.texts)


def test_page_loads_nothing_and_runs_no_scripts(run: RunDirectory) -> None:
    html = page(run)
    found = Page(html)
    assert found.links == [] and "script" not in found.tags and not re.search(r"url\(|@import|https?:", html)
    assert any(HOSTILE in text for text in found.texts), "shown as the text that it is"


def test_run_without_steps_has_a_page(run: RunDirectory) -> None:
    (run.path / "metrics.jsonl").unlink()
    assert "No step has been trained yet." in Page(page(run)).texts


def test_report_writes_to_the_run_directory_or_a_given_file(run: RunDirectory, tmp_path: Path) -> None:
    result = primeslurm("report", "r", cwd=tmp_path)
    assert (result.code, result.out) == (0, f"{run.path}/report.html\n"), result.err
    assert primeslurm("report", "r", "-o", tmp_path / "page.html", cwd=tmp_path).code == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    result = primeslurm("report", "r", "-o", tmp_path / "none" / "page.html", cwd=tmp_path)
    assert result.code == 2 and "--output" in result.err


CHROMIUM = shutil.which("chromium")
# Without these it looks for updates and fails on a closed network.
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def browse(html: Path, *options: str) -> str:
    assert CHROMIUM is not None
    profile = f"--user-data-dir={html.parent / 'profile'}"
    argv = [CHROMIUM, *QUIET, profile, "--window-size=1240,1200", *options, f"file://{html}"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (scripts/test.sh installs it in CI)")
def test_browser_shows_light_and_dark_and_runs_nothing(run: RunDirectory, tmp_path: Path) -> None:
    html = tmp_path / "page.html"
    html.write_text(page(run))
    dom = browse(html, "--dump-dom")
    assert "<title>r: completed</title>" in dom and dom.count("<svg") == 5
    for scheme, back, line in (("1", (255, 255, 255), (11, 98, 196)), ("0", (20, 24, 29), (108, 178, 255))):
        png = tmp_path / f"{scheme}.png"
        browse(html, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={png}")
        image = Image.open(png).convert("RGB")
        colours = {colour for _, colour in image.getcolors(maxcolors=1 << 24)}
        assert image.size == (1240, 1200) and image.getpixel((2, 2)) == back and line in colours
