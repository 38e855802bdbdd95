"""Gradients of one batch under a layout, and the rank program that compares them with a reference."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from primeslurm.nn.layers.vision import VisionInput
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.base.interrupt import Interrupt
from primeslurm.trainer.data.image_positions import Images, vision_input
from primeslurm.trainer.distributed.world import World, join
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.policy.train_step import reduce_after
from primeslurm.wire.batches.batch import Row
from tests.trainer.conftest import SEQ_LEN, finish, make_recipe, start_ranks
from tests.trainer.image_rows import DOCUMENTS, packed

MARK = "GRADIENTS "
ROWS = 4


@dataclass(frozen=True)
class Layout:
    """A model, and its layout over ranks."""

    case: str
    """Name in `families.CASES`."""
    parallelism: dict[str, Any] = field(default_factory=dict)
    attention: str = "flex"
    dtype: str = "float32"
    compile: bool = False
    images: bool = False
    """Whether some rows have images, and the encoder is trained."""
    memory: dict[str, Any] = field(default_factory=dict)
    first: int = 1
    """Rows of the first of two micro batches."""

    def __str__(self) -> str:
        settings = "-".join(f"{name}={value}" for name, value in self.parallelism.items())
        return f"{self.case}-{settings or 'fsdp'}-{self.attention}"


def gradients(layout: Layout, directory: Path, world: World) -> dict[str, torch.Tensor]:
    """Return the whole gradient of every parameter for a fixed batch, on every rank."""
    vlm = {"freeze_vision_encoder": False} if layout.images else None
    model = {"path": str(directory / layout.case), "dtype": layout.dtype, "vlm": vlm}
    trainer = {"parallelism": layout.parallelism, "compile": layout.compile, "memory": layout.memory}
    recipe = make_recipe(directory / layout.case, model=model, trainer=trainer)
    policy, parallelism = build(recipe, world, layout.attention), recipe.trainer.parallelism
    mine = slice(policy.dp_rank, None, policy.dp_world)
    rows, actual = zip(*_rows(), strict=True) if layout.images else ((), ())
    share = [part[mine].to(world.device) for part in _batch(rows)]
    for some in (slice(0, layout.first), slice(layout.first, None)):
        if parallelism.reduce_gradients == "step":
            last = some.stop is None or len(share[0]) <= layout.first
            reduce_after(policy.model, last=last, stays_gathered=not parallelism.reshard_after_forward)
        micro = [part[some] for part in share]
        if len(micro[0]):
            seen = rows[mine][some], actual[mine][some]
            images = vision_input(*seen, policy.model.vision, world.device) if rows else None
            _loss(policy, images, *micro).backward()
    return {name: _whole(parameter) for name, parameter in policy.model.named_parameters() if parameter.requires_grad}


def _rows() -> list[tuple[Row, Images | None]]:
    """Every other row has images, so that one of two ranks may have none."""
    return [packed(DOCUMENTS if index % 2 == 0 else ((), ()), seed=10 * index) for index in range(ROWS)]


def _batch(rows: Sequence[Row]) -> list[torch.Tensor]:
    """Return tokens, positions, labels and weights; the former two from `rows` if given."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (torch.randint(3, 128, (ROWS, SEQ_LEN), generator=generator) for _ in range(2))
    weights = torch.randn(ROWS, SEQ_LEN, generator=generator)
    firsts = [SEQ_LEN // 8 + 13 * row for row in range(ROWS)]  # documents of all lengths, in all pieces
    positions = torch.stack([torch.cat([torch.arange(first), torch.arange(SEQ_LEN - first)]) for first in firsts])
    if rows:
        tokens = torch.from_numpy(np.stack([row.token_ids for row in rows])).long()
        positions = torch.from_numpy(np.stack([row.positions for row in rows])).long()
    return [tokens, positions, labels, weights]


def _loss(policy: PolicyModel, images: VisionInput | None, *batch: torch.Tensor) -> torch.Tensor:
    logits, labels, weights = policy.logits(*batch, images=images)
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / (ROWS * SEQ_LEN)


def _whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    grad = parameter.grad
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().float().cpu()


def worst(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], order: float) -> float:
    """Return the maximum difference of a parameter's gradient relative to the gradient, in a vector norm of `order`."""
    mine = {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in mine.items()}
    assert set(mine) == set(expected)

    def size(tensor: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(tensor, order))

    return max(size(mine[name] - expected[name]) / (size(expected[name]) or 1.0) for name in expected)


def compare(size: int, layouts: list[Layout], directory: Path, *options: str) -> list[float]:
    """Run all layouts in one set of ranks. Return the maximum difference of each."""
    table = directory / f"layouts-{size}.json"
    table.write_text(json.dumps([asdict(layout) for layout in layouts]))
    outputs = finish(start_ranks(size, "tests.trainer.gradients", str(table), *options))
    lines = [[line for line in output.splitlines() if line.startswith(MARK)] for output in outputs]
    return [max(float(line.split()[1]) for line in same) for same in zip(*lines, strict=True)]


def main() -> None:
    """Run one rank. With --write, write the gradients as references."""
    parser = argparse.ArgumentParser()
    parser.add_argument("table", type=Path)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    directory = arguments.table.parent
    world = join(Interrupt(), timeout_s=600)
    for settings in json.loads(arguments.table.read_text()):
        layout = Layout(**settings)
        mine = gradients(layout, directory, world)
        reference = directory / f"{layout.case}.pt"
        if arguments.write:
            torch.save(mine, reference)
        else:
            # Rounding to bfloat16 may send a token to another expert: a large change of few elements.
            order = torch.inf if layout.dtype == "float32" else 2
            print(f"{MARK}{worst(mine, torch.load(reference), order):.2e} {layout}", flush=True)
    world.close()


if __name__ == "__main__":
    main()
