"""Tiny models, recipes and batches, and trainer ranks as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.support.ports import free_port
from benchmarks.support.servers import rank_environment
from primeslurm.recipe import Recipe
from primeslurm.records.journal import Journal
from primeslurm.trainer.base.phase_timer import PhaseTimer
from primeslurm.trainer.components import lora
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.weights.export import cast
from primeslurm.wire.batches.batch import Batch, BatchInfo, Row
from primeslurm.wire.batches.routed_experts import RoutedExperts
from primeslurm.wire.weight_transfer import filesystem
from scripts.models import tiny_model
from tests.support.faulty_storage import storage_time  # noqa: F401 - for all tests
from tests.support.forks import TRAINER, Forked, server

ROOT = Path(__file__).parents[2]
SEQ_LEN = 64
PATIENCE_S = 900.0
LEFT_ALONE_S = 60.0
"""Grace period after one rank has failed, because the others may wait for it forever [s]."""


def start_ranks(size: int, module: str, *args: str) -> Sequence[Forked | subprocess.Popen[str]]:
    """Start `python -m MODULE ARGS` once per rank, forked from a server, or fresh if there are GPUs.

    Kernel libraries query the GPUs at import, and a process forked after that cannot use them.
    """
    if torch.cuda.is_available():
        return start_fresh_ranks(size, module, *args)
    port = free_port()
    forks = server(TRAINER, OMP_NUM_THREADS="1")
    variables = [os.environ | rank_environment(rank, size, port) for rank in range(size)]
    return [forks.start(module, *args, stdout=PIPE, stderr=STDOUT, env=env) for env in variables]


def start_fresh_ranks(size: int, module: str, *args: str) -> list[subprocess.Popen[str]]:
    """Start ranks as fresh processes, as the node agent does."""
    port = free_port()
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    own["PYTHONFAULTHANDLER"] = "1"
    variables = [
        os.environ | own | rank_environment(rank, size, port) | _share_of_gpus(rank, size) for rank in range(size)
    ]
    argv = [sys.executable, "-m", module, *args]
    return [subprocess.Popen(argv, env=env, stdout=PIPE, stderr=STDOUT, text=True) for env in variables]


def _share_of_gpus(rank: int, size: int) -> dict[str, str]:
    """Return variables that make ranks share GPUs if there are too few. Needs NCCL 2.30."""
    gpus = torch.cuda.device_count()
    if not 0 < gpus < size:
        return {}
    return {"CUDA_VISIBLE_DEVICES": str(rank % gpus), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def finish(ranks: Sequence[Forked | subprocess.Popen[str]], code: int = 0) -> list[str]:
    """Wait for ranks, assert their exit code, and return their output."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        outputs = [pool.submit(lambda rank: rank.communicate()[0], rank) for rank in ranks]
        deadline = time.monotonic() + PATIENCE_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            if any(rank.poll() not in (None, code) for rank in ranks):
                deadline = min(deadline, time.monotonic() + LEFT_ALONE_S)
            time.sleep(0.1)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGABRT)  # it prints where its threads are
        printed = [output.result() for output in outputs]
    assert [rank.returncode for rank in ranks] == [code] * len(ranks), "\n".join(printed)
    return printed


def printed(output: str, word: str) -> list[Any]:
    """Return the JSON values that a rank printed after a word."""
    return [json.loads(line.removeprefix(word)) for line in output.splitlines() if line.startswith(f"{word} ")]


def trainer_command(recipe: Path, run_dir: Path, attempt: int, orchestrator: str | None = None) -> list[str]:
    """Return module and arguments of a trainer rank on CPU."""
    link = ["--orchestrator", orchestrator] if orchestrator else []
    files = ["--recipe", str(recipe), "--run-dir", str(run_dir), "--attempt", str(attempt)]
    return ["primeslurm.trainer", *files, "--device", "cpu", *link]


def make_recipe(path: Path, /, **sections: Any) -> Recipe:
    """Return an RL recipe for the model at `path`. `sections` replace the defaults."""
    base: dict[str, Any] = {
        "name": "test",
        "max_steps": 4,
        "seq_len": SEQ_LEN,
        "model": {"path": str(path), "dtype": "float32"},
        "trainer": {"optimizer": {"lr": 1e-3}},
        "environments": [{"id": "reverse-text"}],
    }
    return Recipe.model_validate(base | sections)


def make_row(rng: np.random.Generator, seq_len: int = SEQ_LEN, routed: bool = False) -> Row:
    """Return a row of two random documents and padding, with chosen experts if `routed`."""
    lengths = [seq_len * 5 // 8, seq_len // 4, seq_len - seq_len * 5 // 8 - seq_len // 4]
    mask = rng.random(seq_len) < 0.7
    mask[-lengths[-1] :] = False
    return Row(
        token_ids=rng.integers(3, tiny_model.VOCABULARY, seq_len, dtype=np.int32),
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in lengths]),
        mask=mask,
        logprobs=np.where(mask, -5 + rng.random(seq_len), 0).astype(np.float32),
        advantages=np.where(mask, rng.normal(size=seq_len), 0).astype(np.float32),
        temperatures=np.where(mask, 0.8, 0).astype(np.float32),
        on_policy=np.repeat([True, False], [seq_len // 2, seq_len - seq_len // 2]),
        routed_experts=make_choices(rng, seq_len) if routed else None,
    )


def make_choices(rng: np.random.Generator, tokens: int) -> RoutedExperts:
    """Return random experts for `moe_model` (2 layers, 2 of 8), some unknown and some repeated."""
    choices = rng.random((tokens, 2, 8)).argsort(-1)[..., :2].astype(np.uint8)
    choices[rng.random(tokens) < 0.25] = 255
    choices[rng.random((tokens, 2)) < 0.1] = 0
    return choices


def make_batch(
    step: int, dp_rank: int = 0, dp_world: int = 1, rows: int = 4, seq_len: int = SEQ_LEN, routed: bool = False
) -> Batch:
    """Return one rank's rows of a batch that depends only on `step`."""
    rng = np.random.default_rng(step)
    everything = [make_row(rng, seq_len, routed) for _ in range(rows)]
    tokens = sum(int((row.mask & (row.positions != 0)).sum()) for row in everything)
    info = BatchInfo(step=step, dp_rank=dp_rank, dp_world=dp_world, loss_tokens=tokens)
    return Batch(info, everything[dp_rank::dp_world])


def make_timer(directory: Path) -> PhaseTimer:
    return PhaseTimer(Journal(directory, "test"), record=False)


def exported(policy: PolicyModel, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a policy by Hugging Face name. A collective."""
    state = policy.model.state_dict()
    state = state if policy.lora is None else lora.merge(state, policy.lora)
    return policy.adapter.to_hf({name: cast(name, lora.whole(tensor), dtype) for name, tensor in state.items()})


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def published(run_dir: Path, version: int) -> dict[str, torch.Tensor]:
    return tensors(filesystem.version_dir(run_dir, version))


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe"
    tiny_model.write_model(path, "qwen3_moe", hidden=32)
    return path


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "dense"
    tiny_model.write_model(path, "qwen3", hidden=32)
    return path
