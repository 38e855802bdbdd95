"""A real RL run on TextArena's Hangman, through verifiers' own taskset."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts.models.hangman_model import write_model
from tests.e2e.conftest import ROOT, turns_on_policy
from tests.support.hangman import write_words
from tests.support.runs import Demo

pytestmark = [pytest.mark.campaign, pytest.mark.cluster, pytest.mark.engine, pytest.mark.timeout(1800)]

STEPS = 5
GAMES = ROOT / ".venv" / "games"


def test_a_game_trains(demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns use the game's own texts. A random policy learns which letters are rewarded."""
    if not GAMES.is_dir():
        pytest.skip("TextArena is not installed; `primeslurm install --games` does that")
    write_words(tmp_path / "nltk")
    write_model(tmp_path / "model")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(GAMES), os.environ.get("PYTHONPATH")])))
    changes = (
        f"model.path={tmp_path / 'model'}",
        f"max_steps={STEPS}",
        "orchestrator.batch_size=8",
        "orchestrator.group_size=4",
        "orchestrator.max_inflight_rollouts=8",
        "orchestrator.max_off_policy_steps=0",
    )
    run = demo.submit("../examples/textarena.yaml", *(word for change in changes for word in ("--set", change)))
    demo.finish(run)
    table = turns_on_policy(run, STEPS)
    # in some steps perhaps no game finds a letter and ends
    assert 0 < sum(row["reward/mean"] for row in table) < STEPS, "games are neither all lost nor all won"
    assert any(row["trainer/grad_norm"] > 0 for row in table), "nothing was learned"
