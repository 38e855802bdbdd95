"""The variants of `benchmarks agreement` compute, and each changes the log-probabilities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.agreement import Case, packed
from benchmarks.router_replay import document
from benchmarks.trainer_variants import VARIANTS, Models, reference, scores
from primeslurm.orchestrator.worker.generate_endpoint import Completion
from primeslurm.trainer.distributed.world import World
from tests.trainer.families import COMMON, EXPERTS


def test_every_variant_computes_something_else(world: World, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**COMMON, **EXPERTS), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # with weights of one, it does not matter when their products are rounded
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    draw = np.random.default_rng(0)
    routed = np.argsort(draw.random((64, 2, 8)))[..., :2].astype(np.uint8)
    answer = Completion(draw.integers(3, 64, 32).tolist(), [-4.0] * 32, [0] * 32, routed_experts=routed)
    documents = [document(draw.integers(3, 64, 32).tolist(), answer)]
    rows = packed(documents)
    models = Models(Case(tmp_path, "cpu", True, [], {}).recipe, world)
    names = [name for name, variant in VARIANTS.items() if not variant.gpu_only]
    values = {name: scores(models.get(VARIANTS[name].build), rows, VARIANTS[name])[0] for name in names}
    same = [name for name in names[1:] if np.array_equal(values[name], values["bfloat16"])]
    assert same == []
    (exact,) = reference(tmp_path, documents, torch.device("cpu"))
    assert values["float32"] == pytest.approx(exact[32:], abs=1e-4)
