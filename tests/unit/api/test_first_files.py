"""`primeslurm init` without Slurm, and with one that answers as recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from primeslurm.api.setup import first_files
from primeslurm.api.setup.first_files import Proposal, guessed_runs_directory, propose, write_first_files
from primeslurm.api.setup.ready_recipes import write_new
from primeslurm.base.errors import UsageError
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from primeslurm.slurm.partitions import Partition
from primeslurm.testbed.embedded_slurm.cluster import Cluster
from primeslurm.testbed.embedded_slurm.config import ClusterSpec, LoopbackPlace
from tests.support.cli import primeslurm
from tests.unit.api.test_proposal import CPU, H100, facts, nodes


def no_slurm(directory: Path) -> Path:
    """A directory for PATH without the commands of Slurm."""
    for name in ("sinfo", "scontrol", "sacctmgr", "sbatch"):
        (directory / name).write_text("#!/bin/sh\necho no cluster here >&2; exit 1\n")
        (directory / name).chmod(0o755)
    return directory


def test_without_slurm_the_recipe_is_local_and_passes_check(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    path = no_slurm(tmp_path / "bin")
    written = primeslurm("init", "first", "--json", cwd=tmp_path, path=path)
    assert written.code == 0, written.err
    answer = json.loads(written.out)
    assert answer == {
        "recipe": "first/recipe.yaml",
        "site": None,
        "local": True,
        "why_local": "Slurm does not answer here (sinfo --noheader --all: no cluster here)",
        "embedded": "",
        "found": None,
    }
    assert [each.name for each in (tmp_path / "first").iterdir()] == ["recipe.yaml"]
    checked = primeslurm("check", "recipe.yaml", "--local", cwd=tmp_path / "first", path=path)
    assert checked.code == 0 and "primeslurm install --model smollm2" in checked.err, checked
    assert primeslurm("plan", "recipe.yaml", "--local", cwd=tmp_path / "first", path=path).code == 0


@pytest.mark.parametrize("name", ["site.yaml", "recipe.yaml"])
def test_existing_file_is_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / name).write_text("mine")
    refused = primeslurm("init", cwd=tmp_path, path=no_slurm(tmp_path / "bin"))
    assert refused.code == 2 and refused.err.startswith(f"error: {name}: already exists"), refused
    assert {each.name for each in tmp_path.iterdir()} == {name, "bin"} and (tmp_path / name).read_text() == "mine"


def test_site_file_has_the_facts_of_slurm_and_open_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proposal = propose(facts(H100, CPU, Partition("closed", "DOWN", nodes(1, "gpu:1"))))
    monkeypatch.setattr(first_files, "_ask_slurm", lambda: (proposal, ""))
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/other.conf")
    first = write_first_files(tmp_path / "a: #1 'directory'")  # a path with YAML syntax
    assert first.site is not None
    site, text = load_site(first.site), first.site.read_text()
    node = site.nodes["default"]
    assert (node.partition, node.gpus, node.gres, node.cpus, node.mem) == ("h100", 8, "gpu:h100", 96, "1953G")
    assert (site.nodes["control"].partition, site.slurm_conf) == ("cpu", "/etc/slurm/other.conf")
    assert site.runs == str(tmp_path / "a: #1 'directory'" / "runs")
    assert "LOOK AT THIS" in text and "or that are down: closed" in text
    recipe = load_recipe(first.recipe)
    assert (recipe.deployment.layout, recipe.slurm.time) == ("one_node", "01:00:00")


def test_embedded_cluster_provides_its_own_site_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClusterSpec("toy", tmp_path / "toy", tmp_path / "runs", nodes=1, control_nodes=0)
    Cluster(spec, LoopbackPlace(0))._write_files()
    monkeypatch.setattr(
        first_files, "_ask_slurm", lambda: (propose(facts(Partition("gpu", "UP", nodes(1, "gpu:8")))), "")
    )
    monkeypatch.setenv("SLURM_CONF", str(spec.slurm_conf))
    first = write_first_files(tmp_path / "first")
    assert first.site is not None and first.embedded == "toy"
    site = load_site(first.site)
    assert (site.device, site.network.addresses) == ("cpu", {"toy-n001": "127.20.1.1"})
    assert first.site.read_text() == spec.site_file.read_text()
    assert yaml.safe_load(first.recipe.read_text())["extends"] == "smollm2_arithmetic_cpu.yaml"

    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "toy" / "other.conf"))
    other = write_first_files(tmp_path / "other")
    assert other.site is not None and (other.embedded, load_site(other.site).device) == ("", "cuda")


@pytest.mark.parametrize(
    ("gpus", "base"), [(1, "smollm2_arithmetic_one_gpu"), (2, "smollm2_arithmetic"), (8, "smollm2_arithmetic")]
)
def test_first_recipe_fits_on_one_node(gpus: int, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = Partition("gpu", "UP", nodes(1, f"gpu:{gpus}"), max_minutes=10)
    proposal: Proposal = propose(facts(partition))
    monkeypatch.setattr(first_files, "_ask_slurm", lambda: (proposal, ""))
    written = yaml.safe_load(write_first_files(tmp_path).recipe.read_text())
    assert written == {"extends": f"{base}.yaml", "name": "first-run", "slurm": {"time": "00:10:00"}}


MOUNTS = """/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
scratch@tcp:/fs /fast\\040disk lustre rw 0 0
tmpfs /home/local tmpfs rw 0 0
"""


def test_runs_are_on_a_network_file_system_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_files._file_system(Path("/home/ann/x"), MOUNTS) == "nfs4"
    assert first_files._file_system(Path("/home/local/x"), MOUNTS) == "tmpfs"
    assert first_files._file_system(Path("/fast disk/x"), MOUNTS) == "lustre"
    assert first_files._file_system(Path("/homes"), MOUNTS) == "ext4"
    scratch, here = tmp_path / "scratch", tmp_path / "here"
    scratch.mkdir()
    here.mkdir()
    mounts = f"/dev/sda1 / ext4 rw 0 0\nserver:/x {scratch} nfs rw 0 0\n"
    assert guessed_runs_directory(here, {"SCRATCH": str(scratch)}, mounts) == (scratch / "primeslurm" / "runs", True)
    assert guessed_runs_directory(scratch, {}, mounts) == (scratch / "runs", True)
    assert guessed_runs_directory(here, {"SCRATCH": str(tmp_path / "gone")}, mounts) == (here / "runs", False)


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_directory_that_cannot_be_created_is_a_usage_error(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    answer = primeslurm("init", place, cwd=tmp_path)
    assert answer.code == 2 and answer.err.startswith(f"error: DIR = {place}: cannot be created"), answer


def test_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", f"{path}.tmp")

    monkeypatch.setattr("primeslurm.base.durable.write", refuse)
    with pytest.raises(UsageError) as caught:
        write_new({tmp_path / "site.yaml": ""})
    assert str(caught.value) == f"{tmp_path}/site.yaml: cannot be written: Permission denied (choose another directory)"


def test_next_command_is_quoted_for_a_shell(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    answer = primeslurm("init", "my runs", cwd=tmp_path, path=no_slurm(tmp_path / "bin"))
    assert "Next: cd 'my runs' && primeslurm check recipe.yaml --local" in answer.err
