"""Renderer of Kimi-K2-Thinking, which `renderers` 0.1.12 lacks.

It is the renderer of Kimi-K2.5 with three differences: tools are shown in JSON, as for Kimi-K2; conversations without a
system prompt get one; and prompts do not start the thoughts, because the model does that itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

from renderers import RenderedTokens
from renderers.configs import BaseRendererConfig
from renderers.kimi_k25 import KimiK25Renderer

from primeslurm.chat import ChatMessage
from primeslurm.models.extending_renderer import ExtendingMixin, without_first_messages

SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."

# Id of the tokens around images, which this model does not have
NO_TOKEN = -1


class KimiK2ThinkingConfig(BaseRendererConfig):
    """Supports `thinking_retention` only: the template has no options."""

    name: Literal["custom"] = "custom"
    thinking: Literal[True] = True
    image_cache_max: int = 1

    _internal_fields = frozenset({"thinking", "image_cache_max"})


class KimiK2ThinkingRenderer(ExtendingMixin, KimiK25Renderer):
    """Renders conversations of Kimi-K2-Thinking as its chat template does."""

    config_class: ClassVar[type[BaseRendererConfig]] = KimiK2ThinkingConfig

    # KimiK25Renderer looks up the tokens around images when it is created.
    def _token_id(self, token: str) -> int:
        return NO_TOKEN if token.startswith("<|media_") else int(super()._token_id(token))

    def render(
        self,
        messages: list[ChatMessage],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> RenderedTokens:
        added = []
        if tools:
            declared = json.dumps(list(tools), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            added.append({"role": "tool_declare", "content": declared})
        if messages[0].get("role") != "system":
            added.append({"role": "system", "content": SYSTEM})
        rendered = super().render([*added, *messages], add_generation_prompt=add_generation_prompt, **kwargs)
        rendered = without_first_messages(rendered, len(added))
        return self._without_think(rendered) if add_generation_prompt else rendered

    def _bridge(self, prompt: list[int], completion: list[int], *args: Any, **kwargs: Any) -> RenderedTokens | None:
        bridged = super()._bridge(prompt, completion, *args, **kwargs)
        return None if bridged is None else self._without_think(bridged)

    def _without_think(self, rendered: RenderedTokens) -> RenderedTokens:
        """Remove `<think>` from the end of a prompt."""
        length = len(self._encode("<think>"))
        return replace(
            rendered,
            token_ids=rendered.token_ids[:-length],
            message_indices=rendered.message_indices[:-length],
            sampled_mask=rendered.sampled_mask[:-length],
            is_content=rendered.is_content[:-length] if rendered.is_content else rendered.is_content,
        )
