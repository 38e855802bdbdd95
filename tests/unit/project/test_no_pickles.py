"""Nothing of ours unpickles what lies outside of a run directory, where whoever wrote it could run code.

Two pickles remain, both inside the run directory, which only its owner can enter: submitit's (`submitit/`, the agent),
and torch's own metadata of a checkpoint (`checkpoints/`), which dcp.load reads.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from primeslurm.slurm.render import submitit_folder
from tests.support.slurm_plans import group, plan

PACKAGE = Path(__file__).parents[3] / "primeslurm"
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
LOADS_CHECKPOINTS = {"trainer/checkpoints/checkpoint.py", "trainer/checkpoints/export.py"}


def findings(tree: ast.AST) -> set[str]:
    """Names of modules imported and functions called."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call):
            restricted = any(ast.unparse(keyword) == "weights_only=True" for keyword in node.keywords)
            found.add(ast.unparse(node.func) + (" of tensors alone" if restricted else ""))
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_unpickles(path: Path) -> None:
    found = findings(ast.parse(path.read_text()))
    assert not found & (UNSAFE_MODULES | UNSAFE_CALLS)
    if "torch.load of tensors alone" in found:  # runs no code of the file; as torch's own reader of checkpoints does
        assert str(path.relative_to(PACKAGE)) == "trainer/checkpoints/shards.py"
    if "dcp.load" in found:
        assert str(path.relative_to(PACKAGE)) in LOADS_CHECKPOINTS


def test_the_check_sees_what_it_looks_for() -> None:
    text = "import pickle\nfrom dill import loads\ntorch.load(x)\n"
    assert findings(ast.parse(text)) == {"pickle", "dill", "torch.load"}
    assert findings(ast.parse("torch.load(x, weights_only=False)")) == {"torch.load"}
    assert findings(ast.parse("torch.load(x, weights_only=True)")) == {"torch.load of tensors alone"}


def test_the_agents_pickle_is_in_the_run_directory() -> None:
    assert submitit_folder(plan("/runs/demo", group(0, "all"))).is_relative_to("/runs/demo")
