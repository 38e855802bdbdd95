"""Recipes and runs from Python, without a cluster."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

import primeslurm
from primeslurm.api.checks.recipe_check import plan_emulated
from primeslurm.api.recipes import emulation
from primeslurm.api.sites import with_python
from primeslurm.base.files import write_json
from primeslurm.plan import planner
from primeslurm.records.attempt import EndRecord, JobRecord
from primeslurm.run.directory import RunDirectory
from primeslurm.testbed.embedded_slurm.config import LoopbackPlace
from primeslurm.testbed.embedded_slurm.config import site as embedded_site
from tests.support.cli import primeslurm as command
from tests.support.cli import run_python
from tests.support.plans import plan_of, python
from tests.support.recipes import model_dir, recipe_data, site

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "submit_from_python.py"
NO_SLURM = "Slurm is not reachable from here (sinfo failed; details with --verbose)"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a site file and a recipe that fit together, but neither the model nor Slurm's controller."""
    write(tmp_path)
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site(runs="runs").model_dump(mode="json", by_alias=True)))
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho no controller >&2; exit 1\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(place: Path, **changes: Any) -> None:
    (place / "r.yaml").write_text(yaml.safe_dump(recipe_data(**{"model": {"path": "org/none"}, **changes})))


def test_package_exports_exactly_the_documented_names() -> None:
    for name in primeslurm.__all__:
        assert getattr(primeslurm, name) is not None
    assert set(primeslurm.__all__) <= set(dir(primeslurm))
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        primeslurm.lod  # noqa: B018
    assert (ROOT / "primeslurm" / "py.typed").is_file()


def test_plan_render_and_dry_run_need_neither_slurm_nor_model(place: Path) -> None:
    loaded = primeslurm.load("r.yaml", overrides={"max_steps": 7, "trainer.optimizer.lr": 1e-6}, name="x")
    assert (loaded.recipe.max_steps, loaded.recipe.trainer.optimizer.lr, loaded.recipe.name) == (7, 1e-6, "x")
    plan = loaded.plan()
    assert (plan.totals.nodes, plan.run_dir) == (3, str(place / "runs" / "x"))
    blocked = [finding for finding in plan.findings if finding.level == "blocked"]
    assert [finding.text for finding in blocked] == ["is not in the Hugging Face cache on this machine"]
    assert loaded.render().startswith("#!/bin/bash\n")
    dry = loaded.dry_run()
    assert dry.plan == plan and dry.script == loaded.render()
    (unasked,) = dry.unasked
    assert unasked.startswith(NO_SLURM) and "\n" not in unasked and "no controller" in dry.details
    assert not (place / "runs").exists()


def test_check_reports_everything_and_submit_refuses_it(place: Path) -> None:
    loaded = primeslurm.load("r.yaml", overrides=["deployment.train.gpus_per_node=9"])
    check = loaded.check()
    assert not check.ok and check.plan is None
    assert [(finding.level, finding.field) for finding in check.findings] == [
        ("error", "deployment.train.gpus_per_node"),
        ("blocked", "model.path"),
        ("note", "model.path"),
        ("note", "slurm"),
    ]
    with pytest.raises(primeslurm.UsageError) as refused:
        loaded.submit()
    assert check.violations == check.errors
    assert [each.field for each in refused.value.violations] == ["deployment.train.gpus_per_node", "model.path"]
    assert not (place / "runs").exists()


def test_valid_recipe_may_be_blocked(place: Path) -> None:
    check = primeslurm.load("r.yaml", overrides={"model.path": "Qwen/Qwen3-8B", "model.dtype": "bfloat16"}).check()
    assert check.ok and check.blocked and check.plan is not None


def test_errors_of_recipe_and_site_are_raised_together(place: Path) -> None:
    with pytest.raises(primeslurm.UsageError) as refused:
        primeslurm.load("r.yaml", site="nowhere.yaml", overrides={"max_steps": 0})
    assert [violation.field for violation in refused.value.violations] == ["max_steps", "--site"]


@pytest.fixture
def placements(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of each call that requests resources."""
    calls: list[Any] = []
    work_out = planner.resource_requests
    monkeypatch.setattr(
        planner, "resource_requests", lambda *arguments: calls.append(arguments) or work_out(*arguments)
    )
    return calls


@pytest.mark.parametrize("emulate", [False, True])
def test_submission_plans_once(place: Path, placements: list[Any], emulate: bool) -> None:
    write(place, model={"path": str(model_dir(place))})
    loaded = primeslurm.load("r.yaml", site="site.yaml", emulate=emulate)
    assert loaded.dry_run().plan.emulated == emulate
    assert len(placements) == 1
    with pytest.raises(primeslurm.ClusterError, match="no controller"):
        loaded.submit()
    assert len(placements) == 2


def test_emulated_run_plans_once_and_uses_the_cluster_addresses(
    place: Path, placements: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, elsewhere = primeslurm.load("r.yaml", emulate=True), LoopbackPlace(3)
    assert loaded.cluster is not None
    up = with_python(embedded_site(loaded.cluster, elsewhere))
    monkeypatch.setattr(emulation, "running", lambda spec, *, keep: nullcontext(embedded_site(spec, elsewhere)))
    started = []
    with loaded.on_cluster(starting=started.append) as ready:
        plan_on_cluster = ready.plan()
        with pytest.raises(primeslurm.ClusterError):
            ready.start()
    assert len(placements) == 1 and started == [loaded.cluster]
    assert plan_on_cluster == plan_emulated(loaded.recipe, up).plan
    assert plan_on_cluster.addresses == up.network.addresses != loaded.site.network.addresses


def test_read_only_commands_succeed_without_slurm_and_model(place: Path) -> None:
    shown = command("submit", "r.yaml", "--dry-run", cwd=place, path=place)
    assert shown.code == 0, shown.err
    assert "blocked: model.path = org/none: is not in the Hugging Face cache" in shown.err
    assert f"note: slurm: {NO_SLURM}" in shown.err
    assert "2 GPU nodes" in shown.out and "#SBATCH hetjob" in shown.out
    assert command("render", "r.yaml", cwd=place, path=place).code == 0
    planned = command("plan", "r.yaml", cwd=place, path=place)
    assert planned.code == 0 and "blocked: model.path = org/none" in planned.err
    refused = command("submit", "r.yaml", cwd=place, path=place)
    assert refused.code == 2 and "model.path = org/none: is not in the Hugging Face cache" in refused.err
    write(place, model={"path": str(model_dir(place))})
    assert command("submit", "r.yaml", cwd=place, path=place).code == 3
    assert not (place / "runs").exists()


def test_example_script_runs_without_slurm_and_model(place: Path) -> None:
    done = run_python(EXAMPLE, "r.yaml", "--dry-run", cwd=place)
    assert done.code == 0, done.err
    assert done.out.startswith("test-run: 3 nodes, 16 GPUs, 8 engines\n")
    assert "blocked: model.path = org/none: is not in the Hugging Face cache" in done.err and NO_SLURM in done.err
    refused = run_python(EXAMPLE, "r.yaml", cwd=place)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "model.path: is not in the Hugging Face cache on this machine\n"


@pytest.fixture
def finished(place: Path) -> RunDirectory:
    """A run that has ended."""
    process = plan_of(place / "runs" / "done", (_process(),))
    run = RunDirectory(place / "runs" / "done")
    attempt = run.attempt(1)
    attempt.prepare(process)
    attempt.record_job(JobRecord("999999", "local", 1.0))
    attempt.record_end(EndRecord("completed", "all steps done", "", 4, False, "", 2.0))
    write_json(run.path / "lock.json", {"run_id": "done-1", "created_at": 1.0})
    return run


def _process() -> Any:
    from primeslurm.plan.model import Process

    return Process(name="trainer-rank-0", role="trainer", node=0, argv=python("pass"), log="x")


def test_run_is_found_and_read(finished: RunDirectory) -> None:
    run = primeslurm.find_run("done")
    assert [each.name for each in primeslurm.all_runs()] == ["done"]
    assert run == primeslurm.Run(finished.path)
    assert run.status().phase == run.wait().phase == "completed"
    assert [status.phase for status in run.watch()] == ["completed"]
    assert run.plan().run == finished.attempt(1).plan().run
    assert run.summary().attempts == 1 and run.diagnose().outcome == "completed"
    assert not run.cancel()
    with pytest.raises(primeslurm.UsageError, match="there is nothing to resume"):
        run.resume()
    with pytest.raises(primeslurm.RunError, match="did you mean done"):
        primeslurm.find_run("don")


def test_wait_times_out(finished: RunDirectory) -> None:
    (finished.attempt(1).path / "end.json").unlink()
    write_json(finished.attempt(1).fleet_file, {"time": time.time(), "states": {}})
    with pytest.raises(TimeoutError, match=r"^done is running after 0\.02 s$"):
        primeslurm.find_run("done").wait(timeout_s=0.02, poll_s=0.01)
