"""Conversations and chat templates, shared by SFT, rollouts and evaluations. No torch, no transformers.

`messages` normalizes what users and programs write. `template` renders it, and finds out how a template expects tool
calls. `turn_ends` finds the token that ends a turn. `dataset_lines` reads lines of data sets and collects their errors.
`training_text` decides which text of a line is trained.
"""

from __future__ import annotations

from typing import Any

ChatMessage = dict[str, Any]  # A message in the form of OpenAI's chat completions, as chat templates take it
