"""The environments `arithmetic`, `math-problems` and `tool-use`, and the harness `shell`."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import verifiers.v1 as vf
from transformers import PreTrainedTokenizerFast
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig, make_runtime

from primeslurm.base.errors import UsageError
from primeslurm.orchestrator import environments
from primeslurm.orchestrator.environments.arithmetic import ArithmeticConfig, last_number, pairs
from primeslurm.orchestrator.environments.math_problems import INSTRUCTION, LONGEST_ANSWER, last_box
from primeslurm.orchestrator.environments.shell import ShellConfig, ShellHarness
from primeslurm.orchestrator.environments.tool_use import chains
from primeslurm.orchestrator.rollouts import transcripts
from primeslurm.trainer.data.sft_data import Conversations
from scripts.models import tiny_model
from scripts.models.tool_use_demonstrations import GUESS, demonstrations
from tests.support.conversations_read import loaded
from tests.support.fake_engine import FakeEngine
from tests.support.rollouts import rollouts, small_recipe


def test_splits_are_disjoint_and_complete() -> None:
    train = pairs(ArithmeticConfig(highest=10, held_out=20))
    held_out = pairs(ArithmeticConfig(highest=10, held_out=20, split="held_out"))
    assert len(held_out) == 20
    assert sorted(train + held_out) == [(a, b) for a in range(1, 11) for b in range(1, 11)]


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("12", 12),
        ("5 + 7 = 12.", 12),
        ("-3", -3),
        ("twelve", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_last_number_is_the_answer(reply: str, number: int | None) -> None:
    assert last_number(reply) == number


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("{answer}", 1.0),
        ("It is {answer}.", 0.8),
        ("{next}", 0.2 * 0.5 + 0.2),
        ("I do not know", 0.0),
        (None, 0.0),
    ],
)
async def test_reply_is_rewarded_for_value_distance_and_form(reply: str | None, reward: float) -> None:
    task = next(iter(environments.load("arithmetic", {}).taskset))
    answer = task.data.answer
    text = None if reply is None else reply.format(answer=answer, next=answer + 1)
    trace = SimpleNamespace(last_reply=text)
    parts = [0.6 * await task.correct(trace), 0.2 * await task.close(trace), 0.2 * await task.number_only(trace)]
    assert sum(parts) == pytest.approx(reward)


def test_split_without_sums_is_refused() -> None:
    with pytest.raises(UsageError, match="held_out = 9 leaves no sum to train: there are 9 sums"):
        environments.load("arithmetic", {"highest": 3, "held_out": 9})


def problems(directory: Path, *records: object, **args: str) -> list[vf.Task]:
    path = directory / "math.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    return list(environments.load("math-problems", {"path": str(path), **args}).taskset)


def test_problems_are_read_from_a_file(tmp_path: Path) -> None:
    solution = r"Half of it, so $\boxed{\frac{3}{4}}$."
    first, second = problems(tmp_path, {"q": "1/2?", "a": 0.5}, {"q": "?", "a": solution}, question="q", answer="a")
    assert (first.data.prompt, first.data.answer) == (f"1/2?\n\n{INSTRUCTION}", "0.5")
    assert second.data.answer == r"\frac{3}{4}"


def test_missing_file_and_missing_key_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file .*absent\.jsonl"):
        environments.load("math-problems", {"path": str(tmp_path / "absent.jsonl")})
    with pytest.raises(ValueError, match=r"math\.jsonl, line 2: there is no answer, only question"):
        problems(tmp_path, {"question": "?", "answer": "1"}, {"question": "?"})


GSM8K = {"question": "Natalia sold 48 clips ...", "answer": "48/2 = <<48/2=24>>24 ... 48+24 = 72 ...\n#### 72"}
DAPO = {
    "prompt": [{"role": "user", "content": "Solve: x + 1 = 3."}],
    "reward_model": {"ground_truth": "2", "style": "rule"},
}


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("record", "args", "prompt", "answer"),
    [
        (GSM8K, {"answer_marker": "####"}, GSM8K["question"], "72"),
        (DAPO, {"question": "prompt.0.content", "answer": "reward_model.ground_truth"}, "Solve: x + 1 = 3.", "2"),
    ],
    ids=["GSM8K", "DAPO"],
)
def test_public_data_sets_are_read_without_conversion(
    tmp_path: Path, suffix: str, record: dict[str, Any], args: dict[str, str], prompt: str, answer: str
) -> None:
    path = tmp_path / f"data.{suffix}"
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record, record]), path)
    else:
        path.write_text(f"{json.dumps(record)}\n" * 2)
    tasks = list(environments.load("math-problems", {"path": str(path), "instruction": "", **args}).taskset)
    assert [(task.data.prompt, task.data.answer) for task in tasks] == [(prompt, answer)] * 2


@pytest.mark.parametrize(
    ("record", "args", "why"),
    [
        ({"question": "?", "answer": "72"}, {"answer_marker": "####"}, "line 1: the answer has no marker '####'"),
        (DAPO, {"question": "prompt.1.content", "answer": "prompt"}, "line 1: there is no prompt.1.content"),
        ({"question": "?", "answer": " "}, {}, "line 1: answer is empty"),
        (DAPO, {"question": "prompt", "answer": "prompt"}, "line 1: prompt = .* is neither text nor a number"),
        ({"question": "?", "answer": None}, {}, "line 1: answer = None is neither text nor a number"),
    ],
)
def test_record_without_question_or_answer_is_named(
    tmp_path: Path, record: dict[str, Any], args: dict[str, str], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        problems(tmp_path, record, **args)


def test_invalid_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"data\.parquet is not a readable parquet file"):
        list(environments.load("math-problems", {"path": str(path)}).taskset)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{1}, no, \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        (r"\boxed{}", ""),
        ("1", None),
    ],
)
def test_last_box_is_the_answer(text: str, expected: str | None) -> None:
    assert last_box(text) == expected


async def test_answers_are_compared_as_mathematics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifiers.v1.runtimes.subprocess.CACHE_DIR", tmp_path / "cache")
    (task,) = problems(tmp_path, {"question": "1/3 + 1/6?", "answer": "1/2"})
    runtime = make_runtime(SubprocessConfig(), name="grader")
    await runtime.start()
    try:
        replies = {
            r"\boxed{1/2}": 1.0,
            r"\boxed{\frac{3}{6}}": 1.0,
            r"\boxed{1/3}": 0.0,
            r"\boxed{" + "9" * (LONGEST_ANSWER + 1) + "}": 0.0,
            "1/2": 0.0,
            "": 0.0,
        }
        rewards = {reply: await task.correct(SimpleNamespace(last_reply=reply), runtime) for reply in replies}
    finally:
        await runtime.stop()
    assert rewards == replies


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

    def _sample(self, prompt: list[int], number: int) -> list[int]:
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        read: str = re.findall(r"(?:Follow |<tool_response>\n)([a-z0-9]+)", text)[-1]
        call = f'<tool_call>\n{{"name": "sh", "arguments": {{"command": "cat {read}"}}}}\n</tool_call>'
        answer = read if read.isdigit() or number > self.turns else call
        return [*self._tokenizer.encode(answer, add_special_tokens=False), self._tokenizer.eos_token_id]


@pytest.mark.parametrize(("turns", "reward"), [(100, 1.0), (1, 0.0)])
async def test_rollout_with_commands_is_one_sequence_of_sampled_tokens(model: Path, turns: int, reward: float) -> None:
    environment = {"id": "tool-use", "args": {"links": 3, "n": 5}}
    made = small_recipe(model, seq_len=512, environments=[environment])
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
    if not reward:
        return
    summary, kept = transcripts.stored((rollout,), {"state": "waiting"})
    (shown,) = kept.shown(summary, {}).conversations
    roles = [message.role for message in shown.messages]
    assert roles[-7:] == ["assistant", "tool", "assistant", "tool", "assistant", "tool", "assistant"]
    calls = [call for message in shown.messages for call in message.tool_calls]
    assert [json.loads(call.arguments) for call in calls] == [{"command": f"cat {name}"} for name in names]
    results = [message for message in shown.messages if message.role == "tool"]
    assert [message.content.strip() for message in results] == [*names[1:], answer]
    assert [message.tool_call_id for message in results] == [call.id for call in calls]
    assert shown.messages[-1].content == answer and shown.tools == ["sh"]
    assert sum(summary.reward_parts.values()) == summary.reward == 1.0
    for message in filter(lambda each: each.sampled, shown.messages):
        assert message.started_s is not None and message.ended_s is not None
        assert 0 <= message.started_s <= message.ended_s <= rollout.info.seconds + 1


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
