"""Memory of buffered rollouts in the plan, compared with the memory of the head node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.dispatch import World
from primeslurm.orchestrator.batching.batches import KEPT_STEPS
from primeslurm.orchestrator.dispatch import DispatchLimits
from primeslurm.orchestrator.pipeline.progress import limits
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.plan.estimates.orchestrator_memory import (
    BATCHES_AHEAD,
    BUFFERED,
    ROLLOUT_BYTES,
    TEACHER_BYTES,
    TRAINED_BATCHES,
    buffered_rollouts,
)
from primeslurm.recipe import Recipe
from primeslurm.recipe.reading.recipe_files import load_recipe, load_site
from tests.support.planning import reviewed
from tests.support.recipes import recipe_data, site
from tests.unit.orchestrator.test_packing import group

ROOT = Path(__file__).resolve().parents[3]
SITE = load_site(ROOT / "sites" / "h200.yaml")


def glm5_r3(**orchestrator: Any) -> Recipe:
    recipe = load_recipe(ROOT / "recipes" / "glm5_r3.yaml")
    return recipe.model_copy(update={"orchestrator": recipe.orchestrator.model_copy(update=orchestrator)})


def said(recipe: Recipe, **control: Any) -> tuple[float, list[str]]:
    """Return the size of buffered rollouts [GB] and the findings, with these options of the head node."""
    changed = SITE.model_copy(
        update={"nodes": {**SITE.nodes, "control": SITE.nodes["control"].model_copy(update=control)}}
    )
    found, estimate = reviewed(recipe, changed)
    assert estimate is not None
    (size,) = (amount.value for amount in estimate.amounts if amount.name == BUFFERED)
    return size, [f"{each.level} {each.text}; {each.fix}" for each in found if each.field == "orchestrator.batch_size"]


def test_the_large_glm5_run_buffers_up_to_237_gigabytes_which_its_head_node_holds() -> None:
    recipe = glm5_r3()
    assert buffered_rollouts(recipe) == (8 + 1 + 2) * 256
    expected = 131072 * 256 * (11 * (624 + 13 + 3) + 2 * 18) / 1e9
    assert said(recipe) == (pytest.approx(expected, abs=0.05), [])
    files, _ = said(glm5_r3(rollout_transport="filesystem"))
    assert files == pytest.approx(131072 * 256 * 11 * 640 / 1e9, abs=0.05), (
        "encoded shards are freed once they are files"
    )
    without = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"router_replay": False})})
    assert said(without)[0] == pytest.approx(expected - 131072 * 256 * 11 * 624 / 1e9, abs=0.05)


def test_head_node_too_small_for_buffered_rollouts_is_refused() -> None:
    fix = "slurm.control.mem: 221G, a smaller batch_size or max_off_policy_steps"
    assert said(glm5_r3(), mem="64G")[1] == [
        f"note may not fit: buffered rollouts of seq_len would take 221 of 64 GiB of the head node's memory; {fix}"
    ]
    assert said(glm5_r3(), mem="32G")[1] == [
        "error does not fit: buffered rollouts of a quarter of seq_len take 55 of 32 GiB of the head node's memory; "
        + fix
    ]
    ((absurd),) = said(glm5_r3(batch_size=8192, max_inflight_rollouts=16384))[1]
    assert absurd.startswith("error does not fit: buffered rollouts of a quarter of seq_len take 1769 of 256 GiB")
    assert said(glm5_r3(), mem="32G", memory_gib=1000)[1], "the job may use only the memory that it requests"
    assert not said(glm5_r3(), mem="0", memory_gib=1000)[1] and not said(glm5_r3(), mem=None)[1]


def test_trainer_on_the_head_node_reduces_its_free_memory() -> None:
    offloading = {"router_replay": True, "memory": {"optimizer_offload": True}}
    asked = {"batch_size": 256, "group_size": 16, "max_off_policy_steps": 8}
    recipe = Recipe.model_validate(
        recipe_data(
            seq_len=131072,
            model={"path": "zai-org/GLM-5.1", "dtype": "bfloat16"},
            orchestrator=asked,
            trainer=offloading,
            deployment={"layout": "single", "train": {"nodes": 16}},
        )
    )

    def texts(memory_gib: float) -> list[str]:
        found, _ = reviewed(recipe, site(nodes={"default": {"gres": "gpu:h200", "memory_gib": memory_gib}}))
        return [each.text for each in found if each.field == "orchestrator.batch_size"]

    _, estimate = reviewed(recipe, site(nodes={"default": {"gres": "gpu:h200"}}))
    assert estimate is not None
    offloaded = next(role.host_gib_per_node for role in estimate.roles if role.role == "train")
    assert offloaded > 500 and not texts(offloaded + 222)
    assert texts(offloaded + 100) == [
        "may not fit: buffered rollouts of seq_len would take 221 of 100 GiB of the head node's memory"
    ]


def test_constants_match_the_orchestrator() -> None:
    asked = DispatchLimits({"e": 16}, 256, 512, 8, 10, {"e": 1.0})
    assert TRAINED_BATCHES == KEPT_STEPS and BATCHES_AHEAD * asked.batch_size == asked.max_ahead
    one = group([30], [1.0]).sequences[0]
    frames = one.encode()[1:]
    assert sum(memoryview(frame).nbytes for frame in frames) == ROLLOUT_BYTES * 30
    assert one.logprobs.itemsize == TEACHER_BYTES


class Buffering(World):
    """A simulation that counts finished rollouts which wait for their group or a batch."""

    most = 0

    def _push(self, at: float, job: Job | None) -> None:
        super()._push(at, job)
        done = sum(len(each.done) for each in self.dispatch.open.values())
        self.most = max(self.most, done + self.dispatch.ready.rollouts)


@pytest.mark.parametrize("inflight", [4, 32, 128])
def test_dispatcher_stays_within_the_estimate_with_long_tails(inflight: int) -> None:
    asked = {"batch_size": 32, "group_size": 4, "max_inflight_rollouts": inflight, "max_off_policy_steps": 4}
    recipe = Recipe.model_validate(recipe_data(orchestrator=asked))
    most = limits(recipe)
    simulated = DispatchLimits({"e": 4}, 32, inflight, 4, 10**9, {"e": 1.0}, staleness=most.staleness)
    world = Buffering(simulated, 1.3, 0.0)
    world.run(30)
    bound = buffered_rollouts(recipe) - TRAINED_BATCHES * 32
    assert bound / 3 < world.most <= bound
