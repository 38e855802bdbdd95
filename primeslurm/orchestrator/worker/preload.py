"""What all environment workers import: an agent that imports this once can fork them (`node.agent.fork_server`)."""

from __future__ import annotations

import importlib
import os

MODULES = ("primeslurm.orchestrator.worker.main", "transformers.models.auto.tokenization_auto")


def preload() -> None:
    """Import them."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # as workers do; huggingface_hub looks when it is imported
    for module in MODULES:
        importlib.import_module(module)


preload()
