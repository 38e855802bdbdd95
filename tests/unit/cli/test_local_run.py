"""The warning of `submit --local` in a Slurm step."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.api.submission import Submitted
from primeslurm.cli.verbs import submit
from tests.support.plans import plan_of

WARNING = "Slurm ends this run together with the step or script that started it. Use --wait in both."


@pytest.mark.parametrize(
    ("executor", "in_step", "warned"), [("local", True, 1), ("local", False, 0), ("slurm", True, 0)]
)
def test_local_run_in_a_slurm_step_gets_a_warning(
    executor: str,
    in_step: bool,
    warned: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    if in_step:
        monkeypatch.setenv("SLURMD_NODENAME", "n1")
    plan = plan_of(tmp_path / "run", ()).model_copy(update={"executor": executor})
    submit._announce(Submitted(plan, 1, "5"), wait=False, as_json=False)
    assert capsys.readouterr().err.count(WARNING) == warned
