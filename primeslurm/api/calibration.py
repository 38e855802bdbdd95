"""Measure the rates of a partition's nodes by a short job, and write them to the site file."""

from __future__ import annotations

import difflib
import os
import re
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from primeslurm.api import submission
from primeslurm.api.sites import draft_site, local_site, site_file, with_python
from primeslurm.base import files
from primeslurm.base.errors import RunError, UsageError, Violation
from primeslurm.base.paths import shipped
from primeslurm.plan.calibration_plan import calibration_plan
from primeslurm.plan.estimates.rates import measured_problems
from primeslurm.plan.planner import Planned
from primeslurm.recipe.reading.recipe_files import read_site
from primeslurm.records.measured_rates import FILE, CalibrationRecord
from primeslurm.records.reading import find_record

# The section from its key to its last indented line
_SECTION = re.compile(r"^measured:.*\n?(?:[ \t].*\n?)*", re.MULTILINE)
_HEADING = "measured:  # written by `primeslurm calibrate`"


@dataclass(frozen=True)
class Calibration:
    """A calibration that can be submitted."""

    planned: Planned
    slurm_conf: str | None
    site_file: Path | None  # None: this machine without a site file

    def dry_run(self) -> submission.DryRun:
        """Make all checks of a submission, and write nothing. Raises UsageError."""
        return submission.dry_run(self.planned.plan, self.slurm_conf, ask=True)

    def start(self) -> submission.Submitted:
        """Submit the job, or start it on this machine. Raises UsageError and ClusterError."""
        return submission.submit(self.planned, None, self.slurm_conf)


@dataclass(frozen=True)
class SiteChange:
    """A new text of a site file."""

    file: Path
    before: str
    after: str

    @property
    def diff(self) -> str:
        before, after = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(before, after, str(self.file), f"{self.file} (new)"))

    def write(self) -> None:
        path = self.file.resolve()
        mode = path.stat().st_mode
        files.write_atomic(path, self.after)
        path.chmod(stat.S_IMODE(mode))  # others may read the file of a site


def load_calibration(
    site: Path | None, *, nodes: int | None = None, partition: str | None = None, local: bool = False
) -> Calibration:
    """Plan a calibration.

    Args:
        site: a site file; by default ./site.yaml or ~/.primeslurm/site.yaml, and with `local` none.
        nodes: number of nodes; by default 2, and with `local` 1.
        partition: partition to measure; by default that of the trainer.
        local: measure this machine without Slurm.

    Raises:
        UsageError: the site is wrong, cannot be written, or has no such nodes. Lists every reason.
    """
    draft, file = draft_site(site, local=local), None if local and site is None else site_file(site)
    problems = [*draft.violations, *(_unwritable(file) if file else [])]
    if draft.value is None:
        raise UsageError(problems)
    whole = with_python(draft.value)
    if local and not whole.network.addresses:  # names of the nodes that this machine stands for do not resolve
        network = whole.network.model_copy(update={"addresses": local_site(Path(whole.runs)).network.addresses})
        whole = whole.model_copy(update={"network": network})
    name = f"calibrate-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        planned = calibration_plan(whole, partition, name, nodes or (1 if local else 2), local=local)
    except UsageError as error:
        raise UsageError([*problems, *error.violations]) from None
    if problems:
        raise UsageError(problems)
    return Calibration(planned, whole.slurm_conf, file)


def _unwritable(file: Path) -> list[Violation]:
    directory = file.resolve().parent
    if directory == shipped("sites").resolve():
        return [Violation("--site", str(file), "is an example of a site", "copy it, and calibrate the copy")]
    if not os.access(directory, os.W_OK):
        return [Violation("--site", str(file), "cannot be written: no permission", "calibrate your own copy of it")]
    return []


def measured_by(run_dir: Path) -> CalibrationRecord:
    """Return the rates that a completed calibration run measured. Raises RunError if their file is lost."""
    record = find_record(run_dir / FILE, CalibrationRecord)
    if record is None:
        raise RunError(f"{run_dir / FILE} cannot be read")
    return record


def site_change(file: Path, record: CalibrationRecord) -> SiteChange:
    """Return a site file's text with the measured rates of one partition. All other text stays as it is.

    Raises UsageError if the section cannot be added to the text as lines, or if the rates are implausible.
    """
    # The rates are in the site file, and not in a second file that it names, so that a copy of it is complete.
    data, before = read_site(file).data, files.read_text(file)
    partitions = {**(data.get("measured") or {}), record.partition: _fields(record)}
    section = yaml.safe_dump({"measured": partitions}, sort_keys=False).replace("measured:", _HEADING, 1)
    if old := _SECTION.search(before):
        after = before[: old.start()] + section + before[old.end() :]
    else:
        after = before + ("" if before.endswith("\n") else "\n") + section
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / file.name
        copy.write_text(after)
        changed = read_site(copy)
    if changed.data != {**data, "measured": partitions}:
        why = "the section cannot be added to its text"
        raise UsageError([Violation("--site", str(file), why, f"add it yourself:\n{section}")])
    if problems := measured_problems(changed.valid_value()):
        raise UsageError(problems)
    return SiteChange(file, before, after)


def _fields(record: CalibrationRecord) -> dict[str, object]:
    return {
        **{"at": record.at, "device": record.device, "nodes": record.nodes, "ranks_per_node": record.ranks_per_node},
        **{name: _rounded(rate.median) for name, rate in record.rates.items()},
        "spread": {name: _rounded((rate.high - rate.low) / rate.median) for name, rate in record.rates.items()},
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
