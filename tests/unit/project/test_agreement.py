"""The benchmark of agreement computes the trainer's metric, and one failed variant does not stop it."""

from __future__ import annotations

import time

import numpy as np
import torch

from benchmarks.agreement import attempt, differences
from primeslurm.recipe.sections.losses import DppoLoss
from primeslurm.trainer.components.loss import Documents, Targets, from_recipe


def test_mismatch_kl_is_the_metric_of_training() -> None:
    ours, theirs = np.array([-1.0, -2.5, -0.1], np.float32), np.array([-1.2, -2.4, -0.1], np.float32)
    logprobs = torch.from_numpy(ours)
    zero, documents = torch.zeros(3), Documents(torch.zeros(3, dtype=torch.long), 1)
    targets = Targets(zero.long(), torch.from_numpy(theirs), zero, zero + 1, zero == 0, zero, documents)
    metrics = from_recipe(DppoLoss())(logprobs, zero, targets).metrics
    measured = differences(ours, theirs)
    assert np.isclose(measured["mismatch_kl"], metrics["mismatch_kl"].item() / 3, rtol=1e-4)
    assert np.isclose(measured["largest"], 0.2) and np.isclose(measured["share_beyond_0.1"], 1 / 3)


def test_failed_and_slow_measurements_become_errors() -> None:
    def wait() -> dict[str, float]:
        time.sleep(60)
        return {}

    assert attempt(1, wait) == {"error": "TimeoutError: not finished after 1 s"}
    assert attempt(60, lambda: {"value": [][0]}) == {"error": "IndexError: list index out of range"}
