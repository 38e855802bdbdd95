"""An RL step on rollouts with images, from data URIs to new weights, against transformers."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor

from primeslurm.orchestrator import algorithms
from primeslurm.orchestrator.batching.batches import Batches
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.orchestrator.worker.trace_sequences import stored
from primeslurm.recipe import Recipe
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.components.loss import LossFunction, Sums, Targets, from_recipe
from primeslurm.trainer.data.image_reader import ImageReader
from primeslurm.trainer.distributed.world import RankError, World
from primeslurm.trainer.policy.train_step import TrainStep
from primeslurm.wire.batches.batch import Batch
from primeslurm.wire.batches.inline_images import ImageSpan
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from tests.support.batches import batch_of
from tests.trainer.conftest import SEQ_LEN, exported, make_recipe, make_timer
from tests.trainer.families import BY_NAME, IMAGES, reference_of
from tests.trainer.image_rows import MERGE, write_vision_model

LR, TEMPERATURE, TRUST = 0.5, 0.8, 2e-3
Size = tuple[int, int]
Part = int | Size
"""Number of text tokens (negative: sampled), or width and height of an image."""
ROLLOUTS: tuple[tuple[Part, ...], ...] = (
    # it ends between its images: the second would be cut
    (4, (24, 16), 3, -12, 5, (16, 16), 2, -20, (24, 24), 3, -6),
    # two images; these three share a row, in this order
    (3, (20, 14), 2, -6, (8, 8), 2, -3),
    (5, (16, 24), 2, -6),
    (4, -7),
)
CUT_AT = 62


@dataclass(frozen=True)
class Seen:
    """A rollout with inputs and results of the reference."""

    rollout: Rollout
    images: dict[str, torch.Tensor]
    trained: np.ndarray
    """Whether a token is sampled and within a row [n_tokens]."""


def noise(size: Size, rng: np.random.Generator) -> Image.Image:
    return Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def uri(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


PNG = png(noise((16, 8), np.random.default_rng(0)))


def make(number: int, parts: tuple[Part, ...], processor: Any) -> Seen:
    """Return random text, sampled text and images, without engine log-probabilities."""
    rng = np.random.default_rng(number)
    tokens: list[int] = []
    mask: list[bool] = []
    spans, actual = [], []
    for part in parts:
        if isinstance(part, int):
            new = rng.integers(3, 100, abs(part)).tolist()
        else:
            image = noise(part, rng)
            actual.append(processor(images=[image], return_tensors="pt"))
            count = int(actual[-1]["image_grid_thw"].prod()) // MERGE**2
            spans.append(ImageSpan(uri(image), len(tokens) + 1, len(tokens) + 1 + count))
            new = [IMAGES["vision_start_token_id"], *[IMAGES["image_token_id"]] * count, IMAGES["vision_end_token_id"]]
        tokens += new
        mask += [isinstance(part, int) and part < 0] * len(new)
    sampled = np.array(mask)
    rollout = Rollout(
        RolloutInfo(f"r{number}", "g", "e", 0, float(number % 3), images=tuple(spans)),
        np.array(tokens, np.int32),
        sampled,
        np.zeros(len(tokens), np.float32),
        np.where(sampled, 0, -1).astype(np.int32),
    )
    names = ("pixel_values", "image_grid_thw")
    images = {name: torch.cat([one[name] for one in actual]) for name in names if actual}
    return Seen(rollout, images, sampled & (np.arange(len(tokens)) < (CUT_AT if number == 0 else SEQ_LEN)))


def reference_logprobs(reference: Any, seen: Seen) -> torch.Tensor:
    """Return the reference's log-probability of each token; 0 for the first."""
    ids = torch.from_numpy(seen.rollout.token_ids).long()[None]
    kinds = {"mm_token_type_ids": (ids == IMAGES["image_token_id"]).int()} if seen.images else {}
    scores = (reference(ids, **seen.images, **kinds).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    return torch.cat([torch.zeros(1), scores.gather(-1, ids[0, 1:, None]).squeeze(-1)])


def as_engines_sampled(seen: list[Seen], logprobs: list[torch.Tensor]) -> list[Seen]:
    """Return the rollout with log-probabilities of an older policy."""
    rng = np.random.default_rng(5)
    result = []
    for one, values in zip(seen, logprobs, strict=True):
        rollout = one.rollout
        noisy = values.detach().numpy() + rng.normal(scale=0.3, size=len(values))
        rollout.logprobs[:] = np.where(rollout.mask, np.minimum(noisy, -1e-3), 0)
        result.append(Seen(rollout, one.images, one.trained))
    return result


def orchestrated(recipe: Recipe, rollouts: list[Rollout], directory: Path) -> Batch:
    """Return the batch that the orchestrator would send."""
    received = [Rollout.decode([bytes(f) for f in stored(rollout, directory).encode()]) for rollout in rollouts]
    group = RolloutGroup.from_bytes(RolloutGroup("g", "e", 0, 0, tuple((rollout,) for rollout in received)).to_bytes())
    batches = Batches(recipe, algorithms.from_recipe(recipe))
    batches.add(1, [group])
    batch = batch_of(batches, 1)
    assert batch is not None
    return Batch.decode([bytes(frame) for frame in batch.encode()])


def watched(function: LossFunction, seen: list[tuple[torch.Tensor, Targets]]) -> LossFunction:
    """A loss that records its log-probabilities."""

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, targets: Targets) -> Sums:
        seen.append((logprobs.detach(), targets))
        return function(logprobs, entropy, targets)

    return loss


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


def recipe_of(model: Path) -> Recipe:
    return make_recipe(
        model,
        model={"path": str(model), "dtype": "float32", "vlm": {}},
        trainer={
            "optimizer": {"type": "sgd", "lr": LR, "momentum": 0.0, "max_norm": None},
            "loss": {"type": "dppo", "mask_low": TRUST, "mask_high": TRUST},
        },
        orchestrator={"batch_size": 4, "group_size": 4, "sampling": {"temperature": TEMPERATURE}},
    )


def learner_of(recipe: Recipe, world: World, loss: LossFunction) -> TrainStep:
    policy = build(recipe, world)
    reader = ImageReader(policy.source, IMAGES["image_token_id"])
    return TrainStep(policy, recipe, world, reader, loss=loss)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_step_matches_transformers_on_whole_rollouts(name: str, world: World, tmp_path: Path) -> None:
    model = write_vision_model(name, tmp_path / "model")
    processor = AutoImageProcessor.from_pretrained(model)
    reference = reference_of(BY_NAME[name]).from_pretrained(model, dtype=torch.float32)
    seen = [make(number, parts, processor) for number, parts in enumerate(ROLLOUTS)]
    logprobs = [reference_logprobs(reference, one) for one in seen]
    seen = as_engines_sampled(seen, logprobs)
    recipe = recipe_of(model)
    batch = orchestrated(recipe, [one.rollout for one in seen], tmp_path / "images")
    assert [len(row.images) for row in batch.rows] == [2, 3]
    for row in batch.rows:
        places = [place for one in row.images for place in range(one.start, one.end)]
        assert np.flatnonzero(row.token_ids == IMAGES["image_token_id"]).tolist() == places
    assert [int(start) for start in np.flatnonzero(batch.rows[1].positions == 0)][1] < batch.rows[1].images[2].start

    # the loss: -A * r * keep + kl_tau * d**2, in the mean over all trained tokens
    trained = [torch.from_numpy(one.trained) for one in seen]
    engine = torch.cat([torch.from_numpy(s.rollout.logprobs)[t] for s, t in zip(seen, trained, strict=True)])
    own = torch.cat([values[t] for values, t in zip(logprobs, trained, strict=True)])
    rewards = torch.tensor([one.rollout.info.reward for one in seen])
    advantages = (rewards - rewards.mean()).repeat_interleave(torch.tensor([int(t.sum()) for t in trained]))
    moved = own.detach().exp() - engine.exp()
    keep = ~torch.where(advantages > 0, moved > TRUST, moved < -TRUST)
    loss = (1e-3 * (own - engine) ** 2 - advantages * (own - engine).exp() * keep).mean()
    loss.backward()

    given: list[tuple[torch.Tensor, Targets]] = []
    train_step = learner_of(recipe, world, watched(from_recipe(recipe.trainer.loss), given))
    metrics = train_step.train(batch, make_timer(tmp_path))

    assert metrics["tokens"] == len(own) and metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert 0.1 < metrics["masked_fraction"] < 0.9
    assert metrics["masked_fraction"] == pytest.approx((~keep).float().mean().item())
    ((actual, targets),) = given
    by_engine = targets.logprobs.argsort()  # rows hold the rollouts in another order
    assert (actual[by_engine] - own.detach()[engine.argsort()]).abs().max() < 5e-6
    assert torch.equal(targets.logprobs[by_engine], engine.sort().values)

    before, after = load_file(model / "model.safetensors"), exported(train_step.policy)
    gradients = released(reference)
    assert set(after) == set(before)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, tensor in after.items():
        if name.startswith("model.visual."):
            assert torch.equal(tensor, before[name]), name
        else:
            change = (before[name] - tensor) / LR
            assert (change - gradients[name]).abs().max() < 5e-6 * largest, name
            assert change.any(), name


def released(reference: Any) -> dict[str, torch.Tensor]:
    """Return the gradients outside of the encoder by checkpoint name."""
    actual = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None and ".visual." not in name}
    return {name: grad.mT if ".experts." in name else grad for name, grad in actual.items()}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda file: file.unlink(), "No such file"),
        (
            lambda file: noise((24, 16), np.random.default_rng(9)).save(file, "PNG"),
            "has changed since the rollout",
        ),
        (lambda file: file.write_bytes(file.read_bytes()[:200]), "has changed since the rollout"),
    ],
    ids=["gone", "another", "cut off"],
)
def test_changed_image_ends_the_step(
    spoil: Callable[[Path], Any], why: str, model: Path, world: World, tmp_path: Path
) -> None:
    processor = AutoImageProcessor.from_pretrained(model)
    recipe = recipe_of(model)
    rollouts = [make(number, parts, processor).rollout for number, parts in enumerate(ROLLOUTS[:2])]
    batch = orchestrated(recipe, rollouts, tmp_path / "images")
    file = Path(batch.rows[0].images[0].source)
    spoil(file)
    train_step = learner_of(recipe, world, from_recipe(recipe.trainer.loss))
    with pytest.raises(RankError, match=rf"reading images failed: rank 0: .*{why}") as caught:
        train_step.train(batch, make_timer(tmp_path))
    assert file.name in str(caught.value)
    assert all(parameter.grad is None for parameter in train_step.policy.model.parameters())


@pytest.mark.parametrize(
    ("data", "tokens", "why"),
    [
        (b"no image", 2, "not an image of a supported format"),
        (PNG[:100], 2, "truncated"),
        (PNG[:33] + bytes([0, 0, 0, 5]) + PNG[37:], 2, "broken PNG"),
        (PNG, 3, "2 tokens, expected 3"),
    ],
    ids=["text", "cut off", "damaged", "other tokens"],
)
def test_unreadable_image_is_named(data: bytes, tokens: int, why: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(data)
    reader = ImageReader(model, IMAGES["image_token_id"])
    with pytest.raises(ValueError, match=rf"image {tmp_path}/a\.png: .*{why}"):
        reader.read(ImageSpan(str(tmp_path / "a.png"), 1, 1 + tokens))
