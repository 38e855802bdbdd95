"""Recipes for one node, from submission to the end, on a Slurm cluster with exactly one node."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from primeslurm.records.events.processes import ProcessStarted
from primeslurm.run.directory import RunDirectory
from primeslurm.run.history import events, rows
from primeslurm.testbed.embedded_slurm.cluster import Cluster, up
from primeslurm.testbed.embedded_slurm.config import ClusterSpec
from primeslurm.wire.stored import checkpoints
from tests.support.browser import DRAWN, SCREENSHOTS, Browser, dashboard, needs_chromium, start_chromium
from tests.support.slurm import require_slurm
from tests.support.unmeasured import unmeasured

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.usefixtures("unmeasured")]
ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "recipes"
STEPS = 2
SMALL = (
    "orchestrator.batch_size=16",
    "orchestrator.group_size=4",
    "orchestrator.sampling.max_tokens=16",
    "evaluation=null",
)
"""An emulated step takes as long as its tokens require."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Yield a cluster with one node with 8 fake GPUs."""
    require_slurm()
    with tempfile.TemporaryDirectory(prefix="one") as directory:
        spec = ClusterSpec(
            "one", Path(directory, "c"), Path(directory, "runs"), nodes=1, cpus_per_node=16, control_nodes=0
        )
        started, _ = up(spec)
        yield started
        started.down()


def command(cluster: Cluster, *argv: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Return a function that runs a command as a user of the cluster."""
    env = unmeasured() | {"PYTHONPATH": str(ROOT), "SLURM_CONF": str(cluster.spec.slurm_conf), **variables}
    return subprocess.run(
        [*map(str, argv)], cwd=cluster.spec.directory, env=env, capture_output=True, text=True, timeout=600, check=False
    )


def primeslurm(cluster: Cluster, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return command(cluster, sys.executable, "-m", "primeslurm", *args)


@pytest.mark.parametrize(
    ("recipe", "gpus", "trainers", "engines"),
    [
        pytest.param("qwen3_8b_single_node", 8, [0, 1, 2, 3], [4, 5, 6, 7], marks=pytest.mark.campaign),
        pytest.param("qwen3_30b_a3b_one_node", 8, [0, 1, 2, 3], [4, 5, 6, 7], marks=pytest.mark.campaign),
        ("smollm2_arithmetic_one_gpu", 1, [0], [0]),
    ],
)
def test_one_node_recipe_completes_on_one_node(
    cluster: Cluster, recipe: str, gpus: int, trainers: list[int], engines: list[int]
) -> None:
    options = ["--emulate", "--site", cluster.spec.site_file, "--wait"]
    settings = [word for setting in (f"max_steps={STEPS}", *SMALL) for word in ("--set", setting)]
    done = primeslurm(cluster, "submit", RECIPES / f"{recipe}.yaml", *options, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDirectory(cluster.spec.runs / recipe.replace("_", "-"))
    plan, end = run.attempt(1).plan(), run.attempt(1).end()
    assert end is not None and (end.outcome, end.committed_step) == ("completed", STEPS)
    assert [row["step"] for row in rows(run.path) if "trainer/loss" in row] == list(range(1, STEPS + 1))
    assert checkpoints.newest(run.path) == STEPS
    used = {
        role: sorted(gpu for p in plan.processes() if p.role == role for gpu in p.gpus)
        for role in ("trainer", "engine")
    }
    assert used == {"trainer": trainers, "engine": engines}
    job = run.attempt(1).job()
    assert job is not None
    shown = command(cluster, "scontrol", "--oneliner", "show", "job", job.job_id).stdout
    assert re.search(rf"NumNodes=1 .*TresPerNode=gres[:/]gpu:{gpus}\s", shown), shown
    started = [event.name for event in events(run) if isinstance(event, ProcessStarted)]
    assert sorted(started) == sorted(process.name for process in plan.processes()), "something was restarted"
    if trainers == engines:
        assert started.index("trainer-rank-0") > started.index("engine-r0-0"), "the engine measures an empty GPU"


@pytest.mark.campaign
def test_local_run_in_an_allocation_uses_its_gpus(cluster: Cluster) -> None:
    """Another job has GPU 0, so that Slurm's GPU numbers differ from the plan's."""
    other = command(cluster, "sbatch", "--parsable", "--gres=gpu:1", "--wrap", "sleep 600", "--output=/dev/null")
    allocation = ("salloc", "--quiet", "--nodes=1", "--gres=gpu:2", "--cpus-per-task=4")
    step = ("srun", "--ntasks=1", "--cpus-per-task=4")
    program = (sys.executable, "-m", "tests.emulated.in_allocation", RECIPES / "smollm2_arithmetic.yaml")
    try:
        done = command(cluster, *allocation, *step, *program, cluster.spec.directory, f"max_steps={STEPS}", *SMALL)
        assert done.returncode == 0, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        assert answer["site"] == [2, min(4, len(os.sched_getaffinity(0)))]
        assert answer["gpus"] == {"trainer-rank-0": "1", "engine-r0-0": "2"}
        assert (answer["phase"], answer["steps"] >= STEPS) == ("completed", True)
        too_much = (sys.executable, "-m", "primeslurm", "plan", RECIPES / "qwen3_8b_single_node.yaml", "--local")
        refused = command(cluster, *allocation, *step, *too_much)
        assert refused.returncode == 2
        assert "the roles need at least 8 GPUs, but nodes of partition local have 2" in refused.stderr
        outside = command(cluster, *allocation, *too_much)
        assert outside.returncode == 2 and "its Slurm allocation is node one-n001" in outside.stderr
    finally:
        command(cluster, "scancel", other.stdout.strip())


@pytest.mark.campaign
@needs_chromium
def test_dashboard_follows_a_run_to_its_end(cluster: Cluster) -> None:
    settings = [word for setting in ("max_steps=1000", *SMALL) for word in ("--set", setting)]
    recipe = RECIPES / "smollm2_arithmetic_one_gpu.yaml"
    where = ("--emulate", "--site", cluster.spec.site_file, "--name", "watched")
    done = primeslurm(cluster, "submit", recipe, *where, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    with dashboard(cluster.spec.runs) as address, start_chromium() as chromium:
        browser = Browser(chromium)
        browser.open(address)
        browser.open_run("watched")
        expect(browser.page.locator("body")).to_contain_text(re.compile(r"step ([3-9]|\d{2,3}) of 1000"))
        _check_live_run(browser)
        assert primeslurm(cluster, "cancel", "watched", "--runs", cluster.spec.runs).returncode == 0
        expect(browser.page.locator(".title .badge").first).to_have_text("cancelled")
        _check_ended_run(browser)
        browser.check_privacy(address.partition("?")[0])


def _check_live_run(browser: Browser) -> None:
    browser.until(DRAWN)
    step = browser.page.locator(".chart .where").first
    expect(step).not_to_have_text(step.inner_text())
    browser.screenshot(SCREENSHOTS / "live-curves.png")
    browser.open_tab("Logs")
    browser.click(".log-names button", "orchestrator")
    lines = "document.querySelectorAll('.log > div').length"
    before = browser.until(lines)
    browser.until(f"{lines} > {before}")
    browser.screenshot(SCREENSHOTS / "live-logs.png")


def _check_ended_run(browser: Browser) -> None:
    browser.open_tab("Curves")
    browser.until(DRAWN)
    browser.open_tab("Rollouts")
    steps = "[...new Set([...document.querySelectorAll('tbody td:first-child')].map(cell => cell.textContent))]"
    browser.until(f"{steps}.length > 1")
    browser.type("input[name=last_step]", "1")
    browser.page.get_by_label("Failed").select_option("false")
    browser.until(f"{steps}.join() === '1' && !document.querySelector('tbody').textContent.includes('failed')")
    browser.page.locator("tbody td.name a").first.press("Enter")
    browser.click(".colouring button", "policy version")
    expect(browser.page.locator(".tokens .token[class*=ver]").nth(5)).to_be_visible()
    browser.prefer("dark")
    browser.screenshot(SCREENSHOTS / "ended-rollout-dark.png")
    browser.become_phone()
    browser.shows("cancelled")
    for tab in browser.texts(".tabs a"):
        browser.open_tab(tab)
        browser.check_page()
    browser.screenshot(SCREENSHOTS / "ended-recipe-phone.png")
