"""Imports of all environment workers, which an agent imports once before it forks them (`node.agent.fork_server`)."""

from __future__ import annotations

import importlib
import os

MODULES = ("primeslurm.orchestrator.worker.main", "transformers.models.auto.tokenization_auto")


def preload() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # as workers do; huggingface_hub reads it when it is imported
    for module in MODULES:
        importlib.import_module(module)


preload()
