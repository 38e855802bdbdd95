"""Code that libraries compile as they run: kept on the node's own disk, where the next attempt there starts with it.

Left alone they keep it in the home directory, which on a cluster is one file server for all nodes: hundreds of engines
that start at once wait for one another's locks there, and read each other's half-written files.
"""

from __future__ import annotations

import logging
import os
import stat
from importlib import metadata
from pathlib import Path

VARIABLE = "PRIMESLURM_COMPILED_CODE"
"""Where the plan wants it: a directory that may be everybody's, such as /tmp."""
DIRECTORIES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TILELANG_CACHE_DIR": "tilelang",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "VLLM_CACHE_ROOT": "vllm",
}
"""The variable that each library reads when it is imported or first compiles, and its directory here."""
log = logging.getLogger(__name__)


def use() -> None:
    """Have this process and its children keep what they compile where the plan says, if that is safe.

    Call it before torch or vllm is used. It says in the log if nothing is kept. What the site has set stays.

    Code from there is run. So the directory has a known name, unlike others of this user in such places, but is only
    used if it is this user's alone.
    """
    base = os.environ.get(VARIABLE)
    if not base:
        return
    kept = Path(base) / f"primeslurm-compiled-{os.geteuid()}"
    try:
        kept.mkdir(mode=0o700, exist_ok=True)
        why = _unsafe(kept)
    except OSError as error:
        why = str(error)
    if why:
        log.warning("compiled code is not kept between attempts: %s", why)
        return
    ours = kept / f"torch-{metadata.version('torch')}"
    for variable, name in DIRECTORIES.items():
        os.environ.setdefault(variable, str(ours / name))


def _unsafe(directory: Path) -> str:
    """Why others could put code into a directory; empty if they cannot."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{directory} is no directory"
    if found.st_uid != os.geteuid():
        return f"{directory} is user {found.st_uid}'s"
    if stat.S_IMODE(found.st_mode) & 0o077:
        return f"{directory} is open to others (mode {stat.S_IMODE(found.st_mode):04o})"
    mode = directory.parent.stat().st_mode
    swappable = mode & stat.S_IWOTH and not mode & stat.S_ISVTX
    return f"{directory.parent} may be written by everybody and is not sticky" if swappable else ""
