"""Any model by its own chat template, as the renderer `default` of `renderers` does it.

`renderers` 0.1.12 takes the tokenizer's eos_token for the only end of a turn, and gives each template the arguments of
calls as objects. Gemma's template ends a turn with another token, GLM's with the marker of the next role; DeepSeek-R1's
takes arguments as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from renderers.configs import BaseRendererConfig, DefaultRendererConfig
from renderers.default import DefaultRenderer

from primeslurm.chat import ChatMessage
from primeslurm.chat.messages import normalized
from primeslurm.chat.template import ChatTemplate
from primeslurm.chat.turn_ends import TurnEnds


class ByTemplate(DefaultRenderer):  # type: ignore[misc]
    """Messages to tokens and back."""

    config_class: ClassVar[type[BaseRendererConfig]] = DefaultRendererConfig
    system: str | None = None

    def __init__(self, tokenizer: Any, config: DefaultRendererConfig) -> None:
        """Find out how the template takes messages, and what ends a turn."""
        super().__init__(tokenizer, config)
        self._template = ChatTemplate(tokenizer)
        ends = TurnEnds(self._template).every
        self._stops = sorted({*self._template.eos_ids, *tokenizer.convert_tokens_to_ids(sorted(ends))})

    def get_stop_token_ids(self) -> list[int]:
        """Return the tokens at which sampling ends: where engines stop by default, and what ends a turn."""
        return list(self._stops)

    def _apply(self, messages: Sequence[ChatMessage], **kwargs: Any) -> list[int]:
        said = normalized(messages, self._template.form, lenient=True)
        options = {"tokenize": True, "return_dict": False, **(self.config.model_extra or {}), **kwargs}
        return list(self._tokenizer.apply_chat_template(said, **options))
