"""If a site's set-up command fails in a job, there is one attempt, which ends with the command's message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from primeslurm.api.runs.run import find_run
from primeslurm.run.directory import RunDirectory
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from tests.support.cli import primeslurm
from tests.support.recipes import recipe_data

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ({"modules": ["no-such/1.0"]}, "module load no-such/1.0 (exit code 127)"),
        pytest.param(
            {"prologue": ["source /nowhere/setup.sh"]},
            "/nowhere/setup.sh: No such file or directory",
            marks=pytest.mark.campaign,
        ),
    ],
)
def test_failing_set_up_command_ends_the_run(
    cluster: Cluster, tmp_path: Path, lines: dict[str, list[str]], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BASH_FUNC_module%%", raising=False)
    site = yaml.safe_load((cluster.spec.directory / "site.yaml").read_text())
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site | {"runs": str(tmp_path / "runs")} | lines))
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_data(name="setup")))
    submitted = primeslurm("submit", "r.yaml", "--emulate", "--site", "site.yaml", cwd=tmp_path)
    assert submitted.code == 0, submitted.err

    status = find_run("setup", tmp_path / "runs").wait(poll_s=0.5)
    assert (status.phase, status.attempt) == ("failed", 1)
    assert words in status.reason
    assert status.reason.endswith("another attempt would end in the same way")
    doctor = json.loads(primeslurm("doctor", "setup", "--runs", "runs", "--json", cwd=tmp_path).out)
    assert doctor["first"]["failure"]["component"] == "site set-up"
    assert [cause["fix"] for cause in doctor["first"]["causes"]] == ["correct it in the site file"]
    assert len(RunDirectory(tmp_path / "runs" / "setup").attempts()) == 1


def test_unresolvable_names_end_the_run_without_blaming_nodes(cluster: Cluster, tmp_path: Path) -> None:
    site = yaml.safe_load((cluster.spec.directory / "site.yaml").read_text())
    site |= {"runs": str(tmp_path / "runs"), "network": {}}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site))
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_data(name="nameless")))
    submitted = primeslurm("submit", "r.yaml", "--emulate", "--site", "site.yaml", cwd=tmp_path)
    assert submitted.code == 0, submitted.err
    status = find_run("nameless", tmp_path / "runs").wait(poll_s=0.5)
    assert (status.phase, status.attempt) == ("failed", 1)
    assert "preflight failed on" in status.reason and "so none is excluded" in status.reason
    assert "network.addresses of the site file" in status.reason
    assert status.reason.endswith("another attempt would end in the same way")
    nodes = primeslurm("nodes", "--runs", "runs", "--json", cwd=tmp_path)
    assert json.loads(nodes.out) == []
