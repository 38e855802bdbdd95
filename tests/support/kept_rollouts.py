"""Checks the rollouts that a finished run of `tool-use` has kept, against the environment and the trainer."""

from __future__ import annotations

import json
from pathlib import Path

from primeslurm.orchestrator.environments.tool_use import PROMPT, chains
from primeslurm.records.rollouts import AgentConversation, TokenSequence
from primeslurm.run.rollouts.archive import RolloutArchive
from primeslurm.run.rollouts.query import RolloutQuery

# Largest difference of a log-probability between engine and trainer. Another token would differ by several.
LARGEST_DIFFERENCE = 0.05


def check_tool_use(run: Path, steps: int, links: int = 2) -> int:
    """Check every kept rollout of the batches of an on-policy run. Return the number of tool results that were checked.

    The conversation must be what the environment saw: the task's prompt, and after each `cat` of a file of the chain
    the content of the file. Every trained token must be the one that the engine sampled: the trainer must compute the
    same log-probability for it.
    """
    files = {}
    for names, answer in chains(10_000, 0, links):
        files[PROMPT + names[0]] = dict(zip(names, [*names[1:], answer], strict=True))
    archive = RolloutArchive(run)
    results = 0
    seen: set[int | None] = set()
    for rollout in archive.transcripts(RolloutQuery(evaluation=False, dropped=False, failed=False)):
        seen.add(rollout.summary.step)
        (conversation,) = rollout.conversations
        results += _check_messages(conversation, files)
        for sequence in conversation.sequences:
            _check_tokens(conversation, sequence, rollout.summary.id)
    assert seen >= set(range(1, steps + 1)), f"steps {sorted(set(range(1, steps + 1)) - seen)} have no rollouts"
    assert archive.problems == []
    return results


def _check_messages(conversation: AgentConversation, files: dict[str, dict[str, str]]) -> int:
    prompt, *others = [message for message in conversation.messages if message.role != "system"]
    assert prompt.role == "user"
    contents = files[prompt.content]
    expected: dict[str, str] = {}  # content of the file that a call shows, by id of the call
    results = 0
    for message in others:
        for call in message.tool_calls:
            arguments = json.loads(call.arguments)
            name = str(arguments.get("command", "")).removeprefix("cat ")
            if name in contents:
                expected[call.id] = contents[name]
        if message.role == "tool" and message.tool_call_id in expected:
            assert message.content.strip() == expected.pop(message.tool_call_id)
            results += 1
    return results


def _check_tokens(conversation: AgentConversation, sequence: TokenSequence, id: str) -> None:
    trainer = sequence.trainer_logprobs
    assert trainer is not None, f"{id}: the trainer wrote no log-probabilities"
    assert any(sequence.trained)
    tokens = zip(sequence.trained, sequence.sampled, sequence.logprobs, trainer, strict=True)
    for position, (is_trained, is_sampled, engine, computed) in enumerate(tokens):
        assert is_trained == (computed is not None) and (is_sampled or not is_trained), f"{id}: token {position}"
        if computed is not None and engine is not None:
            assert abs(engine - computed) < LARGEST_DIFFERENCE, f"{id}: token {position}: {engine} and {computed}"
    for span in sequence.spans:
        message = conversation.messages[span.message]
        text = "".join(sequence.pieces[span.start : span.end])
        assert message.content.strip() in text
        for call in message.tool_calls if message.sampled else ():
            assert call.name in text
