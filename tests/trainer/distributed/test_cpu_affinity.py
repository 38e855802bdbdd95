"""CPU affinity near the GPU, with a fake sysfs and real affinities."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from primeslurm.trainer.distributed.cpu_affinity import CpuAffinity

GPU = "0000:1b:00.0"
PROGRAM = """
import json, os, sys, threading
from pathlib import Path
from primeslurm.trainer.distributed import cpu_affinity as cores
os.sched_setaffinity(0, json.loads(sys.argv[2]))
done = threading.Event()
earlier = threading.Thread(target=done.wait)
earlier.start()
place = cores.move_near("0000:1b:00.0", int(sys.argv[3]), Path(sys.argv[1]))
later = threading.Thread(target=done.wait)
later.start()
seen = [sorted(os.sched_getaffinity(number)) for number in (0, earlier.native_id, later.native_id)]
done.set()
print(json.dumps([seen, sorted(place.cores), place.threads, sorted(cores.allowed()), str(place)]))
"""
CORES = sorted(os.sched_getaffinity(0))


def moved(sys_fs: Path, may_use: list[int], ranks: int) -> tuple[list[list[int]], list[int], int, list[int], str]:
    """Return the thread affinities of a process with some allowed cores, and what it logs."""
    argv = [sys.executable, "-c", PROGRAM, str(sys_fs), json.dumps(may_use), str(ranks)]
    seen, cores, threads, allowed, text = json.loads(subprocess.run(argv, check=True, capture_output=True).stdout)
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
