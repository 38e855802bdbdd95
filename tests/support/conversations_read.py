"""Conversations of SFT, without token files."""

from __future__ import annotations

from primeslurm.trainer.data.sft_data import Conversations, Example


def loaded(conversations: Conversations) -> list[Example]:
    """Return all examples that are short enough."""
    return [example for example in conversations.read() if example is not None]
