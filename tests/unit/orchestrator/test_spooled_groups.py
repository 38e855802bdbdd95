"""Recovery reads only the heads of groups, and a damaged file costs one group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeslurm.orchestrator.algorithms import from_recipe
from primeslurm.orchestrator.arguments import OrchestratorArguments
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.dispatch import Dispatcher
from primeslurm.orchestrator.dispatch.curricula import OUTCOMES, Curricula
from primeslurm.orchestrator.pipeline.progress import RunProgress, recover
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.rollouts.spool import Spool, SpooledGroup
from primeslurm.recipe import Recipe
from primeslurm.wire.decoding import DamagedError
from tests.support.recipes import recipe_data
from tests.unit.orchestrator.test_packing import group

RECIPE = Recipe.model_validate(recipe_data())
LABEL = RECIPE.environments[0].label


def example(number: int) -> RolloutGroup:
    return replace(group([3, 7], [0.25, 1.0]), id=f"{LABEL}-{number:08d}", environment=LABEL, example=number)


def recovered(run: Path) -> tuple[Dispatcher, list[str], Spool]:
    arguments = OrchestratorArguments(run, 1, "run", "", "", ["router-0"], ["engine-r0-0"])
    spool, progress = Spool(run / "rollouts"), RunProgress(1, cursors={LABEL: 3})
    batches, curricula = Batches(RECIPE, from_recipe(RECIPE)), Curricula(RECIPE, run / OUTCOMES)
    return *recover(RECIPE, arguments, progress, spool, batches, curricula), spool


def refuse_groups(path: Path) -> bytes:
    """Fail if more than the head of a group is read."""
    if "rollouts" in path.parts:
        pytest.fail(f"{path} was read whole")
    with path.open("rb") as file:
        return file.read()


def test_restart_reads_only_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        Spool(tmp_path / "rollouts").put(example(number))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse_groups)
        dispatcher, gone, _ = recovered(tmp_path)
    assert not gone and all(isinstance(one, SpooledGroup) for one in dispatcher.ready)
    whole = example(0)
    head = next(iter(dispatcher.ready))
    for name in ("id", "environment", "example", "opened_version", "task", "size"):
        assert getattr(head, name) == getattr(whole, name)
    assert (head.newest_version, head.given_rewards, head.scored) == (whole.newest_version, [0.25, 1.0], False)
    assert head.whole().to_bytes() == whole.to_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_file_costs_one_group(data: st.DataObject) -> None:
    with TemporaryDirectory() as directory:
        run = Path(directory)
        for number in range(3):
            Spool(run / "rollouts").put(example(number))
        path = run / "rollouts" / f"{LABEL}-00000001.group"
        raw = bytearray(path.read_bytes())
        where = data.draw(st.integers(0, len(raw) - 1))
        if data.draw(st.booleans()):
            raw[where] ^= data.draw(st.integers(1, 255))
        else:
            del raw[where:]
        path.write_bytes(raw)
        dispatcher, gone, spool = recovered(run)
        broken = f"{LABEL}-00000001"
        if len(dispatcher.ready) == 3:
            with pytest.raises(DamagedError) as error:
                next(one for one in dispatcher.ready if one.id == broken).whole()
            spool.note_damaged(broken, error.value)
            dispatcher.give_up_damaged(broken)
            gone = [broken]
        assert gone == [broken] and [one.example for one in dispatcher.ready] == [0, 2]
        assert dispatcher.unfinished == [(LABEL, 1)] and dispatcher.counts["groups_damaged"] == 1
        spool.delete(gone)
        assert not path.exists() and path.with_suffix(".damaged").exists()
        assert spool.put(example(1)) and [one.id for one in spool.load()][1] == broken


def test_interrupted_write_is_no_group(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "rollouts")
    spool.put(example(0))
    (tmp_path / "rollouts" / f".{LABEL}-00000001.group.abc.tmp").write_bytes(example(1).to_bytes()[:50])
    dispatcher, gone, again = recovered(tmp_path)
    assert [one.example for one in dispatcher.ready] == [0] and not gone and not again.damaged


def test_loaded_group_replaces_the_spooled_one(tmp_path: Path) -> None:
    for number in range(3):
        Spool(tmp_path / "rollouts").put(example(number))
    dispatcher, _, _ = recovered(tmp_path)
    head = [*dispatcher.ready][1]
    dispatcher.ready.replace(head, head.whole())
    assert [one.example for one in dispatcher.ready] == [0, 1, 2]
    assert [isinstance(one, SpooledGroup) for one in dispatcher.ready] == [True, False, True]
    assert np.array_equal([*dispatcher.ready][1].sequences[0].token_ids, example(1).sequences[0].token_ids)
