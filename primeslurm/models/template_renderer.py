"""Renderer that uses the model's own chat template, like `default` of the package `renderers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from renderers.configs import BaseRendererConfig, DefaultRendererConfig
from renderers.default import DefaultRenderer

from primeslurm.chat import ChatMessage
from primeslurm.chat.messages import normalized
from primeslurm.chat.template import ChatTemplate
from primeslurm.chat.turn_ends import TurnEnds


class TemplateRenderer(DefaultRenderer):
    """`DefaultRenderer` with the right stop tokens, and with messages in the form that the template expects."""

    config_class: ClassVar[type[BaseRendererConfig]] = DefaultRendererConfig
    system: str | None = None

    def __init__(self, tokenizer: Any, config: DefaultRendererConfig) -> None:
        super().__init__(tokenizer, config)
        self._template = ChatTemplate(tokenizer)
        # `renderers` 0.1.12 stops at eos_token alone. Gemma's template ends a turn with another token, and GLM's with
        # the marker of the next role.
        ends = TurnEnds(self._template).every
        self._stops = sorted({*self._template.eos_ids, *tokenizer.convert_tokens_to_ids(sorted(ends))})

    def get_stop_token_ids(self) -> list[int]:
        """Return the tokens at which sampling stops: engines' default stop tokens and the ends of a turn."""
        return list(self._stops)

    def _apply(self, messages: Sequence[ChatMessage], **kwargs: Any) -> list[int]:
        # `renderers` gives every template the arguments of calls as objects. DeepSeek-R1's wants text.
        messages = normalized(messages, self._template.form, lenient=True)
        options = {"tokenize": True, "return_dict": False, **(self.config.model_extra or {}), **kwargs}
        return list(self._tokenizer.apply_chat_template(messages, **options))
