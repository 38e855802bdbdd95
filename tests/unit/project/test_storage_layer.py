"""Files of runs are read and written through `files` and `durable`, and wall clocks are shown, never compared."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "primeslurm"
LAYER = ("files.py", "durable.py")
METHODS = frozenset(
    {
        *("read_bytes", "read_text", "write_bytes", "write_text", "open", "touch"),
        *("exists", "is_file", "is_dir", "stat", "lstat", "samefile", "is_symlink", "readlink"),
        *("iterdir", "glob", "rglob", "walk"),
        *("rename", "replace", "unlink", "rmdir", "mkdir", "chmod", "symlink_to", "hardlink_to"),
    }
)
"""Methods of `Path` that ask the file system. `replace` counts with one argument: with two it is that of a string."""
FUNCTIONS = frozenset(
    {
        *("open", "io.open", "shutil.rmtree", "shutil.copy", "shutil.copyfile", "shutil.copytree", "shutil.move"),
        *("os.open", "os.stat", "os.lstat", "os.listdir", "os.scandir", "os.walk", "os.rename", "os.replace"),
        *("os.unlink", "os.remove", "os.rmdir", "os.mkdir", "os.makedirs", "os.truncate", "os.statvfs", "os.link"),
        *("os.path.exists", "os.path.lexists", "os.path.isfile", "os.path.isdir", "os.path.getsize"),
        *("os.path.getmtime", "shutil.disk_usage", "os.symlink", "os.utime", "os.chmod"),
    }
)
OTHERS = ("run", "directory", "RunDirectory(run_dir)", "self._shared_memory", "way", "self", "Image")
"""Receivers of methods of the same names that are no paths."""
KERNEL = "the kernel's own files: /proc, /sys and cgroups"
OWN_DISK = "the node's own disk and memory"
MACHINE = "the machine that the user works at"
USERS = "files that the user names, looked at before a run"
WITHIN = "called within `files.retrying`"
EXCEPTIONS = {
    "api/exporting.py": MACHINE,
    "api/setup/first_files.py": MACHINE,
    "api/images/building.py": "a tool that builds images; it is run again",
    "api/setup/installing.py": MACHINE,
    "api/logs.py": "logs that are followed: it looks again by itself",
    "api/sites.py": MACHINE,
    "api/submission.py": MACHINE,
    "chat/lines.py": "only names a line in an error",
    "cli/__init__.py": MACHINE,
    "compiled_code.py": OWN_DISK,
    "models/catalog.py": "a file of the package",
    "inference/store_client.py": "files of installed packages",
    "node/agent/child_process.py": WITHIN,
    "node/agent/node_context.py": OWN_DISK,
    "node/host/exec_in_process.py": KERNEL,
    "node/host/fabric.py": KERNEL,
    "node/host/network.py": KERNEL,
    "node/host/private_directory.py": OWN_DISK,
    "node/host/process_condition.py": KERNEL,
    "node/host/shared_memory.py": OWN_DISK,
    "node/preflight/checks.py": KERNEL,
    "node/preflight/installed.py": "files of installed packages",
    "orchestrator/dispatch/curricula.py": WITHIN,
    "orchestrator/environments/harbor_local.py": "tasks of the user: a rollout that fails is tried again",
    "orchestrator/environments/remote_sandboxes.py": MACHINE,
    "orchestrator/environments/math_problems.py": USERS,
    "orchestrator/environments/sandbox/bwrap_sandbox.py": "a file of the package",
    "orchestrator/environments/sandbox/containers.py": OWN_DISK,
    "orchestrator/environments/sandbox/disk.py": OWN_DISK,
    "orchestrator/environments/sandbox/sandbox_init.py": "inside of a sandbox",
    "orchestrator/environments/sandbox/install.py": OWN_DISK,
    "orchestrator/environments/sandbox/limits.py": KERNEL,
    "orchestrator/environments/sandbox/uv_scripts.py": "files of installed packages",
    "orchestrator/environments/sandbox/bwrap_args.py": OWN_DISK,
    "orchestrator/environments/sandbox/watch.py": KERNEL,
    "orchestrator/environments/tool_use.py": USERS,
    "models/gpt_oss/harmony.py": OWN_DISK,
    "orchestrator/rollouts/job_protocol.py": OWN_DISK,
    "orchestrator/rollouts/spool.py": WITHIN,
    "orchestrator/rollouts/tool_servers.py": OWN_DISK,
    "orchestrator/rollouts/worker.py": OWN_DISK,
    "plan/checks/files.py": USERS,
    "plan/checks/model_tensors.py": USERS,
    "plan/checks/sft_files.py": USERS,
    "plan/checks/teacher.py": USERS,
    "recipe/reading/recipe_files.py": USERS,
    "records/heartbeats.py": OWN_DISK,
    "run/ownership.py": WITHIN,
    "run/status/signs_of_life.py": "a file that is watched: it looks again by itself",
    "slurm/client.py": MACHINE,
    "slurm/embedded/cluster.py": MACHINE,
    "slurm/embedded/daemons.py": KERNEL,
    "slurm/embedded/equal_pages.py": KERNEL,
    "slurm/inventory.py": "files of the checkout",
    "slurm/local/submit.py": MACHINE,
    "trainer/checkpoints/local_copies.py": OWN_DISK,
    "trainer/checkpoints/shards.py": WITHIN,
    "trainer/checkpoints/staging.py": KERNEL,
    "trainer/data/probe.py": USERS,
    "trainer/data/sft_data.py": "conversations of the user: all ranks read their part again (`retry_while_full`)",
    "trainer/data/token_files.py": "all ranks write their part again (`retry_while_full`)",
    "trainer/distributed/cpu_affinity.py": KERNEL,
    "trainer/weights/convert.py": "a tool; it is run again, and goes on where it stopped",
    "trainer/weights/model_directory.py": WITHIN,
    "wire/stored/task_images.py": WITHIN,
    "wire/transport/loopback.py": KERNEL,
    "wire/transport/rendezvous.py": KERNEL,
    "wire/transport/secret.py": WITHIN,
}
"""Modules that may ask a file system themselves, and why."""
SHOWN = "is written down or shown to people"
COMPARED = "is compared with a time that Slurm, or another machine, has told"
LEDGER = "ages of entries in the ledger, which outlive every process"
WALL_CLOCKS = {
    "api/jobs.py": COMPARED,
    "api/runs.py": SHOWN,
    "api/submission.py": LEDGER,
    "cli/verbs/nodes.py": LEDGER,
    "node/agent/node_agent.py": SHOWN,
    "node/agent/process_manager.py": SHOWN,
    "node/attempt/attempt_end.py": LEDGER,
    "node/attempt/attempt_start.py": SHOWN,
    "node/head/head.py": COMPARED,
    "node/preflight/preflight.py": COMPARED,
    "orchestrator/evaluation/evaluator.py": "the length of an evaluation, which outlives its process; never below 0",
    "orchestrator/weight_transfer/engine_pool.py": SHOWN,
    "orchestrator/rollouts/job_protocol.py": "an incarnation: after a step back the one before is given up first",
    "records/journal.py": SHOWN,
    "records/metrics.py": SHOWN,
    "run/diagnosis/doctor.py": COMPARED,
    "run/directory.py": SHOWN,
    "run/status/run_status.py": COMPARED,
    "slurm/local/controller.py": COMPARED,
}
"""Modules that may look at the wall clock, and what for."""
WALL = ("time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today")


def calls(tree: ast.AST) -> Iterator[str]:
    """Yield line and name of each call that asks a file system, outside of what is handed to `files.retrying`."""
    stack: list[tuple[ast.AST, bool]] = [(tree, False)]
    while stack:
        node, covered = stack.pop()
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if not covered and asks(node, name):
                yield f"{node.lineno}: {name}"
            covered = covered or name in ("files.retrying", "storage.retrying")
        stack += [(child, covered) for child in ast.iter_child_nodes(node)]


def asks(node: ast.Call, name: str) -> bool:
    if name in FUNCTIONS:
        return True
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in METHODS:
        return False
    owner = ast.unparse(node.func.value)
    if owner in ("files", "storage", "durable", "dataclasses", "msgspec.structs"):
        return False
    if node.func.attr in ("exists", "unlink", "open") and owner in OTHERS:
        return False
    return node.func.attr != "replace" or (len(node.args) == 1 and not node.keywords)


def modules() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def test_files_of_runs_are_asked_for_through_one_layer() -> None:
    found = {name: sorted(calls(tree)) for name, tree in modules() if name not in LAYER}
    found = {name: lines for name, lines in found.items() if lines}
    unlisted = {name: lines for name, lines in found.items() if name not in EXCEPTIONS}
    assert unlisted == {}, "use primeslurm.base.files, or say in EXCEPTIONS why the file is of the node itself"
    assert EXCEPTIONS.keys() - found.keys() == set(), "these need no exception any more"


def test_wall_clocks_are_shown_and_intervals_go_by_monotonic_ones() -> None:
    found: dict[str, list[int]] = {}
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL:
                found.setdefault(name, []).append(node.lineno)
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                assert {alias.name for alias in node.names}.isdisjoint({"time", "time_ns"}), f"{name}: `import time`"
    assert {name: lines for name, lines in found.items() if name not in WALL_CLOCKS} == {}, "use time.monotonic()"
    assert WALL_CLOCKS.keys() - found.keys() == set(), "these do not look at the wall clock any more"


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("path.read_bytes()", ["1: path.read_bytes"]),
        ("path.replace(target)", ["1: path.replace"]),
        ("text.replace('a', 'b')", []),
        ("os.path.exists(path)", ["1: os.path.exists"]),
        ("files.retrying(path, lambda: path.read_bytes())", []),
        ("files.read_bytes(path)", []),
        ("(self.path / 'cancel').exists()", ["1: (self.path / 'cancel').exists"]),
        ("sorted(directory.glob('*'))", ["1: directory.glob"]),
    ],
)
def test_what_counts_as_asking_a_file_system(source: str, seen: list[str]) -> None:
    assert list(calls(ast.parse(source))) == seen
