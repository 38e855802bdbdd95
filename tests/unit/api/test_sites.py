"""The site of this machine: its GPUs, or those that Slurm gives to a shell."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from primeslurm.api.sites import find_site, local_site, runs_directory
from primeslurm.base.errors import UsageError
from primeslurm.recipe.site import NodeKind

ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu[07-08]"}


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A /dev with eight GPUs."""
    for index in range(8):
        (tmp_path / f"nvidia{index}").touch()
    return tmp_path


def kind(devices: Path, driver: Path = Path("/none"), **environ: str) -> tuple[str, NodeKind]:
    site = local_site(devices / "runs", devices, driver_dir=driver, environ=environ)
    return site.device, site.nodes["default"]


@pytest.mark.parametrize(
    ("environ", "device", "gpus"),
    [
        ({}, "cuda", 8),
        ({"CUDA_VISIBLE_DEVICES": "4,5"}, "cuda", 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2", "SLURM_JOB_GPUS": "4,5,6"}, "cuda", 3),
        ({"SLURM_STEP_GPUS": "6", "SLURM_JOB_GPUS": "4,5,6"}, "cuda", 1),
        ({"SLURM_JOB_GPUS": "4,5,6"}, "cuda", 3),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1b,GPU-2c"}, "cuda", 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu", 8),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "cpu", 8),
    ],
    ids=str,
)
def test_local_site_has_the_gpus_of_the_shell(environ: dict[str, str], device: str, gpus: int, devices: Path) -> None:
    local_device, nodes = kind(devices, **environ)
    assert (local_device, nodes.gpus) == (device, gpus)


def test_without_devices_the_site_has_fake_gpus(tmp_path: Path) -> None:
    assert kind(tmp_path)[0] == "cpu"
    assert kind(tmp_path)[1].gpus == 8
    local_device, nodes = kind(tmp_path, CUDA_VISIBLE_DEVICES="0,1")
    assert (local_device, nodes.gpus) == ("cpu", 2)


@pytest.mark.parametrize(
    ("environ", "memory_gib"),
    [
        ({}, None),
        ({"SLURM_MEM_PER_NODE": "2048"}, 2.0),
        ({"SLURM_MEM_PER_NODE": "0"}, None),
        ({"SLURM_MEM_PER_CPU": "1024", "SLURM_CPUS_ON_NODE": "1"}, 1.0),
    ],
    ids=str,
)
def test_local_site_has_cores_and_memory_of_the_allocation(
    environ: dict[str, str], memory_gib: float | None, tmp_path: Path
) -> None:
    _, nodes = kind(tmp_path, **environ)
    assert nodes.memory_gib == memory_gib
    assert nodes.cpus == int(environ.get("SLURM_CPUS_ON_NODE", len(os.sched_getaffinity(0))))


@pytest.mark.parametrize(
    ("models", "expected"),
    [
        (["NVIDIA H100 80GB HBM3"], "h100"),
        (["NVIDIA H200", "NVIDIA H200"], "h200"),
        (["NVIDIA A100-SXM4-80GB"], "a100"),
        (["NVIDIA A100-SXM4-40GB"], None),
        (["NVIDIA GH200 480GB"], None),
        (["NVIDIA H100 80GB HBM3", "NVIDIA L40S"], None),
        (["NVIDIA GeForce RTX 4090"], None),
        ([], None),
    ],
    ids=str,
)
def test_gpu_type_comes_from_the_driver(models: list[str], expected: str | None, devices: Path) -> None:
    for number, model in enumerate(models):
        (devices / f"0000:{number}b:00.0").mkdir()
        (devices / f"0000:{number}b:00.0" / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 18\n")
    assert kind(devices, devices)[1].gpu == expected


def test_local_run_outside_of_the_allocated_node_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On many clusters, the shell of `salloc` stays on the login node."""
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    with pytest.raises(UsageError) as caught:
        find_site(None, local=True)
    (violation,) = caught.value.violations
    assert violation.field == "--local"
    assert violation.why.endswith("and its Slurm allocation is node gpu[07-08]") and "srun" in violation.fix
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu08.cluster.example")
    assert find_site(None, local=True).name == "local"
    monkeypatch.undo()
    for name, value in {**ALLOCATION, "SLURMD_NODENAME": "gpu07"}.items():
        monkeypatch.setenv(name, value)
    assert find_site(None, local=True).name == "local"


@pytest.mark.parametrize("more", ["", "foo: 1\n", "device: tpu\n"])
def test_runs_directory_ignores_other_errors_of_the_site_file(
    more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("site.yaml").write_text(f"name: x\nruns: mine\nnodes: {{default: {{partition: p, cpus: 1}}}}\n{more}")
    assert runs_directory(None) == tmp_path / "mine"
    assert runs_directory("others") == Path("others")


@pytest.mark.parametrize("text", ["\t", "runs: [a]\n"])
def test_unreadable_runs_of_a_site_file_are_an_error(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("site.yaml").write_text(text)
    with pytest.raises(UsageError):
        runs_directory(None)
