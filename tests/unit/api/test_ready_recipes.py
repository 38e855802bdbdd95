"""Ready recipes are listed, copied, and accepted by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primeslurm.api.setup.ready_recipes import copy_recipe, list_recipes, purpose_of
from primeslurm.base.errors import UsageError
from primeslurm.base.paths import shipped
from primeslurm.recipe.reading.recipe_files import find_recipe, load_recipe, ready_recipes
from tests.support.cli import primeslurm


def test_every_ready_recipe_has_a_purpose_of_one_sentence() -> None:
    listed = {recipe.name: recipe for recipe in list_recipes()}
    assert set(listed) == {path.stem for path in shipped("recipes").glob("*.yaml")}
    assert all(5 < len(recipe.purpose) < 160 for recipe in listed.values())
    flagship = listed["glm5_pd"]
    assert (flagship.nodes, flagship.gpus) == (34, 224)
    assert flagship.purpose.startswith("Agentic RL of GLM-5.1 (744B")
    assert flagship.purpose.endswith("on software-engineering tasks")


@pytest.mark.parametrize(
    ("text", "purpose"),
    [
        ("# RL of X on\n# sums: many.\n# More.\nschema: 1\n", "RL of X on sums"),
        ("# RL of X 1.5B. More.\n", "RL of X 1.5B"),
        ("# RL of X.\n", "RL of X"),
        ("schema: 1\n# RL\n", ""),
    ],
)
def test_purpose_is_the_first_sentence_of_the_top_comment(text: str, purpose: str) -> None:
    assert purpose_of(text) == purpose


@pytest.mark.parametrize("name", sorted(ready_recipes()))
def test_copy_in_another_directory_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    copy = copy_recipe(name, tmp_path / "mine.yaml")
    assert load_recipe(copy) == load_recipe(ready_recipes()[name])


def test_base_next_to_a_copy_comes_before_the_ready_one(tmp_path: Path) -> None:
    copy = copy_recipe("glm5_r3", tmp_path)
    assert load_recipe(copy).seq_len == 131072
    base = copy_recipe("glm5_pd", tmp_path)
    base.write_text(base.read_text().replace("seq_len: 131072", "seq_len: 65536"))
    assert load_recipe(copy).seq_len == 65536


def test_bare_name_is_a_ready_recipe_unless_a_file_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ready = shipped("recipes") / "tool_use.yaml"
    assert find_recipe(Path("tool_use")) == find_recipe(Path("tool_use.yaml")) == ready
    (tmp_path / "tool_use").mkdir()  # a directory is no recipe
    assert find_recipe(Path("tool_use")) == ready
    (tmp_path / "tool_use.yaml").write_text("schema: 1\n")
    assert find_recipe(Path("tool_use.yaml")) == Path("tool_use.yaml")
    assert find_recipe(Path("./elsewhere/tool_use")) == Path("elsewhere/tool_use")


@pytest.mark.parametrize("name", ["\0", "", "x" * 5000, "no such"])
def test_hostile_names_are_usage_errors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        load_recipe(find_recipe(Path(name)))


def test_copy_overwrites_nothing_and_reports_every_reason(tmp_path: Path) -> None:
    (tmp_path / "tool_use.yaml").write_text("mine")
    again = primeslurm("recipes", "copy", "tool_use", cwd=tmp_path)
    assert (again.code, (tmp_path / "tool_use.yaml").read_text()) == (2, "mine")
    assert again.err.startswith("error: tool_use.yaml: already exists")
    lost = primeslurm("recipes", "copy", "tool_use", "no/such/place.yaml", cwd=tmp_path)
    assert lost.code == 2 and "there is no directory no/such" in lost.err


def test_unknown_name_is_one_error_with_the_nearest_names(tmp_path: Path) -> None:
    for words in (("recipes", "show", "glm5_dp"), ("recipes", "copy", "glm5_dp"), ("plan", "glm5_dp", "--local")):
        refused = primeslurm(*words, cwd=tmp_path)
        assert refused.code == 2 and len(refused.err.splitlines()) == 1, refused
        assert "did you mean glm5_pd" in refused.err and "`primeslurm recipes` lists" in refused.err
    assert list(tmp_path.iterdir()) == []


def test_verbs_accept_ready_recipe_names(tmp_path: Path) -> None:
    site = ("--site", shipped("sites") / "h200.yaml")
    for words in (("plan", "glm5_serve", *site), ("check", "glm5_serve", *site), ("render", "glm5_serve", *site)):
        assert primeslurm(*words, cwd=tmp_path).code == 0, words
    evaluated = primeslurm("eval", "smollm2_arithmetic", "--local", "--dry-run", "--json", cwd=tmp_path)
    assert evaluated.code == 0, evaluated.err
    compared = primeslurm("diff", "glm5_pd", "glm5_r3", *site, "--json", cwd=tmp_path)
    assert compared.code == 1 and len(json.loads(compared.out)) > 5
    shown = primeslurm("recipes", "show", "tool_use_r3", cwd=tmp_path)
    assert shown.out == (shipped("recipes") / "tool_use_r3.yaml").read_text()
    listed = json.loads(primeslurm("recipes", "--json", cwd=tmp_path).out)
    assert {"name", "nodes", "gpus", "purpose", "path"} == set(listed[0])
