"""CPU affinity near the GPU, with a fake sysfs and real affinities."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from primeslurm.trainer.distributed.cpu_affinity import CpuAffinity
from tests.trainer.conftest import finish, printed, start_ranks

GPU = "0000:1b:00.0"
CORES = sorted(os.sched_getaffinity(0))


def moved(sys_fs: Path, may_use: list[int], ranks: int) -> tuple[list[list[int]], list[int], int, list[int], str]:
    """Return the thread affinities of a process with some allowed cores, and what it logs."""
    arguments = (str(sys_fs), json.dumps(may_use), str(ranks))
    (output,) = finish(start_ranks(1, "tests.trainer.distributed.near_cores", *arguments))
    seen, cores, threads, allowed, text = printed(output, "AFFINITY")[0]
    return seen, cores, threads, allowed, text


def sysfs(root: Path, cpulist: str | None) -> Path:
    device = root / "bus/pci/devices" / GPU
    device.mkdir(parents=True)
    if cpulist is not None:
        (device / "local_cpulist").write_text(f"{cpulist}\n")
    return root


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores, to choose one")
def test_all_threads_move_to_the_nearest_allowed_cores(tmp_path: Path) -> None:
    first, last = CORES[0], CORES[-1]
    near = sysfs(tmp_path / "near", f"{last},{last + 1000}-{last + 1003}")
    seen, cores, threads, allowed, text = moved(near, CORES, 1)
    assert seen == [[last]] * 3 and cores == [last] and allowed == CORES
    assert threads == 1, "no more than cores"
    assert text.startswith(f"GPU {GPU}: cores {last} of ")
    assert moved(near, [first], 1)[:2] == ([[first]] * 3, [first]), "none of the nearest may be used"
    everywhere = sysfs(tmp_path / "everywhere", f"0-{last}")
    assert moved(everywhere, [last], 1)[:2] == ([[last]] * 3, [last]), "others are not for this process"


@pytest.mark.parametrize("cpulist", [None, ""])
def test_affinity_stays_if_the_node_reports_no_near_cores(cpulist: str | None, tmp_path: Path) -> None:
    seen, cores, threads, _, _ = moved(sysfs(tmp_path, cpulist), CORES, 1)
    assert seen == [CORES] * 3 and cores == CORES and threads == len(CORES)
    assert moved(tmp_path, CORES, 2 * len(CORES))[2] == 1, "more ranks than cores"


def test_core_ranges_are_formatted_like_the_kernel() -> None:
    assert ": cores 0-3,8,10-11 of " in str(CpuAffinity(GPU, frozenset({0, 1, 2, 3, 8, 10, 11}), 4))
