"""Free host memory for copies of the saved state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from primeslurm.trainer.checkpoints import checkpoint, staging
from primeslurm.trainer.checkpoints.staging import Report, free_bytes, nodes_short_of_memory, tensor_bytes
from primeslurm.trainer.distributed.world import World
from primeslurm.wire.stored import checkpoints
from tests.trainer.checkpoints.test_shards import trained
from tests.trainer.conftest import make_batch, make_timer

GB = 10**9


def test_ranks_of_a_node_share_its_memory() -> None:
    assert nodes_short_of_memory([Report("a", 40 * GB, 120 * GB), Report("b", 80 * GB, 120 * GB)]) == []
    shared = [Report("a", 40 * GB, 120 * GB), Report("b", 50 * GB, 120 * GB), Report("b", 50 * GB, 119 * GB)]
    assert nodes_short_of_memory(shared) == ["b (100.0 GB needed, 119.0 GB free)"]


def test_tensor_bytes_counts_all_tensors() -> None:
    state = {"a": torch.zeros(10), "b": {"c": torch.zeros(3, dtype=torch.bfloat16), "step": 4}}
    assert tensor_bytes(state) == 46


def files(root: Path, contents: dict[str, str]) -> None:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MACHINE = {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 800 kB\n", "proc/self/cgroup": "0::/job/step\n"}
STEP, JOB = "sys/fs/cgroup/job/step/memory.", "sys/fs/cgroup/job/memory."


def test_free_memory_without_cgroup_limits(tmp_path: Path) -> None:
    files(tmp_path, MACHINE)
    assert free_bytes(tmp_path) == 800 * 1024
    files(tmp_path, {f"{STEP}max": "max\n", f"{STEP}current": "9\n", f"{STEP}stat": ""})
    assert free_bytes(tmp_path) == 800 * 1024
    assert 0 < free_bytes() < 1 << 60, "of this machine"


def test_tightest_cgroup_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    wide = {f"{STEP}max": "700000", f"{STEP}current": "1000", f"{STEP}stat": "inactive_file 0"}
    narrow = {f"{JOB}max": "600000", f"{JOB}current": "500000", f"{JOB}stat": "anon 1\ninactive_file 200000\n"}
    files(tmp_path, MACHINE | wide | narrow)
    assert free_bytes(tmp_path) == 300_000


def test_cgroup_v1(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory/slurm/memory."
    first = {
        "proc/self/cgroup": "5:cpu,cpuacct:/slurm\n4:memory:/slurm\n",
        f"{top}limit_in_bytes": "90000",
        f"{top}usage_in_bytes": "50000",
        f"{top}stat": "inactive_file 1\ntotal_inactive_file 20000\n",
    }
    files(tmp_path, MACHINE | first)
    assert free_bytes(tmp_path) == 60_000
    files(tmp_path, {f"{top}limit_in_bytes": "9223372036854771712"})
    assert free_bytes(tmp_path) == 800 * 1024


@pytest.mark.parametrize(("free", "commits_at_once"), [(1000, True), (1 << 40, False)], ids=["full", "empty"])
def test_checkpoint_is_synchronous_without_memory_for_a_copy(
    free: int, commits_at_once: bool, moe_model: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "free_bytes", lambda: free)
    train_step, saver = trained(moe_model, tmp_path, world, 0)
    assert saver._asynchronous is False, "without a GPU, states are in host memory already"
    saver._asynchronous = None  # as with GPUs
    timer = make_timer(tmp_path)
    train_step.train(make_batch(1), timer)
    saver.after(1, train_step, timer)
    assert (saver._pending is None) == commits_at_once
    saver.finish(1, train_step, timer)
    assert checkpoints.committed(tmp_path) == [1] and checkpoints.damage(checkpoints.step_dir(tmp_path, 1)) == []
    assert isinstance(checkpoint.copies_fit(world, {}), bool)
