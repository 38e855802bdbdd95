"""Replaces verifiers' subprocess runtime in this process, and moves verifiers' files below the run."""

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
    """Make verifiers run programs of the node in bubblewrap sandboxes.

    Args:
        runtime: the recipe's runtime. None or a container: sandboxes with default limits.
        files: directory for files that this process's rollouts write outside sandboxes.
        images: directory for container images and apptainer's files, shared by all processes of the run.
        hidden: directories that no sandbox may see, such as the run directory.
    """
    # With a container runtime, tool servers may still run as programs of the node. They get default limits.
    kind: type[runtimes.Runtime] = TrustedRuntime
    if not isinstance(runtime, SubprocessRuntime):
        kind = _sandboxed(SandboxLimits(), (), hidden)
    elif not runtime.trusted:
        kind = _sandboxed(sandbox_limits(runtime.limits), tuple(map(Path, runtime.visible)), hidden)
    runtimes.SubprocessRuntime = kind
    # verifiers keeps these files in the home directory, where a killed worker would leave them.
    unprotected.CACHE_DIR = files
    apptainer._ROOT = images
    e2b._TEMPLATE_LOCK_DIR, limiters.LIMITER_DIR = files / "e2b", files / "limiter"
    os.environ["UV_CACHE_DIR"] = str(files / "uv")
    containers.use_directory(images)
    limits.remove_stale_groups()


def sandbox_limits(recipe: Limits) -> SandboxLimits:
    """Convert the recipe's limits to bytes, and fill in the defaults."""
    default = SandboxLimits()
    return SandboxLimits(
        cpus=recipe.cpus,
        memory=default.memory if recipe.memory_gb is None else round(recipe.memory_gb * GB),
        disk=default.disk if recipe.disk_gb is None else round(recipe.disk_gb * GB),
        processes=recipe.processes or default.processes,
        open_network=recipe.network == "open",
    )


def _sandboxed(allowed: SandboxLimits, visible: tuple[Path, ...], hidden: Sequence[Path]) -> type[SandboxedRuntime]:
    return type("Sandboxed", (SandboxedRuntime,), {"limits": allowed, "visible": visible, "hidden": tuple(hidden)})


class TrustedRuntime(unprotected.SubprocessRuntime):  # type: ignore[misc]
    """verifiers' subprocess runtime, without a sandbox. The only change: it installs no packages for scripts."""

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        text, python = uv_scripts.text_and_python(script)
        assert self.workdir is not None
        path = self.workdir.resolve() / ".program.py"
        if not path.exists():
            path.write_text(text, encoding="utf-8")
        return [python, str(path)]
