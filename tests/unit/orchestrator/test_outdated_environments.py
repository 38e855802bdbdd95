"""Packages made for verifiers before 0.4 are recognised, whichever way they fail to load."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from primeslurm.base.errors import UsageError
from primeslurm.orchestrator import environments

CLASS = "import verifiers as vf\nclass Words(vf.SingleTurnEnv):\n    pass\n"
NAMED = "from verifiers import Rubric\n"
MODULE = "from verifiers.utils.data_utils import extract_boxed_answer\n"
LAZY = "def load_environment(**kwargs):\n    import verifiers as vf\n    return vf.SingleTurnEnv()\n"
BROKEN = "raise KeyError('data')\n"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that modules are imported from."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("of_old_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def install(directory: Path, module: str, text: str, *requirements: str) -> None:
    (directory / f"{module}.py").write_text(text)
    about = directory / f"{module}-1.0.dist-info"
    about.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {module}", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requirements)]
    (about / "METADATA").write_text("\n".join(lines) + "\n")
    (about / "top_level.txt").write_text(f"{module}\n")
    importlib.invalidate_caches()


def refusal(name: str) -> str:
    with pytest.raises(UsageError) as raised:
        environments.load(name, {})
    (violation,) = raised.value.violations
    assert (violation.field, violation.value) == ("environments.id", name)
    return f"{violation.why} ({violation.fix})"


@pytest.mark.parametrize(
    ("module", "text", "sign"),
    [
        ("of_old_class", CLASS, "it uses verifiers.SingleTurnEnv"),
        ("of_old_name", NAMED, "it uses verifiers.Rubric"),
        ("of_old_module", MODULE, "it uses verifiers.utils"),
        ("of_old_entry", LAZY, "it has load_environment() and exports no taskset"),
    ],
)
def test_removed_parts_of_verifiers_reveal_an_old_package(module: str, text: str, sign: str, packages: Path) -> None:
    install(packages, module, text, "verifiers>=0.1", "datasets")
    message = refusal(module.replace("_", "-"))
    assert message.startswith(f"it is made for verifiers before 0.4 ({sign}), and verifiers 0.4")
    assert "(install a version for verifiers 0.4, or port it" in message


@pytest.mark.parametrize(
    "requirement",
    ["verifiers<0.2", "verifiers>=0.1.9,<0.4 ; python_version > '3'", "verifiers==0.1.*", "verifiers[all]~=0.1.8"],
)
def test_requirements_reveal_an_old_package(requirement: str, packages: Path) -> None:
    install(packages, "of_old_requirement", BROKEN, "not a requirement !", requirement)
    assert "before 0.4 (of_old_requirement requires verifiers" in refusal("of-old-requirement")


@pytest.mark.parametrize("requirement", ["verifiers>=0.4", "verifiers>=0.5", "verifiers==99.*", "verifiers"])
def test_error_of_a_newer_package_is_described(requirement: str, packages: Path) -> None:
    install(packages, "of_old_error", BROKEN, requirement)
    assert "KeyError: 'data' (of_old_error.py, line 1" in refusal("of-old-error")
