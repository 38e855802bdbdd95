"""`check` and `submit` of recipes whose environments do not load."""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from primeslurm.api.checks.environments import environment_problems
from primeslurm.base.errors import Violation
from primeslurm.plan.checks.environments import Interpreter, ProbeReport, probe_environments
from primeslurm.plan.model import Finding
from primeslurm.recipe import Recipe, Site
from primeslurm.recipe.sections.orchestrator import Environment
from primeslurm.recipe.sections.trainer import Model
from primeslurm.wire.probe_messages import UNKNOWN
from scripts.models import tiny_model
from tests.support.cli import ROOT, Result, primeslurm
from tests.support.recipes import recipe_data

PACKAGES = Path(ROOT) / "tests" / "support" / "environments"
SITE: dict[str, Any] = {
    "schema": 1,
    "name": "here",
    "device": "cpu",
    "nodes": {"default": {"partition": "p", "gpus": 8, "cpus": 8}},
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with all programs of this machine except podman."""
    directory = tmp_path_factory.mktemp("bin")
    for place in map(Path, os.environ["PATH"].split(":")):
        for path in place.iterdir() if place.is_dir() else ():
            if path.name != "podman" and not (directory / path.name).is_symlink():
                (directory / path.name).symlink_to(path)
    return directory


@pytest.fixture
def place(tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a site file and a model. The packages of `support/environments` are importable."""
    monkeypatch.setattr("tests.support.cli.ROOT", f"{ROOT}:{PACKAGES}")
    monkeypatch.setenv("PATH", str(programs))
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(SITE))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    (tmp_path / "model" / "a.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return tmp_path


def run(place: Path, verb: str, environments: list[dict[str, Any]], *args: str) -> Result:
    recipe = recipe_data(model={"path": str(place / "model")}, environments=environments)
    (place / "r.yaml").write_text(yaml.safe_dump(recipe))
    return primeslurm(verb, "r.yaml", *args, cwd=place)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"id": "reverse-txt"}, "id = reverse-txt: no such environment (did you mean reverse-text?)"),
    (
        {"id": "fine-words", "name": "a", "args": {"dificulty": "hard"}},
        "args.dificulty = hard: the environment takes no such argument (nearest: difficulty)",
    ),
    (
        {"id": "fine-words", "name": "b", "args": {"difficulty": "hrd", "n": "many"}},
        "args.difficulty = hrd: input should be 'easy' or 'hard'",
    ),
    (
        {"id": "fine-words", "name": "f", "harness": {"id": "bash", "edt": True}},
        "harness.edt = True: the environment takes no such argument",
    ),
    ({"id": "fine-words", "name": "g", "harness": {"id": "my-own"}}, "harness.id = my-own: no such harness (with "),
    ({"id": "fine-words", "name": "c", "args": {"n": 0}}, "args: fine-words has no tasks with these arguments"),
    (
        {"id": "needs-container"},
        "runtime = subprocess: BoxTask must run in a container (`runtime: {type: apptainer}`)",
    ),
    (
        {"id": "fine-words", "name": "e", "harness": {"id": "bash"}, "runtime": {"type": "podman"}},
        "runtime = podman: `podman` is not installed here (install it, or use another runtime)",
    ),
    (
        {"id": "broken-import"},
        "id = broken-import: needs the module a_package_that_nobody_has, which is not installed (install it beside",
    ),
    (
        {"id": "broken-tasks"},
        "id = broken-tasks: its first task cannot be read: KeyError: 'prompt' (broken_tasks.py, line 20, in load)",
    ),
    ({"id": "ends-python"}, "id = ends-python: loading it ended the interpreter (exit code 3): no licence found"),
    ({"id": "never-loads", "load_timeout_s": 1}, "id = never-loads: has not loaded after 1 s; it is at "),
]


def test_everything_that_does_not_load_is_reported(place: Path) -> None:
    (place / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 8192}))
    tiny_model.tokenizer().save_pretrained(place / "model")
    wrong = [environment for environment, _ in WRONG]
    options = ("--local", "--set", "model.renderer_options={thinks: true}")
    result = run(place, "check", [{"id": "reverse-text"}, *wrong, {"id": "fine-words"}], *options)
    assert (result.code, result.out) == (2, "")
    assert result.err.endswith("r.yaml: 15 errors, 2 warnings.\n"), result.err
    assert "model.renderer_options of qwen3: thinks: Extra inputs are not permitted" in result.err
    for i, (_, text) in enumerate(WRONG):
        assert f"error: environments.{i + 1}.{text}" in result.err, result.err
    assert "environments.7.harness = needs-container: it cannot use the tools that the environment" in result.err
    assert "environments.3.args.n = many: input should be a valid integer" in result.err
    assert "never_loads.py, line 7, in wait (load less, or raise load_timeout_s)" in result.err
    assert "Traceback" not in result.err
    assert {path.name for path in place.iterdir()} == {"r.yaml", "site.yaml", "model"}


def test_data_is_read_with_this_python_if_that_of_jobs_cannot_be_used(place: Path) -> None:
    (place / "site.yaml").write_text(yaml.safe_dump({**SITE, "python": "/elsewhere/bin/python"}))
    rows = place / "rows.jsonl"
    rows.write_text('{"question": "2 + 3?", "anser": "5"}\n')
    in_podman = {"id": "fine-words", "harness": {"id": "bash"}, "runtime": {"type": "podman"}}
    result = run(place, "check", [{"id": "math-problems", "args": {"path": str(rows)}}, {"id": "not-here"}, in_podman])
    assert result.code == 0, result.err
    why = "/elsewhere/bin/python is not on this host"
    assert f"note: environments: checked with {sys.executable}, because {why}; the nodes load them and" in result.err
    later = "; the nodes are checked when the job starts"
    warnings = [line for line in result.err.splitlines() if line.startswith("warning: environments.")]
    assert len(warnings) == 3 and all(later in line for line in warnings), result.err
    assert "warning: environments.2.runtime = podman: `podman` is not installed here; the nodes are" in result.err
    assert "note: environments.2.runtime = podman: each rollout installs harness bash in its container" in result.err
    assert "rows.jsonl, line 1: there is no answer, only question, anser" in result.err


def problems_reported(
    monkeypatch: pytest.MonkeyPatch, site: dict[str, Any], reports: dict[str, ProbeReport]
) -> tuple[list[Violation], list[Finding]]:
    """Return the problems of an environment, given the report of each Python that probes it."""
    monkeypatch.setattr(
        "primeslurm.api.checks.environments.probe_environments",
        lambda environments, model, interpreter, **_: reports[interpreter.python],
    )
    recipe = Recipe.model_validate(recipe_data(environments=[{"id": "own-words"}]))
    return environment_problems(recipe, Site.model_validate({**SITE, "runs": "/runs", **site}), local=False)


JOBS = "/usr/bin/python3"
ELSEWHERE: list[tuple[dict[str, Any], str]] = [
    ({"python": "/elsewhere/bin/python"}, "/elsewhere/bin/python is not on this host"),
    ({"slurm": {"container": {"type": "pyxis", "image": "i"}}}, "jobs run in a container image"),
    ({"python": JOBS, "prologue": ["source x"]}, f"{JOBS} has no verifiers without the site's modules and prologue"),
]


@pytest.mark.parametrize(("site", "why"), ELSEWHERE)
def test_problems_that_this_python_finds_for_that_of_jobs_are_warnings(
    monkeypatch: pytest.MonkeyPatch, site: dict[str, Any], why: str
) -> None:
    unreadable = Violation("environments.0.id", "own-words", "its first task cannot be read")
    reports = {JOBS: ProbeReport(missing_package="verifiers"), sys.executable: ProbeReport((unreadable,))}
    problems, (warning, note) = problems_reported(monkeypatch, site, reports)
    assert not problems and (warning.level, note.level) == ("warning", "note")
    assert str(warning.text).startswith("its first task cannot be read; the nodes are checked when the job starts")
    assert str(note.text).startswith(f"checked with {sys.executable}, because {why}; the nodes load them and")


def test_environments_that_no_python_here_can_load_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", JOBS)  # has no verifiers
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    site = Site.model_validate({**SITE, "runs": "/runs", "python": "/elsewhere/bin/python"})
    problems, (note,) = environment_problems(
        Recipe.model_validate(recipe_data(environments=[{"id": "fine-words"}])), site, local=False
    )
    assert not problems and note.level == "note"
    assert str(note.text).startswith(
        "not checked here: /elsewhere/bin/python is not on this host, and /usr/bin/python3 "
    )
    assert "`primeslurm install --cpu --to DIR`" in note.fix


def test_python_without_verifiers_is_refused(place: Path) -> None:
    (place / "site.yaml").write_text(yaml.safe_dump({**SITE, "python": "/usr/bin/python3"}))
    result = run(place, "check", [{"id": "fine-words"}])
    assert (result.code, result.out) == (2, "")
    assert "python = /usr/bin/python3: this Python, which jobs use, has no verifiers" in result.err


@pytest.mark.parametrize(("verb", "args"), [("plan", ["--json"]), ("render", []), ("submit", ["--dry-run", "--json"])])
def test_plan_render_and_dry_run_load_no_environment(place: Path, verb: str, args: list[str]) -> None:
    result = run(place, verb, [{"id": "never-loads"}], *args)
    assert result.code == 0, result.err


def test_broken_python_is_reported() -> None:
    tried = probe_environments(
        {"environments.0": Environment(id="fine-words")}, Model(path="m"), Interpreter("/bin/false", {})
    )
    why = "cannot be loaded: /bin/false ends with exit code 1: no output"
    assert [str(violation) for violation in tried.violations] == [f"environments: {why}"]
    tried = probe_environments(
        {"environments.0": Environment(id="fine-words")}, Model(path="m"), Interpreter("/bin/true", {})
    )
    why = "cannot be loaded: /bin/true does not answer"
    assert [str(violation) for violation in tried.violations] == [f"environments: {why}"]


def test_files_of_environments_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments are killed before they could remove their files."""
    agents, other = tmp_path / "agents", tmp_path / "other"
    agents.mkdir()
    other.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(other))
    monkeypatch.setenv("TMPDIR", str(other))
    python = tmp_path / "python"  # loads no environment, which would take seconds
    python.write_text('#!/bin/sh\ntouch "$TMPDIR/left" && ls "$TMPDIR" >&2; exit 3\n')
    python.chmod(0o755)
    made: list[Path] = []
    mkdtemp = tempfile.mkdtemp
    monkeypatch.setattr("tempfile.mkdtemp", lambda *args: made.append(Path(mkdtemp(*args))) or str(made[-1]))
    for tmp in (None, agents):
        interpreter = Interpreter(str(python), {})
        tried = probe_environments({"environments.0": Environment(id="fine-words")}, Model(path="m"), interpreter, tmp)
        assert "exit code 3: left" in str(tried.violations[0])
    assert [path.parent for path in made] == [other, agents]
    assert not any(agents.iterdir()) and not any(other.iterdir())


def test_model_without_tool_rendering_is_refused(place: Path) -> None:
    """The chat template differs from that of the model family, and only the jobs' Python can render it."""
    tokenizer = tiny_model.tokenizer()
    tokenizer.chat_template = tiny_model.CHAT_TEMPLATE.replace("# Tools", "# What you may call")
    tokenizer.save_pretrained(place / "model")
    config = {"model_type": "qwen3", "max_position_embeddings": 8192}
    (place / "model" / "config.json").write_text(json.dumps(config))
    tools: list[dict[str, Any]] = [{"id": "tool-use"}, {"id": "fine-words", "harness": {"id": "bash"}}]
    silent: list[dict[str, Any]] = [
        {"id": "reverse-text"},
        {"id": "fine-words", "name": "none", "harness": {"id": "null"}},
    ]
    result = run(place, "check", [*silent, *tools], "--local")
    assert (result.code, result.out) == (2, "")
    assert result.err.endswith("r.yaml: 2 errors, 2 warnings.\n"), result.err
    why = f"it offers the model tools, but tools cannot be rendered for {place}/model: qwen3: it renders "
    assert f"error: environments.2.harness = tool-use: {why}" in result.err
    assert f"error: environments.3.harness = bash: {why}" in result.err
    assert "name one that fits in model.renderer (a harness without tools, such as `harness: {id: chat}`" in result.err


def test_submit_refuses_missing_renderers_and_environments(place: Path) -> None:
    (place / "model" / "config.json").write_text(json.dumps({"model_type": "afmoe", "max_position_embeddings": 8192}))
    tiny_model.tokenizer().save_pretrained(place / "model")
    result = run(place, "submit", [{"id": "tool-use"}, {"id": "gsm8k-tools"}], "--local")
    assert (result.code, result.out) == (2, ""), result.err
    assert result.err.count("there is no renderer for model type afmoe") == 1, result.err
    why = "no such environment: the module gsm8k_tools cannot be imported (install it (`pip install -e DIRECTORY`)"
    assert f"environments.1.id = gsm8k-tools: {why}" in result.err
    assert {path.name for path in place.iterdir()} == {"r.yaml", "site.yaml", "model"}


@pytest.mark.parametrize(
    ("python_path", "expected"),
    [
        ("/absolute", "; or `export PYTHONPATH=$PWD/mine`, with `pass_env: [PYTHONPATH]` in the recipe"),
        ("/absolute:mine", "; relative entries of PYTHONPATH (mine) are not used"),
    ],
    ids=["absolute", "relative"],
)
def test_module_that_is_not_importable_gets_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_path: str, expected: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_words.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path)
    reports = {sys.executable: ProbeReport((Violation("environments.0.id", "own-words", UNKNOWN),))}
    (problem,), _ = problems_reported(monkeypatch, {"python": sys.executable}, reports)
    assert problem.why == "no such environment: the module own_words cannot be imported"
    assert problem.fix.startswith("install it (`pip install -e DIRECTORY`)") and expected in problem.fix


def test_data_of_environments_and_evaluations_is_read(place: Path) -> None:
    lines = [json.dumps({"question": f"What is {i} + 1?", "answer": str(i + 1)}) for i in range(20)]
    (place / "good.jsonl").write_text("\n".join(lines))
    (place / "bad.jsonl").write_text("\n".join([*lines[:6], "no JSON", *lines[7:]]))
    good, bad = ({"id": "math-problems", "args": {"path": str(place / f"{name}.jsonl")}} for name in ("good", "bad"))
    no_tasks = {"id": "harbor-local", "args": {"path": str(place)}, "harness": {"id": "bash"}}
    evaluated = [
        good | {"name": f"e{i}"} | number for i, number in enumerate(({"examples": 256}, {"examples": 20}, {}))
    ]
    evaluation = f"evaluation.environments={json.dumps(evaluated)}"
    result = run(place, "check", [good | {"name": "good"}, bad | {"name": "bad"}, no_tasks], "--set", evaluation)
    assert result.code == 2
    assert f"error: environments.1.args.path = {place / 'bad.jsonl'}: task 7 cannot be read" in result.err
    assert f"{place / 'bad.jsonl'}, line 7" in result.err and ": environments.0" not in result.err
    # It needs no line of a bundled environment's code.
    assert f"its first task cannot be read: there is no task (a directory with task.toml) in {place}\n" in result.err
    assert "warning: evaluation.environments.0.examples = 256: the file has 20 tasks" in result.err
    assert "evaluation.environments.1" not in result.err and "evaluation.environments.2" not in result.err
