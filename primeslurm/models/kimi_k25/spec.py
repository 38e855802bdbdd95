"""Kimi-K2.5 to K2.7: Kimi-K2 beside what sees images, which is not trained."""

from __future__ import annotations

from primeslurm.models.family import Capabilities, Family, Parsers

FAMILY = Family(
    name="kimi_k25",
    model_types={
        "kimi_k25": Capabilities(ep=True, cp=True, fp8=True, router_replay=True, int4_checkpoint=True, compile=True)
    },
    parsers={r"kimi-?k2\.[5-9]": Parsers("kimi_k2", "kimi_k2")},
    renderer="kimi-k2.5",
)
