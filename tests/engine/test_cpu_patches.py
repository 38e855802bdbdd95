"""The CPU patches refuse a changed vLLM, may be applied twice, and are correct under expert parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from subprocess import DEVNULL, PIPE
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from primeslurm.base import compiled_code
from primeslurm.inference.patches import coordinator_addresses, expect
from primeslurm.orchestrator.weight_updates.engine_client import PolicyVersion
from primeslurm.testbed.cpu_engine import patches
from tests.engine.conftest import ConnectEngine, tiny_recipe
from tests.support.engine_commands import engine_command
from tests.support.generate import generate
from tests.support.models import check_sampled_by, make_model, publish
from tests.support.processes import EngineForks

pytestmark = pytest.mark.engine
PROMPT = [2, 5, 9, 14, 7, 3, 21]


def test_registering_twice_changes_nothing() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from primeslurm.inference.plugin import register

    register()
    patched = UnquantizedFusedMoEMethod._setup_kernel
    register()
    assert UnquantizedFusedMoEMethod._setup_kernel is patched
    assert "primeslurm_filesystem" in WeightTransferEngineFactory._registry


SETTINGS = """
import sys
from vllm import envs, plugins
from vllm.model_executor.models import registry
from vllm.v1.engine import coordinator, core
registry._run_in_subprocess = lambda fn: "a new process"
plugins.load_general_plugins()
print(envs.VLLM_CACHE_ROOT)
print(core.HANDSHAKE_TIMEOUT_MINS, coordinator.DPCoordinator._wait_for_zmq_addrs.__name__)
sys.imported = "a fork"  # which has the memory of this process
print(registry._run_in_subprocess(lambda: sys.imported), end=", else ")
print(registry._run_in_subprocess(lambda: sys.exit("CUDA error")))
"""


def test_plugin_sets_directory_timeouts_and_forks_of_an_engine(tmp_path: Path) -> None:
    """vLLM loads these modules when it parses arguments, before it knows its cache directory."""
    variables = {name: os.environ[name] for name in os.environ if name not in compiled_code.DIRECTORIES}
    variables |= {compiled_code.VARIABLE: str(tmp_path), "VLLM_ENGINE_READY_TIMEOUT_S": "7201"}
    output = subprocess.check_output([sys.executable, "-c", SETTINGS], env=variables, text=True, timeout=600)
    cache, late_ranks, inspection = output.splitlines()[-3:]
    assert Path(cache).is_relative_to(tmp_path)
    assert late_ranks == "121 coordinator_addresses", "ranks wait for late ones until the start timeout"
    assert inspection == "a fork, else a new process"


def test_addresses_of_a_coordinator_or_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sentinel, _alive = mp.Pipe()
    child = SimpleNamespace(proc=SimpleNamespace(sentinel=sentinel))
    received, sent = mp.Pipe(duplex=False)
    sent.send(("a", "b", "c"))
    assert coordinator_addresses(child, received) == ("a", "b", "c") and received.closed
    received, sent = mp.Pipe(duplex=False)
    sent.close()
    with pytest.raises(RuntimeError, match="ended while it started"):
        coordinator_addresses(child, received)
    received, sent = mp.Pipe(duplex=False)
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "0")
    with pytest.raises(RuntimeError, match="not ready after 0 s"):
        coordinator_addresses(child, received)


def test_patch_refuses_a_changed_vllm() -> None:
    class Changed:
        def renamed_arguments(self, other: int) -> None: ...

    with pytest.raises(RuntimeError, match=r"Changed\.gone is missing"):
        expect(Changed, "gone", ())
    with pytest.raises(RuntimeError, match="no parameter layer"):
        expect(Changed, "renamed_arguments", ("layer",))


def test_patch_refuses_a_vllm_with_its_own_collectives() -> None:
    from primeslurm.inference.plugin import register

    register()  # now CpuCommunicator has them, as if they were vLLM's own
    with pytest.raises(RuntimeError, match="now has all_gatherv"):
        patches._add_variable_collectives()


IDLE_AGENT = """
import os, time
from primeslurm.inference.plugin import register
if {patched}:
    register()
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config
agent = NixlWrapper("idle", nixl_agent_config(num_threads=4))
before = os.times()
time.sleep(3)
after = os.times()
print(after.user - before.user + after.system - before.system)
"""


@pytest.mark.campaign
def test_an_idle_nixl_agent_sleeps() -> None:
    """Compared side by side, because the core share of a polling thread depends on the machine."""
    agents = [
        subprocess.Popen([sys.executable, "-c", IDLE_AGENT.format(patched=patched)], stdout=PIPE, stderr=DEVNULL)
        for patched in (True, False)
    ]
    ours, stock = (float(agent.communicate()[0].split()[-1]) for agent in agents)
    assert ours < 0.5 * stock, (ours, stock)


@pytest.mark.parametrize(("threads", "method"), [("1", "fork"), ("2", "spawn")])
def test_forked_engine_has_one_openmp_thread(threads: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms.cpu import CpuPlatform

    def stock(cls: type, vllm_config: object) -> None:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "")
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(stock))
    patches._fork_processes()
    CpuPlatform.check_and_update_config(None)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == method


def _collectives(rank: int, file: str) -> None:
    dist.init_process_group("gloo", f"file://{file}", timedelta(seconds=30), rank=rank, world_size=2)
    communicator = SimpleNamespace(world_size=2, rank_in_group=rank, cpu_group=dist.group.WORLD)
    sizes = [1, 3]
    rows = [torch.arange(6.0).view(3, 2)[: sizes[r]] + 10 * r for r in (0, 1)]
    gathered = patches._all_gatherv(communicator, rows[rank], sizes=sizes)
    assert torch.equal(gathered, torch.cat(rows))
    pair = patches._all_gatherv(communicator, [rows[rank], rows[rank] + 1], sizes=sizes)
    assert torch.equal(pair[1], torch.cat(rows) + 1)
    mine = patches._reduce_scatterv(communicator, gathered * (rank + 1), dim=0, sizes=sizes)
    assert torch.equal(mine, rows[rank] * 3)
    columns = patches._reduce_scatterv(communicator, torch.arange(8.0).view(2, 4))
    assert torch.equal(columns, 2 * torch.arange(8.0).view(2, 4)[:, 2 * rank : 2 * rank + 2])
    dist.destroy_process_group()


@pytest.mark.campaign
def test_collectives_of_uneven_sizes(tmp_path: Path) -> None:
    mp.start_processes(_collectives, (str(tmp_path / "store"),), nprocs=2, start_method="spawn")


async def test_expert_parallel_workers_take_a_policy(
    engine_forks: EngineForks, client: ConnectEngine, model: Path, tmp_path: Path
) -> None:
    recipe = tiny_recipe(model, parallel={"tp": 2}, vllm_extra={"enable_expert_parallel": True})
    engine = engine_forks.start(engine_command(recipe, "cpu", "engine", sys.executable))
    engine.wait("/primeslurm/status")
    try:
        started = psutil.Process(engine.pid).children(recursive=True)
        assert len(started) >= 3, "a core and two workers"
        # Spawned processes would start with vLLM's current settings.
        assert all(process.environ().get("VLLM_WORKER_MULTIPROC_METHOD") != "spawn" for process in started)
        target = make_model(tmp_path / "target", seed=9)
        await client(engine).apply(PolicyVersion(1, str(publish(target, tmp_path, 1))), timeout_s=600)
        answer = generate(engine.url, PROMPT, 8)
        check_sampled_by(target, PROMPT, answer)
    finally:
        engine.stop()
