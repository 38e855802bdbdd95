"""Which site file counts, and where runs live."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from primeslurm.errors import UsageError, Violation
from primeslurm.paths import expanded, is_file
from primeslurm.recipe import Site
from primeslurm.recipe.fields.text import text_problems
from primeslurm.recipe.reading.explain import InputFault
from primeslurm.recipe.reading.recipe_files import Draft, read_site
from primeslurm.recipe.site import Network, NodeKind

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
    return draft_site(path, local=local).sound()


def draft_site(path: Path | None, *, local: bool = False) -> Draft[Site]:
    """Find the site to use as `find_site` does, whatever is wrong with it."""
    if local and path is None:
        return Draft(Site, text_problems, {}, _with_libraries(local_site(Path("runs").resolve())))
    candidates = [path] if path else [expanded(candidate) for candidate in SITE_FILES]
    for candidate in candidates:
        if path or is_file(candidate):
            return _located(read_site(candidate), candidate)
    why = f"there is no site file: looked for {', '.join(str(c) for c in SITE_FILES)}"
    fix = "`primeslurm init` writes one, `primeslurm cluster up` starts an emulated cluster with one; or use --local"
    return Draft(Site, text_problems, {}, None, (InputFault(Violation("--site", "", why, fix), ()),))


def _located(draft: Draft[Site], file: Path) -> Draft[Site]:
    """The site of a file, with absolute paths."""
    if draft.value is None:
        return draft
    try:
        site = draft.value.model_copy(update={"runs": str(_runs(file, draft.value.runs))})
    except UsageError as error:
        return replace(draft, value=None, faults=tuple(InputFault(each, ("runs",)) for each in error.violations))
    return replace(draft, value=_with_libraries(site))


def local_site(runs: Path, device_dir: Path = Path("/dev")) -> Site:
    """Describe this machine as a site: its own GPUs, or, without any, CPU processes on pretended ones.

    Every agent gets a loopback address of its own, so that "nodes" may use the same ports.

    Args:
        runs: directory of all runs.
        device_dir: where the devices of GPUs are.
    """
    gpus = len([path for path in device_dir.glob("nvidia[0-9]*") if path.name[6:].isdigit()])
    kind = NodeKind(partition="local", gpus=gpus or _FAKE_GPUS, cpus=os.cpu_count() or 1)
    return Site(
        schema=1,
        name="local",
        device="cuda" if gpus else "cpu",
        runs=str(runs),
        nodes={"default": kind},
        network=Network(addresses={f"local-{i}": f"127.77.0.{i + 1}" for i in range(_LOCAL_NODES)}),
    )


def runs_directory(runs: str | Path | None) -> Path:
    """Find where runs live: as given, else as the site file says, else ./runs."""
    if runs is not None:
        return Path(runs)
    try:
        return Path(find_site(None).runs)
    except UsageError:
        return Path("runs")


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
