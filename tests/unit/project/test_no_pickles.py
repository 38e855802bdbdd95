"""No module unpickles files from outside of a run directory, because their authors could execute code.

Two pickles remain, both inside the run directory, which only its owner can enter: submitit's agent (`submitit/`), and
torch's metadata of a checkpoint (`checkpoints/`), which dcp.load reads.
"""

from __future__ import annotations

import ast
from pathlib import Path

from primeslurm.slurm.render import submitit_folder
from tests.support.slurm_plans import group, plan

PACKAGE = Path(__file__).parents[3] / "primeslurm"
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
UNSAFE_CALLS = {"torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
SAFE = {
    "weights_only=True": " of tensors alone",
    "allow_pickle=False": " without pickles",
    "Loader=getattr(yaml, 'CSafeLoader', yaml.SafeLoader)": " of data alone",
}
"""Arguments that make an unsafe call safe."""
SHARDS = "trainer/checkpoints/shards.py"
LOADS_CHECKPOINTS = {"trainer/checkpoints/checkpoint.py", "trainer/checkpoints/export.py"}


def findings(tree: ast.AST) -> set[str]:
    """Return the names of imported modules and called functions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
        elif isinstance(node, ast.Call):
            names.add(
                ast.unparse(node.func)
                + next((SAFE[word] for word in map(ast.unparse, node.keywords) if word in SAFE), "")
            )
    return names


def test_no_module_unpickles() -> None:
    calls = {str(path.relative_to(PACKAGE)): findings(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py")}
    assert {path: unsafe for path, names in calls.items() if (unsafe := names & (UNSAFE_MODULES | UNSAFE_CALLS))} == {}
    # With weights_only=True torch executes no code of the file.
    assert [path for path, names in calls.items() if "torch.load of tensors alone" in names] == [SHARDS]
    assert {path for path, names in calls.items() if "dcp.load" in names} <= LOADS_CHECKPOINTS


def test_checker_finds_violations() -> None:
    text = "import pickle\nfrom dill import loads\ntorch.load(x)\n"
    assert findings(ast.parse(text)) == {"pickle", "dill", "torch.load"}
    assert findings(ast.parse("torch.load(x, weights_only=False)")) == {"torch.load"}
    assert findings(ast.parse("torch.load(x, weights_only=True)")) == {"torch.load of tensors alone"}
    assert findings(ast.parse("yaml.load(x, Loader=yaml.UnsafeLoader)")) == {"yaml.load"}
    assert findings(ast.parse("np.load(x, allow_pickle=True)")) == {"np.load"}


def test_the_agents_pickle_is_in_the_run_directory() -> None:
    assert submitit_folder(plan("/runs/demo", group(0, "all"))).is_relative_to("/runs/demo")
