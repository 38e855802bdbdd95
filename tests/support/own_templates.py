"""Chat templates with the structure of some that are not in this repository: Kimi-K2 to K2.7, GLM-5.1, INTELLECT-3 and
DeepSeek-V3.1.
"""

import json
from pathlib import Path

from renderers import prime_qwen3

from primeslurm.models.deepseek_v3 import renderer as deepseek_v31_renderer
from primeslurm.models.glm4_moe import renderer as intellect3_renderer

KIMI_K2 = """
{%- set last = namespace(answer=-1) %}
{%- for message in messages %}
    {%- if message.role == "assistant" and not message.tool_calls %}{% set last.answer = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}
    {{- "<|im_system|>tool_declare<|im_middle|>" + tools | tojson(separators=(",", ":")) + "<|im_end|>" }}
{%- endif %}
{%- if messages[0].role != "system" %}
    {{- "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>" }}
    {{- AFTER_DEFAULT }}
{%- endif %}
{%- for message in messages %}
    {%- set name = message.name or message.role %}
    {%- set role = message.role if message.role in ("user", "assistant") else "system" %}
    {{- "<|im_" + role + "|>" + name + "<|im_middle|>" }}
    {%- if message.role == "tool" %}{{ "## Return of " + message.tool_call_id + "\\n" }}{% endif %}
    {%- if message.role == "assistant" %}THOUGHTS{% endif %}
    {{- message.content }}
    {%- if message.tool_calls %}
        {{- "<|tool_calls_section_begin|>" }}
        {%- for call in message.tool_calls %}
            {{- "<|tool_call_begin|>" + call.id + "<|tool_call_argument_begin|>" }}
            {{- call.function.arguments | tojson + "<|tool_call_end|>" }}
        {%- endfor %}
        {{- "<|tool_calls_section_end|>" }}
    {%- endif %}
    {{- "<|im_end|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_assistant|>assistant<|im_middle|>" + OPENED }}{% endif %}
"""
KEPT = '{{ "<think>" + (message.reasoning_content or "") + "</think>" }}'
DROPPED = f'{{% if loop.index0 > last.answer %}}{KEPT}{{% else %}}{{{{ "<think></think>" }}}}{{% endif %}}'
DEFAULT = KIMI_K2[
    KIMI_K2.index("{%- if messages[0]") : KIMI_K2.index("{%- for message in messages %}\n    {%- set name")
]
TYPESCRIPT = KIMI_K2.replace(DEFAULT, "").replace('tools | tojson(separators=(",", ":"))', "tools_ts_str")


def _made(template: str, thoughts: str, after_default: str = '""', opened: str = '""') -> str:
    filled = template.replace("THOUGHTS", thoughts).replace("AFTER_DEFAULT", after_default)
    return filled.replace("OPENED", opened)


INTELLECT_3 = """
{%- macro others(fields, known) %}
    {%- for key, value in fields.items() if key not in known %}
        {{- "\\n<" + key + ">" + (value if value is string else value | tojson) + "</" + key + ">" }}
    {%- endfor %}
{%- endmacro %}
{%- set opens = messages[0].role == "system" %}
{%- if opens or tools %}
    {{- "<|im_start|>system\\n" + (messages[0].content if opens else SYSTEM) }}
    {%- if tools %}
        {{- HEADER }}
        {%- for tool in tools | map(attribute="function") %}
            {{- "\\n<function>\\n<name>" + tool.name + "</name>\\n<description>" + tool.description }}
            {{- "</description>\\n<parameters>" }}
            {%- for name, fields in tool.parameters.properties.items() %}
                {{- "\\n<parameter>\\n<name>" + name + "</name>\\n<type>" + fields.type + "</type>" }}
                {{- others(fields, ["type"]) + "\\n</parameter>" }}
            {%- endfor %}
            {{- others(tool.parameters, ["type", "properties"]) + "\\n</parameters>\\n</function>" }}
        {%- endfor %}
        {{- FOOTER }}
    {%- endif %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages[1 if opens else 0:] %}
    {%- if message.role == "tool" %}
        {%- if loop.previtem.role != "tool" %}{{ "<|im_start|>user\\n" }}{% endif %}
        {{- "<tool_response>\\n" + message.content + "\\n</tool_response>\\n" }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{ "<|im_end|>\\n" }}{% endif %}
    {%- else %}
        {{- "<|im_start|>" + message.role }}
        {%- if message.reasoning_content is defined %}
            {{- "\\n<think>" + message.reasoning_content + "</think>" }}
        {%- endif %}
        {%- if message.content or not message.tool_calls %}{{ "\\n" + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- if loop.first and message.content %}{{ "\\n" }}{% endif %}
            {{- "\\n<tool_call>\\n<function=" + call.function.name + ">\\n" }}
            {%- for name, value in call.function.arguments.items() %}
                {{- "<parameter=" + name + ">\\n" + (value if value is string else value | tojson) }}
                {{- "\\n</parameter>\\n" }}
            {%- endfor %}
            {{- "</function>\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n<think>" }}{% endif %}
"""
GLM_4_7 = Path(__file__).parents[1] / "data" / "chat_templates" / "GLM-4.7-Flash.jinja"
GLM_5_1 = (
    GLM_4_7.read_text()
    .replace("{{ tool | tojson", "{{ tool.function | tojson")
    .replace("and reasoning_content -%}", "and (reasoning_content or loop.index0 > ns.last_user_index) -%}")
)
"""As `renderers` says: GLM-5's, but tools have no envelope, and thoughts after the last question may be empty."""
DEEPSEEK_V3_1 = """
{{- bos_token + messages | selectattr("role", "equalto", "system") | map(attribute="content") | join("\\n\\n") }}
{%- if tools %}
    {{- "\\n\\n" + HEADER }}
    {%- for tool in tools | map(attribute="function") %}
        {{- "\\n### " + tool.name + "\\nDescription: " + tool.description }}
        {{- "\\n\\nParameters: " + tool.parameters | tojson + "\\n" }}
    {%- endfor %}
    {{- FOOTER }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "<\uff5cUser\uff5c>" + message.content + "<\uff5cAssistant\uff5c>" }}
        {{- "<think>" if loop.last and thinking else "</think>" }}
    {%- elif message.role == "tool" %}
        {{- "<\uff5ctool▁output▁begin\uff5c>" + message.content + "<\uff5ctool▁output▁end\uff5c>" }}
    {%- elif message.role == "assistant" %}
        {{- message.content }}
        {%- for call in message.tool_calls %}
            {{- "<\uff5ctool▁calls▁begin\uff5c>" if loop.first }}
            {{- "<\uff5ctool▁call▁begin\uff5c>" + call.function.name }}
            {{- "<\uff5ctool▁sep\uff5c>" + call.function.arguments | tojson }}
            {{- "<\uff5ctool▁call▁end\uff5c>" + ("<\uff5ctool▁calls▁end\uff5c>" if loop.last else "") }}
        {%- endfor %}
        {{- "<\uff5cend▁of▁sentence\uff5c>" }}
    {%- endif %}
{%- endfor %}
"""
TOOLS_SHOWN = DEEPSEEK_V3_1[DEEPSEEK_V3_1.index("{%- if tools") : DEEPSEEK_V3_1.index("{%- for message")]
DEEPSEEK_V3_1_RELEASED = DEEPSEEK_V3_1.replace(TOOLS_SHOWN, "")
"""The template does not show tools; its makers describe their format elsewhere."""


def _told(template: str, **words: str) -> str:
    """Return the template with the description of tools, which is not compared."""
    for name, text in words.items():
        template = template.replace(name, json.dumps(text))
    return template


OWN = {
    "GLM-5.1": GLM_5_1,
    "Kimi-K2-Instruct": _made(KIMI_K2, "", '"\\n"'),
    "Kimi-K2-Thinking": _made(KIMI_K2, DROPPED),
    "Kimi-K2.5": _made(TYPESCRIPT, DROPPED, opened='"<think>"'),
    "Kimi-K2.7-Code": _made(TYPESCRIPT, KEPT, opened='"<think>"'),
    "INTELLECT-3": _told(
        INTELLECT_3,
        SYSTEM=intellect3_renderer.SYSTEM,
        HEADER=prime_qwen3._TOOLS_HEADER,
        FOOTER=prime_qwen3._TOOLS_FOOTER,
    ),
    "DeepSeek-V3.1": _told(DEEPSEEK_V3_1, HEADER=deepseek_v31_renderer.HEADER, FOOTER=deepseek_v31_renderer.FOOTER),
}
"""Templates by a name that tells which model they imitate."""
