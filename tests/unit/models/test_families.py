"""The registry finds the families of this package by folder, and those of other packages by entry point."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.models import Parsers, RendererTraits, bundled, families, family_of, parsers_of
from primeslurm.models.renderers import DEFAULT, RENDERERS, renderer_traits, renderers_of

ROOT = Path(__file__).resolve().parents[3]

FAMILY = """
from primeslurm.models import Capabilities, Family, RendererTraits

FOUND = Family(
    name="found",
    model_types={"found": Capabilities(), "found_moe": Capabilities(ep=True)},
    renderer="other_package:Renderer",
    renderer_traits={"other_package:Renderer": RendererTraits(describes_tools=True)},
)
AGAIN = Family(name="again", model_types={"qwen3": Capabilities()})
"""


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory on sys.path for packages."""
    monkeypatch.syspath_prepend(tmp_path)
    families.cache_clear()
    yield tmp_path
    families.cache_clear()
    sys.modules.pop("other_package", None)


def install(directory: Path, *values: str) -> None:
    """Install a package with these entry points."""
    (directory / "other_package.py").write_text(FAMILY)
    about = directory / "other_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    lines = [f"family{index} = {value}" for index, value in enumerate(values)]
    (about / "entry_points.txt").write_text("\n".join(["[primeslurm.families]", *lines]))


def test_every_family_folder_has_the_name_of_its_family() -> None:
    folders = [path.parent.name for path in (ROOT / "primeslurm" / "models").glob("*/spec.py")]
    assert sorted(folders) == sorted(family.name for family in bundled()) and len(folders) > 10


def test_specs_import_neither_torch_nor_pydantic() -> None:
    code = "import sys, primeslurm.models.catalog as c; c.catalog(); print({'torch', 'pydantic'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_model_types_are_unique() -> None:
    types = [model_type for family in bundled() for model_type in family.model_types]
    assert len(types) == len(set(types))


def test_family_of_an_installed_package_is_found(site_packages: Path) -> None:
    install(site_packages, "other_package:FOUND")
    assert families()[:-1] == bundled()
    family = family_of("found_moe")
    assert family is not None and family.name == "found" and family.model_types["found_moe"].ep
    assert renderers_of("found", "m") == ("other_package:Renderer",)
    assert renderer_traits("other_package:Renderer").describes_tools
    assert renderer_traits("other_package:Another") == RendererTraits()


def test_only_families_name_renderers() -> None:
    # No other code compares names of renderers, except that of the plain chat template.
    own = {name for family in bundled() for name in (family.renderer, *family.renderers.values()) if name}
    names = {*RENDERERS, *own} - {DEFAULT}
    for family in bundled():
        assert family.renderer_traits.keys() <= {family.renderer, *family.renderers.values()}
    mentions = [
        (path.name, node.value)
        for path in (ROOT / "primeslurm" / "orchestrator").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert mentions == []


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (["other_package:MISSING"], "other_package:MISSING: cannot be imported: AttributeError"),
        (["no_such_package:FOUND"], "cannot be imported: ModuleNotFoundError"),
        (["other_package:Capabilities"], "is a type, not a Family"),
        (["other_package:AGAIN"], "another family has the model type qwen3"),
        (["other_package:FOUND", "other_package:FOUND"], "another family has the model type found, found_moe"),
    ],
)
def test_bad_entry_points_are_usage_errors(site_packages: Path, values: list[str], why: str) -> None:
    install(site_packages, *values)
    with pytest.raises(UsageError, match=why):
        families()


@pytest.mark.parametrize(
    ("name", "parsers"),
    [
        ("deepseek-ai/DeepSeek-V3.2-Exp", Parsers("deepseek_v32", "deepseek_v3")),
        ("DeepSeek-V3-0324", Parsers("deepseek_v3")),
        ("DeepSeek-R1-0528-Qwen3-8B", Parsers("hermes", "qwen3")),
        ("Qwen3-VL-30B-A3B-Instruct", Parsers("hermes", "qwen3")),
        ("Qwen3.5-35B-A3B", Parsers("qwen3_coder", "qwen3")),
        ("GLM-4.7", Parsers("glm47", "glm45")),
        ("GLM-4.6", Parsers("glm45", "glm45")),
        ("INTELLECT-3/", Parsers("qwen3_coder", "deepseek_r1")),
        ("qwen3/step-100", Parsers()),
    ],
)
def test_parsers_follow_the_last_and_longest_match_in_the_name(name: str, parsers: Parsers) -> None:
    assert parsers_of(name) == parsers
