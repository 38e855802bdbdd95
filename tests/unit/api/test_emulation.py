"""Embedded clusters of emulated runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from primeslurm.api.recipes import emulation
from primeslurm.api.recipes.loading import load
from primeslurm.base.errors import UsageError
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import find_recipe, load_recipe
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from primeslurm.testbed.embedded_slurm.config import ClusterSpec, LoopbackPlace, is_name

FIELDS = {
    "seq_len": 1024,
    "model": {"path": "/m"},
    "environments": [{"id": "e"}],
    "deployment": {"train": {"nodes": 2}},
}
CUT = "a-name-of-more-than-23-letters"


def test_no_two_runs_share_a_cluster() -> None:
    runs = ("try-1", "a_b", "a-b", "a.b", CUT, f"{CUT}-2")
    names = [emulation.cluster_for(Recipe.model_validate({"name": run, **FIELDS})).name for run in runs]
    assert len(set(names)) == len(runs) and all(map(is_name, names))
    assert names[0] == "emulate-try-1"


def test_run_on_one_node_gets_a_cluster_of_one_node() -> None:
    source = find_recipe(Path("qwen3_8b_single_node"))
    spec = emulation.cluster_for(emulation.for_emulation(load_recipe(source)))
    assert (spec.nodes, spec.control_nodes) == (1, 0)


def test_emulation_needs_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.yaml").write_text(json.dumps({"name": "r", **FIELDS}))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "safetensors" else find_spec(name))
    with pytest.raises(UsageError, match=r"--emulate: .* has no safetensors \(`primeslurm install --cpu"):
        load(tmp_path / "r.yaml", emulate=True)


@pytest.mark.parametrize("home", ["/root", "/home/alice", "/home/a-long-user-name"])
def test_cluster_of_any_run_name_has_a_short_path(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    for run in ("r", "qwen3-30b-a3b-one-node", "smollm2-arithmetic-one-gpu", f"{CUT}-{CUT}"):
        emulation.cluster_for(Recipe.model_validate({"name": run, **FIELDS})).check()


@pytest.mark.parametrize("started", [True, False])
def test_only_a_cluster_started_here_is_stopped(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClusterSpec("emulate-r", Path("/c"), Path("/runs"))
    ended: list[str] = []
    monkeypatch.setattr(emulation, "up", lambda spec: (Cluster(spec, LoopbackPlace(0)), started))
    monkeypatch.setattr(Cluster, "down", lambda cluster: ended.append(cluster.spec.name))
    with emulation.running(spec, keep=False):
        pass
    with pytest.raises(RuntimeError), emulation.running(spec, keep=True):
        raise RuntimeError
    assert ended == ["emulate-r"] * 2 * started
