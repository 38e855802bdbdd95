"""An engine of a model that sees images takes a new policy, its encoder included."""

from __future__ import annotations

from pathlib import Path

import pytest

from primeslurm.orchestrator.engines import Policy
from tests.engine.conftest import tiny_engine
from tests.support.generate import generate, logprobs, tokens
from tests.support.models import publish
from tests.support.vision_models import make_vision_model, reference_logprobs

pytest.importorskip("torchvision", reason="vLLM's models that see images need it", exc_type=ImportError)
pytestmark = pytest.mark.engine
PROMPT = [5, 9, 14, 7, 33, 21]


async def test_an_update_is_taken_whole(zygote, client, tmp_path: Path) -> None:
    models = [make_vision_model(tmp_path / f"m{seed}", seed) for seed in (0, 1)]
    policy = Policy(1, str(publish(models[1], tmp_path, 1)))
    few = {"limit_mm_per_prompt": {"image": 1, "video": 0}}
    server = zygote.start(tiny_engine(models[0], vllm_extra=few), {})
    try:
        server.wait("/primeslurm/status")
        await client(server).apply(policy, timeout_s=120)
        answer = generate(server.url, PROMPT, 16, temperature=1.0, seed=5)
    finally:
        server.stop()
    expected = reference_logprobs(models[1], PROMPT + tokens(answer))[len(PROMPT) - 1 :]
    assert logprobs(answer) == pytest.approx(expected, abs=1e-4)
