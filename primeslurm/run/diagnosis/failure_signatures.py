"""Table of known failures: log patterns, exit codes, head messages and Slurm states, each with cause and fix."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from primeslurm.wire import exit_codes


class Cause(msgspec.Struct, frozen=True):
    """Probable cause of a failure, and its fix."""

    cause: str
    fix: str
    evidence: str = ""  # log line that points to the cause


@dataclass(frozen=True)
class FailureSignature:
    """Pattern of log lines that points to a cause."""

    pattern: re.Pattern[str]
    cause: str
    fix: str
    symptom: bool = False
    """Usually follows from a failure elsewhere, so another process that failed at the same time is blamed first."""
    transient: bool = False  # another node, or the same node later, may not have the fault


def _known(pattern: str, cause: str, fix: str, *, symptom: bool = False, transient: bool = False) -> FailureSignature:
    return FailureSignature(re.compile(pattern), cause, fix, symptom, transient)


KNOWN = (
    _known(
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED",
        "a GPU ran out of memory",
        "trainer: more GPUs, a shorter seq_len or more parallelism; engine, or a colocated trainer: a lower "
        "inference.gpu_memory_utilization",
    ),
    _known(
        r"No available memory for the cache blocks|larger than the maximum number of tokens that can be stored in KV",
        "the KV cache does not fit into GPU memory beside the weights",
        "more GPUs per engine, a shorter seq_len, or a higher inference.gpu_memory_utilization",
    ),
    _known(
        r"Free memory on device .* is less than desired GPU memory utilization",
        "another process uses memory of the engine's GPU",
        "use nvidia-smi on that node to find leftover processes, or exclude the node (slurm.exclude)",
        transient=True,
    ),
    _known(
        r"oom[-_]kill|Out of memory: Killed|Cannot allocate memory|\bMemoryError\b|OUT_OF_MEMORY",
        "the node ran out of CPU memory",
        "request more from Slurm (`mem` of the component), or reduce the memory of KV offload",
        transient=True,
    ),
    _known(
        r"No space left on device|Disk quota exceeded|ENOSPC|EDQUOT",
        "a disk, quota or /dev/shm is full",
        "free space in the run directory, in TMPDIR and in /dev/shm of the node; keep fewer checkpoints",
        transient=True,
    ),
    _known(
        r"Address already in use|EADDRINUSE|address in use",
        "a port was taken by another process of the node",
        "find it with `ss -tanp`, or change deployment.inference.router_port or backend_port if the recipe has it, or "
        "port_base in the site file",
        transient=True,
    ),
    _known(
        r"(?i:no such file or directory).*(config\.json|safetensors|tokenizer|model)|Repo id must be in the form"
        r"|does not appear to have a file named|Can't load (the )?(config|tokenizer)|LocalEntryNotFoundError"
        r"|OfflineModeIsEnabled",
        "model files are missing or incomplete on the node",
        "check that every node mounts the file system of model.path, and that all shards exist",
    ),
    _known(
        r"ModuleNotFoundError|cannot open shared object file|undefined symbol|GLIBC_\S+' not found",
        "a package or library is missing on the node, or has another version",
        "`primeslurm doctor --all` compares nodes with the lock; `primeslurm install --gpu --to DIR` installs it",
    ),
    _known(
        r"No CUDA GPUs are available|Found no NVIDIA driver|CUDA driver version is insufficient|libcuda\.so",
        "the process has no usable GPU",
        "check the driver with nvidia-smi on that node, and the gres of the partition",
        transient=True,
    ),
    _known(
        r"uncorrectable ECC|CUDA error: (?!out of memory|no kernel image)|\bXid\b"
        r"|fallen off the bus",
        "a GPU failed, or a kernel made an invalid memory access",
        "exclude the node (slurm.exclude) and resume; if other nodes fail in the same way, suspect the software",
        transient=True,
    ),
    _known(
        r"the gradient norm is (nan|inf|-inf)|loss is (nan|inf)",
        "training diverged: the gradient is not finite",
        "resume from an earlier checkpoint with a lower learning rate; check KL and reward before that step",
    ),
    _known(
        r"(?i:nixl)\S* ?.*(?i:error|fail|invalid|backend)|UCX +ERROR|no usable transports|Destination is unreachable"
        r"|\buc[tp]_\w+.*(?i:fail|error)",
        "KV transfer between engines (NIXL over UCX) failed",
        "check network.hcas and interface in the site file; processes must load UCX from its library_path",
        transient=True,
    ),
    _known(
        r"Stale file handle|Transport endpoint is not connected|Input/output error|Errno 5\b",
        "the shared file system failed on that node",
        "check the mount on that node; if other nodes work, exclude it (slurm.exclude)",
        transient=True,
    ),
    _known(
        r"Too many open files",
        "the limit on open files is too low",
        "raise the limit (`ulimit -n`) in the site's prologue",
    ),
    _known(
        r"ncclSystemError|ncclInternalError|ncclUnhandledCudaError|unhandled (system|cuda) error|NCCL WARN",
        "NCCL could not use the network or a GPU",
        "check network.hcas and interface in the site file; set NCCL_DEBUG=INFO in the site's env for details",
        transient=True,
    ),
    _known(
        r"collective operation timeout|NCCL.*[Tt]imed? ?out|ncclRemoteError",
        "a collective timed out because a rank did not join",
        "find the rank that hung or died first in the other trainer logs",
        symptom=True,
    ),
    _known(
        r"Connection (reset|closed) by peer|Connection refused|Broken pipe|Dist(Store|Network)Error|wait timeout"
        r"|Max retries exceeded|Temporary failure in name resolution",
        "another process ended, or could not be reached",
        "find the process that ended first; if none did, check the interface in the site file",
        symptom=True,
    ),
    _known(
        r"\bLinkError\b",
        "the orchestrator did not answer the trainer",
        "check the orchestrator's log, and whether the trainer's node can reach the orchestrator's node",
        symptom=True,
    ),
    _known(
        r"Permission denied|Operation not permitted",
        "the user has no permission to read or write a file",
        "check the owner and mode of the run directory and of the model",
    ),
)

_SIGNALS: dict[int, Cause] = {
    signal.SIGKILL: Cause(
        "SIGKILL from outside: the kernel (out of memory), Slurm or a user",
        "check `dmesg -T` on the node and `sacct`; if the kernel killed it, request more memory",
    ),
    signal.SIGBUS: Cause(
        "a memory-mapped file could not be read: /dev/shm is full, or a shared file changed", "check `df`"
    ),
    signal.SIGSEGV: Cause(
        "native code crashed", "the last log lines name the library; compare its version with the lock"
    ),
    signal.SIGABRT: Cause("native code aborted", "read the lines before the abort"),
}
_CODES = {
    exit_codes.STALLED: Cause("the run stalled", "check the log of the suspect that the orchestrator names"),
    exit_codes.UNRECOVERABLE: Cause(
        "the error is permanent, so a restart does not help", "correct the error in its last log lines"
    ),
    exit_codes.CHECKPOINTED: Cause(
        "the process wrote a checkpoint and stopped, as requested", "nothing: the run resumes"
    ),
    127: Cause("the program does not exist on the node", "check `python` and `modules` of the site file"),
}
_SLURM = {
    "TIMEOUT": Cause("the time limit was reached", "raise slurm.time; the run resumes from its last checkpoint"),
    "DEADLINE": Cause("the job's deadline was reached", "submit it again"),
    "PREEMPTED": Cause("the job was preempted", "nothing: the run resumes; or use a QOS that is not preempted"),
    "NODE_FAIL": Cause(
        "a node of the job went down", "nothing: the run resumes on other nodes; spare nodes avoid the wait"
    ),
    "OUT_OF_MEMORY": Cause("the node ran out of CPU memory", "request more from Slurm (`mem` of the component)"),
    "CANCELLED": Cause("the job was cancelled", "`primeslurm resume` continues the run"),
    "BOOT_FAIL": Cause("a node did not boot", "submit it again"),
    "FAILED": Cause("the batch script failed before the agents started", "read the job's output file"),
}
_REASONS = {
    r"^a command of the site's set-up failed": Cause(
        "`modules` or `prologue` of the site file does not work in a job", "correct it in the site file"
    ),
    r"srun: (fatal|error): ": Cause(
        "srun could not start the agents", "correct the options of site or recipe, or the variables, that srun names"
    ),
    r"USR2|time limit|preempt": Cause("preemption or the time limit", "nothing: the run resumes"),
    r"no sign of its agent|preflight has not ended": Cause(
        "an agent did not start in time", "check its node; if all nodes start slowly, raise node_start_s of the site"
    ),
    r"silent for|no heartbeat for|last heartbeat": Cause(
        "a node was lost, or its agent hangs", "check `sinfo -R` and the node's console; exclude it (slurm.exclude)"
    ),
    r"not ready within": Cause("loading took too long", "check the end of its log: slow storage, or a hang"),
    r"environments do not load": Cause(
        "an environment does not load on the nodes", "correct the error, and test with the Python that jobs use"
    ),
    r"fails every time|rollouts failed in a row": Cause(
        "the environment fails every time", "correct the environment; test it alone, without engines"
    ),
    r"groups in a row were rejected": Cause(
        "filters reject every group, so no batch forms", "relax the filter, or use other tasks"
    ),
    r"no progress|nothing moves|saw no progress|no finished rollout|no token was generated": Cause(
        "the run stalled", "read the suspect's log; `primeslurm attach` to it and run `py-spy dump`"
    ),
}


# Prefixes of log lines below the level ERROR. Engines print options there that would match patterns of errors.
_MILD = re.compile(
    r"(\(\w+ pid=\d+\) )?(DEBUG|INFO|WARNING)\b"  # of vLLM, uvicorn, the router
    r"|[\d-]+[ T][\d:,.]+ (\w+ \d+ )?(DEBUG|INFO|WARNING)\b"  # of our own processes
    r"|(\[rank\d+\]:)?\[[IW]\d{4} "  # of torch
)


def is_benign(line: str) -> bool:
    """True if a log line has a level below ERROR."""
    return _MILD.match(line) is not None


def in_log(lines: Iterable[str]) -> list[tuple[FailureSignature, str]]:
    """Return the signatures that match a log, each with its first line. Symptoms of failures elsewhere come last."""
    matches: dict[str, tuple[FailureSignature, str]] = {}
    for line in lines:
        if is_benign(line):
            continue
        for signature in KNOWN:
            if signature.cause not in matches and signature.pattern.search(line):
                matches[signature.cause] = (signature, line.strip())
    return sorted(matches.values(), key=lambda each: each[0].symptom)


# Timeouts and busy services, which may work the next time.
_LATE = re.compile(r"(?i)time(d )?out|unable to contact|connection failure|temporarily|\bbusy\b|try again")


def is_transient(error: str) -> bool:
    """True if an error may not occur on another node, or later, judging by its most likely cause."""
    if _LATE.search(error):
        return True
    match = next((signature for signature in KNOWN if signature.pattern.search(error)), None)
    return match is not None and (match.transient or match.symptom)


def of_exit(code: int | None) -> list[Cause]:
    """Return the cause that an exit code (negative: a signal) points to, if any."""
    if code is None:
        return []
    number = -code if code < 0 else code - 128  # a shell reports a signal as 128 + its number
    cause = _CODES.get(code) or _SIGNALS.get(number)
    return [cause] if cause else []


def of_reason(text: str) -> list[Cause]:
    """Return the cause that a message of the head or the orchestrator points to, if any."""
    return [cause for pattern, cause in _REASONS.items() if re.search(pattern, text)][:1]


def of_job(state: str) -> list[Cause]:
    """Return the cause that Slurm's state of the job points to, if any."""
    cause = _SLURM.get(state.partition(" ")[0])
    return [cause] if cause else []
