"""Modules that commands import, because imports dominate the start-up time."""

from __future__ import annotations

import inspect
import os
from importlib import import_module
from pathlib import Path

import pytest
import typer
import yaml

from primeslurm.cli.lazy_verbs import PLUGINS, VERBS, load_verb, without_plugins
from tests.support.cli import run_python
from tests.support.recipes import model_dir, recipe_data, site

NEVER = {"torch", "vllm", "transformers", "verifiers", "numpy", "zmq", "httpx", "submitit"}
"""Only commands that submit import these."""


def imported_by(*args: str, cwd: Path) -> set[str]:
    """Return the modules, and their packages, that a command imports."""
    code = f"""
import atexit, sys
atexit.register(lambda: print("IMPORTED", *sys.modules, file=sys.stderr))
sys.argv = ["primeslurm", *{list(args)!r}]
from primeslurm.cli import main
main()
"""
    done = run_python("-c", code, cwd=cwd)
    assert done.code == 0, done.err
    names = next(line for line in done.err.splitlines() if line.startswith("IMPORTED")).split()[1:]
    return {name[: i if i > 0 else None] for name in names for i in (-1, name.find("."))}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a model, a site file and a recipe that fit together."""
    recipe = recipe_data(model={"path": str(model_dir(tmp_path))})
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(site(runs="runs").model_dump(mode="json", by_alias=True)))
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def test_help_imports_no_verb(place: Path) -> None:
    found = imported_by("--help", cwd=place)
    assert found & (NEVER | {"pydantic", "yaml", "jinja2", "msgspec"}) == set()
    ours = {name for name in found if name.startswith("primeslurm.")}
    assert ours == {"primeslurm.cli", "primeslurm.cli.lazy_verbs", "primeslurm.base", "primeslurm.base.errors"}


@pytest.mark.parametrize(
    ("verb", "spared"),
    [
        (
            ("render", "r.yaml"),
            {"primeslurm.plan.checks.environments", "primeslurm.run.status.run_status", "primeslurm.node"},
        ),
        (
            ("plan", "r.yaml"),
            {"jinja2", "primeslurm.slurm.render", "primeslurm.run.status.run_status", "primeslurm.node"},
        ),
        (("submit", "r.yaml", "--local", "--dry-run"), {"primeslurm.node"}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_verb_imports_only_what_it_needs(place: Path, verb: tuple[str, ...], spared: set[str]) -> None:
    assert imported_by(*verb, cwd=place) & (NEVER | spared) == set()


def test_importing_primeslurm_imports_no_subpackage(tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import primeslurm; print(*set(sys.modules) - before)"
    assert set(run_python("-c", code, cwd=tmp_path).out.split()) == {"primeslurm"}


@pytest.mark.parametrize("asked", [None, "logfire-plugin"])
def test_pydantic_plugin_setting_is_restored(monkeypatch: pytest.MonkeyPatch, asked: str | None) -> None:
    """Jobs inherit the variable, and their models may have plugins."""
    monkeypatch.delenv(PLUGINS, raising=False)
    if asked is not None:
        monkeypatch.setenv(PLUGINS, asked)
    with without_plugins():
        assert os.environ[PLUGINS] == "__all__"
    assert os.environ.get(PLUGINS) == asked


@pytest.mark.parametrize("verb", VERBS)
def test_help_line_of_a_verb_is_its_docstring(verb: str) -> None:
    module, _, name = VERBS[verb].place.partition(":")
    found = getattr(import_module(f"primeslurm.cli.verbs.{module}"), name)
    text = found.info.help if isinstance(found, typer.Typer) else inspect.getdoc(found)
    assert text.split("\n\n")[0] == VERBS[verb].help
    assert load_verb(verb).get_short_help_str(1000)


def test_completion_works_with_and_without_a_verb(place: Path) -> None:
    def complete(*words: str) -> list[str]:
        env = {
            "_PRIMESLURM_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        code = "import sys; sys.argv = ['primeslurm']; from primeslurm.cli import main; main()"
        return run_python("-c", code, cwd=place, **env).out.split()

    assert complete("primeslurm", "ren") == ["render"]
    assert "--dry-run" in complete("primeslurm", "submit", "--dr")
    assert complete("primeslurm", "cluster", "do") == ["down"]
