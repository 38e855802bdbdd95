"""Whole commands without a cluster: exit code, stdout, stderr, and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.api.sites import find_site
from primeslurm.base.errors import UsageError
from primeslurm.base.model_files import model_directory
from primeslurm.plan.checks.files import model_files
from primeslurm.plan.planner import derive
from primeslurm.recipe.reading.recipe_files import load_recipe
from primeslurm.run.directory import create
from tests.support.cli import primeslurm, run_python
from tests.support.recipes import model_dir, recipe_data, site, write_recipe

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a model, a site file and a recipe that fit together."""
    model = model_dir(tmp_path)
    data = site(runs="runs").model_dump(mode="json", by_alias=True)
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(data))
    write(tmp_path, model={"path": str(model)})
    return tmp_path


def write(directory: Path, **changes: Any) -> Path:
    path = directory / "r.yaml"
    path.write_text(yaml.safe_dump(recipe_data(**{"model": {"path": str(directory / "model")}, **changes})))
    return path


def files(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.mark.parametrize("words", [(), ("cluster",)])
def test_help_is_shown_without_a_verb(words: tuple[str, ...], tmp_path: Path) -> None:
    shown = primeslurm(*words, cwd=tmp_path)
    assert (shown.code, shown.err) == (0, "") and "Usage: primeslurm" in shown.out
    assert shown.out == primeslurm(*words, "--help", cwd=tmp_path).out


def test_dry_run_shows_placement_and_script_and_writes_nothing(place: Path) -> None:
    before = files(place)
    result = primeslurm("submit", "r.yaml", "--local", "--dry-run", cwd=place)
    assert result.code == 0, result.err
    assert result.err.endswith("dry run: nothing was written or submitted\n")
    for text in ("engine-r0-0..7", "router-0", "trainer-rank-1..7", "orchestrator", "as 3 nodes"):
        assert text in result.out
    assert files(place) == before


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path is short enough for Unix sockets of a cluster."""
    with tempfile.TemporaryDirectory(prefix="e") as directory:
        yield Path(directory)


def test_emulated_dry_run_needs_neither_site_nor_model(short: Path) -> None:
    slurm = {"account": "lab", "train": {"partition": "h200", "mem": "2000G"}, "time": "02:00:00"}
    write(short, slurm=slurm, model={"path": "zai-org/GLM-5.1"})
    result = primeslurm("submit", "r.yaml", "--name", "e", "--emulate", "--dry-run", "--json", cwd=short)
    assert result.code == 0, result.err
    assert "Stand-ins load no model, data or environments" in result.err
    answer = json.loads(result.out)
    assert answer["plan"]["totals"]["nodes"] == 3 and answer["plan"]["run_dir"] == str(short / "runs" / "e")
    assert "--time=02:00:00" in answer["script"]
    assert not any(word in answer["script"] for word in ("--account", "h200", "2000G")), "these are of another cluster"
    modules = {p["role"]: p["argv"][2] for node in answer["plan"]["nodes"] for p in node["processes"]}
    assert (
        modules["engine"] == "primeslurm.testbed.emulated.engine" and modules["router"] == "primeslurm.inference.router"
    )
    assert [path.name for path in short.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {},
            ["--local"],
            "error: --local: an emulated run is a Slurm job on an embedded cluster (leave it out)\n",
        ),
        (
            {"deployment": {"train": {"gpus_per_node": 9}}},
            [],
            "error: deployment.train.gpus_per_node = 9: nodes of partition gpu have 8 GPUs (nearest: 8)\n",
        ),
    ],
)
def test_unsupported_emulation_is_refused(
    short: Path, changes: dict[str, Any], options: list[str], message: str
) -> None:
    write(short, **changes)
    result = primeslurm("submit", "r.yaml", "--name", "e", "--emulate", *options, cwd=short)
    assert (result.code, result.out, result.err) == (2, "", message)
    assert [path.name for path in short.iterdir()] == ["r.yaml"]


def test_render_prints_only_the_script(place: Path) -> None:
    result = primeslurm("render", "r.yaml", cwd=place)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("#!/bin/bash\n")
    assert subprocess.run(["bash", "-n"], input=result.out, text=True, check=False).returncode == 0


def test_check_accepts_a_good_recipe_and_gives_advice(place: Path) -> None:
    write(place, checkpoint={"interval": 100})
    result = primeslurm("check", "r.yaml", cwd=place)
    assert (result.code, result.out) == (0, "")
    assert "warning: checkpoint.interval: only the last step (4) is saved" in result.err
    assert "test-run: recipe is valid. 3 nodes: 1 train, 1 inference, 1 control.\n" in result.err
    all_findings = json.loads(primeslurm("check", "r.yaml", "--json", cwd=place).out)
    assert "checkpoint.interval" in [finding["field"] for finding in all_findings]


def test_schema_is_a_json_schema_of_recipes_or_sites(place: Path) -> None:
    assert "max_off_policy_steps" in primeslurm("schema", cwd=place).out
    assert "port_base" in json.loads(primeslurm("schema", "--site", cwd=place).out)["properties"]


BAD = [
    (
        {"model": {"path": "./none"}},
        (),
        "error: model.path = ./none: is not a directory on this machine, and not in the Hugging Face cache "
        "(set a directory, or a hub id in the cache)\n",
    ),
    ({"seq_len": 8192}, (), "error: seq_len = 8192: the model's max_position_embeddings is 4096 (nearest: 4096)\n"),
    (
        {"deployment": {"train": {"gpus_per_node": 9}}},
        (),
        "error: deployment.train.gpus_per_node = 9: nodes of partition local have 8 GPUs (nearest: 8)\n",
    ),
    (
        {"deployment": {"train": {"nodes": 10**9}}},
        (),
        "error: deployment = 1000000002 nodes: more than 10000 nodes cannot be planned\n",
    ),
    (
        {"max_steps": 0, "model": {"path": "./none"}},
        ("--site", "nowhere.yaml"),
        "error: 2 problems\n  max_steps = 0: must be greater than 0 (nearest: 1)\n  --site = nowhere.yaml: ",
    ),
]


@pytest.mark.parametrize(("changes", "args", "message"), BAD, ids=[b[2][:50] for b in BAD])
def test_bad_input_exits_with_2_and_writes_nothing(
    place: Path, changes: dict[str, Any], args: tuple[str, ...], message: str
) -> None:
    write(place, **changes)
    before = files(place)
    result = primeslurm("submit", "r.yaml", "--local", *args, cwd=place)
    assert result.err.startswith(message), result.err
    assert (result.code, result.out) == (2, "")
    assert files(place) == before


def test_run_name_in_use_is_refused(place: Path) -> None:
    (place / "runs" / "test-run").mkdir(parents=True)
    (place / "runs" / "test-run" / "lock.json").write_text("{}")
    result = primeslurm("submit", "r.yaml", "--local", cwd=place)
    assert result.code == 2
    assert "name = test-run: is in use" in result.err
    assert "(choose another name with `--name`, or `primeslurm resume test-run` to continue the run)" in result.err


def test_partly_written_run_is_removed(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml"))
    plan = derive(recipe, site(), tmp_path / "runs" / "half")
    with pytest.raises(FileNotFoundError):
        create(recipe, plan, tmp_path / "gone.yaml")
    assert list((tmp_path / "runs").iterdir()) == []


def test_job_refused_by_sbatch_leaves_nothing(place: Path) -> None:
    commands = {
        "sinfo": 'for n in 1 2 3 4; do echo "c$n|cpu|idle|96|9999|(null)|"; echo "g$n|gpu|idle|96|9999|gpu:8|"; done',
        "scontrol": 'case "$*" in *partition) echo PartitionName=cpu; echo PartitionName=gpu;; esac',
        "sbatch": 'echo "sbatch: error: Invalid account" >&2; exit 1',
    }
    for name, text in commands.items():
        (place / name).write_text(f"#!/bin/sh\n{text}\n")
        (place / name).chmod(0o755)
    result = primeslurm("submit", "r.yaml", cwd=place, path=place)
    assert result.code == 3 and "sbatch: error: Invalid account" in result.err, result.err
    assert list((place / "runs").iterdir()) == []


def test_check_as_json_is_always_a_list_of_findings(place: Path) -> None:
    result = primeslurm("check", "r.yaml", "--json", "--set", "max_steps=0", cwd=place)
    assert (result.code, result.err) == (2, "")
    first, *others = json.loads(result.out)
    expected = {"field": "max_steps", "value": "0", "text": "must be greater than 0", "fix": "nearest: 1"}
    assert first == {"level": "error", **expected}
    assert "error" not in {finding["level"] for finding in others}


@pytest.mark.parametrize("path", ["~nosuchuser/x", "x" * 300])
def test_unreadable_path_counts_as_missing(tmp_path: Path, path: str) -> None:
    assert model_directory(path) is None
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", model={"path": path}))
    absent = model_files(recipe).absent
    assert absent is not None and (absent.level, absent.field, absent.value) == ("blocked", "model.path", path)


def test_runs_directory_must_be_resolvable(place: Path) -> None:
    data = site(runs="~nosuchuser/runs").model_dump(mode="json", by_alias=True)
    (place / "site.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(UsageError, match=r"^runs = ~nosuchuser/runs: .*absolute path"):
        find_site(place / "site.yaml")


def test_missing_site_file_names_the_alternatives(place: Path) -> None:
    (place / "site.yaml").unlink()
    result = primeslurm("plan", "r.yaml", cwd=place)
    assert (result.code, result.err) == (
        2,
        "error: --site: there is no site file: looked for site.yaml, ~/.primeslurm/site.yaml "
        "(`primeslurm init` writes one, `primeslurm cluster up` starts an emulated cluster with one; or use --local, "
        "or the example: --site h200)\n",
    )
    for example in ("h200", "sites/h200.yaml"):
        assert primeslurm("plan", "r.yaml", "--site", example, cwd=place).code == 0
    result = primeslurm("plan", "r.yaml", "--site", "site.yaml", cwd=place)
    assert result.err == (
        "error: --site = site.yaml: there is no such file "
        "(`primeslurm init` writes site.yaml; --site h200 is an example)\n"
    )


@pytest.mark.parametrize(
    "words", [["plan", "--json"], ["check", "r.yaml", "--jsno", "--json"], ["plna", "r.yaml", "--json"]]
)
def test_usage_error_is_json_with_json(place: Path, words: list[str]) -> None:
    result = primeslurm(*words, cwd=place)
    assert result.code == 2
    error = json.loads(result.out)
    assert error["exit_code"] == 2 and error["violations"][0]["field"] == "command"
    assert error["error"].removeprefix("command: ")[:12] in result.err


def test_file_system_error_is_json_with_json(place: Path) -> None:
    (place / "runs").write_text("no directory")
    result = primeslurm("submit", "r.yaml", "--local", "--json", cwd=place)
    assert result.code == 1
    assert json.loads(result.out)["exit_code"] == 1 and "runs" in json.loads(result.out)["error"]
    assert result.err.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "closing"),
    [
        ("plan r.yaml", "2>&-"),
        ("check nope.yaml --json", "> /dev/full"),
        pytest.param("plan r.yaml", ">&-", marks=pytest.mark.campaign),
        pytest.param("check nope.yaml", "2> /dev/full", marks=pytest.mark.campaign),
    ],
)
def test_closed_output_gives_no_traceback(place: Path, words: str, closing: str) -> None:
    command = f"{sys.executable} -m primeslurm {words} {closing}"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(place)}
    done = subprocess.run(["bash", "-c", command], cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode in (0, 1, 2)
    assert "Traceback" not in done.stderr
    if closing == "2>&-" and words.startswith("plan"):
        assert done.stdout.startswith("test-run: ") and "warning" not in done.stdout


def test_stdout_without_unicode_gets_question_marks(tmp_path: Path) -> None:
    code = "import primeslurm.cli as cli; cli.prepare_streams(); print('reward ▁█')"
    done = run_python("-c", code, cwd=tmp_path, PYTHONIOENCODING="ascii")
    assert (done.code, done.out, done.err) == (0, "reward ??\n", "")


def test_runs_names_the_directory_without_runs(place: Path) -> None:
    result = primeslurm("runs", "--runs", "rnus", cwd=place)
    assert (result.code, result.out, result.err) == (0, "", "no runs in rnus\n")


@pytest.mark.parametrize("words", [("--node", "gpu-1"), ("--all",)])
def test_doctor_refuses_a_run_together_with_nodes(place: Path, words: tuple[str, ...]) -> None:
    result = primeslurm("doctor", "some-run", *words, cwd=place)
    assert result.code == 2 and result.err.startswith(f"error: {words[0]}") and "keep one" in result.err


@pytest.mark.parametrize("value", ["nan", "-1"])
def test_doctor_refuses_invalid_max_kl(place: Path, value: str) -> None:
    result = primeslurm("doctor", "some-run", f"--max-kl={value}", cwd=place)
    assert result.code == 2 and result.err.startswith("error: --max-kl") and "default: 0.1" in result.err
