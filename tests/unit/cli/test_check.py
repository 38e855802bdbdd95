"""Output of `check`, and its queries of Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from primeslurm.api.checks.recipe_check import by_severity
from primeslurm.plan.checks import files
from primeslurm.plan.model import Finding
from tests.support.cli import ROOT, Result, primeslurm
from tests.support.recipes import model_dir, recipe_data, site

SLURM = {
    "sinfo": 'for n in 1 2 3 4; do echo "c$n|cpu|idle|96|9999|(null)|"; echo "g$n|gpu|idle|96|9999|gpu:8|"; done',
    "scontrol": 'case "$*" in *partition) echo PartitionName=cpu; echo PartitionName=gpu;; esac',
    "sbatch": "exit 0",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a valid recipe, its model, a site file, and a Slurm with partitions cpu and gpu."""
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_data(model={"path": str(model_dir(tmp_path))})))
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site(runs="runs").model_dump(mode="json", by_alias=True)))
    commands(tmp_path, **SLURM)
    return tmp_path


def commands(place: Path, **scripts: str) -> None:
    for name, text in scripts.items():
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o755)


def run(place: Path, *words: str) -> Result:
    return primeslurm(*words, cwd=place, path=place)


ELSEWHERE = ("--set", "slurm.train.partition=h100")


@pytest.mark.parametrize("verb", [("check",), ("submit", "--dry-run"), ("submit",)], ids=" ".join)
def test_check_dry_run_and_submit_ask_slurm_the_same(place: Path, verb: tuple[str, ...]) -> None:
    result = run(place, verb[0], "r.yaml", *verb[1:], *ELSEWHERE)
    assert result.code == 2
    assert "error: slurm.train.partition = h100: no such partition (valid: cpu, gpu)\n" in result.err
    assert not (place / "runs").exists()


@pytest.mark.parametrize("verb", [("check",), ("submit", "--dry-run")], ids=" ".join)
def test_no_slurm_does_not_ask_slurm(place: Path, verb: tuple[str, ...]) -> None:
    commands(place, sinfo="touch asked", scontrol="touch asked")
    result = run(place, verb[0], "r.yaml", *verb[1:], *ELSEWHERE, "--no-slurm")
    assert result.code == 0, result.err
    assert "slurm" not in result.err.lower()
    assert not (place / "asked").exists()


def test_submit_refuses_no_slurm(place: Path) -> None:
    result = run(place, "submit", "r.yaml", "--no-slurm")
    assert (result.code, result.err[:19]) == (2, "error: --no-slurm: ")


def test_faulty_recipe_is_still_checked_with_slurm(place: Path) -> None:
    result = run(place, "check", "r.yaml", *ELSEWHERE, "--set", "seed=many")
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert [line.split()[1] for line in errors] == ["seed", "slurm.train.partition"]


def test_unreachable_slurm_is_one_note(place: Path) -> None:
    commands(place, sinfo="echo 'sinfo: error: no controller' >&2; echo more >&2; exit 1")
    short = run(place, "check", "r.yaml")
    assert short.code == 0
    (line,) = [line for line in short.err.splitlines() if "Slurm" in line]
    assert line.startswith("note: slurm: Slurm is not reachable from here (sinfo failed; details with --verbose), so ")
    assert "no controller" not in short.err
    assert "no controller" in run(place, "check", "r.yaml", "--verbose").err


def test_last_line_has_the_nodes_of_the_job(place: Path) -> None:
    spare = ("--set", "deployment.spares.train=1")
    assert run(place, "check", "r.yaml", *spare).err.splitlines()[-1] == (
        "test-run: recipe is valid. 5 nodes: 1 train, 1 inference, 1 control, 2 spares."
    )
    planned = run(place, "plan", "r.yaml", "--verbose", *spare).out
    assert "3 GPU nodes (24 GPUs), 2 CPU nodes, including 2 spares" in planned
    assert "totals: 5 nodes: 1 train, 1 inference, 1 control, 2 spares, " in planned
    local = run(place, "check", "r.yaml", "--local", "--set", "deployment.train.gpus_per_node=1")
    assert local.err.splitlines()[-1].startswith(("test-run: recipe is valid. This machine, as ", "r.yaml: 1 error"))


@pytest.mark.parametrize("path", ["org/none", ".primeslurm/reverse-text/model"])
def test_missing_model_is_a_blocker(place: Path, path: str) -> None:
    result = run(place, "check", "r.yaml", "--set", f"model.path={path}")
    assert result.code == 0
    assert f"blocked: model.path = {path}: " in result.err
    assert "not submittable from this machine (1 blocker: model.path " in result.err
    refused = run(place, "submit", "r.yaml", "--set", f"model.path={path}")
    assert refused.code == 2 and f"error: model.path = {path}: " in refused.err


@pytest.mark.parametrize(
    ("path", "command"),
    [
        (".primeslurm/reverse-text/model", "`./just warm-start` makes it"),
        ("/home/me/primeslurm/.primeslurm/tool-use/random", "`./just warm-start tool-use` makes it"),
        (".primeslurm/hangman/model/", "`./just warm-start hangman` makes it"),
        (".primeslurm/smollm2/model", "`primeslurm install --model smollm2` makes it"),
        (".primeslurm/another/model", ""),
        ("/models/reverse-text/model", ""),
    ],
)
def test_missing_demo_model_names_its_command(monkeypatch: pytest.MonkeyPatch, path: str, command: str) -> None:
    assert files.made_by(path) == command
    monkeypatch.setattr(files, "in_checkout", lambda: False)
    installed = files.made_by(path)
    assert installed == (f"a checkout of {files.REPOSITORY} makes it" if "./just" in command else command)


def test_findings_are_sorted_by_severity_without_duplicates() -> None:
    levels = ("note", "warning", "blocked", "error", "warning")
    findings = [Finding(level=level, field=str(i), text="x") for i, level in enumerate(levels)]  # type: ignore[arg-type]
    shown = by_severity([*findings, findings[0]])
    assert [(each.level, each.field) for each in shown] == [
        ("error", "3"),
        ("blocked", "2"),
        ("warning", "1"),
        ("warning", "4"),
        ("note", "0"),
    ]


def on_a_terminal(place: Path, **variables: str) -> str:
    """Return the output of `check` on a terminal."""
    master, slave = os.openpty()
    env = {**os.environ, "PYTHONPATH": ROOT, "TERM": "xterm-256color", "HOME": str(place), **variables}
    argv = [sys.executable, "-m", "primeslurm", "check", "r.yaml", "--no-slurm", "--set", "foo.bar=1"]
    done = subprocess.run(argv, cwd=place, env=env, stderr=slave, stdout=subprocess.PIPE, timeout=120, check=False)
    os.close(slave)
    written = os.read(master, 1 << 16).decode()
    os.close(master)
    assert done.returncode == 2
    return written


def test_colours_need_a_terminal_and_no_NO_COLOR(place: Path) -> None:
    coloured, plain = on_a_terminal(place), on_a_terminal(place, NO_COLOR="1")
    assert "\x1b[1;31merror\x1b[0m: \x1b[1mfoo.bar\x1b[0m: there is no section foo" in coloured
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    assert run(place, "check", "r.yaml", "--no-slurm", "--set", "foo.bar=1").err.splitlines() == plain.splitlines()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("trainer.foo={a: 1, b: 2}", "trainer.foo.a, trainer.foo.b: there is no section foo in trainer ("),
        ("chekpoint.interval=5", "chekpoint.interval: there is no section chekpoint (did you mean checkpoint?)"),
        ("optim={lr: 1, foo: 2}", "optim.lr = 1: no such key (use trainer.optimizer.lr: learning rate)"),
        ("trainer.ep=8", "trainer.ep = 8: no such key (did you mean trainer.parallelism.ep?)"),
        ("python=/usr/bin/python3", "python: belongs in the site file (move it to the site file)"),
    ],
)
def test_unknown_key_is_named_as_typed(place: Path, given: str, expected: str) -> None:
    result = run(place, "check", "r.yaml", "--no-slurm", "--set", given)
    assert f"error: {expected}" in result.err
    assert "{" not in result.err.partition("error: ")[2].partition(" (")[0]


def test_recipe_key_in_a_site_file_is_reported(place: Path) -> None:
    data = yaml.safe_load((place / "site.yaml").read_text())
    data |= {"trainer": {"fp8": True}}
    data["nodes"]["default"]["cpus-per-task"] = 3
    (place / "site.yaml").write_text(yaml.safe_dump(data))
    result = run(place, "check", "r.yaml")
    assert "error: trainer: belongs in the recipe (move it to the recipe)\n" in result.err
    key = "nodes.default.cpus-per-task = 3: no such key (in the recipe, use slurm.train.cpus_per_task: cores on "
    assert f"error: {key}" in result.err
