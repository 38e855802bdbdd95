"""The checks of preflight, each a small function that returns its findings."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from primeslurm.base import files
from primeslurm.base.durable import MIN_FREE_BYTES, may_recover
from primeslurm.base.files import read_json, write_atomic
from primeslurm.base.private_directory import LONGEST_FOR_SOCKETS
from primeslurm.base.units import duration, gib
from primeslurm.node.host.network import FIXED, can_bind
from primeslurm.plan.gpus import GIB
from primeslurm.records.fleet import CheckLevel, PreflightCheck, SharedCheck

COMMAND_TIMEOUT_S = 20.0
USED_MIB = 2048  # GPU memory that may be in use before the run starts: the driver uses less than this
ENOUGH_FREE = 10 * GIB
ENOUGH_SHM = 2 * GIB
SKEW_S = 5.0
CACHED_S = 60.0  # how out of date a network file system may show a file
# Errors of a path that somebody must correct. Other errors come from a file system that may recover.
_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
SLOW_S = 5.0  # a file system that takes longer than this for a small file is slow


# GPUs


def gpu_checks(wanted: int) -> list[PreflightCheck]:
    """Check number, free memory and errors of the GPUs, as nvidia-smi reports them."""
    # A program and not the library NVML: a call into a stuck driver never returns, and an agent stuck in one could not
    # even be killed.
    try:
        gpus = _nvidia_smi("gpu", "index", "uuid", "memory.used", "ecc.errors.uncorrected.volatile.total")
        rows = _nvidia_smi("remapped-rows", "gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
    except (OSError, subprocess.SubprocessError) as error:
        text = f"nvidia-smi failed: {_text(error)}"
        return [PreflightCheck("gpus", "failed", text, "look for Xid errors in `dmesg`")]
    return judge_gpus(wanted, gpus, rows)


def judge_gpus(wanted: int, gpus: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> list[PreflightCheck]:
    """Judge nvidia-smi's answers about `wanted` GPUs.

    `gpus` has index, UUID, used memory [MiB] and uncorrected ECC errors; `rows` has UUID, and whether a remapping of
    memory rows is pending or has failed.
    """
    findings = []
    if len(gpus) < wanted:
        text = f"{len(gpus)} GPUs are visible, {wanted} are needed"
        findings.append(PreflightCheck("gpus", "failed", text, "drain the node"))
    for index, _, used, errors in gpus:
        if _number(errors):
            text = f"GPU {index} has {errors} uncorrected ECC errors"
            findings.append(PreflightCheck("ecc", "failed", text, "reset the GPU, or drain the node"))
        if _number(used) > USED_MIB:
            text = f"GPU {index}: {used} MiB are in use already"
            findings.append(PreflightCheck("gpu memory", "failed", text, "end what a former job left on it"))
    for uuid, pending, failure in rows:
        index = next((gpu[0] for gpu in gpus if gpu[1] == uuid), uuid)
        if _number(failure):
            text = f"GPU {index} cannot remap a broken row of its memory"
            findings.append(PreflightCheck("row remapping", "failed", text, "replace the GPU"))
        elif _number(pending):
            text = f"GPU {index} waits for a reset to remap a row"
            findings.append(PreflightCheck("row remapping", "warning", text, "reset the GPU"))
    return findings or [PreflightCheck("gpus", "ok", f"{len(gpus)} GPUs")]


def shared_gpu_checks() -> list[PreflightCheck]:
    """Check that two processes can share a GPU, as trainer and engine do with `deployment.colocated`."""
    try:
        gpus = _nvidia_smi("gpu", "index", "compute_mode")
    except (OSError, subprocess.SubprocessError) as error:
        return [PreflightCheck("compute mode", "warning", f"nvidia-smi failed: {_text(error)}")]
    fix = "`nvidia-smi --compute-mode=DEFAULT` as root, or leave deployment.colocated out"
    return [
        PreflightCheck("compute mode", "failed", f"GPU {index} takes one process only (compute mode {mode})", fix)
        for index, mode in gpus
        if mode in ("Exclusive_Process", "Exclusive_Thread", "Prohibited")
    ]


def _nvidia_smi(what: str, *fields: str) -> list[list[str]]:
    argv = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    if allocated := os.environ.get("CUDA_VISIBLE_DEVICES"):
        argv.append(f"--id={allocated}")  # other jobs may use the node's other GPUs
    done = subprocess.run(
        argv, capture_output=True, encoding="utf-8", errors="replace", timeout=COMMAND_TIMEOUT_S, check=True
    )
    lines = [line for line in done.stdout.splitlines() if line.count(",") == len(fields) - 1]
    return [[part.strip() for part in line.split(",")] for line in lines]


def _number(text: str) -> int:
    # nvidia-smi also writes [N/A], Yes and No.
    return int(text) if text.isdigit() else int(text == "Yes")


# network


def hca_names(env: Mapping[str, str]) -> list[str]:
    """Return the adapters that UCX_NET_DEVICES and NCCL_IB_HCA name, as `device` or `device:port`; no patterns."""
    entries = env.get("UCX_NET_DEVICES", "").split(",")
    nccl = env.get("NCCL_IB_HCA", "")
    entries += nccl.removeprefix("=").split(",") if not nccl.startswith("^") else []
    return list(dict.fromkeys(entry for entry in entries if re.fullmatch(r"[a-z]+\w*_\w+(:\d+)?", entry)))


def hca_checks(names: Iterable[str], root: Path = Path("/sys/class/infiniband")) -> list[PreflightCheck]:
    findings = []
    for name in names:
        device, _, port = name.partition(":")
        try:
            state = (root / device / "ports" / (port or "1") / "state").read_text().strip()
        except OSError:
            fix = "correct `network` of the site file"
            findings.append(PreflightCheck("hca", "failed", f"there is no adapter {name}", fix))
            continue
        if "ACTIVE" not in state:
            fix = "check its cable and switch port"
            findings.append(PreflightCheck("hca", "failed", f"adapter {name} is {state}", fix))
    return findings or [PreflightCheck("hca", "ok", f"active: {', '.join(names)}")]


def rdma_checks(gpu_initiated: bool, root: Path = Path("/")) -> list[PreflightCheck]:
    """Check what the GPU's driver needs for RDMA of GPU memory, and for RDMA that GPUs start themselves (DeepEP).

    They are warnings: a driver that is newer than these checks may need none of it.
    """
    params, version = (_driver_text(root / "proc/driver/nvidia" / name) for name in ("params", "version"))
    findings = []
    if "Open Kernel Module" not in version and not (root / "sys/module/nvidia_peermem").is_dir():
        text = "NICs cannot read GPU memory: nvidia_peermem is not loaded, and the driver is not the open one"
        findings.append(PreflightCheck("gpu rdma", "warning", text, "`modprobe nvidia_peermem` as root"))
    if gpu_initiated and "PeerMappingOverride=1" not in params and not (root / "dev/gdrdrv").exists():
        text = "DeepEP between nodes needs IBGDA, and the driver has neither PeerMappingOverride=1 nor GDRCopy"
        fix = 'load gdrdrv, or nvidia with NVreg_RegistryDwords="PeerMappingOverride=1;" NVreg_EnableStreamMemOPs=1'
        findings.append(PreflightCheck("ibgda", "warning", text, fix))
    return findings


def _driver_text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def port_check(address: str, ports: Iterable[int], fixed: Collection[int] = ()) -> PreflightCheck:
    """Check that ports are free. The agent uses others where they are not, except for fixed ones."""
    busy = [str(port) for port in ports if not can_bind(address, port)]
    if taken := [port for port in busy if int(port) in fixed]:
        return PreflightCheck("ports", "failed", f"in use: {', '.join(taken)}; {FIXED}", "end the program that has it")
    if busy:
        return PreflightCheck("ports", "warning", f"in use: {', '.join(busy)}", "others are chosen")
    return PreflightCheck("ports", "ok", f"free on {address}")


def clock_check(ahead_s: float) -> PreflightCheck:
    """Compare clocks. `ahead_s`: this node's time minus the time in a file that the head has just written [s]."""
    if -SKEW_S <= ahead_s <= SKEW_S:
        return PreflightCheck("clock", "ok", f"within {duration(abs(ahead_s))} of the head's")
    if ahead_s < 0 or ahead_s > SKEW_S + CACHED_S:
        text = f"differs from the head's by {duration(abs(ahead_s))}"
        return PreflightCheck("clock", "failed", text, "start chrony or ntpd on the node")
    text = f"{duration(ahead_s)} ahead of the head's, or the file system is that slow"
    return PreflightCheck("clock", "warning", text)


# files


def writable_check(directory: Path, rank: int) -> PreflightCheck:
    """Check that a small file can be written to the run directory and read back, and measure the time."""
    path, began, content = directory / f".preflight-{rank}", time.monotonic(), os.urandom(64).hex()
    try:
        write_atomic(path, content)
        same = files.read_text(path) == content
        files.unlink(path)
    except OSError as error:
        text = f"cannot write to {directory}: {_text(error)}"
        return (SharedCheck if may_recover(error) else PreflightCheck)("shared file system", "failed", text)
    seconds = time.monotonic() - began
    if not same:
        text = f"{directory} does not return the content that was written to it"
        return PreflightCheck("shared file system", "failed", text)
    level: CheckLevel = "warning" if seconds > SLOW_S else "ok"
    return PreflightCheck("shared file system", level, f"a small file takes {seconds:.2f} s")


def space_checks(run_dir: Path, tmp: Path) -> list[PreflightCheck]:
    findings = []
    for name, path in (("run directory", run_dir), ("temporary directory", tmp)):
        free = shutil.disk_usage(path).free
        level: CheckLevel = "ok" if free >= ENOUGH_FREE else "warning"
        if free < MIN_FREE_BYTES:
            level = "failed"
        text = f"{gib(free / GIB)} free in the {name} {path}"
        findings.append((SharedCheck if path == run_dir else PreflightCheck)("space", level, text))
    return findings


def socket_checks(tmp: Path) -> list[PreflightCheck]:
    """Check that the path of the agent's directory is short enough for the sockets of engines."""
    too_long = len(os.fsencode(tmp)) - LONGEST_FOR_SOCKETS
    if too_long <= 0:
        return []
    text = f"{tmp.parent} is {too_long} characters too long for engines' sockets, whose paths have 107 at most"
    return [PreflightCheck("temporary directory", "failed", text, "set TMPDIR to a shorter path for jobs")]


def memory_limit_checks(hcas: Sequence[str]) -> list[PreflightCheck]:
    """Check shared memory, which vLLM and NCCL need, and locked memory, which RDMA needs."""
    shm = shutil.disk_usage("/dev/shm").total
    level: CheckLevel = "ok" if shm >= ENOUGH_SHM else "warning"
    findings = [PreflightCheck("/dev/shm", level, gib(shm / GIB))]
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if hcas and limit != resource.RLIM_INFINITY:
        text = f"limited to {limit // 1024} KiB, RDMA needs more"
        fix = "unlimited for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        findings.append(PreflightCheck("locked memory", "failed", text, fix))
    return findings


def model_check(directory: Path) -> PreflightCheck:
    """Check that the model's files are readable and complete: its configuration, and every shard of its index."""
    try:
        config = read_json(directory / "config.json")
        index = read_json(directory / "model.safetensors.index.json")
        if config is None:
            return PreflightCheck("model", "failed", f"{directory} has no readable config.json")
        names = sorted(set(index["weight_map"].values())) if index else []
        statuses = {path.name: files.status(path) for path in files.listing(directory, "*.safetensors")}
        sizes = {name: status.st_size for name, status in statuses.items() if status}
    except OSError as error:
        name = "model" if error.errno in _LASTING else "shared file system"
        return PreflightCheck(name, "failed", f"{directory} cannot be read: {_text(error)}")
    missing = [name for name in names if not sizes.get(name)]
    if missing:
        text = f"{directory} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:3])}"
        return PreflightCheck("model", "failed", text, "download the model again")
    return PreflightCheck("model", "ok", f"{len(sizes)} weight files, {gib(sum(sizes.values()) / GIB)}")


def version_checks(
    here: Mapping[str, str | None], head: Mapping[str, str | None], lock: Mapping[str, str | None]
) -> list[PreflightCheck]:
    """Compare package versions on this node with the head's, and with those of lock.json, written at submission."""
    findings = []
    for name, version in head.items():
        mine = here.get(name)
        if mine != version:
            text = f"{name} is {mine or 'missing'}, the head has {version or 'none'}"
            findings.append(PreflightCheck("versions", "failed", text, "use one environment on a shared file system"))
        elif lock.get(name) not in (None, mine):  # a login node may have the command line alone
            text = f"{name} is {mine or 'missing'}, the run was submitted with {lock[name]}"
            findings.append(PreflightCheck("versions", "warning", text))
    return findings or [PreflightCheck("versions", "ok", "the head's")]


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stdout + error.stderr).strip()[:200] or f"exit code {error.returncode}"
    return str(error)
