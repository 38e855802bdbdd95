"""The other prompt that the policy gets as its own teacher: the same conversation, with a hint that it did not have.

The hint is a field of the task. It is put into the messages, and these are rendered as the first prompt was; what was
sampled, and what followed, stays as it is. The orchestrator asks how likely the sampled tokens are after that.
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


async def hinted(
    teacher: PolicyTeacher, client: TrainClient, trace: vf.Trace, sequences: Sequence[Rollout]
) -> tuple[Rollout, ...]:
    """Return the sequences of a trace with the prompt that the teacher gets in place of their own.

    Raises:
        RolloutError: the task has no such field, or a prompt cannot be rendered as it was.
    """
    text = teacher.template.replace("{hint}", _hint(teacher, trace.task.data))
    found = []
    known: dict[tuple[int, ...], TeacherPrompt] = {}
    for sequence in sequences:
        nodes, own, tools = _prompt(trace, sequence)
        if (key := tuple(own)) not in known:
            messages = [message_to_wire(node.message) for node in nodes]
            again, told = await _rendered(client, (messages, _with(messages, text, teacher.into)), tools)
            if again != own:
                raise RolloutError("the prompt cannot be rendered again as it was, so none with a hint can be made")
            known[key] = TeacherPrompt(told, len(own))
        info = msgspec.structs.replace(sequence.info, teacher_prompt=known[key])
        found.append(replace(sequence, info=info))
    return tuple(found)


def _hint(teacher: PolicyTeacher, data: Any) -> str:
    """The field of the task, or the entry of its `info` if that is a mapping."""
    fields = data.model_dump()
    info = fields.get("info")
    known = {**(info if isinstance(info, dict) else {}), **fields}
    if known.get(teacher.hint) is None:
        there = ", ".join(sorted(name for name, value in known.items() if value is not None))
        raise RolloutError(f"teacher.hint: {teacher.hint} is not in the task, which has {there}")
    return str(known[teacher.hint])


def _prompt(trace: vf.Trace, sequence: Rollout) -> tuple[list[vf.MessageNode], list[int], list[vf.Tool]]:
    """What a sequence begins with: the messages before the first that was sampled, their tokens, and what tools it has.

    The tokens include those that have the model answer, which verifiers counts to the answer.
    """
    tokens = sequence.token_ids.tolist()
    for branch in trace.branches:
        lengths = [len(node.token_ids) for node in branch.nodes]
        if sum(lengths) == len(tokens) and tokens == [token for node in branch.nodes for token in node.token_ids]:
            nodes = list(takewhile(lambda node: not any(node.mask), branch.nodes))
            before = sum(len(node.token_ids) for node in nodes)
            return nodes, tokens[: before + branch.nodes[len(nodes)].mask.index(True)], branch.nodes[0].tools
    raise RolloutError("a sequence is of no branch of its trace")


def _with(messages: Sequence[ChatMessage], text: str, into: str) -> list[ChatMessage]:
    """The messages with a text at the end of the first of a role; a system message is made if there is none."""
    place = next((i for i, message in enumerate(messages) if message["role"] == into), None)
    if place is None:
        return [{"role": into, "content": text}, *messages]
    content = messages[place].get("content") or ""
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": text}]
    else:
        content = f"{content}\n\n{text}" if content else text
    return [*messages[:place], {**messages[place], "content": content}, *messages[place + 1 :]]


async def _rendered(
    client: TrainClient, conversations: Sequence[Sequence[ChatMessage]], tools: Sequence[vf.Tool]
) -> list[list[int]]:
    """Token ids of each conversation, as the client renders them before it asks for an answer."""
    config = client.config
    pool = ElasticRendererPool(config.renderer_model_name, config.renderer, multiplex=config.multiplex)
    offered = [tool_to_wire(tool) for tool in tools] or None
    async with pool.acquire() as slot:

        def render() -> list[list[int]]:
            found = [
                slot.renderer.render(list(one), tools=offered, add_generation_prompt=True) for one in conversations
            ]
            return [list(rendered.token_ids) for rendered in found]

        found: list[list[int]] = await slot.run(render)
        return found
