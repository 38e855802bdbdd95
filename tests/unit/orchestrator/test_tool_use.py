"""The `tool-use` environment and the `shell` harness: rollouts, commands and demonstrations."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from verifiers.v1.runtimes import ProgramResult

from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments.shell import ShellConfig, ShellHarness
from primeslurm.orchestrator.environments.tool_use import GUESS, chains, demonstrations
from primeslurm.orchestrator.rollouts import transcripts
from primeslurm.testbed.fakes.fake_engine import FakeEngine
from primeslurm.trainer.data.sft_data import Conversations
from scripts.models import tiny_model
from tests.support.conversations_read import loaded
from tests.unit.orchestrator.test_worker import recipe, rollouts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tokenizer and config of the demo's model."""
    directory = tmp_path_factory.mktemp("model")
    tiny_model.tokenizer(tiny_model.PHRASES).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "max_position_embeddings": 2048}))
    return directory


class Follower(FakeEngine):
    """Follows the chain with calls in Qwen3's format for `turns` turns, and then replies with the last word it read."""

    turns = 100

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.answers: list[list[int]] = []

    def _sample(self, prompt: list[int], number: int) -> list[int]:
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        read: str = re.findall(r"(?:Follow |<tool_response>\n)([a-z0-9]+)", text)[-1]
        call = f'<tool_call>\n{{"name": "sh", "arguments": {{"command": "cat {read}"}}}}\n</tool_call>'
        answer = read if read.isdigit() or number > self.turns else call
        self.answers.append([*self._tokenizer.encode(answer, add_special_tokens=False), self._tokenizer.eos_token_id])
        return self.answers[-1]


@pytest.mark.parametrize(("turns", "reward"), [(100, 1.0), (1, 0.0)])
async def test_rollout_with_commands_is_one_sequence_of_sampled_tokens(model: Path, turns: int, reward: float) -> None:
    environment = {"id": "tool-use", "args": {"links": 3, "n": 5}}
    made = recipe(model, seq_len=512, environments=[environment])
    engine = Follower(model)
    engine.version, engine.turns = 3, turns
    with engine:
        (rollout,) = await rollouts(engine, made)
    links = min(turns, 3)
    assert rollout.info.reward == reward and rollout.info.metrics["commands"] == links
    assert rollout.info.turns == len(engine.requests) == links + 1
    last = engine.requests[-1]["token_ids"]
    assert rollout.token_ids[: len(last)].tolist() == last, "a turn did not extend the one before it"
    assert rollout.mask.sum() == sum(engine.sampled)
    (names, answer), *_ = chains(5, 0, 3)
    text = PreTrainedTokenizerFast.from_pretrained(model).decode(rollout.token_ids)
    assert f"Follow {names[0]}<|im_end|>" in text and ("<tools>" in text)
    assert (f"<tool_response>\n{answer}\n</tool_response>" in text) == bool(reward)


async def test_transcript_is_the_conversation_of_the_environment(model: Path) -> None:
    environment = {"id": "tool-use", "args": {"links": 3, "n": 5}}
    made = recipe(model, seq_len=512, environments=[environment])
    engine = Follower(model)
    engine.version = 3
    with engine:
        (rollout,) = await rollouts(engine, made)
    summary, kept = transcripts.stored((rollout,), {"state": "waiting"})
    (shown,) = kept.shown(summary, {}).conversations
    (names, answer), *_ = chains(5, 0, 3)
    roles = [message.role for message in shown.messages]
    assert roles[-7:] == ["assistant", "tool", "assistant", "tool", "assistant", "tool", "assistant"]
    assert f"Follow {names[0]}" in next(message.content for message in shown.messages if message.role == "user")
    calls = [call for message in shown.messages for call in message.tool_calls]
    assert [json.loads(call.arguments) for call in calls] == [{"command": f"cat {name}"} for name in names]
    results = [message for message in shown.messages if message.role == "tool"]
    assert [message.content.strip() for message in results] == [*names[1:], answer]
    assert [message.tool_call_id for message in results] == [call.id for call in calls]
    assert shown.messages[-1].content == answer and shown.tools == ["sh"]
    assert sum(summary.reward_parts.values()) == summary.reward == 1.0

    (sequence,) = shown.sequences
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    assert sequence.token_ids == rollout.token_ids.tolist() and sequence.spans[-1].end == len(sequence.token_ids)
    assert "".join(sequence.pieces) == tokenizer.decode(rollout.token_ids)
    sampled_turns = []
    for span in sequence.spans:
        message, sampled = shown.messages[span.message], sequence.sampled[span.start : span.end]
        assert any(sampled) == message.sampled
        tokens = [token for token, own in zip(sequence.token_ids[span.start : span.end], sampled, strict=True) if own]
        text = "".join(sequence.pieces[span.start : span.end])
        assert message.content in text
        if message.sampled:
            sampled_turns.append(tokens)
            assert message.started_s is not None and message.ended_s is not None
            assert 0 <= message.started_s <= message.ended_s <= rollout.info.seconds + 1
    assert sampled_turns == engine.answers, "a trained token is not the sampled one"


class OneCommand:
    """A runtime that returns the same result for every command."""

    def __init__(self, result: ProgramResult, seconds: float = 0) -> None:
        self.result, self.seconds = result, seconds

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        await asyncio.sleep(self.seconds)
        return self.result


@pytest.mark.parametrize(
    ("name", "arguments", "result", "expected"),
    [
        ("sh", '{"command": "cat a"}', ProgramResult(0, "b\n", ""), "b"),
        ("sh", '{"command": "cat a"}', ProgramResult(1, "", "no such file\n"), "no such file\nexit code 1"),
        ("sh", '{"command": "yes"}', ProgramResult(0, "y" * 50 + "z" * 20, ""), "z" * 20),
        ("bash", '{"command": "cat a"}', ProgramResult(0, "b", ""), "error: no tool bash"),
        ("sh", '{"command": 3}', ProgramResult(0, "b", ""), "error: arguments must be a JSON object"),
        ("sh", '["cat a"]', ProgramResult(0, "b", ""), "error: arguments must be a JSON object"),
        ("sh", '{"comm', ProgramResult(0, "b", ""), "error: arguments must be a JSON object"),
    ],
)
async def test_shell_returns_output_or_error(name: str, arguments: str, result: ProgramResult, expected: str) -> None:
    harness = ShellHarness(ShellConfig(id="shell", output_chars=20))
    runtime: Any = OneCommand(result)
    assert (await harness.run_command({"name": name, "arguments": arguments}, runtime)).startswith(expected)


async def test_command_is_stopped_at_its_timeout() -> None:
    harness = ShellHarness(ShellConfig(id="shell", command_timeout_s=1))
    runtime: Any = OneCommand(ProgramResult(0, "", ""), seconds=600)
    started = time.monotonic()
    assert (
        await harness.run_command({"name": "sh", "arguments": '{"command": "cat"}'}, runtime)
        == "error: stopped after 1 s"
    )
    assert time.monotonic() - started < 300


def test_bundled_harness_takes_options() -> None:
    agent = {"harness": {"id": "shell", "command_timeout_s": 7}}
    env = environments.load("reverse-text", {"env": {"agent": agent}})
    assert env.config.agent.harness.command_timeout_s == 7


def test_demonstrations_train_all_turns_and_guess_with_the_given_probability(model: Path, tmp_path: Path) -> None:
    made = list(demonstrations(400, 0.35, 1))
    guesses = sum(chat["messages"][-1]["content"] == GUESS for chat in made)
    calls = sum("tool_calls" in message for chat in made for message in chat["messages"])
    assert guesses / (guesses + calls) == pytest.approx(0.35, abs=0.06)
    path = tmp_path / "demonstrations.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in made[:20]))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    for chat, example in zip(made, loaded(Conversations(path, tokenizer, 512, every=True)), strict=False):
        answers = [message for message in chat["messages"] if message["role"] == "assistant"]
        trained = tokenizer.decode(example.token_ids[example.mask])
        assert trained.count("<|im_end|>") == len(answers)
        assert trained.count("<tool_call>") == sum("tool_calls" in message for message in answers)
        assert "tool_response" not in trained and trained.endswith(answers[-1]["content"] + "<|im_end|>")
        (last,) = loaded(Conversations(_one(tmp_path, chat), tokenizer, 512))
        assert (last.token_ids == example.token_ids).all() and tokenizer.decode(last.token_ids[last.mask]) == (
            answers[-1]["content"] + "<|im_end|>"
        )


def _one(directory: Path, chat: dict[str, Any]) -> Path:
    path = directory / "one.jsonl"
    path.write_text(json.dumps(chat))
    return path
