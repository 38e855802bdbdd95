"""Measure the rates of a partition's nodes by a short job, and write them to the site file."""

from __future__ import annotations

import difflib
import os
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import yaml

from primeslurm.api import submission
from primeslurm.api.sites import draft_site, local_site, site_file, with_python
from primeslurm.base import files
from primeslurm.base.errors import RunError, UsageError, Violation
from primeslurm.base.paths import shipped
from primeslurm.plan.calibration import calibrated_kind, calibration_plan
from primeslurm.plan.planner import Planned
from primeslurm.recipe.reading.recipe_files import read_site
from primeslurm.records.calibration import FILE, CalibrationRecord
from primeslurm.records.reading import find_record

# The section from its key to its last indented line
_SECTION = re.compile(r"^measured:.*\n?(?:[ \t]*\n|[ \t].*\n?)*", re.MULTILINE)
_COMMENT = "measured:  # written by `primeslurm calibrate`"


@dataclass(frozen=True)
class Calibration:
    """A calibration that can be submitted."""

    planned: Planned
    slurm_conf: str | None
    site_file: Path | None  # None: this machine without a site file

    def dry_run(self, *, slurm: bool = True) -> submission.DryRun:
        """Make all checks of a submission, and write nothing. Raises UsageError."""
        return submission.dry_run(self.planned.plan, self.slurm_conf, ask=slurm)

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
        files.write_atomic(self.file.resolve(), self.after)


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
    problems = draft.violations
    if file is not None:
        problems += unwritable(file)
    planned = None
    if draft.value is not None:
        name = f"calibrate-{time.strftime('%Y%m%d-%H%M%S')}"
        whole = with_python(draft.value)
        if local and not whole.network.addresses:  # names of the nodes that this machine stands for do not resolve
            network = whole.network.model_copy(update={"addresses": local_site(Path(whole.runs)).network.addresses})
            whole = whole.model_copy(update={"network": network})
        try:
            kind = calibrated_kind(whole, partition)
            planned = calibration_plan(whole, kind, name, nodes or (1 if local else 2), local=local)
        except UsageError as error:
            problems += error.violations
    if problems or planned is None or draft.value is None:
        raise UsageError(problems)
    return Calibration(planned, draft.value.slurm_conf, file)


def unwritable(file: Path) -> list[Violation]:
    """Return why the rates cannot be written to a site file."""
    target = file.resolve()
    if target.parent == shipped("sites").resolve():
        return [Violation("--site", str(file), "is an example of a site", "copy it, and calibrate the copy")]
    if not os.access(target.parent, os.W_OK):
        return [Violation("--site", str(file), "cannot be written: no permission", "calibrate your own copy of it")]
    return []


def measured(run_dir: Path) -> CalibrationRecord:
    """Return the rates that a calibration run measured. Raises RunError if it has none."""
    record = find_record(run_dir / FILE, CalibrationRecord)
    if record is None:
        raise RunError(f"{run_dir} has no {FILE}: the run is no calibration, or it has not completed")
    return record


def site_change(file: Path, record: CalibrationRecord) -> SiteChange:
    """Return a site file's text with the measured rates of one partition. All other text stays as it is.

    Raises UsageError if the section cannot be added to the text as lines, or if the rates are implausible.
    """
    # The rates are part of the site file, and not of a second file that it names, so that a copy of it is complete.
    draft = read_site(file)
    before = files.read_text(file)
    section = draft.data.get("measured")
    partitions = {**(section if isinstance(section, dict) else {}), record.partition: _fields(record)}
    text = yaml.safe_dump({"measured": partitions}, sort_keys=False, default_flow_style=False)
    text = text.replace("measured:", _COMMENT, 1)
    found = _SECTION.search(before)
    if found:
        rest = before[found.end() :]
        after = before[: found.start()] + text + ("\n" if rest and found[0].endswith("\n\n") else "") + rest
    else:
        after = before + ("" if before.endswith("\n") else "\n") + text
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / file.name
        copy.write_text(after)
        changed = read_site(copy)
    if changed.value is None and draft.value is not None and changed.data:
        raise UsageError(changed.violations)
    others = [{key: value for key, value in each.data.items() if key != "measured"} for each in (draft, changed)]
    if others[0] != others[1] or changed.data.get("measured") != partitions:
        why = "the section cannot be added to its text"
        raise UsageError([Violation("--site", str(file), why, f"add it yourself:\n{text}")])
    return SiteChange(file, before, after)


def _fields(record: CalibrationRecord) -> dict[str, object]:
    return {
        **{"at": record.at, "device": record.device, "nodes": record.nodes, "ranks_per_node": record.ranks_per_node},
        **{name: _rounded(rate.median) for name, rate in record.rates.items()},
        "spread": {name: _rounded(rate.spread) for name, rate in record.rates.items()},
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def as_json(record: CalibrationRecord) -> object:
    """Return a record as JSON values."""
    return msgspec.to_builtins(record)
