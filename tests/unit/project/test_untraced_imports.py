"""Coverage traces only measured modules, even where one imports an unmeasured one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys

seen = []


def trace(frame, event, argument):
    if event == "call" and frame.f_globals["__name__"] in ("measured_not", "primeslurm.base.errors"):
        seen.append(frame.f_globals["__name__"])
    return trace


from tests.support.untraced_imports import coverage_init

coverage_init(None, None)
sys.settrace(trace)
import measured_not
from measured_not import answer

answer()
sys.settrace(None)
assert measured_not.__loader__ is measured_not.__spec__.loader
assert type(measured_not.__loader__).__name__ == "SourceFileLoader"
print(*seen)
"""


def test_only_measured_modules_are_traced(tmp_path: Path) -> None:
    (tmp_path / "measured_not.py").write_text(
        "def answer():\n    return 1\n\n\nanswer()\nimport primeslurm.base.errors\nanswer()\n"
    )
    argv = [sys.executable, "-S", "-c", f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]\n{PROGRAM}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[-1] == "measured_not", "what is called later is traced"
    assert words.count("measured_not") == 1, "and not what it does while it is imported"
    assert "primeslurm.base.errors" in words
