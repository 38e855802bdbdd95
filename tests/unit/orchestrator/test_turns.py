"""Turns extend the sampled tokens with every family's renderer. A rollout branches if the template drops thoughts."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from openai_harmony import Author, DeveloperContent, Role, SystemContent, ToolDescription
from openai_harmony import Conversation as Conversations
from openai_harmony import Message as HarmonyMessage
from renderers import create_renderer
from renderers.base import load_tokenizer
from transformers import PreTrainedTokenizerFast
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.dialects.chat import parse_message
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, TraceTask

from primeslurm.models import bundled
from primeslurm.models.extending_renderer import LONGEST_PROMPT, extending_config
from primeslurm.orchestrator.rendering import conversation_cache
from primeslurm.orchestrator.rendering.conversation_cache import ConversationCache
from primeslurm.orchestrator.rendering.renderer_selection import Rendering, renderer_config
from primeslurm.orchestrator.rollouts import transcripts
from primeslurm.orchestrator.rollouts.job_protocol import Job
from primeslurm.orchestrator.worker import token_client
from primeslurm.orchestrator.worker.trace_sequences import sequences
from primeslurm.orchestrator.worker.trace_transcripts import TranscriptWriter
from primeslurm.wire.batches.rollout import Rollout
from tests.support.conversations import (
    START,
    TOOL,
    Conversation,
    Message,
    ScriptedEngine,
    answering,
    calling,
    converse,
    sampled,
    write_harmony_tokenizer,
    write_tokenizer,
)

TURNS = 20
QUESTION = 9
"""The turn whose answer ends the work. Then the user asks another question."""
NAMES = sorted(
    {name for family in bundled() if family.renderer for name in (family.renderer, *family.renderers.values())}
    | {"deepseek-v4"}  # belongs to no family, but a recipe may name it
)
THINKING: dict[str, dict[str, Any]] = {
    "deepseek-v4": {"enable_thinking": True},
    "laguna-xs.2": {"enable_thinking": True},
    "laguna-m.1": {"enable_thinking": True},
}
"""Renderers whose thinking has to be switched on."""
DEEPSEEK_V3_1 = "primeslurm.models.deepseek_v3.renderer:DeepSeekV31Renderer"
THOUGHTLESS = {DEEPSEEK_V3_1, "deepseek-v3", "kimi-k2", "laguna-xs-2.1", "llama-3", "prime-qwen3", "qwen3-vl"}
"""Renderers of models that do not think by default."""
SEQUENCES = {"deepseek-r1": TURNS}
"""Its template drops the thoughts of every answer."""
INTELLECT_3 = "primeslurm.models.glm4_moe.renderer:Intellect3Renderer"
ONE_SEQUENCE = {"deepseek-v4", "laguna-xs.2", "laguna-m.1", "laguna-s-2.1", "qwen3.8", "glm-5.3", INTELLECT_3}
"""Templates that keep all thoughts."""


def messages_of(name: str) -> list[Message]:
    """Return the model's answers, turn by turn."""
    answers = [answering(turn) if turn in (QUESTION, TURNS - 1) else calling(turn) for turn in range(TURNS)]
    if name in THOUGHTLESS:
        answers = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in answers]
    return answers


def replies(turn: int, message: Message) -> list[Message]:
    """Return the messages that follow an answer."""
    if turn == TURNS - 1:
        return []
    if turn == QUESTION:
        return [{"role": "user", "content": "And then?"}]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "look_up"
    return [{"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": f"found {turn}"}]


def trained(talk: Conversation) -> tuple[Rollout, ...]:
    """Return the training sequences of a conversation."""
    return sequences(Job("j", "g", "e", 0, 3, "r", "s"), talk.trace, talk.completions, 1.0, False)


def assert_trained_as_seen(rollouts: tuple[Rollout, ...], engine: ScriptedEngine) -> None:
    """Assert that each sampled token is trained once, after exactly the prompt that the engine got."""
    expected = sorted((tuple(r["token_ids"]), tuple(s)) for r, s in zip(engine.requests, engine.script, strict=True))
    actual = []
    for rollout in rollouts:
        tokens, mask = rollout.token_ids.tolist(), rollout.mask.tolist()
        starts = [i for i, is_sampled in enumerate(mask) if is_sampled and not mask[i - 1]]
        for start in starts:
            end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            actual.append((tuple(tokens[:start]), tuple(tokens[start:end])))
    assert sorted(actual) == expected


@pytest.mark.parametrize("name", NAMES)
async def test_twenty_turns_with_tools_and_thoughts(name: str, tmp_path: Path) -> None:
    config = renderer_config(name, THINKING.get(name, {}))
    model = write_harmony_tokenizer(tmp_path) if name == "gpt-oss" else write_tokenizer(tmp_path, config)
    renderer = create_renderer(load_tokenizer(str(model)), config)
    answers = messages_of(name)
    speaking = renderer
    if name == "gpt-oss":  # its prompts never show thoughts
        speaking = create_renderer(renderer._tokenizer, renderer_config(name, {"auto_drop_analysis": False}))
    engine = ScriptedEngine([sampled(speaking, message) for message in answers])
    async with engine.serving():
        conversation = await converse(model, Rendering(config), engine, replies)
    rollouts = trained(conversation)
    assert_trained_as_seen(rollouts, engine)
    assert len(rollouts) == (1 if name in ONE_SEQUENCE | THOUGHTLESS else SEQUENCES.get(name, 2))
    assert {rollout.info.turns for rollout in rollouts} == {TURNS}
    calls = [message["tool_calls"][0]["function"] for message in conversation.messages if message.get("tool_calls")]
    assert [call["arguments"] for call in calls] == [
        f'{{"word": "w {turn}"}}' for turn in range(TURNS) if turn % 10 != 9
    ]
    if name not in THOUGHTLESS | {"deepseek-r1"}:  # R1's template starts no thoughts after a tool's result
        thoughts = [m.get("reasoning_content", "").strip() for m in conversation.messages if m["role"] == "assistant"]
        assert thoughts == [message["reasoning_content"] for message in answers]
    assert_rendered_as_a_whole(renderer, engine, conversation)
    assert_transcript_is_complete(model, conversation)
    if name == "gpt-oss":
        assert_rendered_as_by_its_makers(renderer, engine, conversation)


def assert_transcript_is_complete(model: Path, conversation: Conversation) -> None:
    """Assert that the transcript has the messages that the program sent and got, and the text of every token."""
    job, writer = Job("j", "g", "e", 0, 3, "r", "s"), TranscriptWriter(str(model))
    rollouts = sequences(job, conversation.trace, conversation.completions, 1.0, False, 0, writer.describe)
    summary, kept = transcripts.stored(rollouts, {"state": "waiting"})
    (shown,) = kept.shown(summary, {}).conversations
    spoken = [message for message in shown.messages if message.sampled]
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    assert [(each.content, each.reasoning) for each in spoken] == [
        (each.get("content") or "", each.get("reasoning_content") or "") for each in answers
    ]
    calls = [[call["function"] for call in each.get("tool_calls") or ()] for each in answers]
    assert [[{"name": call.name, "arguments": call.arguments} for call in each.tool_calls] for each in spoken] == calls
    longest = max(shown.sequences, key=lambda each: len(each.spans))
    heard = [shown.messages[span.message] for span in longest.spans if shown.messages[span.message].role != "assistant"]
    given = [message for message in conversation.messages if message["role"] != "assistant"]
    assert [(each.role, each.content) for each in heard] == [(each["role"], each["content"]) for each in given]
    assert shown.tools == ["look_up"]
    tokenizer = load_tokenizer(str(model))
    for rollout, sequence in zip(rollouts, shown.sequences, strict=True):
        assert sequence.token_ids == rollout.token_ids.tolist() and sequence.sampled == (rollout.versions >= 0).tolist()
        assert "".join(sequence.pieces) == tokenizer.decode(sequence.token_ids, skip_special_tokens=False)
        assert [span.end for span in sequence.spans][-1] == len(sequence.token_ids)
        for span in sequence.spans:
            if shown.messages[span.message].sampled and any(sequence.sampled[span.start : span.end]):
                text = "".join(sequence.pieces[span.start : span.end])
                assert shown.messages[span.message].content in text


def assert_rendered_as_a_whole(renderer: Any, engine: ScriptedEngine, conversation: Conversation) -> None:
    """Assert that the prompts, rendered turn by turn, equal the renderer's output for the whole conversation."""
    length = 2
    for turn, request in enumerate(engine.requests):
        whole = renderer.render_ids(conversation.messages[:length], tools=[TOOL], add_generation_prompt=True)
        seen = renderer._tokenizer.decode(request["token_ids"])
        assert seen == renderer._tokenizer.decode(whole) and request["token_ids"] == whole, f"turn {turn}"
        length += 2
    assert length == len(conversation.messages) + 1
    assert list(START) == conversation.messages[:2]


def assert_rendered_as_by_its_makers(renderer: Any, engine: ScriptedEngine, conversation: Conversation) -> None:
    """Assert that OpenAI's encoder gives the same prompts, except that it does not choose the answer's channel.

    The encoder gets no thoughts before the last question, because it drops them after an answer, and shows them again
    after a call.
    """
    opened = [renderer._channel, *renderer._encode("analysis"), renderer._message]
    date = renderer._conversation_start_date_resolved
    tools = [ToolDescription.new(**TOOL["function"])]
    about = DeveloperContent.new().with_instructions(START[0]["content"]).with_function_tools(tools)
    head = [
        HarmonyMessage.from_role_and_content(Role.SYSTEM, SystemContent.new().with_conversation_start_date(date)),
        HarmonyMessage.from_role_and_content(Role.DEVELOPER, about),
    ]
    for turn, request in enumerate(engine.requests):
        question = 3 + 2 * QUESTION if turn > QUESTION else 1
        messages = conversation.messages[1 : 2 + 2 * turn]
        numbered = enumerate(messages, 1)
        converted = [part for number, message in numbered for part in as_harmony(message, thinks=number > question)]
        history = Conversations.from_messages([*head, *converted])
        theirs = renderer._enc.render_conversation_for_completion(history, Role.ASSISTANT)
        assert request["token_ids"] == [*theirs, *opened], f"turn {turn}"


def as_harmony(message: Message, thinks: bool) -> list[HarmonyMessage]:
    """Convert a message to the encoder's form."""
    if message["role"] == "user":
        return [HarmonyMessage.from_role_and_content(Role.USER, message["content"])]
    if message["role"] == "tool":
        author = Author.new(Role.TOOL, "functions.look_up")
        answer = HarmonyMessage.from_author_and_content(author, message["content"])
        return [answer.with_recipient("assistant").with_channel("commentary")]
    made = []
    if thinks:
        thought = HarmonyMessage.from_role_and_content(Role.ASSISTANT, message["reasoning_content"])
        made.append(thought.with_channel("analysis"))
    for call in message.get("tool_calls") or ():
        call_message = HarmonyMessage.from_role_and_content(Role.ASSISTANT, call["function"]["arguments"])
        made.append(call_message.with_channel("commentary").with_recipient("functions.look_up"))
    if message.get("content"):
        made.append(HarmonyMessage.from_role_and_content(Role.ASSISTANT, message["content"]).with_channel("final"))
    return made


async def test_deepseek_v31_thinks_once_per_question_and_drops_the_thoughts(tmp_path: Path) -> None:
    # Answers after a tool's result have no thoughts. An answer with thoughts is in the next prompt without them, which
    # starts another sequence.
    config, silent = renderer_config(DEEPSEEK_V3_1, {"thinking": True}), renderer_config(DEEPSEEK_V3_1, {})
    model = write_tokenizer(tmp_path, config)
    renderer, other = (create_renderer(load_tokenizer(str(model)), each) for each in (config, silent))
    script = [
        sampled(renderer, message) if turn in (0, QUESTION + 1) else sampled(other, bare(message))
        for turn, message in enumerate(messages_of("qwen3"))
    ]
    engine = ScriptedEngine(script)
    async with engine.serving():
        conversation = await converse(model, Rendering(config), engine, replies)
    rollouts = trained(conversation)
    assert_trained_as_seen(rollouts, engine)
    assert len(rollouts) == 3
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    assert [m.get("reasoning_content") for m in answers if m.get("reasoning_content")] == ["I think 0.", "I think 10."]
    assert_rendered_as_a_whole(renderer, engine, conversation)


def test_malformed_calls_of_deepseek_v31_get_a_status(tmp_path: Path) -> None:
    config = renderer_config(DEEPSEEK_V3_1, {})
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path, config)))
    begin, call, sep, end = (f"<\uff5ctool▁{name}\uff5c>" for name in ("calls▁begin", "call▁begin", "sep", "call▁end"))
    calls = {
        f'{call}add{sep}{{"a": 1}}{end}': ("ok", "add", {"a": 1}),
        f"{call}add{sep}{end}": ("ok", "add", {}),
        f'{call}add{sep}{{"a": {end}': ("invalid_json", "add", '{"a": '),
        f"{call}add{sep}{'[' * 3000}{end}": ("invalid_json", "add", "[" * 3000),
        f"{call}{sep}{{}}{end}": ("missing_name", None, {}),
        f"{call}add{end}": ("malformed_structure", None, None),
        f'{call}add{sep}{{"a": 1}}': ("unclosed_block", "add", {"a": 1}),
    }
    ids = tokenizer.encode(f"Now.{begin}{''.join(calls)}", add_special_tokens=False)
    parsed = create_renderer(tokenizer, config).parse_response(ids)
    assert parsed.content == "Now."
    assert [(call.status, call.name, call.arguments) for call in parsed.tool_calls] == list(calls.values())


async def test_cost_of_a_turn_does_not_grow_with_the_conversation(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Turn 200 tokenizes and hashes only what is new, like turn 2.
    turns, tokenized, hashed = 200, [0], [0]
    encode, message_hash = PreTrainedTokenizerFast._encode_plus, conversation_cache._hash_message

    def counting_encode(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        encoding = encode(tokenizer, *args, **kwargs)
        tokenized[-1] += len(encoding["input_ids"])
        return encoding

    def counting_hash(message: Any) -> str:
        hashed[-1] += 1
        return message_hash(message)

    def more(turn: int, message: Message) -> list[Message]:
        tokenized.append(0)
        hashed.append(0)
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "name": "look_up", "content": f"found {100 + turn}"}
        return [result] if turn < turns - 1 else []

    config = extending_config("qwen3", {})
    renderer = create_renderer(load_tokenizer(str(qwen3)), config)
    engine = ScriptedEngine([sampled(renderer, calling(100 + turn)) for turn in range(turns)])
    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", counting_encode)
    monkeypatch.setattr(conversation_cache, "_hash_message", counting_hash)
    async with engine.serving():
        conversation = await converse(qwen3, Rendering(config), engine, more)
    (rollout,) = trained(conversation)
    assert len(engine.requests) == rollout.info.turns == turns
    assert 0 < max(tokenized[1:turns]) <= tokenized[1]  # texts that came before are not encoded again
    assert hashed[1] > 0 and set(hashed[1:turns]) == {hashed[1]}


async def test_turn_requests_only_its_own_rows_of_router_replay(qwen3: Path) -> None:
    config = extending_config("qwen3", {})
    renderer = create_renderer(load_tokenizer(str(qwen3)), config)
    engine = ScriptedEngine([sampled(renderer, message) for message in messages_of("qwen3")], routed=True)
    async with engine.serving():
        conversation = await converse(qwen3, Rendering(config), engine, replies)
    seen = [len(request["token_ids"]) for request in engine.requests]
    asked = [request["sampling_params"].get("routed_experts_prompt_start", 0) for request in engine.requests]
    expected = [0] + [seen[turn] + len(engine.script[turn]) - 1 for turn in range(TURNS - 1)]
    expected[QUESTION + 1] = 0  # a new sequence
    assert asked == expected
    for rollout in trained(conversation):  # the row of an answer's last token arrives with the next turn
        assert rollout.routed_experts is not None
        last = len(rollout.token_ids) - 1
        assert rollout.routed_experts[:, 2, 1].tolist() == [*(p % 200 for p in range(last)), 255]


def bare(message: Message) -> Message:
    """Return an answer as many programs resend it: without thoughts, and without surrounding whitespace."""
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**kept, "content": (kept.get("content") or "").strip()}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("qwen3"), extending_config("qwen3", {}))


async def talked(
    model: Path, answers: list[Message], options: dict[str, Any], **talk: Any
) -> tuple[Conversation, ScriptedEngine]:
    config = extending_config("qwen3", options)
    renderer = create_renderer(load_tokenizer(str(model)), config)
    engine = ScriptedEngine([sampled(renderer, message) for message in answers])
    async with engine.serving():
        return await converse(model, Rendering(config), engine, **talk), engine


async def test_programs_that_resend_answers_without_thoughts_extend_the_sequence(qwen3: Path) -> None:
    answers = [*messages_of("qwen3")[:QUESTION], answering(9)]
    for turn in (3, 4):  # the same call after different thoughts
        answers[turn]["tool_calls"] = answers[2]["tool_calls"]

    def more(turn: int, message: Message) -> list[Message]:
        return replies(turn, message) if turn < QUESTION else []

    conversation, engine = await talked(qwen3, answers, {}, replies=more, says_again=bare)
    (rollout,) = trained(conversation)
    assert_trained_as_seen((rollout,), engine)
    assert all(f"I think {turn}." in load_tokenizer(str(qwen3)).decode(rollout.token_ids) for turn in range(QUESTION))


@pytest.mark.parametrize(
    ("thinks", "options", "expected"),
    [(False, {}, 1), (True, {}, 4), (True, {"thinking_retention": "all"}, 1), (False, {"enable_thinking": False}, 1)],
)
async def test_questions_branch_only_if_thoughts_are_dropped(
    qwen3: Path, thinks: bool, options: dict[str, Any], expected: int
) -> None:
    answers = [answering(turn) for turn in range(4)]
    if not thinks:
        answers = [{"role": "assistant", "content": f"  It is {turn}. "} for turn in range(4)]

    def ask(turn: int, message: Message) -> list[Message]:
        return [{"role": "user", "content": "And then?"}] if turn < 3 else []

    if thinks or options:
        conversation, engine = await talked(qwen3, answers, options, replies=ask)
    else:  # the template adds empty thoughts before the last answer, but such models sample none
        tokenizer = load_tokenizer(str(qwen3))
        engine = ScriptedEngine([tokenizer.encode(message["content"] + "<|im_end|>") for message in answers])
        async with engine.serving():
            conversation = await converse(
                qwen3, Rendering(extending_config("qwen3", {})), engine, replies=ask, says_again=bare
            )
    rollouts = trained(conversation)
    assert_trained_as_seen(rollouts, engine)
    assert len(rollouts) == expected


async def test_tools_that_cannot_be_rendered_are_refused_with_a_reason(qwen3: Path) -> None:
    engine, rendering = (
        ScriptedEngine([]),
        Rendering(extending_config("qwen3", {}), "tools cannot be rendered for m: why"),
    )
    async with engine.serving():
        with pytest.raises(AssertionError, match="tools cannot be rendered for m: why"):
            await converse(qwen3, rendering, engine, replies)
    assert not engine.requests


def test_equal_answer_of_another_branch_is_not_restored() -> None:
    # Two agents of a rollout give equal answers after different thoughts.
    trace = vf.Trace(task=TraceTask(type="Task", data=vf.TaskData(prompt="")), agent=AgentInfo(config=AgentConfig()))

    def add(parent: int | None, role: str, text: str, thoughts: str | None = None) -> int:
        message = {"role": role, "content": text, "reasoning_content": thoughts}
        trace.nodes.append(MessageNode(parent=parent, message=parse_message(message), sampled=thoughts is not None))
        return len(trace.nodes) - 1

    conversations: list[list[Message]] = []
    for agent in ("one", "other"):
        place = None
        conversations.append([])
        for question in (agent, "And then?"):
            asked = add(place, "user", question)
            place = add(asked, "assistant", "Done.", f"{agent}: {question}")
            conversations[-1] += [{"role": "user", "content": question}, {"role": "assistant", "content": "Done."}]
    for agent, messages in zip(("one", "other"), conversations, strict=True):
        restored = ConversationCache(trace).messages(messages, parse_message)
        assert [restored[i].reasoning_content for i in (1, 3)] == [f"{agent}: {agent}", f"{agent}: And then?"]
    rephrased = [{"role": "user", "content": "In other words"}, *conversations[1][1:]]
    restored = ConversationCache(trace).messages(rephrased, parse_message)
    assert restored[1].reasoning_content == "one: one", "ambiguous: the first one"


def test_prompt_of_a_group_is_tokenized_once(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenized: list[object] = []
    encode = PreTrainedTokenizerFast._encode_plus
    counting = lambda *args, **options: (tokenized.append(args), encode(*args, **options))[1]  # noqa: E731
    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", counting)
    renderer = create_renderer(load_tokenizer(str(qwen3)), extending_config("qwen3", {}))
    prompts = [[{"role": "user", "content": text}] for text in ("two", "three", "four " * LONGEST_PROMPT)]
    first = renderer.render(prompts[0], add_generation_prompt=True)
    tokens, calls = list(first.token_ids), len(tokenized)
    first.token_ids.append(0)
    assert renderer.render(prompts[0], add_generation_prompt=True).token_ids == tokens
    assert len(tokenized) == calls
    assert renderer.render(prompts[0]).token_ids != tokens != renderer.render(prompts[1]).token_ids
    long = [renderer.render(prompts[2]).token_ids for _ in range(2)]
    assert long[0] == long[1] and len(tokenized) > calls + 2, "a long prompt is not remembered"


async def test_only_short_prompts_are_rendered_on_the_event_loop() -> None:
    slot, loop = token_client.PromptSlot(None), threading.get_ident()
    assert await slot.run(threading.get_ident) != loop
    token_client.is_short.set(True)
    assert await slot.run(threading.get_ident) == loop
    with slot.lock:  # another prompt is being rendered
        rendering = asyncio.create_task(slot.run(threading.get_ident))
        await asyncio.sleep(0)
    assert await rendering != loop
