"""Slurm-native asynchronous RL post-training: one recipe, one command.

```
import primeslurm

loaded = primeslurm.load("recipes/reverse_text.yaml", local=True, overrides={"max_steps": 3})
run = loaded.submit()
print(run.wait().phase)
```
"""

TYPE_CHECKING = False  # as in typing, which would take longer to import than all of this
if TYPE_CHECKING:
    from primeslurm.api.checks.recipe_check import Check
    from primeslurm.api.recipes.loading import LoadedRecipe, load
    from primeslurm.api.runs.run import Run, all_runs, find_run
    from primeslurm.api.submission import DryRun
    from primeslurm.api.testbed import find_cluster, find_clusters, start_cluster
    from primeslurm.base.errors import ClusterError, PrimeslurmError, RunError, UsageError, Violation
    from primeslurm.plan.model import Finding, Plan
    from primeslurm.run.status.run_status import RunStatus

__version__ = "0.2.0"
__all__ = [
    "Check",
    "ClusterError",
    "DryRun",
    "Finding",
    "LoadedRecipe",
    "Plan",
    "PrimeslurmError",
    "Run",
    "RunError",
    "RunStatus",
    "UsageError",
    "Violation",
    "__version__",
    "all_runs",
    "find_cluster",
    "find_clusters",
    "find_run",
    "load",
    "start_cluster",
]

# Imported when they are asked for: every process of a run imports this package, and most need nothing of these.
_HOMES = {
    "primeslurm.api.checks.recipe_check": ("Check",),
    "primeslurm.api.testbed": ("find_cluster", "find_clusters", "start_cluster"),
    "primeslurm.api.recipes.loading": ("LoadedRecipe", "load"),
    "primeslurm.api.runs.run": ("Run", "all_runs", "find_run"),
    "primeslurm.api.submission": ("DryRun",),
    "primeslurm.base.errors": ("ClusterError", "PrimeslurmError", "RunError", "UsageError", "Violation"),
    "primeslurm.plan.model": ("Finding", "Plan"),
    "primeslurm.run.status.run_status": ("RunStatus",),
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        for module, names in _HOMES.items():
            if name in names:
                from importlib import import_module

                return getattr(import_module(module), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
