"""Conversations and chat templates, for SFT, rollouts and evaluations alike: no torch, no transformers.

`messages` brings what users and programs write into one form before any template sees it. `template` renders it, and
knows how a template takes tool calls. `turn_ends` finds the token that ends a turn. `training_text` says which of a
conversation's text is trained.
"""

from __future__ import annotations

from typing import Any

ChatMessage = dict[str, Any]
"""A message of a conversation, as OpenAI's chat completions and chat templates have it."""
