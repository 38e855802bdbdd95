"""Checks after a power cut: acknowledged data exists, and the resume succeeds."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from submitit.helpers import DelayedSubmission

from primeslurm.api import submission
from primeslurm.orchestrator.pipeline.progress import PROGRESS, RunProgress, restore
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.records.metrics import rows
from primeslurm.records.reading import whole_lines
from primeslurm.wire.decoding import DamagedError, decode_msgpack
from primeslurm.wire.stored import checkpoints
from primeslurm.wire.transport import secret
from primeslurm.wire.weight_transfer import filesystem
from tests.power.attempt import STEPS, Place, _digest, train


def losses(place: Place) -> list[str]:
    """Return which acknowledged data is lost."""
    writes = place.acknowledged
    kinds = {each["kind"] for each in writes}
    if not place.run.exists():
        return ["the run was submitted, and is gone"] if "taken" in kinds else []
    lost = _of_submission(place, kinds)
    last = max((each["step"] for each in writes if each["kind"] == "committed"), default=0)
    newest = checkpoints.newest(place.run.path) or 0
    if newest < last:
        lost.append(f"step {last} was committed, {newest} is the newest on disk")
    for step in checkpoints.committed(place.run.path):
        lost += checkpoints.damage(checkpoints.step_dir(place.run.path, step))
    lost += _of_records(place, newest)
    lost += _of_weights(place, writes, newest)
    lost += _of_groups(place, writes, newest)
    return lost + of_progress(place, writes)


def resume(place: Place) -> str:
    """Resume the run and train it to its end. Return the error, if any."""
    if not place.run.exists():
        return ""
    before = checkpoints.newest(place.run.path) or 0
    if before < STEPS:
        submission.resume(place.run, place.run.latest())
        train(place, "resumed", preempt=False)
    newest = checkpoints.newest(place.run.path)
    if newest != STEPS:
        return f"resumed at step {before}, it ended at {newest}"
    steps = [int(row["step"]) for row in rows(place.run.path / "metrics.jsonl")]
    return "" if steps == list(range(1, STEPS + 1)) else f"metrics have the steps {steps}"


def _of_submission(place: Place, kinds: set[str]) -> list[str]:
    lost = []
    try:
        secret.read(place.run.path)
    except secret.SecretError as error:
        lost.append(str(error))
    place.run.latest().plan()
    Recipe.model_validate_json((place.run.path / "recipe.resolved.json").read_bytes())
    if "taken" in kinds:
        pickles = list((place.run.path / "submitit").glob("*.pkl*"))
        try:
            agents: list[Any] = [DelayedSubmission.load(path).function for path in pickles]
        except Exception as error:  # unpickling an empty file may raise anything
            return [*lost, f"a pickle cannot be read: {error!r}"]
        if "submitted" in kinds and not place.pickle.exists() and "recovering" not in kinds:
            lost.append("the job's pickle is gone")
        if not agents:
            lost.append("there is no pickle")
    return lost


def _of_records(place: Place, newest: int) -> list[str]:
    steps = [int(row["step"]) for row in rows(place.run.path / "metrics.jsonl")]
    lost = [] if set(range(1, newest + 1)) <= set(steps) else [f"metrics of {steps} are there, {newest} is committed"]
    events: list[dict[str, Any]] = []
    for path in place.run.path.glob("attempts/*/events/trainer-rank-0.jsonl"):
        events += [json.loads(line) for line in whole_lines(path)]
    trained = {event["step"] for event in events if event["kind"] == "step"}
    if not set(range(1, newest + 1)) <= trained:
        lost.append(f"events say that {sorted(trained)} were trained, {newest} is committed")
    return lost


def _of_weights(place: Place, writes: list[dict[str, Any]], newest: int) -> list[str]:
    published = {each["version"] for each in writes if each["kind"] == "published"}
    return filesystem.damage(filesystem.version_dir(place.run.path, newest)) if newest in published else []


def _of_groups(place: Place, writes: list[dict[str, Any]], newest: int) -> list[str]:
    """Check that acknowledged groups exist, unless a committed step trained them or a resume undid them."""
    groups: dict[str, dict[str, Any]] = {}
    batches: dict[int, list[str]] = {}
    for each in writes:
        if each["kind"] == "group":
            groups[each["id"]] = each
        elif each["kind"] == "batches":
            batches |= {int(step): ids for step, ids in each["batches"].items()}
        elif each["kind"] == "recovering":
            groups = {name: group for name, group in groups.items() if group["version"] <= each["step"]}
    trained = {name for step, ids in batches.items() if step <= newest for name in ids}
    digests = {}
    for path in (place.run.path / "rollouts").glob("*.group"):
        try:
            group = RolloutGroup.from_bytes(path.read_bytes())
        except ValueError:
            continue
        digests[group.id] = _digest(group.to_bytes())
    lost = sorted(name for name, each in groups.items() if name not in trained and digests.get(name) != each["digest"])
    return [f"acknowledged groups are gone: {', '.join(lost)}"] if lost else []


def of_progress(place: Place, writes: list[dict[str, Any]]) -> list[str]:
    """Check that an orchestrator that restarts in the same attempt continues with what it has told the trainer."""
    recorded = [each for each in writes if each["kind"] == "progress"]
    if not recorded:
        return []
    last = recorded[-1]
    with contextlib.suppress(OSError, DamagedError):
        if decode_msgpack((place.run.path / PROGRESS).read_bytes(), RunProgress).attempt > last["attempt"]:
            return []  # a new attempt resumes from the committed step, and was about to report it
    now = restore(place.run.path, last["attempt"])
    if now.next_step < last["next_step"]:
        return [f"progress was {last}, and is {now}"]
    return []
