"""Which site file counts, and where runs live."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from primeslurm.base.errors import UsageError, Violation
from primeslurm.base.hostlists import compress
from primeslurm.base.paths import expanded, is_file
from primeslurm.plan.gpus import GPUS
from primeslurm.recipe import Site
from primeslurm.recipe.fields.strings import string_problems
from primeslurm.recipe.reading.recipe_files import Draft, read_site
from primeslurm.recipe.reading.validation_errors import InputFault
from primeslurm.recipe.site import Network, NodeKind
from primeslurm.slurm.environment import allocated_elsewhere, cpus_given, gpus_given, memory_given_mib

SITE_FILES = (Path("site.yaml"), Path("~/.primeslurm/site.yaml"))
"""Where a site file is looked for if none is named."""
_LOCAL_NODES = 64
_FAKE_GPUS = 8


def find_site(path: Path | None, *, local: bool = False) -> Site:
    """Find the site to use: of a file, or of this machine.

    Args:
        path: a site file; None: the first of `SITE_FILES` that is there.
        local: without a file, take this machine, and no Slurm.

    Raises:
        UsageError: there is no site file, or something is wrong in it.
    """
    return draft_site(path, local=local).valid_value()


def draft_site(path: Path | None, *, local: bool = False) -> Draft[Site]:
    """Find the site to use as `find_site` does, whatever is wrong with it."""
    if local and (nodes := allocated_elsewhere(os.environ, socket.gethostname())):
        why = f"this shell is on {socket.gethostname()}, and its Slurm allocation is node {compress(nodes)}"
        fix = "start it there: srun --ntasks=1 --cpus-per-task=N primeslurm submit RECIPE --local --wait"
        return Draft(Site, string_problems, {}, None, (InputFault(Violation("--local", "", why, fix), ()),))
    if local and path is None:
        return Draft(Site, string_problems, {}, _with_libraries(local_site(Path("runs").resolve())))
    candidates = [path] if path else [expanded(candidate) for candidate in SITE_FILES]
    for candidate in candidates:
        if path or is_file(candidate):
            return _located(read_site(candidate), candidate)
    why = f"there is no site file: looked for {', '.join(str(c) for c in SITE_FILES)}"
    fix = "`primeslurm init` writes one, `primeslurm cluster up` starts an emulated cluster with one; or use --local"
    return Draft(Site, string_problems, {}, None, (InputFault(Violation("--site", "", why, fix), ()),))


def _located(draft: Draft[Site], file: Path) -> Draft[Site]:
    """The site of a file, with absolute paths."""
    if draft.value is None:
        return draft
    try:
        site = draft.value.model_copy(update={"runs": str(_runs(file, draft.value.runs))})
    except UsageError as error:
        return replace(draft, value=None, faults=tuple(InputFault(each, ("runs",)) for each in error.violations))
    return replace(draft, value=_with_libraries(site))


def local_site(
    runs: Path,
    device_dir: Path = Path("/dev"),
    *,
    driver_dir: Path = Path("/proc/driver/nvidia/gpus"),
    environ: Mapping[str, str] = os.environ,
) -> Site:
    """Describe this machine as a site: its GPUs, or CPU processes on pretended GPUs if it has none.

    Inside an allocation of Slurm, the site is what Slurm gives this shell of the machine's GPUs, cores and memory.
    Every agent gets a loopback address of its own, so that "nodes" may use the same ports.

    Args:
        runs: directory of all runs.
        device_dir: where the devices of GPUs are.
        driver_dir: where NVIDIA's driver describes its GPUs.
        environ: environment of this shell.
    """
    devices = len([path for path in device_dir.glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    given = gpus_given(environ)
    gpus = devices if given is None else min(devices, len(given))
    cpus = min(len(os.sched_getaffinity(0)), cpus_given(environ) or sys.maxsize)
    memory = memory_given_mib(environ, cpus)
    kind = NodeKind(
        partition="local",
        gpus=gpus or len(given or ()) or _FAKE_GPUS,
        cpus=cpus,
        gpu=_gpu_type(driver_dir) if gpus else None,
        memory_gib=memory and memory / 1024,
    )
    return Site(
        schema=1,
        name="local",
        device="cuda" if gpus else "cpu",
        runs=str(runs),
        nodes={"default": kind},
        network=Network(addresses={f"local-{i}": f"127.77.0.{i + 1}" for i in range(_LOCAL_NODES)}),
    )


def _gpu_type(driver_dir: Path) -> str | None:
    """Return the type of this machine's GPUs, for the memory estimate; None if it is unknown or they differ."""
    models = {line for path in driver_dir.glob("*/information") for line in re.findall(r"Model:\s*(.*)", _text(path))}
    types = {name for model in models for name in GPUS if re.search(rf"\b{name}\b", model, re.IGNORECASE)}
    smaller = any("40GB" in model for model in models)  # an A100 of half the size
    return types.pop() if len(models) == len(types) == 1 and not smaller else None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def runs_directory(runs: str | Path | None) -> Path:
    """Find where runs live: as given, else as the site file says, else ./runs.

    Other mistakes in the site file do not matter here: runs can be watched and cancelled while it is edited.

    Raises:
        UsageError: the site file does not say it, because it cannot be read, or its `runs` is wrong.
    """
    if runs is not None:
        return Path(runs)
    file = next((path for path in map(expanded, SITE_FILES) if is_file(path)), None)
    if file is None:
        return Path("runs")
    draft = _located(read_site(file), file)
    if draft.value is not None:
        return Path(draft.value.runs)
    said = draft.data.get("runs", Site.model_fields["runs"].default)
    if not draft.data or not isinstance(said, str):
        raise UsageError(draft.violations)
    return _runs(file, said)


def with_python(site: Site) -> Site:
    """Put this interpreter on the nodes of a site that names none."""
    return site.model_copy(update={"python": site.python or sys.executable})


def _runs(site_file: Path, runs: str) -> Path:
    """The site's directory of runs, which is relative to its file. Raises UsageError."""
    try:
        return (site_file.resolve().parent / Path(runs).expanduser()).resolve()
    except (OSError, RuntimeError) as error:  # no such user's home, a loop of links
        raise UsageError([Violation("runs", runs, str(error), "give an absolute path")]) from None


def _with_libraries(site: Site) -> Site:
    """The site with a UCX built in this checkout first on its library path."""
    built = Path(__file__).resolve().parents[2] / "third_party" / "ucx" / "lib"
    return site.model_copy(update={"library_path": (str(built), *site.library_path)}) if built.is_dir() else site
