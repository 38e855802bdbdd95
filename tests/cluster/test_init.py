"""`primeslurm init` queries a real Slurm, and its files pass `check`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from tests.cluster.accounting.cluster import AccountingCluster
from tests.support.cli import primeslurm

pytestmark = pytest.mark.cluster


def test_files_for_an_embedded_cluster_pass_check(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(cluster.spec.slurm_conf))
    written = primeslurm("init", "first", cwd=tmp_path)
    assert written.code == 0 and written.out.split() == ["first/site.yaml", "first/recipe.yaml"], written
    site = load_site(tmp_path / "first" / "site.yaml")
    nodes = site.nodes["default"], site.nodes["control"]
    assert [(node.partition, node.gpus, node.cpus) for node in nodes] == [("gpu", 2, 8), ("cpu", 0, 8)]
    assert site == load_site(cluster.spec.site_file)
    monkeypatch.delenv("SLURM_CONF")
    checked = primeslurm("check", "recipe.yaml", cwd=tmp_path / "first")
    assert checked.code == 0 and "first-run: recipe is valid" in checked.err, checked
    assert "Slurm gives no answer" not in checked.err
    dry = primeslurm("submit", "recipe.yaml", "--dry-run", cwd=tmp_path / "first")
    assert dry.code == 0 and "--gres=gpu:" in dry.out, dry


def test_init_chooses_partition_account_and_time_of_the_user(lab: AccountingCluster) -> None:
    """`short` has the same nodes as `gpu`, with shorter jobs."""
    written = lab.primeslurm("init", "first", "--json")
    assert written.returncode == 0, written
    answer = json.loads(written.stdout)
    assert (answer["local"], answer["found"]["gpu"]["partition"]) == (False, "gpu")
    home = lab.namespace.home
    site, recipe = load_site(home / "first" / "site.yaml"), load_recipe(home / "first" / "recipe.yaml")
    node = site.nodes["default"]
    assert (node.gpus, node.gres, node.cpus, node.mem, site.slurm.account) == (2, "gpu:h100", 8, "3G", "lab7")
    assert (recipe.deployment.layout, recipe.slurm.time) == ("one_node", "01:00:00")
    text = (home / "first" / "site.yaml").read_text()
    assert "QOS that you may use (slurm.qos): expendable, few, narrow, normal, scavenger, small, sudden" in text
    checked = lab.primeslurm("check", "recipe.yaml", cwd=home / "first")
    assert checked.returncode == 0 and "first-run: recipe is valid" in checked.stderr, checked
    again = lab.primeslurm("init", "first")
    assert again.returncode == 2 and "first/site.yaml" in again.stderr and "first/recipe.yaml" in again.stderr
