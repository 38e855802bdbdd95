"""Short chat templates with all ways to end a turn, and their tokenizers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.support.conversations import with_tokens

TOKEN = re.compile(
    r"<\|[^|<>\s{}]+\|>|<\uff5c[^\uff5c<>]+\uff5c>|</?s>|</?\w*_\w+>|\[/?[A-Z_]+\]|<bos>|<eos>|</?think>"
)
LLAMA_3 = """{{- bos_token }}
{%- for message in messages %}
    {%- if not (message.role in ['ipython', 'tool'] or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
        {%- if call.name == 'python' %}
            {{- '<|python_tag|>' + call.arguments.code + '<|eom_id|>' }}
        {%- else %}
            {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
        {%- endif %}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- (message.content | tojson if message.content is iterable else message.content) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] ' + message.content + ' [/TOOL_RESULTS]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- call.function | tojson }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, tool and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""
PHI_3 = """{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}
"""
HARMONY = """{%- for message in messages %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- if message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
        {{- call.arguments | tojson + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if loop.last and message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
NEXT_ROLE = """{%- for message in messages %}
    {{- {'system': '<|system|>', 'user': '\n<|user|>', 'assistant': '<|assistant|>'}[message.role] + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""
"""A line break precedes the marker that ends a turn."""
UNENDING = """{%- for message in messages %}
    {{- '### ' + message.role + ':\n' + message.content + '\n\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}
"""


def tokenizer(template: str, eos: str | None = None, *more: str) -> Any:
    """Return a byte-level tokenizer in which all markers of a chat template are single tokens."""
    marks = [*TOKEN.findall(template), *([eos] if eos else []), *more]
    result = with_tokens(list(dict.fromkeys(marks)))
    result.chat_template = template
    if eos:
        result.eos_token = eos
    if "bos_token" in template:
        result.add_special_tokens({"bos_token": "<bos>"})
    return result


def write_model(
    directory: Path, template: str, eos: str | None, stops: list[str] | str | None = None, *more: str
) -> Path:
    """Write a tokenizer, and a generation_config.json with these stop tokens (a string: one token; None: no file)."""
    made = tokenizer(template, eos, *more, *([stops] if isinstance(stops, str) else stops or []))
    made.save_pretrained(directory)
    if stops is not None:
        listed = {"eos_token_id": made.convert_tokens_to_ids(stops)}
        (directory / "generation_config.json").write_text(json.dumps(listed))
    return directory
