"""Checks of one node, each a small function of what it looks at: is this node fit to work?"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from primeslurm.base import files
from primeslurm.base.files import read_json, write_atomic
from primeslurm.base.units import duration, gib
from primeslurm.node.host.network import can_bind
from primeslurm.node.host.private_directory import LONGEST_FOR_SOCKETS
from primeslurm.plan.memory.gpus import GIB
from primeslurm.records.fleet import CheckLevel, PreflightCheck, SharedCheck
from primeslurm.records.reserve import LEAST_FREE, may_pass

COMMAND_TIMEOUT_S = 20.0
USED_MIB = 2048
"""GPU memory in use before anything of ours runs; less than this is the driver's own."""
ENOUGH_FREE = 10 * GIB
ENOUGH_SHM = 2 * GIB
SKEW_S = 5.0
CACHED_S = 60.0
"""How old a file on a network file system may look."""
_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
"""Errors of a path that somebody has to correct; others come from a file system that may recover."""
SLOW_S = 5.0
"""A file system that takes longer than this for a small file is slow."""


# GPUs


def gpu_checks(wanted: int) -> list[PreflightCheck]:
    """Check the GPUs that nvidia-smi sees: how many, their memory, their errors.

    A program of its own and not its library (NVML) in this process: a call into a driver that hangs never returns and
    cannot be killed, and an agent that is stuck in one could not even end.
    """
    try:
        gpus = _nvidia_smi("gpu", "index", "uuid", "memory.used", "ecc.errors.uncorrected.volatile.total")
        rows = _nvidia_smi("remapped-rows", "gpu_uuid", "remapped_rows.pending", "remapped_rows.failure")
    except (OSError, subprocess.SubprocessError) as error:
        return [
            PreflightCheck("gpus", "failed", f"nvidia-smi failed: {_words(error)}", "look for Xid errors in `dmesg`")
        ]
    return judge_gpus(wanted, gpus, rows)


def judge_gpus(wanted: int, gpus: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> list[PreflightCheck]:
    """Judge nvidia-smi's answers.

    Args:
        wanted: how many GPUs the node has to have.
        gpus: for each GPU its index, uuid, MiB in use, and uncorrected ECC errors.
        rows: for each GPU its uuid, whether rows of its memory wait to be remapped, and whether that has failed.
    """
    found = []
    if len(gpus) < wanted:
        found.append(
            PreflightCheck("gpus", "failed", f"{len(gpus)} GPUs are visible, {wanted} are needed", "drain the node")
        )
    for index, _, used, errors in gpus:
        if _number(errors):
            text = f"GPU {index} has {errors} uncorrected ECC errors"
            found.append(PreflightCheck("ecc", "failed", text, "reset the GPU, or drain the node"))
        if _number(used) > USED_MIB:
            text = f"GPU {index}: {used} MiB are in use already"
            found.append(PreflightCheck("gpu memory", "failed", text, "end what a former job left on it"))
    for uuid, pending, failure in rows:
        index = next((gpu[0] for gpu in gpus if gpu[1] == uuid), uuid)
        if _number(failure):
            text = f"GPU {index} cannot remap a broken row of its memory"
            found.append(PreflightCheck("row remapping", "failed", text, "replace the GPU"))
        elif _number(pending):
            text = f"GPU {index} waits for a reset to remap a row"
            found.append(PreflightCheck("row remapping", "warning", text, "reset the GPU"))
    return found or [PreflightCheck("gpus", "ok", f"{len(gpus)} GPUs")]


def shared_gpu_checks() -> list[PreflightCheck]:
    """Check that two processes can use a GPU at once, which trainer and engine do with `deployment.colocated`."""
    try:
        gpus = _nvidia_smi("gpu", "index", "compute_mode")
    except (OSError, subprocess.SubprocessError) as error:
        return [PreflightCheck("compute mode", "warning", f"nvidia-smi does not tell: {_words(error)}")]
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
    """A count, with nvidia-smi's words for one ([N/A], Yes, No) read as 0 or 1."""
    if text.isdigit():
        return int(text)
    return int(text == "Yes")


# network


def hca_names(env: Mapping[str, str]) -> list[str]:
    """Adapters that UCX_NET_DEVICES and NCCL_IB_HCA name, as `device` or `device:port`; patterns name none."""
    entries = env.get("UCX_NET_DEVICES", "").split(",")
    nccl = env.get("NCCL_IB_HCA", "")
    entries += nccl.removeprefix("=").split(",") if not nccl.startswith("^") else []
    return list(dict.fromkeys(entry for entry in entries if re.fullmatch(r"[a-z]+\w*_\w+(:\d+)?", entry)))


def hca_checks(names: Iterable[str], root: Path = Path("/sys/class/infiniband")) -> list[PreflightCheck]:
    """Whether the adapters are there and their ports active."""
    found = []
    for name in names:
        device, _, port = name.partition(":")
        state = root / device / "ports" / (port or "1") / "state"
        try:
            text = state.read_text().strip()
        except OSError:
            found.append(
                PreflightCheck("hca", "failed", f"there is no adapter {name}", "correct `network` of the site file")
            )
            continue
        if "ACTIVE" not in text:
            found.append(
                PreflightCheck("hca", "failed", f"adapter {name} is {text}", "check its cable and switch port")
            )
    return found or [PreflightCheck("hca", "ok", f"active: {', '.join(names)}")]


def port_check(address: str, ports: Iterable[int]) -> PreflightCheck:
    """Whether the preferred ports are free. An agent looks for others where they are not."""
    busy = [str(port) for port in ports if not can_bind(address, port)]
    if busy:
        return PreflightCheck("ports", "warning", f"in use: {', '.join(busy)}", "others are chosen")
    return PreflightCheck("ports", "ok", f"free on {address}")


def clock_check(ahead_s: float) -> PreflightCheck:
    """`ahead_s`: this node's clock minus the time in a file that the head has just written, at first sight of it."""
    if -SKEW_S <= ahead_s <= SKEW_S:
        return PreflightCheck("clock", "ok", f"within {duration(abs(ahead_s))} of the head's")
    if ahead_s < 0 or ahead_s > SKEW_S + CACHED_S:
        text = f"differs from the head's by {duration(abs(ahead_s))}"
        return PreflightCheck("clock", "failed", text, "start chrony or ntpd on the node")
    return PreflightCheck(
        "clock", "warning", f"{duration(ahead_s)} ahead of the head's, or the file system is that slow"
    )


# files


def writable_check(directory: Path, rank: int) -> PreflightCheck:
    """Whether a small file can be written to the run directory and read again, and how long that takes."""
    path, began, content = directory / f".preflight-{rank}", time.monotonic(), os.urandom(64).hex()
    try:
        write_atomic(path, content)
        same = files.read_text(path) == content
        files.unlink(path)
    except OSError as error:
        text = f"cannot write to {directory}: {_words(error)}"
        shared = may_pass(error) or files.is_transient(error)
        return (SharedCheck if shared else PreflightCheck)("shared file system", "failed", text)
    seconds = time.monotonic() - began
    if not same:
        return PreflightCheck("shared file system", "failed", f"{directory} does not give back what is written to it")
    level: CheckLevel = "warning" if seconds > SLOW_S else "ok"
    return PreflightCheck("shared file system", level, f"a small file takes {seconds:.2f} s")


def space_checks(run_dir: Path, tmp: Path) -> list[PreflightCheck]:
    """Free space where runs and temporary files go."""
    found = []
    for name, path in (("run directory", run_dir), ("temporary directory", tmp)):
        free = shutil.disk_usage(path).free
        level: CheckLevel = "ok" if free >= ENOUGH_FREE else "warning"
        if free < LEAST_FREE:
            level = "failed"
        text = f"{gib(free / GIB)} free in the {name} {path}"
        found.append((SharedCheck if path == run_dir else PreflightCheck)("space", level, text))
    return found


def socket_checks(tmp: Path) -> list[PreflightCheck]:
    """Whether engines can make their sockets in the agent's directory."""
    too_long = len(os.fsencode(tmp)) - LONGEST_FOR_SOCKETS
    if too_long <= 0:
        return []
    text = f"{tmp.parent} is {too_long} characters too long for engines' sockets, whose paths have 107 at most"
    return [PreflightCheck("temporary directory", "failed", text, "set TMPDIR to a shorter path for jobs")]


def memory_limit_checks(hcas: Sequence[str]) -> list[PreflightCheck]:
    """Shared memory for vLLM and NCCL, and locked memory for RDMA."""
    shm = shutil.disk_usage("/dev/shm").total
    level: CheckLevel = "ok" if shm >= ENOUGH_SHM else "warning"
    found = [PreflightCheck("/dev/shm", level, gib(shm / GIB))]
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if hcas and limit != resource.RLIM_INFINITY:
        fix = "unlimited for slurmd, and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        found.append(PreflightCheck("locked memory", "failed", f"limited to {limit // 1024} KiB, RDMA needs more", fix))
    return found


def model_check(directory: Path) -> PreflightCheck:
    """Whether the model's files are readable and complete: its configuration and every shard of its index."""
    try:
        config = read_json(directory / "config.json")
        index = read_json(directory / "model.safetensors.index.json")
        if config is None:
            return PreflightCheck("model", "failed", f"{directory} has no readable config.json")
        names = sorted(set(index["weight_map"].values())) if index else []
        found = {path.name: files.status(path) for path in files.listing(directory, "*.safetensors")}
        sizes = {name: about.st_size for name, about in found.items() if about}
    except OSError as error:
        name = "model" if error.errno in _LASTING else "shared file system"
        return PreflightCheck(name, "failed", f"{directory} cannot be read: {_words(error)}")
    missing = [name for name in names if not sizes.get(name)]
    if missing:
        text = f"{directory} lacks {len(missing)} of {len(names)} shards: {', '.join(missing[:3])}"
        return PreflightCheck("model", "failed", text, "download the model again")
    return PreflightCheck("model", "ok", f"{len(sizes)} weight files, {gib(sum(sizes.values()) / GIB)}")


def version_checks(
    here: Mapping[str, str | None], head: Mapping[str, str | None], lock: Mapping[str, str | None]
) -> list[PreflightCheck]:
    """Compare the node's packages with the head's, and with those of the machine that submitted.

    Args:
        here: version by package on this node; None: it is not installed.
        head: the same of the head's node.
        lock: the same of lock.json.
    """
    found = []
    for name, version in head.items():
        mine = here.get(name)
        if mine != version:
            text = f"{name} is {mine or 'missing'}, the head has {version or 'none'}"
            found.append(PreflightCheck("versions", "failed", text, "use one environment on a shared file system"))
        elif lock.get(name) not in (None, mine):  # a login node may have the command line alone
            text = f"{name} is {mine or 'missing'}, the run was submitted with {lock[name]}"
            found.append(PreflightCheck("versions", "warning", text))
    return found or [PreflightCheck("versions", "ok", "the head's")]


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stdout + error.stderr).strip()[:200] or f"exit code {error.returncode}"
    return str(error)
