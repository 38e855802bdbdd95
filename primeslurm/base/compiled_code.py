"""Caches of just-in-time compiled code (torch.compile, Triton, DeepGEMM, ...) on the node's local disk."""

from __future__ import annotations

import logging
import os
import stat
from importlib import metadata
from pathlib import Path

from primeslurm.base.files import swappable

# Set by the plan: parent directory of the caches. It may be world-writable, such as /tmp.
VARIABLE = "PRIMESLURM_COMPILED_CODE"
# Environment variable of each library's cache, and its subdirectory.
DIRECTORIES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash_attention",  # used with FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
    "VLLM_CACHE_ROOT": "vllm",
}
log = logging.getLogger(__name__)


def use() -> None:
    """Point the caches of this process and its children to the directory of the plan, if that is safe.

    Call it before torch or vLLM is used. Variables that the site has set stay. If the directory is not safe, log a
    warning and cache nothing.
    """
    # By default these libraries cache in the home directory, which all nodes of a cluster share. Hundreds of engines
    # that start at once would wait for each other's locks, and read unfinished files.
    base = os.environ.get(VARIABLE)
    if not base:
        return
    # The next attempt must find the directory, so its name is predictable. Code from it is executed, so another user
    # must not have been able to create it.
    cache = Path(base) / f"primeslurm-compiled-{os.geteuid()}"
    try:
        cache.mkdir(mode=0o700, exist_ok=True)
        problem = _unsafe(cache)
    except OSError as error:
        problem = str(error)
    if problem:
        log.warning("compiled code is not cached between attempts: %s", problem)
        return
    for variable, name in DIRECTORIES.items():
        os.environ.setdefault(variable, str(cache / f"torch-{metadata.version('torch')}" / name))


def _unsafe(directory: Path) -> str:
    """Return why other users could write code into a directory; empty if they cannot."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is not a directory"
    if status.st_uid != os.geteuid():
        return f"{directory} belongs to user {status.st_uid}"
    if stat.S_IMODE(status.st_mode) & 0o077:
        return f"{directory} is accessible to others (mode {stat.S_IMODE(status.st_mode):04o})"
    return f"{directory.parent} is world-writable and has no sticky bit" if swappable(directory.parent) else ""
