"""`primeslurm images`: each image is built once, and interrupted builds do not count."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.base.errors import ExitCode
from primeslurm.wire.stored import task_images
from tests.support import fake_builder
from tests.support.cli import Result, primeslurm
from tests.support.recipes import recipe_data


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    return fake_builder.install(tmp_path / "bin", "buildah", "docker", "apptainer")


def task(directory: Path, name: str, *lines: str, toml: str = "") -> Path:
    """Write a task with a Dockerfile."""
    (directory / name / "environment").mkdir(parents=True)
    (directory / name / "tests").mkdir()
    for file in ("instruction.md", "tests/test.sh"):
        (directory / name / file).touch()
    (directory / name / "task.toml").write_text(toml)
    (directory / name / "environment" / "Dockerfile").write_text("\n".join(("FROM debian", *lines, "")))
    return directory / name


def images(tools: Path, *words: str | Path) -> Result:
    return primeslurm("images", *words, cwd=tools.parent, PATH=str(tools), TMPDIR=str(tools.parent))


def built(tools: Path) -> int:
    """Return the number of builds."""
    requests = tools / "asked"
    return requests.read_text().count(" build --tag") if requests.exists() else 0


def listed(result: Result) -> list[tuple[str, ...]]:
    return [tuple(line.split()[1:]) for line in result.out.splitlines()]


def test_image_is_built_again_only_if_its_dockerfile_changes(tools: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    one, other = task(tasks, "one", "WORKDIR /testbed"), task(tasks, "deep/other", "WORKDIR /testbed")
    first = images(tools, "tasks")
    assert (first.code, listed(first)) == (0, [("other", "one")]), first.err
    assert built(tools) == 1
    (sif,) = tasks.glob(".images/*.sif")
    assert sif.read_text() == (one / "environment/Dockerfile").read_text()
    assert sif.with_suffix(".apptainer").read_text() == "/testbed\n"
    assert images(tools, "tasks").out == first.out and built(tools) == 1
    os.utime(one / "environment/Dockerfile", (0, 0))
    (other / "environment/data").write_text("more")
    assert listed(images(tools, "tasks")) == [("other",), ("one",)] and built(tools) == 2
    assert not list((tools / "store").glob("localhost*")), "builders keep what no one runs"


def test_failed_builds_are_named_and_others_are_built(tools: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    for name in ("one", "two"):
        task(tasks, name, "RUN false", f"LABEL name={name}")
    task(tasks, "three")
    done = images(tools, "tasks")
    assert done.code == ExitCode.FAILED
    assert "2 of 3 images were not built" in done.err
    for name in ("one", "two"):
        log_lines = (
            "buildah build ended with exit code 1",
            "STEP 2: RUN false",
            "Error: building at STEP 2: exit status 1",
        )
        assert f"{name}: " + "\n    ".join(log_lines) in done.err
    assert {path.suffix for path in tasks.glob(".images/*")} == {".sif", ".apptainer"}, "the error says it all"
    again = json.loads(images(tools, "tasks", "--json").out)
    assert again["exit_code"] == ExitCode.FAILED and "2 of 2 images" in again["error"]


def test_error_has_the_end_of_a_long_log_and_its_path(tools: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    one = task(tasks, "one", "RUN false", "LABEL lines=30")
    done = images(tools, "tasks")
    (log,) = tasks.glob(".images/*.log")
    assert "\n    line 29\n" in done.err and "\n    line 5\n" not in done.err and f"(the end of {log})" in done.err
    assert "line 5\n" in log.read_text()
    images(tools, "tasks")
    assert list(tasks.glob(".images/*.log")) == [log]
    (one / "environment/Dockerfile").write_text("FROM debian\n")
    log.rename(log.with_stem(task_images.environment_digest(one / "environment")))
    assert images(tools, "tasks").code == 0 and not list(tasks.glob(".images/*.log"))


def test_interrupted_build_does_not_count(tools: Path, tmp_path: Path) -> None:
    task(tmp_path / "tasks", "one", "LABEL killed")
    place = tmp_path / "tasks" / ".images"
    assert images(tools, "tasks").code == -9
    assert {path.suffix for path in place.iterdir()} == {".part"}
    again = images(tools, "tasks")
    assert (again.code, listed(again)) == (0, [("one",)]), again.err
    assert {path.suffix for path in place.iterdir()} == {".sif", ".apptainer"}


def test_images_are_built_in_parallel(tools: Path, tmp_path: Path) -> None:
    task(tmp_path / "tasks", "one", "LABEL name=one", "LABEL beside=two")
    task(tmp_path / "tasks", "two", "LABEL name=two", "LABEL beside=one")
    done = images(tools, "tasks", "--jobs", "2")
    assert done.code == 0, done.err


def test_dry_run_shows_commands_and_writes_nothing(tools: Path, tmp_path: Path) -> None:
    task(tmp_path / "tasks", "one")
    done = images(tools, "tasks", "--dry-run")
    assert done.code == 0 and listed(done) == [("one",)]
    assert "buildah build --tag localhost/primeslurm-tasks:" in done.err and "apptainer build" in done.err
    assert "1 to build" in done.err
    assert built(tools) == 0 and not (tmp_path / "tasks/.images").exists()
    (row,) = json.loads(images(tools, "tasks", "--dry-run", "--json").out)
    assert (row["tasks"], row["built"], row["runtime"]) == (["one"], False, "apptainer")


def test_dry_run_works_without_build_programs(tools: Path, tmp_path: Path) -> None:
    task(tmp_path / "tasks", "one")
    for name in ("buildah", "docker", "apptainer"):
        (tools / name).unlink()
    done = images(tools, "tasks", "--dry-run")
    assert done.code == 0 and "podman build --tag localhost/primeslurm-tasks:" in done.err
    assert "this machine cannot run these commands: no program can build a Dockerfile: none of podman" in done.err
    assert "this machine cannot run these commands: apptainer, which writes the images" in done.err


def test_registry_image_becomes_a_sif_only_for_apptainer(tools: Path, tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    for name, image in (("one", "python:3.12"), ("two", "python:3.12"), ("file", "/shared/own.sif")):
        task(tasks, name, toml=f"[environment]\ndocker_image = '{image}'")
    for name in ("buildah", "docker"):
        (tools / name).unlink()
    done = images(tools, "tasks")
    assert (done.code, listed(done)) == (0, [("one", "two")]), done.err
    (sif,) = tasks.glob(".images/*.sif")
    assert sif.read_text() == "FROM //python:3.12\n"
    assert task_images.built_image(tasks / ".images", sif.stem, "apptainer") == task_images.TaskImage(str(sif), None)
    assert "0 built, 1 there already" in images(tools, "tasks").err
    podman = images(fake_builder.install(tools, "podman"), "tasks", "--runtime", "podman")
    assert (podman.code, listed(podman)) == (0, []), podman.err


def test_docker_images_have_no_file(tools: Path, tmp_path: Path) -> None:
    task(tmp_path / "tasks", "one", "WORKDIR /")
    done = images(tools, "tasks", "--runtime", "docker", "--images", "elsewhere")
    assert done.code == 0 and done.out.startswith("localhost/primeslurm-tasks:")
    assert [path.suffix for path in (tmp_path / "elsewhere").iterdir()] == [".docker"]
    assert "apptainer" not in (tools / "asked").read_text()
    again = ("tasks", "--runtime", "docker", "--images", "elsewhere")
    images(tools, *again)
    assert built(tools) == 1
    for path in (tools / "store").glob("localhost*"):
        path.unlink()  # as `docker image prune` does
    images(tools, *again)
    assert built(tools) == 2


def test_recipe_names_tasks_and_runtime(tools: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        task(tmp_path / "tasks", name, f"LABEL name={name}")
    environments: list[dict[str, Any]] = [
        {"id": "harbor-local", "args": {"path": str(tmp_path / "tasks"), "tasks": ["two"]}, "harness": {"id": "bash"}},
        {"id": "reverse-text"},
    ]
    environments[0]["runtime"] = {"type": "docker"}
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_data(environments=environments)))
    done = images(tools, "r.yaml")
    assert (done.code, listed(done)) == (0, [("two",)]), done.err
    assert done.out.startswith("localhost/")
    contrary = images(tools, "r.yaml", "--runtime", "podman")
    assert contrary.code == ExitCode.BAD_INPUT and "a recipe sets this in" in contrary.err
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_data(environments=environments[1:])))
    none = images(tools, "r.yaml")
    assert none.code == ExitCode.BAD_INPUT and "has no environment harbor-local" in none.err


@pytest.mark.parametrize(
    ("words", "lacking", "expected"),
    [
        (("nowhere",), (), "TASKS = nowhere: is neither a directory of tasks nor a recipe"),
        (("empty",), (), "TASKS = empty: has no task (a directory with task.toml)"),
        (
            ("tasks", "--runtime", "modal"),
            (),
            "--runtime = modal: is not a container runtime that images can be built for (one of apptainer",
        ),
        (("tasks",), ("buildah", "docker"), "none of podman, buildah, docker is installed here"),
        (
            ("tasks",),
            ("apptainer",),
            "--runtime = apptainer: apptainer, which writes the images, is not installed here",
        ),
        (("tasks", "--runtime", "podman"), (), "none of podman is installed here"),
        (("broken",), (), "broken/one/task.toml: cannot be read: "),
    ],
)
def test_impossible_builds_are_refused_before_any_build(
    words: tuple[str, ...], lacking: tuple[str, ...], expected: str, tools: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    task(tmp_path / "tasks", "one")
    task(tmp_path / "broken", "one", toml="[environment")
    for name in lacking:
        (tools / name).unlink()
    done = images(tools, *words)
    assert done.code == ExitCode.BAD_INPUT and expected in done.err, done.err
    assert built(tools) == 0 and not list(tmp_path.rglob(".images"))
