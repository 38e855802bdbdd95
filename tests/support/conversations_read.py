"""Conversations of SFT without files of their tokens."""

from __future__ import annotations

from primeslurm.trainer.data.sft_data import Conversations, Example


def loaded(conversations: Conversations) -> list[Example]:
    """All examples that are short enough."""
    return [example for example in conversations.read() if example is not None]
