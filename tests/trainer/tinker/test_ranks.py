"""Adapters of several clients on several ranks, against each client alone on one rank."""

from __future__ import annotations

import json
from collections import ChainMap, Counter
from pathlib import Path

import pytest
import torch

from primeslurm.tinker.backbone import Backbone
from tests.trainer.conftest import finish, start_ranks
from tests.trainer.tinker.backbone_ranks import ALONE, BATCH_TOKENS, TOGETHER, disturb, train

EXACT = 5e-6
LAYOUTS = {
    2: [
        ("dense", {}),
        ("moe", {"ep": 2}),
        ("dense", {"cp": 2}),
    ],
    4: [
        ("moe", {"ep": 2, "cp": 2, "cp_style": "allgather", "activation_checkpointing": "full"}),
        ("dense", {"dp_replicate": 2}),
    ],
}


def test_clients_on_several_ranks_equal_each_alone_on_one(
    backbone: Backbone, moe_backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbones, outputs = {"dense": backbone, "moe": moe_backbone}, []
    for size, layouts in LAYOUTS.items():
        arguments = []
        for number, (kind, layout) in enumerate(layouts):
            outputs.append((kind, layout, tmp_path / f"{size}-{number}.pt"))
            arguments += [backbones[kind].limits.model, json.dumps(layout), str(outputs[-1][2])]
        finish(start_ranks(size, "tests.trainer.tinker.backbone_ranks", *arguments))
    monkeypatch.setattr("primeslurm.tinker.rows.BATCH_TOKENS", BATCH_TOKENS)
    expected = {}
    for kind, one in backbones.items():
        steps = Counter(number for clients in TOGETHER for number in clients)
        each_alone = [train(one, [[number]] * count) for number, count in steps.items()]
        expected[kind] = {
            "together": dict(ChainMap(*each_alone)),
            "alone": train(one, ALONE),
            "disturbed": disturb(one),
        }
    for kind, layout, file in outputs:
        results = torch.load(file)
        for name, values in expected[kind].items():
            assert results[name].keys() == values.keys()
            for each, value in values.items():
                difference = ((results[name][each] - value).abs() / value.abs().clamp(min=1)).max().item()
                assert difference < EXACT, (layout, name, each)
