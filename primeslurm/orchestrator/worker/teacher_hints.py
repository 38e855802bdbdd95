"""Prompts for the policy as its own teacher: the same conversation with a hint that the policy did not get.

The hint is a field of the task. It is added to the messages, which are rendered again. Sampled tokens and all that
follows stay as they are. The orchestrator then asks for the log-probabilities of the sampled tokens after that prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import msgspec
import verifiers.v1 as vf
from verifiers.v1.clients.train import ElasticRendererPool, TrainClient, tool_to_wire
from verifiers.v1.dialects.chat import message_to_wire

from primeslurm.chat import ChatMessage
from primeslurm.orchestrator.rollouts.job_protocol import RolloutError
from primeslurm.recipe.sections.teacher import PolicyTeacher
from primeslurm.wire.batches.rollout import Rollout, TeacherPrompt


async def with_teacher_prompts(
    teacher: PolicyTeacher, client: TrainClient, trace: vf.Trace, sequences: Sequence[Rollout]
) -> tuple[Rollout, ...]:
    """Return the sequences of a trace, each with the teacher's prompt: the policy's prompt with the hint.

    Raise RolloutError if the task lacks the hint's field, or rendering the policy's prompt again gives other tokens.
    """
    text = teacher.template.replace("{hint}", _hint(teacher, trace.task.data))
    rollouts = []
    prompts: dict[tuple[int, ...], TeacherPrompt] = {}
    for sequence in sequences:
        nodes, prompt, tools = _prompt(trace, sequence)
        if (key := tuple(prompt)) not in prompts:
            messages = [message_to_wire(node.message) for node in nodes]
            conversations = messages, _with_hint(messages, text, teacher.message_role)
            rendered, with_hint = await _rendered(client, conversations, tools)
            if rendered != prompt:
                raise RolloutError("the prompt cannot be rendered again as it was, so none with a hint can be made")
            prompts[key] = TeacherPrompt(with_hint, len(prompt))
        info = msgspec.structs.replace(sequence.info, teacher_prompt=prompts[key])
        rollouts.append(replace(sequence, info=info))
    return tuple(rollouts)


def _hint(teacher: PolicyTeacher, data: Any) -> str:
    """Return the hint from the task's fields, or from its `info` if that is a mapping."""
    fields = data.model_dump()
    info = fields.get("info")
    values = {**(info if isinstance(info, dict) else {}), **fields}
    if values.get(teacher.hint) is None:
        names = ", ".join(sorted(name for name, value in values.items() if value is not None))
        raise RolloutError(f"teacher.hint: {teacher.hint} is not in the task, which has {names}")
    return str(values[teacher.hint])


def _prompt(trace: vf.Trace, sequence: Rollout) -> tuple[list[vf.MessageNode], list[int], list[vf.Tool]]:
    """Return the messages before a sequence's first sampled one, their tokens, and the tools."""
    # The tokens include those that start the model's answer, which verifiers counts as part of the answer.
    tokens = sequence.token_ids.tolist()
    for branch in trace.branches:
        lengths = [len(node.token_ids) for node in branch.nodes]
        if sum(lengths) == len(tokens) and tokens == [token for node in branch.nodes for token in node.token_ids]:
            nodes = list(takewhile(lambda node: not any(node.mask), branch.nodes))
            before = sum(len(node.token_ids) for node in nodes)
            return nodes, tokens[: before + branch.nodes[len(nodes)].mask.index(True)], branch.nodes[0].tools
    raise RolloutError("a sequence is not a branch of its trace")


def _with_hint(messages: Sequence[ChatMessage], text: str, role: str) -> list[ChatMessage]:
    """Append a text to the first message of a role, or put a new message in front."""
    index = next((i for i, message in enumerate(messages) if message["role"] == role), None)
    if index is None:
        return [{"role": role, "content": text}, *messages]
    content = messages[index].get("content") or ""
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": text}]
    else:
        content = f"{content}\n\n{text}" if content else text
    return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]


async def _rendered(
    client: TrainClient, conversations: Sequence[Sequence[ChatMessage]], tools: Sequence[vf.Tool]
) -> list[list[int]]:
    """Render conversations to token ids, as the client does before it requests an answer."""
    config = client.config
    pool = ElasticRendererPool(config.renderer_model_name, config.renderer, multiplex=config.multiplex)
    offered = [tool_to_wire(tool) for tool in tools] or None
    async with pool.acquire() as slot:

        def render() -> list[list[int]]:
            return [
                list(slot.renderer.render(list(one), tools=offered, add_generation_prompt=True).token_ids)
                for one in conversations
            ]

        tokens: list[list[int]] = await slot.run(render)
        return tokens
