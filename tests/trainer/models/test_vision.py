"""Models with vision encoders, compared with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primeslurm.recipe import Recipe
from primeslurm.recipe.sections.trainer import Vlm
from primeslurm.trainer.assembly.build import build
from primeslurm.trainer.assembly.generic_model import GenericModel
from primeslurm.trainer.data.image_positions import Images, vision_input
from primeslurm.trainer.distributed.world import World
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.wire.batches.batch import Row
from tests.trainer.conftest import make_recipe
from tests.trainer.families import CASES, IMAGES, OTHER_VISION_CASE, VISION_CASES, Case, reference_of, write
from tests.trainer.image_rows import DOCUMENTS, document, packed

WITH_VISION = [*(case for case in CASES if hasattr(case.config(), "vision_config")), *VISION_CASES]


def vlm_recipe(path: Path, trainer: dict[str, Any] | None = None, freeze: bool = True) -> Recipe:
    model = {"path": str(path), "dtype": "float32", "vlm": {"freeze_vision_encoder": freeze}}
    return make_recipe(path, model=model, **({"trainer": trainer} if trainer else {}))


def logits(policy: PolicyModel, *with_images: tuple[Row, Images | None]) -> torch.Tensor:
    rows, images_of_rows = zip(*with_images, strict=True)
    tokens, positions = (torch.from_numpy(np.stack([getattr(r, n) for r in rows])) for n in ("token_ids", "positions"))
    images = vision_input(rows, images_of_rows, policy.model.vision, policy.device)
    with torch.no_grad():
        return policy.logits(tokens.long(), positions.long(), images=images)[0]


@pytest.mark.parametrize("case", WITH_VISION, ids=lambda case: case.name)
def test_logits_with_images_equal_those_of_transformers(case: Case, world: World, tmp_path: Path) -> None:
    path = write(case, tmp_path)
    actual = logits(build(vlm_recipe(path), world), packed(DOCUMENTS), packed(DOCUMENTS[1:], 7))
    reference = reference_of(case).from_pretrained(path, dtype=torch.float32).eval()
    for row, (documents, seed) in enumerate(((DOCUMENTS, 0), (DOCUMENTS[1:], 7))):
        first = 0
        for index, grids in enumerate(documents):
            tokens, images = document(grids, seed + index)
            ids = torch.from_numpy(tokens).long()[None]
            options: dict[str, Any] = {
                "pixel_values": torch.from_numpy(images.pixels),
                "image_grid_thw": torch.from_numpy(images.grids).long(),
                "mm_token_type_ids": (ids == IMAGES["image_token_id"]).int(),
            }
            with torch.no_grad():
                expected = reference(ids, **(options if grids else {})).logits[0]
            part = actual[row, first : first + len(tokens)]
            assert expected.abs().max() > 0.5
            assert (part - expected).abs().max() < case.tolerance, (row, index)
            first += len(tokens)


def test_vision_encoder_of_a_generic_model_is_found_by_name() -> None:
    hf = VISION_CASES[0].config
    with torch.device("meta"):
        models = {name: GenericModel(hf(), Vlm(**options)) for name, options in NAMED.items()}
        for options, why in REFUSED:
            with pytest.raises(ValueError, match=why):
                GenericModel(hf(), Vlm(**options))
        with pytest.raises(ValueError, match="llava does not read images as patches with three coordinates"):
            GenericModel(OTHER_VISION_CASE.config(), Vlm())
    for name, model in models.items():
        trained = {".visual." in key for key, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained == ({True, False} if name == "trained" else {False}), name


NAMED: dict[str, dict[str, Any]] = {
    "usual": {},
    "named": {"vision_encoder": "model.visual", "language_model": "model.language_model"},
    "trained": {"freeze_vision_encoder": False},
}
REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"vision_encoder": "visual"}, r"vision_encoder: glm4v has no attribute 'visual'; it has model, model\.visual, "),
    ({"language_model": "model"}, "one of the two attributes is part of the other"),
)
