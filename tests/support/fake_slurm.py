"""Slurm's commands as scripts on a directory. A job is a directory with its state and the arguments of its sbatch.

Files beside the jobs change the commands: sbatch fails with the text of `refuse` (before Slurm has the job), of `lost`
(after that) or of `broken` (after Slurm has created and cancelled the job). It waits while `early` (before) or `hold`
(after) exists. With `down` the controller does not answer. sbatch creates `called`.
"""

from __future__ import annotations

from pathlib import Path

_DOWN = '[ -e down ] && { echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1; }\n'
_SBATCH = """touch called
while [ -e early ]; do sleep 0.02; done
[ -e refuse ] && { cat refuse >&2; exit 1; }
id=1; until mkdir jobs/$id 2>/dev/null; do id=$((id + 1)); done
echo PENDING > jobs/$id/state
echo "$*" > jobs/$id/words
while [ -e hold ]; do sleep 0.02; done
[ -e broken ] && { echo CANCELLED > jobs/$id/state; cat broken >&2; exit 1; }
[ -e lost ] && { cat lost >&2; exit 1; }
echo Submitted batch job $id
"""
_SQUEUE = """for job in jobs/*/; do
  [ -d "$job" ] && echo "$(basename "$job")|$(cat "$job/state")|$(cat "$job/words")|"
done
exit 0
"""
_SCONTROL = """[ "$1" = ping ] && { echo Slurmctld is UP; exit 0; }
for id; do true; done
[ -d jobs/$id ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
echo "JobId=$id Partition=gpu JobState=$(cat jobs/$id/state) Reason=None Restarts=0 StartTime=now ExitCode=0:0"
"""
_SCANCEL = "echo CANCELLED > jobs/$1/state\n"


class FakeSlurm:
    """Commands in `bin`, and the jobs that they have created."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.bin = directory / "bin"
        self.bin.mkdir(parents=True)
        (directory / "jobs").mkdir()
        scripts = {
            "sbatch": _SBATCH,
            "squeue": _DOWN + _SQUEUE,
            "scontrol": _DOWN + _SCONTROL,
            "scancel": _DOWN + _SCANCEL,
            "sacct": "echo Slurm accounting storage is disabled >&2; exit 1\n",
        }
        for name, body in scripts.items():
            (self.bin / name).write_text(f"#!/bin/sh\ncd '{directory}' || exit 1\n{body}")
            (self.bin / name).chmod(0o755)

    def set(self, name: str, text: str = "") -> None:
        """Create a file that changes the commands."""
        (self.directory / name).write_text(text)

    def unset(self, name: str) -> None:
        (self.directory / name).unlink()

    @property
    def jobs(self) -> dict[str, str]:
        """State by job id."""
        paths = sorted(path.parent for path in self.directory.glob("jobs/*/words"))
        return {path.name: (path / "state").read_text().strip() for path in paths}

    def words(self, job_id: str) -> str:
        """Return the arguments of sbatch."""
        return (self.directory / "jobs" / job_id / "words").read_text()
