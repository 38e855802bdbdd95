"""A whole run with real engines, router and teacher, and a scripted trainer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from primeslurm.plan.placement.inference import teacher_recipe
from primeslurm.recipe import Recipe
from tests.engine.conftest import StartEngine, StartRouter
from tests.support.engine_commands import engine_command
from tests.support.models import make_model, publish, reference_logprobs
from tests.support.processes import EngineForks, Server
from tests.support.recipes import recipe_data
from tests.support.runs import check_staleness
from tests.support.scripted_run import OFF_POLICY, Run

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unmeasured")]
STEPS = 3


@pytest.fixture(scope="module")
def teacher(engine_forks: EngineForks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Server]]:
    """Start a teacher as a plan would: another model, with its tokenizer, that reads 16 tokens at a time."""
    directory = make_model(tmp_path_factory.mktemp("teacher"), seed=99)
    settings = {"type": "engines", "path": str(directory), "dtype": "float32", "kv_cache_bytes": 2**24}
    settings |= {"max_num_batched_tokens": 16, "vllm_extra": {"max_num_seqs": 8}}
    recipe = Recipe.model_validate(recipe_data(orchestrator={"advantages": "opd"}, teacher=settings))
    alone = teacher_recipe(recipe)
    assert alone is not None
    server = engine_forks.start(engine_command(alone, "cpu", "engine", sys.executable))
    server.wait("/health")
    yield directory, server
    server.stop()


def test_trained_tokens_are_what_the_engines_sampled(
    start_engine: StartEngine, open_router: StartRouter, model: Path, teacher: tuple[Path, Server], tmp_path: Path
) -> None:
    servers = {"prefill-r0-0": start_engine("prefill"), "decode-r0-0": start_engine("decode")}
    router = open_router(prefill=[servers["prefill-r0-0"]], decode=[servers["decode-r0-0"]])
    policies = {0: model, **{v: make_model(tmp_path / f"policy{v}", seed=v) for v in range(1, STEPS + 1)}}

    def weights(run_dir: Path, version: int) -> Path:
        return publish(policies[version], run_dir, version) if version else model

    engines = {name: server.url for name, server in servers.items()}
    teacher_model, teacher_server = teacher
    changes = {
        "max_steps": STEPS,
        "model": {"path": str(model), "dtype": "float32"},
        "teacher": {"type": "engines", "path": str(teacher_model)},
        "trainer": {"loss": {"type": "dppo", "ref_kl": 0.1}},
    }
    run = Run(tmp_path, model, [router.url], engines, weights, changes, teachers={"teacher-0": teacher_server.url})
    run.start("orchestrator")
    run.start("worker")
    link = run.link()
    try:
        run.publish(link, 0)
        first = run.batch(link, 1)
        for step in range(1, STEPS + 1):
            run.train(link, step, commits=step == STEPS)
        assert run.processes["orchestrator"].wait(900) == 0, run.logs()
    finally:
        run.stop()
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    check_staleness(rows, OFF_POLICY)
    assert all(row["teacher/kl"] > 0.1 for row in rows), "another model than the policy"
    for row in first[0].rows:  # all rollouts of the first step were sampled by version 0
        for start, end in documents(row.positions):
            expected = reference_logprobs(model, row.token_ids[start:end].tolist())
            trained = row.mask[start:end]
            assert np.abs(np.array(expected)[trained[1:]] - row.logprobs[start:end][trained]).max(initial=0) < 0.02
            teachers = np.array(reference_logprobs(teacher_model, row.token_ids[start:end].tolist()))[trained[1:]]
            assert np.abs(teachers - row.ref_logprobs[start:end][trained]).max(initial=0) < 1e-4
            assert not row.ref_logprobs[start:end][~trained].any()


def documents(positions: np.ndarray) -> list[tuple[int, int]]:
    """Return start and end of each document of a row."""
    starts = [int(i) for i in np.flatnonzero(positions == 0)]
    return list(zip(starts, [*starts[1:], len(positions)], strict=True))
