"""Find the site file and the directory of runs."""

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
from primeslurm.base.paths import exists, expanded, is_file, shipped
from primeslurm.plan.gpus import GPUS
from primeslurm.recipe import Site
from primeslurm.recipe.fields.strings import string_problems
from primeslurm.recipe.reading.recipe_files import Draft, read_site
from primeslurm.recipe.reading.validation_errors import InputFault
from primeslurm.recipe.site import Network, NodeKind
from primeslurm.slurm.environment import allocated_elsewhere, cpus_given, gpus_given, memory_given_mib

# Paths that are searched, in order, if no site file is given.
SITE_FILES = (Path("site.yaml"), Path("~/.primeslurm/site.yaml"))
_LOCAL_NODES = 64
_FAKE_GPUS = 8


def find_site(path: Path | None, *, local: bool = False) -> Site:
    """Return the site of a file (by default the first existing one of `SITE_FILES`), or with `local` this machine.

    Raises UsageError if there is no site file, or it is wrong.
    """
    return draft_site(path, local=local).valid_value()


def site_file(path: Path | None) -> Path | None:
    """Return the site file that commands read, given one or none; None if it does not exist."""
    if path and not is_file(path):
        # The example is found by `h200`, or by its path in a checkout, also if the package is installed from a wheel.
        example = shipped("sites") / f"{path.name.removesuffix('.yaml')}.yaml"
        path = example if path.parent in (Path(), Path("sites")) else path
    return next((file for file in ([path] if path else map(expanded, SITE_FILES)) if is_file(file)), None)


def draft_site(path: Path | None, *, local: bool = False) -> Draft[Site]:
    """Return the site as `find_site` does, but with its errors instead of an exception."""
    # On many clusters, the shell of `salloc` stays on the login node.
    if local and (nodes := allocated_elsewhere(os.environ, socket.gethostname())):
        why = f"this shell is on {socket.gethostname()}, and its Slurm allocation is node {compress(nodes)}"
        fix = "start it there: srun --ntasks=1 --cpus-per-task=N primeslurm submit RECIPE --local --wait"
        return Draft(Site, string_problems, {}, None, (InputFault(Violation("--local", "", why, fix), ()),))
    if local and path is None:
        return Draft(Site, string_problems, {}, _with_libraries(local_site(Path("runs").resolve())))
    file = site_file(path)
    if path and file is None and not exists(path):
        fix = "`primeslurm init` writes site.yaml; --site h200 is an example"
        return Draft(Site, string_problems, {}, None, (_fault(str(path), "there is no such file", fix),))
    if file := file or path:
        return _located(read_site(file), file)
    why = f"there is no site file: looked for {', '.join(str(c) for c in SITE_FILES)}"
    fix = (
        "`primeslurm init` writes one, `primeslurm cluster up` starts an emulated cluster with one; "
        "or use --local, or the example: --site h200"
    )
    return Draft(Site, string_problems, {}, None, (_fault("", why, fix),))


def _fault(value: str, why: str, fix: str) -> InputFault:
    return InputFault(Violation("--site", value, why, fix), ())


def _located(draft: Draft[Site], file: Path) -> Draft[Site]:
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
    """Describe this machine as a site: its GPUs, or CPU processes on fake GPUs if it has none.

    In a shell of a Slurm allocation, the site has only the allocated GPUs, cores and memory. Each agent gets its own
    loopback address, so that "nodes" may use the same ports. `device_dir` has the device files of GPUs, and
    `driver_dir` their descriptions by NVIDIA's driver.
    """
    devices = len([path for path in device_dir.glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    allocated_gpus = gpus_given(environ)
    gpus = devices if allocated_gpus is None else min(devices, len(allocated_gpus))
    cpus = min(len(os.sched_getaffinity(0)), cpus_given(environ) or sys.maxsize)
    memory = memory_given_mib(environ, cpus)
    kind = NodeKind(
        partition="local",
        gpus=gpus or len(allocated_gpus or ()) or _FAKE_GPUS,
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
    """Return the GPU type for the memory estimate; None if it is unknown, or if the GPUs differ."""
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
    """Return the directory of runs: as given, as the site file says, or ./runs.

    Other errors in the site file are ignored, so that runs can be watched and cancelled while it is edited. Raises
    UsageError if the site file cannot be read, or its `runs` is wrong.
    """
    if runs is not None:
        return Path(runs)
    file = next((path for path in map(expanded, SITE_FILES) if is_file(path)), None)
    if file is None:
        return Path("runs")
    draft = _located(read_site(file), file)
    if draft.value is not None:
        return Path(draft.value.runs)
    runs_field = draft.data.get("runs", Site.model_fields["runs"].default)
    if not draft.data or not isinstance(runs_field, str):
        raise UsageError(draft.violations)
    return _runs(file, runs_field)


def with_python(site: Site) -> Site:
    """Use this interpreter on the nodes of a site that does not set `python`."""
    return site.model_copy(update={"python": site.python or sys.executable})


def _runs(site_file: Path, runs: str) -> Path:
    """Resolve a directory of runs relative to its site file. Raises UsageError."""
    try:
        return (site_file.resolve().parent / Path(runs).expanduser()).resolve()
    except (OSError, RuntimeError) as error:  # no such user's home, a loop of links
        raise UsageError([Violation("runs", runs, str(error), "give an absolute path")]) from None


def _with_libraries(site: Site) -> Site:
    built = Path(__file__).resolve().parents[2] / "third_party" / "ucx" / "lib"
    return site.model_copy(update={"library_path": (str(built), *site.library_path)}) if built.is_dir() else site
