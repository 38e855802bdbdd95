"""All benchmarks have one command, which documents name correctly."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_run, wide_ep
from benchmarks.__main__ import benchmarks
from benchmarks.dispatch import GROUP, RESULT, SIGMAS, WheneverThereIsRoom, bound_with_waste
from benchmarks.fault_table import recorded
from benchmarks.training_speed import arguments
from benchmarks.training_sweep import cells, compiled, deep
from primeslurm.orchestrator.dispatch import DispatchLimits

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks WORDS`."""
    argv = [sys.executable, "-m", "benchmarks", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def test_each_benchmark_describes_its_measurement() -> None:
    descriptions = benchmarks()
    assert {"gpu_run", "training_speed"} <= descriptions.keys() and not {
        "live_memory",
        "titan_step",
    } & descriptions.keys()
    assert all(line.endswith(".") for line in descriptions.values())
    listed = run().stdout
    assert all(f"\n{name} " in listed and line in listed for name, line in descriptions.items())


@pytest.mark.parametrize("name", benchmarks())
def test_each_benchmark_has_help(name: str) -> None:
    assert f'prog="python -m benchmarks {name}"' in (ROOT / "benchmarks" / f"{name}.py").read_text()


def test_benchmark_gets_its_arguments() -> None:
    shown = run("training_sweep", "--help")
    assert shown.returncode == 0 and shown.stdout.startswith("usage: python -m benchmarks training_sweep")
    wrong = run("training_sweeep")
    assert wrong.returncode == 1 and "no benchmark is named 'training_sweeep'" in wrong.stderr


def test_example_may_be_dropped_repeatedly_with_eager_groups() -> None:
    limits = DispatchLimits({"e": 1}, 1, 1, 0, 100, {"e": 1.0})
    made = WheneverThereIsRoom(limits, ["r"], "s", "i")
    for made.version in (0, 2, 4):
        job = made.next_job({"e"})
        assert job is not None and job.example == 0 and made.apply_age_limit(made.version + 2).cancelled == [job.id]


def test_bound_of_drop_accounts_for_discarded_work() -> None:
    rows = json.loads(RESULT.read_text())["rows"]
    plain = [row for row in rows if row["inflight"] >= 512 and "bound_with_waste_s" in row]
    assert {row["sigma"] for row in plain} == set(SIGMAS)
    for row in plain:
        batch = row["inflight"] // 2 // GROUP * GROUP
        assert row["bound_with_waste_s"] == bound_with_waste(row["inflight"], row["sigma"], batch)
        assert row["bound_s"] <= row["bound_with_waste_s"] and row["step_s"] <= 1.05 * row["bound_with_waste_s"]


def test_documents_name_benchmarks_that_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"python -m benchmarks ([a-z0-9_]+)", page.read_text())}
    assert len(named) > 10 and named <= benchmarks().keys()


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_benchmarks_do_not_import_tests(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    assert "tests" not in {module.partition(".")[0] for module in modules}


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_sweep_options_are_valid_for_training_speed(gpus: int) -> None:
    for settings in (cells(gpus) | compiled(gpus) | deep(gpus)).values():
        options = arguments([*settings, "--ranks", str(gpus)])
        assert options.ep in (1, gpus) and options.cp in (1, gpus) and (options.experts or gpus) % gpus == 0


def test_the_order_of_a_visit_names_cells_that_exist() -> None:
    _, _, visit = (ROOT / "benchmarks" / "README.md").read_text().partition("## On four and eight GPUs")
    cells_by_command = {"gpu_run OUT.json": gpu_run.CELLS, "wide_ep OUT.json": wide_ep.CELLS}
    cells_by_command |= {"training_sweep OUT 4": {**cells(4), **deep(4)}, "training_sweep OUT 1": compiled(1)}
    for command, there in cells_by_command.items():
        named = re.findall(rf"python -m benchmarks {command} ([^`]+?)(?: --[^`]*)?`", visit)
        assert named and {word for words in named for word in words.split()} <= set(there), command


def test_fault_table_contains_recorded_costs(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_it(n, record_property):\n    record_property('cost', f'{{\"fault\": \"f{n}\"}}')\n    assert n == 1\n"
    )
    report = tmp_path / "report.xml"
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--rootdir",
        tmp_path,
        tmp_path,
        f"--junitxml={report}",
        "-o",
        "junit_family=xunit1",
    ]
    assert subprocess.run(argv, capture_output=True, check=False, cwd=tmp_path).returncode == 1
    assert recorded(report) == [{"fault": "f1"}, {"fault": "f2"}]
