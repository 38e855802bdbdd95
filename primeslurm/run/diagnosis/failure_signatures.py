"""Known causes of failures: what a log line, an exit code or Slurm's word points to, and what helps. A table."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from primeslurm.wire import exit_codes


class Cause(msgspec.Struct, frozen=True):
    """What probably happened, and what helps."""

    cause: str
    fix: str
    evidence: str = ""
    """The line that says so."""


@dataclass(frozen=True)
class FailureSignature:
    """A pattern of log lines."""

    pattern: re.Pattern[str]
    cause: str
    fix: str
    symptom: bool = False
    """Usually the consequence of a failure elsewhere: another process that failed at the same time is blamed first."""
    transient: bool = False
    """Another node may be free of it, or this one later: a fault of its own, or something that others do there."""


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
        "no room for the KV cache beside the weights",
        "more GPUs per engine, a shorter seq_len, or a higher inference.gpu_memory_utilization",
    ),
    _known(
        r"Free memory on device .* is less than desired GPU memory utilization",
        "another process has memory of the engine's GPU",
        "look with nvidia-smi on that node for what was left behind, or exclude the node (slurm.exclude)",
        transient=True,
    ),
    _known(
        r"oom[-_]kill|Out of memory: Killed|Cannot allocate memory|\bMemoryError\b|OUT_OF_MEMORY",
        "the node's own memory ran out",
        "ask Slurm for more (`mem` of the component), or lower the memory of KV offload",
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
        "look for what listens there (`ss -ltnp`), or move port_base in the site file",
        transient=True,
    ),
    _known(
        r"(?i:no such file or directory).*(config\.json|safetensors|tokenizer|model)|Repo id must be in the form"
        r"|does not appear to have a file named|Can't load (the )?(config|tokenizer)|LocalEntryNotFoundError"
        r"|OfflineModeIsEnabled",
        "model files are missing or incomplete on the node",
        "check that model.path is on a file system that every node has, and that all its shards are there",
    ),
    _known(
        r"ModuleNotFoundError|cannot open shared object file|undefined symbol|GLIBC_\S+' not found",
        "a package or library is missing on the node, or of another version",
        "`primeslurm doctor --all` compares nodes with the lock, which `primeslurm install --gpu --to DIR` installs",
    ),
    _known(
        r"No CUDA GPUs are available|Found no NVIDIA driver|CUDA driver version is insufficient|libcuda\.so",
        "the process sees no usable GPU",
        "check the driver with nvidia-smi on that node, and what gres the partition gives",
        transient=True,
    ),
    _known(
        r"uncorrectable ECC|CUDA error: (?!out of memory|no kernel image)|\bXid\b"
        r"|fallen off the bus",
        "a GPU failed, or a kernel wrote where it must not",
        "exclude the node (slurm.exclude) and go on; if it happens on other nodes too, it is the software",
        transient=True,
    ),
    _known(
        r"the gradient norm is (nan|inf|-inf)|loss is (nan|inf)",
        "training diverged: the gradient is not finite",
        "resume from an earlier checkpoint with a lower learning rate; look at KL and reward before that step",
    ),
    _known(
        r"(?i:nixl)\S* ?.*(?i:error|fail|invalid|backend)|UCX +ERROR|no usable transports|Destination is unreachable"
        r"|\buc[tp]_\w+.*(?i:fail|error)",
        "KV transfer between engines (NIXL over UCX) failed",
        "check network.hcas and interface in the site file; UCX must be the one of its library_path",
        transient=True,
    ),
    _known(
        r"Stale file handle|Transport endpoint is not connected|Input/output error|Errno 5\b",
        "the shared file system failed on that node",
        "check the mount on that node; exclude it (slurm.exclude) if others have no trouble",
        transient=True,
    ),
    _known(
        r"Too many open files",
        "the limit of open files is too low",
        "raise it (`ulimit -n`) in the site's prologue",
    ),
    _known(
        r"ncclSystemError|ncclInternalError|ncclUnhandledCudaError|unhandled (system|cuda) error|NCCL WARN",
        "NCCL could not use the network or a GPU",
        "check network.hcas and interface in the site file; run with NCCL_DEBUG=INFO in the site's env",
        transient=True,
    ),
    _known(
        r"collective operation timeout|NCCL.*[Tt]imed? ?out|ncclRemoteError",
        "a collective waited for a rank that did not come",
        "the rank that hangs or died first is to blame: look for it among the other trainer logs",
        symptom=True,
    ),
    _known(
        r"Connection (reset|closed) by peer|Connection refused|Broken pipe|Dist(Store|Network)Error|wait timeout"
        r"|Max retries exceeded|Temporary failure in name resolution",
        "another process went away, or was never reached",
        "look for what ended first; if nothing did, check the interface in the site file",
        symptom=True,
    ),
    _known(
        r"\bLinkError\b",
        "the orchestrator did not answer the trainer",
        "look at the orchestrator's log and state; is its node reachable from the trainer's?",
        symptom=True,
    ),
    _known(
        r"Permission denied|Operation not permitted",
        "the user may not read or write something",
        "check the owner and mode of the run directory and of the model",
    ),
)

_SIGNALS: dict[int, Cause] = {
    signal.SIGKILL: Cause(
        "it was killed from outside: by the kernel when the node's memory ran out, by Slurm, or by somebody",
        "`dmesg -T` on the node and `sacct` tell which; ask for more memory if it was the kernel",
    ),
    signal.SIGBUS: Cause("a memory-mapped file could not be read: /dev/shm full, or a shared file changed", "see df"),
    signal.SIGSEGV: Cause("native code crashed", "its last log lines name the library; compare versions with the lock"),
    signal.SIGABRT: Cause("native code gave up", "the lines before the abort say why"),
}
_CODES = {
    exit_codes.STALLED: Cause("the orchestrator saw no progress", "look at the suspect that it names"),
    exit_codes.UNRECOVERABLE: Cause("the run cannot work as it is", "correct what its last words name"),
    exit_codes.CHECKPOINTED: Cause("it was asked to checkpoint and stop, and did so", "nothing: the run resumes"),
    127: Cause("the program does not exist on the node", "check `python` and modules of the site file"),
}
_SLURM = {
    "TIMEOUT": Cause("the time limit was reached", "a longer slurm.time; the run resumes from its last commit"),
    "DEADLINE": Cause("the job's deadline was reached", "submit it again"),
    "PREEMPTED": Cause("the job was preempted", "nothing: it resumes; or a qos that is not preempted"),
    "NODE_FAIL": Cause("a node of the job went down", "nothing: it resumes on others; spare nodes avoid the wait"),
    "OUT_OF_MEMORY": Cause("the node's own memory ran out", "ask Slurm for more (`mem` of the component)"),
    "CANCELLED": Cause("somebody cancelled the job", "`primeslurm resume` goes on"),
    "BOOT_FAIL": Cause("a node did not boot", "submit it again"),
    "FAILED": Cause("the batch script failed before the agents could say why", "see the job's output file"),
}
_REASONS = (
    (
        re.compile(r"^a command of the site's set-up failed"),
        Cause("`modules` or `prologue` of the site file does not work in a job", "correct it in the site file"),
    ),
    (
        re.compile(r"srun: (fatal|error): "),
        Cause("srun could not start the agents", "correct what srun says: options of the site or recipe, or variables"),
    ),
    (re.compile(r"USR2|time limit|preempt"), Cause("preemption or the time limit", "nothing: the run resumes")),
    (
        re.compile(r"no sign of its agent|preflight has not ended"),
        Cause(
            "an agent did not start in time", "see its node; where all start slowly, a longer node_start_s of the site"
        ),
    ),
    (
        re.compile(r"silent for|no heartbeat for|last heartbeat"),
        Cause("a node was lost, or its agent hangs", "see `sinfo -R` and its console; exclude it (slurm.exclude)"),
    ),
    (re.compile(r"not ready within"), Cause("it took too long to load", "slow storage, or a hang: see its log's end")),
    (
        re.compile(r"environments do not load"),
        Cause("an environment does not load on the nodes", "correct what it says, with the Python that jobs use"),
    ),
    (
        re.compile(r"fails every time|rollouts failed in a row"),
        Cause("the environment fails every time", "correct it; it fails without engines, too, tried by itself"),
    ),
    (
        re.compile(r"groups in a row were rejected"),
        Cause("no group is kept, so no batch can form", "loosen the filter that rejects them, or take other tasks"),
    ),
    (
        re.compile(r"no progress|nothing moves|saw no progress|no finished rollout|no token was generated"),
        Cause("the run stalled", "`primeslurm attach` to the suspect and look (py-spy dump); see its log"),
    ),
)


_MILD = re.compile(
    r"(\(\w+ pid=\d+\) )?(DEBUG|INFO|WARNING)\b"  # of vLLM, uvicorn, the router
    r"|[\d-]+[ T][\d:,.]+ (\w+ \d+ )?(DEBUG|INFO|WARNING)\b"  # of our own processes
    r"|(\[rank\d+\]:)?\[[IW]\d{4} "  # of torch
)
"""How lines begin that their writer went on after. Engines name their options there, and limits that may be met."""


def is_benign(line: str) -> bool:
    """Whether a log says of a line that it is no error."""
    return _MILD.match(line) is not None


def in_log(lines: Iterable[str]) -> list[tuple[FailureSignature, str]]:
    """Known causes that a log points to, each with its first line; symptoms of failures elsewhere come last."""
    found: dict[str, tuple[FailureSignature, str]] = {}
    for line in lines:
        if is_benign(line):
            continue
        for known in KNOWN:
            if known.cause not in found and known.pattern.search(line):
                found[known.cause] = (known, line.strip())
    return sorted(found.values(), key=lambda each: each[0].symptom)


_LATE = re.compile(r"(?i)time(d )?out|unable to contact|connection failure|temporarily|\bbusy\b|try again")
"""What was not there in time, or was busy, may be there the next time, whoever was waited for."""


def is_transient(error: str) -> bool:
    """Whether another node, or the same one later, may be free of an error, by its most likely cause."""
    if _LATE.search(error):
        return True
    known = next((known for known in KNOWN if known.pattern.search(error)), None)
    return known is not None and (known.transient or known.symptom)


def of_exit(code: int | None) -> list[Cause]:
    """Tell what an exit code (negative: a signal) says by itself."""
    if code is None:
        return []
    number = -code if code < 0 else code - 128  # a shell reports a signal as 128 + its number
    cause = _CODES.get(code) or _SIGNALS.get(number)
    return [cause] if cause else []


def of_reason(text: str) -> list[Cause]:
    """Tell what the head's or the orchestrator's words say."""
    return [cause for pattern, cause in _REASONS if pattern.search(text)][:1]


def of_job(state: str) -> list[Cause]:
    """Tell what Slurm's state of the job says."""
    cause = _SLURM.get(state.partition(" ")[0])
    return [cause] if cause else []
