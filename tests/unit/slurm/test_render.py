"""Batch scripts against golden files; PRIMESLURM_UPDATE_GOLDEN=1 rewrites the files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from primeslurm.plan.model import Plan
from primeslurm.plan.planner import derive
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from primeslurm.slurm.render import render
from tests.support.slurm_plans import group, plan

GOLDEN = Path(__file__).parents[2] / "golden"
SHELLCHECK = Path(sys.executable).with_name("shellcheck")
WEIRD = 'it\'s 5 $HOME `id` "x" \\ #1 !'

FULL_OPTIONS = {
    "mem": "1000G",
    "constraint": "nvme&ib",
    "nodelist": "node[004-005]",
    "switches": "1@02:00:00",
    "exclusive": True,
}
ROOT = Path(__file__).parents[3]
PLANS = {
    "environments": derive(
        load_recipe(ROOT / "recipes" / "glm5_pd.yaml"),
        load_site(ROOT / "sites" / "h200.yaml").model_copy(update={"python": "/venv/bin/python"}),
        Path("/runs/glm5-pd"),
    ),
    "single": plan("/runs/demo", group(0, "all", 3, gpus=2), requeue=False),
    "het": plan(
        "/runs/demo",
        group(0, "control"),
        group(1, "train", 1, gpus=2),
        group(2, "prefill", 1, gpus=2),
        group(3, "decode", 1, gpus=2),
        env={"OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "${host}"},
    ),
    "everything": plan(
        "/runs/demo",
        group(0, "control", **FULL_OPTIONS),
        group(1, "train", 16, gpus=8, **FULL_OPTIONS),
        group(2, "prefill", 12, gpus=8, **FULL_OPTIONS),
        group(3, "decode", 24, gpus=8, **FULL_OPTIONS),
        env={f"VARIABLE_{i}": str(i) for i in range(70)},
        account="research",
        qos="high",
        reservation="maintenance",
        comment="nightly",
        exclude="node[001-003]",
        time_min="00:30:00",
        dependency="afterok:12:13,singleton",
        mail_user="someone@example.com",
        mail_types=("FAIL", "END"),
        licenses="matlab:2",
        nice=-5,
        priority=7,
        extra=("--wckey=a b", "--contiguous"),
        modules=("cuda/13.0", "ucx"),
        prologue=tuple(f"ulimit -n {65536 + i}" for i in range(12)),
    ).model_copy(update={"library_path": ("/opt/ucx 1.19/lib", "/opt/libfabric/lib")}),
    "pyxis": plan(
        "/runs/demo",
        group(0, "control"),
        group(1, "train", gpus=8),
        srun=("--container-image=nvcr.io#nvidia/pytorch:25.09-py3", "--container-mounts=/runs/demo:/runs/demo,/data"),
    ),
    "apptainer": plan(
        "/runs/demo",
        group(0, "all", 2, gpus=8),
        launcher=("apptainer", "exec", "--nv", "--bind", "/my data:/data:ro", "/images/prime rl.sif"),
    ),
    "quoting": plan(
        "/runs/it's 100% $x",
        group(0, "control"),
        group(1, "train", gpus=1, constraint="a|b"),
        env={"WEIRD": WEIRD, "EMPTY": ""},
        comment=WEIRD,
        modules=("a b;c",),
    ),
}


def golden(name: str, given: Plan) -> Path:
    """Return the golden script of a plan. Update it first if requested. The path of Python depends on the machine."""
    text = render(given.model_copy(update={"python": "/opt/primeslurm/bin/python"}))
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("PRIMESLURM_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    return path


@pytest.mark.parametrize("name", PLANS)
def test_golden(name: str) -> None:
    path = golden(name, PLANS[name])
    assert len(path.read_text().splitlines()) < 70
    subprocess.run(["bash", "-n", path], check=True)
    # SC2016 warns of $ in single quotes, which is what quoting is for here.
    checked = subprocess.run([SHELLCHECK, "--exclude=SC2016", path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_no_golden_file_without_a_plan() -> None:
    assert {path.stem for path in GOLDEN.glob("*.sbatch")} == set(PLANS)


def test_bash_sees_quoted_values_unchanged(tmp_path: Path) -> None:
    """Run the script with a fake srun that records its arguments and environment."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$WEIRD" "[$EMPTY]" "$SUBMITIT_EXECUTOR" "$@"\n')
    (tools / "srun").chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(render(PLANS["quoting"].model_copy(update={"job": PLANS["het"].job})))
    path = f"{tools}:{os.environ['PATH']}"
    seen = subprocess.run(["bash", script, "w"], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert seen.stderr == ""
    assert re.fullmatch(r"primeslurm: start [0-9a-f-]{36}", seen.stdout.splitlines()[0])
    assert seen.stdout.splitlines()[1:] == [
        WEIRD,
        "[]",
        "slurm",
        "--het-group=0,1",
        "--ntasks-per-node=1",
        "--export=ALL",
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        "--label",
        "--unbuffered",
        sys.executable,
        "-u",
        "-m",
        "primeslurm.node.start_agent",
        "/runs/it's 100% $x/submitit",
        "w",
    ]


def test_only_a_step_that_failed_has_an_aftermath(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/bash\nexit $CODE\n")
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    for program in (tmp_path / "srun", python):
        program.chmod(0o755)
    script = render(PLANS["quoting"].model_copy(update={"python": str(python), "job": PLANS["het"].job}))
    batch_epilogue = ["-m", "primeslurm.node.attempt.batch_epilogue", "/runs/it's 100% $x", "w", "9"]
    step = ["srun", "--het-group=0,1", *["--ntasks-per-node=1", "--export=ALL", "--cpu-bind=none"]]
    step += [
        "--kill-on-bad-exit=0",
        "--label",
        "--unbuffered",
        str(python),
        "-u",
        "-m",
        "primeslurm.node.start_agent",
        "/runs/it's 100% $x/submitit",
        "w",
    ]
    for code, expected in ((0, []), (9, [*batch_epilogue, *step])):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code)}
        seen = subprocess.run(
            ["bash", "-c", script, "bash", "w"], env=environment, capture_output=True, text=True, check=True
        )
        assert seen.stdout.splitlines()[1:] == expected
