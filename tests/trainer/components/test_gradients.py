"""Every parallel layout computes the gradients of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from primeslurm.nn.layers import sparse_attention
from primeslurm.trainer.distributed.world import World
from tests.trainer.families import CASES, UNEVEN_CASES, VISION_CASES, write
from tests.trainer.gradients import Layout, compare, gradients, worst

TOLERANCE = 5e-6
DELTA_NETS = 2e-5
"""Tolerance of gated delta nets over several ranks. Measured: 8.5e-6 on CPUs with AMX."""
ROUNDED = 2e-2
"""Tolerance of gradients summed in bfloat16: a few roundings of 2^-9."""

# All cases of a size share one set of processes; a case more costs about a second. test_family_layouts.py trains every
# family with expert and context parallelism.
TWO_RANKS = [
    Layout("qwen3_moe"),
    Layout("qwen3_moe", {"dp_replicate": 2}),
    Layout("qwen3_moe", {"ep": 2}),
    Layout("qwen3_moe", {"ep": 2, "reduce_gradients": "step"}),
    Layout("qwen3_moe", {"reduce_gradients": "step", "reshard_after_forward": False}),
    Layout("qwen3_moe", {"ep": 2, "gradient_dtype": "bfloat16"}),
    Layout("qwen3_moe", {"cp": 2, "reduce_gradients": "step", "gradient_dtype": "bfloat16"}),
    Layout("qwen3_moe", {"cp": 2, "cp_style": "ulysses"}),
    Layout("qwen3_moe", {"cp": 2, "cp_style": "ulysses"}, "varlen"),
    Layout("qwen3_moe", {"cp": 2, "cp_style": "allgather"}),
    Layout("qwen3_moe", {"cp": 2, "cp_style": "allgather"}, "varlen"),
    Layout("qwen3_moe", {"cp": 2, "ep": 2, "activation_checkpointing": "selective"}, "varlen"),
    Layout("qwen3_moe", {"cp": 2, "ep": 2, "cp_style": "allgather", "activation_checkpointing": "full"}, "varlen"),
    # one rank's rows have no images
    Layout("qwen3_vl", images=True),
    Layout("qwen3_vl", {"reduce_gradients": "step"}, images=True),
    Layout("qwen3_vl", {"cp": 2, "activation_checkpointing": "full"}, images=True),
    Layout("qwen3_vl_moe", {"cp": 2, "ep": 2, "cp_style": "allgather"}, images=True),
    Layout("qwen3_5", images=True),
    Layout("qwen2_5_vl", {"activation_checkpointing": "full"}, images=True),
    Layout("qwen3_5", {"cp": 2}, images=True),
    Layout("qwen3-tied", {"dp_replicate": 2}),
    Layout("glm4", {"cp": 2, "cp_style": "allgather", "activation_checkpointing": "full"}),
    Layout("deepseek_v3", {"cp": 2, "ep": 2}, "varlen"),
    Layout("deepseek_v3", {"cp": 2, "cp_style": "allgather"}, "varlen"),
    Layout("deepseek_v32", {"cp": 2, "ep": 2, "activation_checkpointing": "selective"}),
    # attention sinks
    Layout("gpt_oss", {"cp": 2, "ep": 2}, "varlen"),
    Layout("gpt_oss", {"cp": 2, "cp_style": "allgather"}),
    # recurrent layers: states of whole rows, more heads of values than of keys, groups; recomputed within recomputed
    Layout("qwen3_5_text", {"cp": 2}, "varlen"),
    Layout("nemotron_h", {"cp": 2, "ep": 2, "activation_checkpointing": "selective"}, "varlen"),
    # windows, and several masks
    Layout("afmoe", {"cp": 2, "ep": 2}, "varlen"),
    Layout("afmoe", {"cp": 2, "cp_style": "allgather"}, "varlen"),
    Layout("afmoe", {"cp": 2, "cp_style": "allgather"}),
]
FOUR_RANKS = [
    Layout("qwen3_moe", {"ep": 2}),
    Layout("qwen3_moe", {"dp_replicate": 2, "ep": 2}),
    Layout("qwen3_moe", {"cp": 2, "cp_style": "ulysses"}, "varlen"),
    Layout("qwen3_moe", {"cp": 2, "ep": 4}, "varlen"),
    Layout("qwen3_moe", {"cp": 2, "ep": 2, "cp_style": "allgather"}),
    Layout("qwen3_moe", {"dp_replicate": 2, "cp": 2, "ep": 2}, "varlen"),
    Layout("qwen3_moe", {"dp_replicate": 2, "cp": 2, "ep": 2, "reduce_gradients": "step"}, "varlen"),
    Layout("qwen3_moe", {"dp_replicate": 2, "cp": 2, "ep": 2, "gradient_dtype": "bfloat16"}, "varlen"),
    Layout("qwen3", {"cp": 4}, "varlen"),
    Layout("glm_moe_dsa", {"cp": 2, "ep": 4}),
    Layout("glm_moe_dsa", {"cp": 4, "activation_checkpointing": "selective"}),
    # fewer heads of keys, and fewer groups, than ranks
    Layout("qwen3_5_text", {"cp": 4}, "varlen"),
    Layout("nemotron_h", {"cp": 4, "ep": 4}, "varlen"),
    # experts that do not come out even: FSDP splits their rows
    Layout("qwen3_moe-uneven"),
    Layout("qwen3_moe-uneven", {"ep": 2}),
    Layout("deepseek_v3-uneven", {"cp": 2, "ep": 2}),
    Layout("gpt_oss-uneven"),
    Layout("qwen3_vl_moe-uneven", {"ep": 2}),
]


@pytest.fixture(scope="module")
def references(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model of every case, and the gradients of one process."""
    directory = tmp_path_factory.mktemp("gradients")
    used = {layout.case for layout in TWO_RANKS + FOUR_RANKS}
    for case in (*CASES, *VISION_CASES, *UNEVEN_CASES):
        if case.name in used:
            write(case, directory / case.name)
            images = any(layout.case == case.name and layout.images for layout in TWO_RANKS)
            actual = gradients(Layout(case.name, images=images), directory, world)
            torch.save(actual, directory / f"{case.name}.pt")
    return directory


@pytest.fixture(scope="module")
def two_ranks(references: Path) -> dict[str, float]:
    return dict(zip(map(str, TWO_RANKS), compare(2, TWO_RANKS, references), strict=True))


@pytest.fixture(scope="module")
def four_ranks(references: Path) -> dict[str, float]:
    return dict(zip(map(str, FOUR_RANKS), compare(4, FOUR_RANKS, references), strict=True))


@pytest.mark.parametrize("layout", TWO_RANKS, ids=str)
def test_two_ranks_match_one(layout: Layout, two_ranks: dict[str, float]) -> None:
    check(layout, two_ranks[str(layout)])


@pytest.mark.parametrize("layout", FOUR_RANKS, ids=str)
def test_four_ranks_match_one(layout: Layout, four_ranks: dict[str, float]) -> None:
    check(layout, four_ranks[str(layout)])


def check(layout: Layout, difference: float) -> None:
    """Return whether a difference is within rounding (and not 0 in bfloat16)."""
    if layout.parallelism.get("gradient_dtype") == "bfloat16":
        assert 1e-4 < difference < ROUNDED
    else:
        assert difference < (DELTA_NETS if layout.case.startswith("qwen3_5") else TOLERANCE)


@pytest.mark.parametrize("case", ["qwen3_5_text", "nemotron_h", "glm_moe_dsa"])
def test_selective_checkpointing_does_not_change_gradients(case: str, references: Path, world: World) -> None:
    selective = gradients(Layout(case, {"activation_checkpointing": "selective"}), references, world)
    assert worst(selective, torch.load(references / f"{case}.pt"), torch.inf) < TOLERANCE


def test_keys_are_selected_once_with_any_checkpointing(
    references: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    scores, expected = sparse_attention._scores, torch.load(references / "glm_moe_dsa.pt")
    monkeypatch.setattr(sparse_attention, "_scores", lambda *given: (calls.append(1), scores(*given))[1])
    counts = []
    for checkpointing, keeps in (("none", True), ("selective", True), ("full", True), ("full", False)):
        memory = {"keep_dsa_indices": keeps}
        layout = Layout("glm_moe_dsa", {"activation_checkpointing": checkpointing}, memory=memory)
        assert worst(gradients(layout, references, world), expected, torch.inf) < TOLERANCE
        counts.append(len(calls) - sum(counts))
    assert counts[0] > 0 and counts == [counts[0]] * 3 + [2 * counts[0]]
