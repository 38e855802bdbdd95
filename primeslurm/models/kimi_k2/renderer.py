"""Kimi-K2-Thinking, which `renderers` 0.1.12 has no renderer for.

It is Kimi-K2.5 with tools in JSON, as Kimi-K2 has them, a system prompt where there is none, and a prompt that ends
before the thoughts: the model begins them itself.
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
from primeslurm.models.extending_renderer import Extending

SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."

NO_IMAGES = -1
"""Stands for the tokens around images, which the model has none of."""


class KimiK2ThinkingConfig(BaseRendererConfig):  # type: ignore[misc]
    """What `thinking_retention` says; the template itself has no options."""

    name: Literal["custom"] = "custom"
    thinking: Literal[True] = True
    image_cache_max: int = 1

    _internal_fields = frozenset({"thinking", "image_cache_max"})


class KimiK2ThinkingRenderer(Extending, KimiK25Renderer):  # type: ignore[misc]
    """Messages to tokens and back."""

    config_class: ClassVar[type[BaseRendererConfig]] = KimiK2ThinkingConfig

    def _token_id(self, token: str) -> int:
        return NO_IMAGES if token.startswith("<|media_") else int(super()._token_id(token))

    def render(
        self,
        messages: list[ChatMessage],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> RenderedTokens:
        """Render a conversation."""
        own = []
        if tools:
            declared = json.dumps(list(tools), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
            own.append({"role": "tool_declare", "content": declared})
        if messages[0].get("role") != "system":
            own.append({"role": "system", "content": SYSTEM})
        found = super().render([*own, *messages], add_generation_prompt=add_generation_prompt, **kwargs)
        found = replace(
            found,
            message_indices=[max(index - len(own), -1) for index in found.message_indices],
            message_roles=found.message_roles[len(own) :],
            message_tool_names=found.message_tool_names[len(own) :],
        )
        return self._unopened(found) if add_generation_prompt else found

    def _bridge(self, prompt: list[int], completion: list[int], *args: Any, **kwargs: Any) -> RenderedTokens | None:
        found = super()._bridge(prompt, completion, *args, **kwargs)
        return None if found is None else self._unopened(found)

    def _unopened(self, rendered: RenderedTokens) -> RenderedTokens:
        """Take the beginning of thoughts off the end of a prompt."""
        opened = len(self._encode("<think>"))
        return replace(
            rendered,
            token_ids=rendered.token_ids[:-opened],
            message_indices=rendered.message_indices[:-opened],
            sampled_mask=rendered.sampled_mask[:-opened],
            is_content=rendered.is_content[:-opened] if rendered.is_content else rendered.is_content,
        )
