"""Makes verifiers, in this process, run the node's programs in sandboxes, and keep its files below the run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from verifiers.v1 import runtimes
from verifiers.v1.runtimes import apptainer, e2b, limiters
from verifiers.v1.runtimes import subprocess as unprotected

from primeslurm.orchestrator.environments.sandbox import containers, limits, uv_scripts
from primeslurm.orchestrator.environments.sandbox.limits import GB, SandboxLimits
from primeslurm.orchestrator.environments.sandbox.runtime import SandboxedRuntime
from primeslurm.recipe.sections.sandboxes import Limits, Runtime, SubprocessRuntime


def install(runtime: Runtime | None, files: Path, images: Path, hidden: Sequence[Path]) -> None:
    """Replace verifiers' subprocess runtime.

    Args:
        runtime: the recipe's, if it says one.
        files: directory for what this process's rollouts write outside of sandboxes.
        images: directory for container images and apptainer's own files, which all processes of the run share.
        hidden: directories that no sandbox may see: the run's, and others'.
    """
    kind: type[runtimes.Runtime] = TrustedRuntime
    if not isinstance(runtime, SubprocessRuntime):
        kind = _sandboxed(SandboxLimits(), (), hidden)
    elif not runtime.trusted:
        kind = _sandboxed(sandbox_limits(runtime.limits), tuple(map(Path, runtime.visible)), hidden)
    runtimes.SubprocessRuntime = kind
    # verifiers keeps all this below the home directory, where a killed worker would leave it
    unprotected.CACHE_DIR = files
    apptainer._ROOT = images
    e2b._TEMPLATE_LOCK_DIR, limiters.LIMITER_DIR = files / "e2b", files / "limiter"
    os.environ["UV_CACHE_DIR"] = str(files / "uv")
    containers.use_directory(images)
    limits.remove_stale_groups()


def sandbox_limits(asked: Limits) -> SandboxLimits:
    """The recipe's limits in bytes; what it leaves open is the default."""
    default = SandboxLimits()
    return SandboxLimits(
        cpus=asked.cpus,
        memory=default.memory if asked.memory_gb is None else round(asked.memory_gb * GB),
        disk=default.disk if asked.disk_gb is None else round(asked.disk_gb * GB),
        processes=asked.processes or default.processes,
        open_network=asked.network == "open",
    )


def _sandboxed(allowed: SandboxLimits, visible: tuple[Path, ...], hidden: Sequence[Path]) -> type[SandboxedRuntime]:
    return type("Sandboxed", (SandboxedRuntime,), {"limits": allowed, "visible": visible, "hidden": tuple(hidden)})


class TrustedRuntime(unprotected.SubprocessRuntime):  # type: ignore[misc]
    """verifiers' own, without a sandbox; only that it installs nothing."""

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        """Write a script to the rollout's directory, for a Python that has its packages. Raises SandboxError."""
        text, python = uv_scripts.prepared(script)
        assert self.workdir is not None
        path = self.workdir.resolve() / ".program.py"
        if not path.exists():
            path.write_text(text, encoding="utf-8")
        return [python, str(path)]
