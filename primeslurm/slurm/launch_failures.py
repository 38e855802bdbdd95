"""Find tasks that could not start in the job's output, and build the step without their nodes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from primeslurm.base import files
from primeslurm.base.hostlists import expand
from primeslurm.plan.model import Plan
from primeslurm.records.job_output import MARK, of_start

# Variable with a unique word for this start of the job. Slurm's restart count may be inherited from the shell that
# submits.
START = "PRIMESLURM_START"
# Line of the job's output: the previous step ended all its tasks, and they start again
AGAIN = "primeslurm: again without some nodes"
# Variable of a step without some nodes: names of all nodes of the job, by rank
NODES = "PRIMESLURM_NODES"
_LAUNCH = re.compile(r"^srun: error: Task launch for \S+ failed on node (\S+): (.+)$", re.MULTILINE)
_KILL = re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: (Killed|Out Of Memory)$", re.MULTILINE)
_FAILURE = re.compile(r"^srun: error: Node failure on (\S+)$", re.MULTILINE)
_EXIT = re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: (Exited with exit code \d+)$", re.MULTILINE)
_END = re.compile(r"^srun: error: (\S+): tasks? [\d,-]+: (.+)$", re.MULTILINE)


def restarts(environ: Mapping[str, str]) -> int:
    return int(environ.get("SLURM_RESTART_COUNT", "0"))


def node_names(plan: Plan, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the job's nodes by rank; empty outside a Slurm job."""
    if NODES in environ:
        return tuple(environ[NODES].split(","))
    single = len(plan.groups) == 1
    names = ("SLURM_JOB_NODELIST" if single else f"SLURM_JOB_NODELIST_HET_GROUP_{g.index}" for g in plan.groups)
    node_list = [name for variable in names for name in expand(environ.get(variable, ""))]
    return tuple(node_list) if len(node_list) == plan.allocated else ()


class JobOutput:
    """Incremental reader of a job's output since one of its starts.

    Output of earlier starts precedes it in the same file. The file grows, and its file system may be slow.
    """

    def __init__(self, path: Path, start: str) -> None:
        self._path, self._start = path, start
        self._read = 0  # offset after the last whole line [bytes]
        self._begun = False

    def _rest(self, handle: BinaryIO) -> bytes:
        handle.seek(self._read)
        return handle.read()

    def news(self) -> str:
        """Return the new whole lines of this start.

        Raises:
            OSError: the file does not exist yet or cannot be read.
        """
        # Opening the file makes a network file system ask its server for new data.
        lines, end, _ = files.reading(self._path, self._rest).rpartition(b"\n")
        self._read += len(lines) + len(end)
        text = (lines + end).decode(errors="replace")
        following = of_start(text, self._start)
        if following is None:
            return text if self._begun else ""
        self._begun = True
        return following


def launch_failures(output: str) -> dict[str, str]:
    """Return nodes that srun could not reach, and why, from the output of one start. srun then ends all other tasks."""
    return dict(_LAUNCH.findall(output))


def early_exits(output: str) -> dict[str, str]:
    """Return nodes whose task exited with an error, and how, from the output of one start."""
    return {name: how for hostlist, how in _EXIT.findall(output) for name in expand(hostlist)}


def ended_tasks(output: str) -> dict[str, str]:
    """Return nodes whose task ended, also by a signal, and how, in the last start of a job's whole output."""
    _, _, last = output.rpartition(f"{MARK} ")
    return {name: how for hostlist, how in _END.findall(last) for name in expand(hostlist)}


def killed_nodes(output: str) -> dict[str, str]:
    """Return nodes that failed or whose task was killed, and how, from the output of one start."""
    # srun kills all tasks if some cannot start. Those are started again, so they do not count. A node failure means
    # that Slurm takes the node from the job.
    _, _, last = output.rpartition(f"{AGAIN}\n")
    failed = {name: "node failure" for hostlist in _FAILURE.findall(last) for name in expand(hostlist)}
    return failed | {name: how for hostlist, how in _KILL.findall(last) for name in expand(hostlist)}


def spares_suffice(plan: Plan, names: Sequence[str], lost: Collection[str]) -> bool:
    """Return whether the job can start without `lost` nodes: only with enough spares, and not without the head."""
    if not names or names[0] in lost or not plan.survives_nodes:
        return False
    needed = {group.index: sum(node.group == group.index for node in plan.nodes) for group in plan.groups}
    return all(len(_left(plan, names, lost, group)) >= count for group, count in needed.items())


def step_without(plan: Plan, names: Sequence[str], lost: Collection[str], step: Sequence[str]) -> list[str]:
    """Return the command of a step that runs on all nodes except `lost` ones.

    `names` are the nodes of the job by rank. `step` is srun, its options, and its command.
    """
    program, *words = [word for word in step if not word.startswith("--het-group=")]
    het = len(plan.groups) > 1
    argv = [program]
    for group in plan.groups:
        left = _left(plan, names, lost, group.index)
        argv += [":"] if group.index else []
        argv += [f"--het-group={group.index}"] if het else []
        argv += [f"--nodes={len(left)}", f"--ntasks={len(left)}", f"--nodelist={','.join(left)}", *words]
    return argv


def _left(plan: Plan, names: Sequence[str], lost: Collection[str], group: int) -> list[str]:
    return [names[rank] for rank in plan.ranks(group) if names[rank] not in lost]
