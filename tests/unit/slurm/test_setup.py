"""The site's set-up in the batch script, run by bash: a failed command ends the job with its output."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from primeslurm.node.attempt.setup_failure import ending_of_setup
from primeslurm.slurm.render import render
from tests.support.slurm_plans import group, plan


def run(
    tmp_path: Path, *, modules: tuple[str, ...] = (), prologue: tuple[str, ...] = (), module: str = ""
) -> tuple[int, list[str], str]:
    """Run a batch script; return its exit code, its lines after the first, and what it wrote to stderr.

    Args:
        tmp_path: directory for fake programs srun and Python.
        modules: of the site.
        prologue: of the site.
        module: body of the shell function `module`; empty for a shell without it.
    """
    for name, body in (("srun", "echo step"), ("python", 'echo "python ${*:3}"')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    given = plan("/runs/demo", group(0, "all"), modules=modules, prologue=prologue)
    script = render(given.model_copy(update={"python": str(tmp_path / "python")}))
    (tmp_path / "job.sbatch").write_text(script)
    define = f"module() {{ {module}; }}; export -f module; " if module else "unset -f module; "
    done = subprocess.run(
        ["bash", "-c", define + "exec bash job.sbatch w"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    first, *lines = done.stdout.splitlines()
    assert re.fullmatch(r"primeslurm: start [0-9a-f-]{36}", first)
    return done.returncode, lines, done.stderr


OK = (0, ["step"])
LMOD = 'echo "Lmod has detected the following error: unknown: $*" >&2; return 1'
TCL_3 = """echo "ModuleCmd_Load.c(213):ERROR:105: Unable to locate a modulefile for '$2'" >&2"""


@pytest.mark.parametrize(
    ("module", "code", "words"),
    [
        ("", 127, "module: command not found"),
        (LMOD, 1, "Lmod has detected the following error: unknown: load cuda/99 ucx"),
        (TCL_3, 1, "ERROR:105: Unable to locate a modulefile for 'cuda/99'"),
    ],
)
def test_a_module_that_does_not_load_ends_the_job(tmp_path: Path, module: str, code: int, words: str) -> None:
    found, lines, said = run(tmp_path, modules=("cuda/99", "ucx"), module=module)
    assert found == code
    assert lines == [f"python /runs/demo w {code} module load cuda/99 ucx"]
    assert words in said
    assert f"primeslurm: set-up failed with exit code {code}: module load cuda/99 ucx" in said


def test_modules_that_load_say_what_they_like_and_stay_loaded(tmp_path: Path) -> None:
    module = 'echo "WARNING: cuda/99 is old; no ERROR" >&2; export LOADED="$2"'
    code, lines, said = run(tmp_path, modules=("cuda/99",), module=module, prologue=('echo "has $LOADED"',))
    assert (code, lines) == (0, ["has cuda/99", "step"])
    assert said == "WARNING: cuda/99 is old; no ERROR\n"


@pytest.mark.parametrize(
    ("lines", "code", "command"),
    [
        (("source /nowhere/setup.sh",), 1, "source /nowhere/setup.sh"),
        (("no-such-program --x",), 127, "no-such-program --x"),
        (("for i in 1 2; do", "cd /nowhere", "done"), 1, "cd /nowhere"),
        (("source ./ends-badly.sh",), 3, "source ./ends-badly.sh"),
        (('[ -d /nowhere ] || { echo "no scratch" >&2; exit 4; }',), 4, "exit 4"),
        (("exit 0",), 0, "exit 0"),
        (("f() { return 5; }", "f"), 5, "return 5"),
    ],
)
def test_a_failing_line_of_the_prologue_ends_the_job(
    tmp_path: Path, lines: tuple[str, ...], code: int, command: str
) -> None:
    (tmp_path / "ends-badly.sh").write_text("return 3\n")
    found, out, said = run(tmp_path, prologue=lines)
    assert found == (code or 1)
    assert out == [f"python /runs/demo w {code} {command}"]
    assert f"primeslurm: set-up failed with exit code {code}: {command}\n" in said


@pytest.mark.parametrize(
    "lines",
    [
        ("false || true", "if false; then", "echo no", "fi", "! true || true"),
        ("source ./vendor.sh",),
        ("[ -n '' ] && echo no", "set -u"),
        ("trap 'echo own' ERR", "true"),
    ],
)
def test_prologue_without_failure_continues(tmp_path: Path, lines: tuple[str, ...]) -> None:
    (tmp_path / "vendor.sh").write_text("false\ngrep -q x /nowhere 2> /dev/null\n[ -n '' ] && echo no\nexport X=1\n")
    assert run(tmp_path, prologue=lines)[:2] == OK


def test_the_end_names_the_command_and_its_last_words() -> None:
    output = "loading\n\nmodule: command not found\nprimeslurm: set-up failed with exit code 127: module load cuda\n"
    ending = ending_of_setup(127, "module load cuda", output)
    assert ending.reason == (
        "a command of the site's set-up failed: module load cuda (exit code 127): loading; module: command not found"
    )
    assert ending.final and ending.suspect == "site set-up"
    assert len(ending_of_setup(1, "x", "y" * 10_000).reason) < 800
