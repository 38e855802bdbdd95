"""Each check of preflight, and preflight as a whole."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from primeslurm.base import files
from primeslurm.base.files import write_json
from primeslurm.node.preflight import checks, recipe_inputs
from primeslurm.node.preflight.checks import (
    PreflightCheck,
    clock_check,
    hca_checks,
    hca_names,
    judge_gpus,
    model_check,
    rdma_checks,
    version_checks,
)
from primeslurm.node.preflight.preflight import Preflight, PreflightTimings
from primeslurm.plan.checks.environments import ProbeReport, probe_environments
from primeslurm.plan.model import Plan, Process
from primeslurm.records.fleet import PreflightState, SharedCheck
from primeslurm.records.journal import Journal
from primeslurm.records.monitors import MLFLOW_MISSING
from primeslurm.run.directory import RunDirectory
from tests.support.cli import ROOT
from tests.support.plans import plan_of, python
from tests.support.recipes import model_dir
from tests.support.turn_templates import CHATML, write_model
from tests.support.waiting import wait_until

# As `nvidia-smi --format=csv,noheader,nounits` prints them: index, uuid, MiB used, uncorrected errors.
SOUND = ["0", "GPU-a", "4", "0"]
NO_ECC = ["1", "GPU-b", "4", "[N/A]"]
ROWS = [["GPU-a", "No", "No"], ["GPU-b", "No", "No"]]


def texts(findings: list[PreflightCheck], level: str) -> list[str]:
    return [check.text for check in findings if check.level == level]


def test_gpus_without_faults_pass() -> None:
    assert judge_gpus(2, [SOUND, NO_ECC], ROWS) == [PreflightCheck("gpus", "ok", "2 GPUs")]


def test_all_faults_of_gpus_are_reported() -> None:
    gpus = [["0", "GPU-a", "90000", "3"], NO_ECC]
    check = judge_gpus(8, gpus, [["GPU-a", "Yes", "No"], ["GPU-b", "Yes", "Yes"]])
    assert texts(check, "failed") == [
        "2 GPUs are visible, 8 are needed",
        "GPU 0 has 3 uncorrected ECC errors",
        "GPU 0: 90000 MiB are in use already",
        "GPU 1 cannot remap a broken row of its memory",
    ]
    assert texts(check, "warning") == ["GPU 0 waits for a reset to remap a row"]


def test_a_failing_nvidia_smi_fails_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = checks.gpu_checks(1)
    assert (check.level, check.text) == ("failed", "nvidia-smi failed: No such file or directory")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Unable to determine the device handle: GPU is lost'\nexit 15\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (check,) = checks.gpu_checks(1)
    assert check.text == "nvidia-smi failed: Unable to determine the device handle: GPU is lost"


@pytest.mark.parametrize(("mode", "fit"), [("Default", True), ("Exclusive_Process", False), ("[N/A]", True)])
def test_shared_gpus_must_accept_two_processes(
    mode: str, fit: bool, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"""#!/bin/sh
case "$1" in
  *compute_mode*) echo "0, {mode}";;
  *remapped*) echo "GPU-a, No, No";;
  *) echo "0, GPU-a, 4, 0";;
esac
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (one,) = plan.nodes[0].processes
    for processes, shared in (((one.model_copy(update={"gpus": (0,)}),), False), ((*2 * (one,),), True)):
        placed = tuple(process.model_copy(update={"gpus": (0,)}) for process in processes)
        node = plan.nodes[0].model_copy(update={"processes": placed})
        findings = preflight(plan.model_copy(update={"device": "cuda", "nodes": (node,)}), 0, tmp_path)._gpu()
        failed = [each.text for each in findings if each.name == "compute mode"]
        expected = f"GPU 0 takes one process only (compute mode {mode})"
        assert failed == ([] if fit or not shared else [expected])
        assert [each.text for each in findings if each.name == "gpus"] == ["1 GPUs"], "a shared GPU counts once"


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({}, []),
        ({"UCX_NET_DEVICES": "mlx5_0:1,mlx5_3:1", "NCCL_IB_HCA": "=mlx5_0:1"}, ["mlx5_0:1", "mlx5_3:1"]),
        ({"UCX_NET_DEVICES": "all", "NCCL_IB_HCA": "^mlx5_0"}, []),
        ({"NCCL_IB_HCA": "mlx5"}, []),  # a prefix does not name one adapter
    ],
)
def test_adapters_named_in_the_environment_are_found(env: dict[str, str], names: list[str]) -> None:
    assert hca_names(env) == names


def test_adapters_must_exist_and_be_active(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
    assert hca_checks(["mlx5_0:1"], tmp_path) == [PreflightCheck("hca", "ok", "active: mlx5_0:1")]
    check = hca_checks(["mlx5_0", "mlx5_1:1", "mlx5_2"], tmp_path)
    assert texts(check, "failed") == ["adapter mlx5_1:1 is 1: DOWN", "there is no adapter mlx5_2"]


def test_missing_driver_support_for_rdma_is_a_warning(tmp_path: Path) -> None:
    driver = tmp_path / "proc" / "driver" / "nvidia"
    driver.mkdir(parents=True)
    (driver / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1\n")
    (driver / "params").write_text('EnableStreamMemOPs: 0\nRegistryDwords: ""\n')
    assert [check.name for check in rdma_checks(True, tmp_path)] == ["gpu rdma", "ibgda"]
    assert [check.name for check in rdma_checks(False, tmp_path)] == ["gpu rdma"]
    (tmp_path / "sys" / "module" / "nvidia_peermem").mkdir(parents=True)
    (driver / "params").write_text('EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n')
    assert rdma_checks(True, tmp_path) == []
    (driver / "params").unlink()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "gdrdrv").touch()
    assert rdma_checks(True, tmp_path) == []


def test_busy_ports_are_a_warning_unless_the_recipe_fixes_them() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check, fixed = checks.port_check("127.0.0.1", [port]), checks.port_check("127.0.0.1", [port], {port})
    assert (check.level, check.text) == ("warning", f"in use: {port}")
    assert fixed.level == "failed" and fixed.text.startswith(f"in use: {port}; the recipe fixes it")


@pytest.mark.parametrize(
    ("ahead_s", "level"), [(0.5, "ok"), (-4.9, "ok"), (-6.0, "failed"), (30.0, "warning"), (66.0, "failed")]
)
def test_clocks_may_differ_by_five_seconds(ahead_s: float, level: str) -> None:
    assert clock_check(ahead_s).level == level


def test_the_run_directory_must_be_writable(tmp_path: Path) -> None:
    assert checks.writable_check(tmp_path, 3).level == "ok"
    assert list(tmp_path.iterdir()) == []
    check = checks.writable_check(tmp_path / "none", 3)
    assert (check.level, check.text) == ("failed", f"cannot write to {tmp_path}/none: No such file or directory")


@pytest.mark.parametrize(("number", "shared"), [(errno.ENOSPC, True), (errno.EROFS, True), (errno.EACCES, False)])
def test_a_full_or_read_only_file_system_is_no_fault_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, shared: bool
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checks, "write_atomic", fails)
    check = checks.writable_check(tmp_path, 3)
    assert (check.level, isinstance(check, SharedCheck)) == ("failed", shared)
    assert os.strerror(number) in check.text


def test_the_head_waits_until_it_can_publish_its_reference(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    check = preflight(plan, 0, tmp_path, clock_wait_s=0.2, full_poll_s=0.05)
    monkeypatch.setattr(files, "sleep", time.sleep)
    monkeypatch.setattr(files, "clock", time.monotonic)
    with monkeypatch.context() as read_only:
        read_only.setattr("primeslurm.node.preflight.preflight.write_json", fails)
        check.start()
        wait_until(lambda: check.file_system)
        assert check.verdict == (PreflightState.CHECKING, "") and "Read-only" in check.file_system
    assert verdict(check)[0] is PreflightState.FIT


def test_little_space_is_a_warning_and_too_little_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "ENOUGH_FREE", 2**60)
    assert [check.level for check in checks.space_checks(tmp_path, tmp_path)] == ["warning", "warning"]
    monkeypatch.setattr(checks, "MIN_FREE_BYTES", 2**60)
    assert [check.level for check in checks.space_checks(tmp_path, tmp_path)] == ["failed", "failed"]


def test_rdma_needs_locked_memory() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    try:
        assert texts(checks.memory_limit_checks(["mlx5_0"]), "failed") == ["limited to 64 KiB, RDMA needs more"]
        assert texts(checks.memory_limit_checks([]), "failed") == []
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


def test_a_model_must_be_complete(tmp_path: Path) -> None:
    assert model_check(tmp_path).text == f"{tmp_path} has no readable config.json"
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    assert model_check(tmp_path).level == "ok"
    index = {"weight_map": {"w1": "a.safetensors", "w2": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "b.safetensors").touch()
    assert model_check(tmp_path).text == f"{tmp_path} lacks 1 of 2 shards: b.safetensors"
    (tmp_path / "b.safetensors").write_bytes(b"x")
    assert model_check(tmp_path).level == "ok"


def test_versions_must_be_those_of_the_head() -> None:
    head = {"torch": "2.9", "nixl": None}
    assert version_checks(head, head, head) == [PreflightCheck("versions", "ok", "the head's")]
    (check,) = version_checks({"torch": "2.8", "nixl": None}, head, head)
    assert (check.level, check.text) == ("failed", "torch is 2.8, the head has 2.9")
    (check,) = version_checks(head, head, {"torch": "2.7"})
    assert (check.level, check.text) == ("warning", "torch is 2.9, the run was submitted with 2.7")
    (check,) = version_checks({"torch": "2.9"}, {"torch": "2.9"}, {"torch": None})
    assert check.level == "ok", "a login node with the base install has no torch"


def preflight(plan: Plan, rank: int, tmp_path: Path, **seconds: float) -> Preflight:
    attempt = RunDirectory(Path(plan.run_dir)).attempt(1)
    journal = Journal(attempt.path, f"agent-{rank}")
    return Preflight(plan, rank, f"n{rank}", attempt, tmp_path, journal, PreflightTimings(**seconds))


def verdict(check: Preflight) -> tuple[PreflightState, str]:
    wait_until(lambda: check.verdict[0] is not PreflightState.CHECKING)
    return check.verdict


def judged(check: Preflight) -> tuple[PreflightState, str]:
    """Run preflight to its end."""
    check.start()
    return verdict(check)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    process = Process(name="p", role="engine", node=0, argv=python("pass"), log="p.log", ports={"http": 21500})
    made = plan_of(tmp_path / "run", (process,), spares=1)
    made = made.model_copy(update={"addresses": {"n0": "127.0.0.1", "n1": "127.0.0.1"}})
    attempt = RunDirectory(tmp_path / "run").attempt(1)
    attempt.prepare(made)
    write_json(attempt.fleet_file, {"time": time.time()})
    return made


def test_two_nodes_pass(plan: Plan, tmp_path: Path) -> None:
    both = [preflight(plan, rank, tmp_path, clock_wait_s=0.2) for rank in (1, 0)]
    for one in both:
        one.start()
    assert [verdict(one) for one in both] == [(PreflightState.FIT, "")] * 2


def test_a_node_that_sees_another_plan_fails(plan: Plan, tmp_path: Path) -> None:
    attempt = RunDirectory(Path(plan.run_dir)).attempt(1)
    write_json(attempt.path / "preflight.json", {"plan_digest": "other", "packages": {}})
    assert judged(preflight(plan, 1, tmp_path)) == (
        PreflightState.UNFIT,
        f"{attempt.plan_file} differs from what the head sees",
    )


def test_the_teachers_model_is_checked(plan: Plan, tmp_path: Path) -> None:
    model = model_dir(tmp_path)
    teacher = {"type": "engines", "path": str(tmp_path / "none")}
    write_json(Path(plan.run_dir) / "recipe.resolved.json", {"model": {"path": str(model)}, "teacher": teacher})
    assert judged(preflight(plan, 0, tmp_path)) == (PreflightState.UNFIT, f"there is no model {tmp_path / 'none'}")


@pytest.mark.parametrize("name", ["orchestrator", "trainer-rank-0", "engine-r0-0"])
def test_mlflow_must_be_installed_where_metrics_are_written(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    process = plan.nodes[0].processes[0].model_copy(update={"name": name})
    nodes = (plan.nodes[0].model_copy(update={"processes": (process,)}),)
    recipe = {"model": {"path": str(model_dir(tmp_path))}, "monitor": {"mlflow": {"experiment": "e"}}}
    write_json(Path(plan.run_dir) / "recipe.resolved.json", recipe)
    check = preflight(plan.model_copy(update={"nodes": nodes}), 0, tmp_path, clock_wait_s=0.2)
    check.start()
    writes = name != "engine-r0-0"
    assert verdict(check) == ((PreflightState.UNFIT, MLFLOW_MISSING) if writes else (PreflightState.FIT, ""))


def test_environments_are_loaded_where_workers_may_run(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests/support/environments")
    worker = plan.nodes[0].processes[0].model_copy(update={"role": "environment"})
    nodes = (plan.nodes[0].model_copy(update={"processes": (worker,)}),)
    wrong = [{"id": "fine-words"}, {"id": "fine-words", "name": "b", "args": {"n": "many"}}]
    model = model_dir(tmp_path)
    write_model(model, CHATML, "<|im_end|>")
    write_json(Path(plan.run_dir) / "recipe.resolved.json", {"model": {"path": str(model)}, "environments": wrong})
    may_probe = threading.Event()

    def held(*args: Any, **options: Any) -> ProbeReport:
        assert may_probe.wait(600)
        return probe_environments(*args, **options)

    monkeypatch.setattr(recipe_inputs, "probe_environments", held)
    elsewhere = preflight(plan, 1, tmp_path, clock_wait_s=0.2)
    here = preflight(plan.model_copy(update={"nodes": nodes}), 0, tmp_path, clock_wait_s=0.2)
    here.start()
    elsewhere.start()
    assert verdict(elsewhere) == (PreflightState.FIT, "") and not elsewhere.environments_fail
    why = "environments.1.args.n = many: input should be a valid integer, unable to parse string as an integer"
    assert verdict(here)[0] is PreflightState.FIT and here.checks_environments, "only workers wait for environments"
    may_probe.set()
    wait_until(lambda: not here.checks_environments)
    assert verdict(here) == (PreflightState.UNFIT, why) and here.environments_fail == why


def test_environments_that_cannot_be_checked_fail_like_those_that_do_not_load(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("primeslurm.node.preflight.recipe_inputs.probe_environments", fails)
    worker = plan.nodes[0].processes[0].model_copy(update={"role": "environment"})
    nodes = (plan.nodes[0].model_copy(update={"processes": (worker,)}),)
    write_json(Path(plan.run_dir) / "recipe.resolved.json", {"model": {"path": str(model_dir(tmp_path))}})
    check = preflight(plan.model_copy(update={"nodes": nodes}), 0, tmp_path, clock_wait_s=0.2)
    check.start()
    wait_until(lambda: not check.checks_environments)
    why = "the environments: OSError: [Errno 28] No space left on device"
    assert check.verdict == (PreflightState.UNFIT, why) and check.environments_fail == why


class Clock:
    """A fake module `time` whose monotonic clock can be advanced."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.offset_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("primeslurm.node.preflight.preflight.time", clock)
    return clock


def test_a_check_that_takes_too_long_fails_the_node(
    plan: Plan, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()

    def endless(*_: object) -> None:
        begun.set()
        time.sleep(3600)

    monkeypatch.setattr(checks, "space_checks", endless)
    check = preflight(plan, 1, tmp_path)
    check.start()
    assert begun.wait(600)
    assert check.verdict == (PreflightState.CHECKING, "")
    clock.offset_s = 60.0
    assert check.verdict == (
        PreflightState.UNFIT,
        "preflight takes longer than 1 min; it checks its file systems",
    )


def test_preflight_waits_for_a_full_disk(
    plan: Plan, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = preflight(plan, 0, tmp_path, clock_wait_s=0.2, full_poll_s=0.05)
    with monkeypatch.context() as full:
        full.setattr(checks, "MIN_FREE_BYTES", 2**60)
        check.start()
        wait_until(lambda: check.file_system)
        clock.offset_s = 120.0  # longer than the timeout of the checks, shorter than the run's stall timeout
        assert check.verdict == (PreflightState.CHECKING, "")
        assert check.file_system.endswith(f"the run directory {plan.run_dir}")
    assert verdict(check) == (PreflightState.FIT, "") and check.file_system == ""


def test_the_wait_for_a_full_disk_ends(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MIN_FREE_BYTES", 2**60)
    soon = plan.model_copy(update={"stall_timeout_s": 0})
    state, why = judged(check := preflight(soon, 0, tmp_path, clock_wait_s=0.2, full_poll_s=0.05))
    assert state is PreflightState.UNFIT and check.file_system in why and "GiB free in the run directory" in why


def test_preflight_waits_for_a_late_head(plan: Plan, tmp_path: Path, clock: Clock) -> None:
    check = preflight(plan, 1, tmp_path, clock_wait_s=0.2)
    check.start()
    wait_until(lambda: check._deadline == math.inf)  # it waits for the head
    clock.offset_s = 120.0
    assert check.verdict[0] is PreflightState.CHECKING
    preflight(plan, 0, tmp_path, clock_wait_s=0.2).start()
    assert verdict(check) == (PreflightState.FIT, "")


def test_the_wait_for_the_head_ends(plan: Plan, tmp_path: Path) -> None:
    assert judged(preflight(plan.model_copy(update={"node_start_s": 1}), 1, tmp_path)) == (
        PreflightState.UNFIT,
        "the files of the head are not visible after 1 s",
    )


def test_the_sites_hcas_are_checked(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_IB_HCA", raising=False)
    (node,) = plan.nodes
    used = tuple(process.model_copy(update={"gpus": (0,)}) for process in node.processes)
    nodes = (node.model_copy(update={"processes": used}),)
    on_gpus = plan.model_copy(update={"device": "cuda", "hcas": ("mlx5_77",), "nodes": nodes})
    state, why = judged(preflight(on_gpus, 1, tmp_path))
    assert state is PreflightState.UNFIT and "mlx5_77" in why


def test_an_unreadable_model_is_no_fault_of_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> PreflightCheck:
        def fail(path: Path) -> None:
            raise OSError(code, os.strerror(code), str(path))

        monkeypatch.setattr(checks, "read_json", fail)
        return checks.model_check(tmp_path)

    assert refuse(errno.EACCES) == PreflightCheck("model", "failed", f"{tmp_path} cannot be read: Permission denied")
    assert refuse(errno.ESTALE).name == "shared file system"
