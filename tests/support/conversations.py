"""Conversations with thoughts and tool calls, between a program, the token client and a scripted engine."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf
from aiohttp import web
from renderers import create_renderer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import AgentInfo, TraceTask

from primeslurm.models.gpt_oss import harmony
from primeslurm.orchestrator.rendering.conversation_cache import cache_conversations
from primeslurm.orchestrator.rendering.program_protocols import ROLLOUT_DIALECTS
from primeslurm.orchestrator.rendering.renderer_selection import Rendering
from primeslurm.orchestrator.worker.token_client import TokenClient
from tests.support.fake_engine import routed

Message = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}
O200K = "fb374d419588a4632f3f557e76b4b70aebbca790"
"""The vocabulary `o200k_base` in tiktoken's cache."""
HARMONY = {
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
}
"""Special tokens of gpt-oss in the conversations."""
START: Sequence[Message] = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look it up."})


def calling(turn: int) -> Message:
    """Return an answer that thinks and calls a tool."""
    function = {"name": "look_up", "arguments": {"word": f"w {turn}"}}
    calls = [{"id": f"functions.look_up:{turn}", "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "reasoning_content": f"I think {turn}.", "tool_calls": calls}


def answering(turn: int) -> Message:
    """Return an answer that thinks and ends the work."""
    return {"role": "assistant", "content": f"It is {turn}.", "reasoning_content": f"Done {turn}."}


def write_tokenizer(directory: Path, config: Any) -> Path:
    """Write a byte tokenizer with all tokens that a renderer needs, and return its directory."""
    special: list[str] = []
    while True:
        tokenizer = with_tokens(special)
        missing = missing_tokens(tokenizer, config)
        if not missing:
            tokenizer.save_pretrained(directory)
            return directory
        assert not set(missing) <= set(special), f"{missing} are in vain"
        special += [token for token in missing if token not in special]


def with_tokens(special: Sequence[str]) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<unk>"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    fast.add_tokens([AddedToken(token, special=False, normalized=False) for token in special])
    return fast


def write_harmony_tokenizer(directory: Path) -> Path:
    """Write a tokenizer with gpt-oss's vocabulary and no merges, and return its directory.

    litellm, a dependency of mini-swe-agent (`./just harness mini_swe_agent`), contains the vocabulary as a tiktoken
    cache.
    """
    places = Path(sys.prefix).glob("harnesses/mini_swe_agent/lib/python3*/site-packages/litellm/litellm_core_utils")
    (file,) = (place / "tokenizers" / O200K for place in places)
    lines = (line.split() for line in file.read_bytes().splitlines())
    alphabet = harmony.byte_alphabet()
    ranks = {"".join(alphabet[byte] for byte in base64.b64decode(token)): int(rank) for token, rank in lines}
    core = Tokenizer(models.BPE(vocab=ranks, merges=[], ignore_merges=True))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core)
    special = [HARMONY.get(i, f"<|reserved_{i}|>") for i in range(len(ranks), max(HARMONY) + 1)]
    fast.add_tokens([AddedToken(token, special=False, normalized=False) for token in special])
    fast.save_pretrained(directory)
    return directory


def missing_tokens(tokenizer: Any, config: Any) -> list[str]:
    """Return the tokens that a renderer needs and the tokenizer lacks."""
    vocabulary, convert, encode = tokenizer.get_vocab(), tokenizer.convert_tokens_to_ids, tokenizer.encode
    missing: list[str] = []

    def converted(token: Any) -> Any:
        if isinstance(token, str) and token not in vocabulary:
            missing.append(token)
            return len(vocabulary)
        return convert(token)

    def encoded(text: str, **kwargs: Any) -> Any:
        if text[:1] in "<[\uff5c" and text[-1:] in ">]\uff5c" and text not in vocabulary:
            missing.append(text)
            return [len(vocabulary)]
        return encode(text, **kwargs)

    tokenizer.convert_tokens_to_ids, tokenizer.encode = converted, encoded
    try:
        create_renderer(tokenizer, config)
    except (AssertionError, ValueError):
        if not missing:
            raise
    del tokenizer.convert_tokens_to_ids, tokenizer.encode
    return missing


def sampled(renderer: Any, message: Message) -> list[int]:
    """Return the tokens that a model samples for this message after START, up to and with the end of its turn."""
    start, thoughts = list(START), message.get("reasoning_content", "")
    before = renderer.render_ids(start, tools=[TOOL], add_generation_prompt=True)
    whole = renderer.render_ids([*start, message], tools=[TOOL])
    tokens = whole[len(before) :]
    if whole[: len(before)] != before or thoughts not in renderer._tokenizer.decode(tokens):
        # the template drops the thoughts of earlier answers
        pairs = zip(whole, before, strict=False)
        header = next((i for i, (one, other) in enumerate(pairs) if one != other), len(before))
        rest = whole[header:]
        closed = thoughts if "</think>" in renderer._tokenizer.decode(rest) else f"{thoughts}</think>"
        tokens = [*renderer._tokenizer.encode(closed, add_special_tokens=False), *rest]
        empty = renderer._tokenizer.encode("<think></think>", add_special_tokens=False)
        if rest[: len(empty)] == empty:  # the model begins thoughts itself
            thinking = renderer._tokenizer.encode(f"<think>{thoughts}</think>", add_special_tokens=False)
            tokens = [*thinking, *rest[len(empty) :]]
    stops = set(renderer.get_stop_token_ids())
    if not stops & set(tokens):  # the token that ends the turn begins the next one
        bare = {key: value for key, value in message.items() if key != "reasoning_content"}
        follows = {"role": "user", "content": "."}
        if calls := message.get("tool_calls"):
            follows = {"role": "tool", "tool_call_id": calls[0]["id"], "name": "look_up", "content": "."}
        followed = renderer.render_ids([*start, bare, follows], tools=[TOOL])
        tokens = [*tokens, next(token for token in reversed(followed) if token in stops)]
    end = next(i for i, token in enumerate(tokens) if token in stops)
    return list(tokens[: end + 1])


@dataclass
class ScriptedEngine:
    """Answers request i with the tokens of script[i]."""

    script: Sequence[Sequence[int]]
    routed: bool = False
    """Whether answers route the token at position p to expert p % 200, in 3 layers with 2 experts each."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[ScriptedEngine]:
        """Serve on a free port."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/inference/v1/generate", self._generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _generate(self, request: web.Request) -> web.Response:
        tokens = list(self.script[len(self.requests)])
        body = await request.json()
        self.requests.append(body)
        content = [{"token_id": token, "logprob": -(i + 1) / 8} for i, token in enumerate(tokens)]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}],
        }
        if self.routed:
            first = body["sampling_params"].get("routed_experts_prompt_start", 0)
            choice["routed_experts"] = routed(first, len(body["token_ids"]) + len(tokens) - 1)
        return web.json_response({"request_id": "r", "choices": [choice]})


@dataclass
class RealEngine:
    """A running engine."""

    url: str
    routed: bool = False


@dataclass
class Conversation:
    """Result of a conversation."""

    trace: vf.Trace
    completions: list[Any]
    messages: list[Message]


async def converse(
    model: Path,
    rendering: Rendering,
    engine: ScriptedEngine | RealEngine,
    replies: Callable[[int, Message], Sequence[Message]],
    says_again: Callable[[Message], Message] = lambda message: message,
    **sampling: Any,
) -> Conversation:
    """Let a program talk to the engine until `replies` has no further message.

    `replies` gives the messages that follow an answer, by its number. `says_again` changes an answer before the program
    sends it back as part of the conversation.
    """
    messages = list(START)
    async with rollout(model, rendering, engine, **sampling) as (base, secret, ended):
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=60, headers=headers, trust_env=False) as program:
            turn = 0
            while True:
                body = {"model": "m", "messages": messages, "tools": [TOOL]}
                reply = await program.post(f"{base}/v1/chat/completions", json=body)
                assert reply.is_success, reply.text
                message = reply.json()["choices"][0]["message"]
                messages.append(says_again({name: value for name, value in message.items() if value is not None}))
                more = list(replies(turn, message))
                if not more:
                    break
                messages += more
                turn += 1
    return ended(json.loads(json.dumps(messages)))


@asynccontextmanager
async def rollout(
    model: Path,
    rendering: Rendering,
    engine: ScriptedEngine | RealEngine,
    trained: dict[str, Any] | None = None,
    trainable: bool = True,
    **sampling: Any,
) -> AsyncIterator[tuple[str, str, Callable[[list[Message]], Conversation]]]:
    """Return a rollout whose program talks to an engine: its endpoint, its secret, and a function that returns the
    conversation.

    `trained` are the sampling parameters of the recipe; None if the rollout is not trained. `sampling` are the
    rollout's.
    """
    where, options = lambda: engine.url, {"routed": engine.routed, "rendering": rendering, "trained": trained}
    client = TokenClient("router", where, str(model), 1 << 20, 60, **options)
    task = TraceTask(type="Task", data=vf.TaskData(prompt="Look it up."))
    trace = vf.Trace(task=task, agent=AgentInfo(config=AgentConfig(), trainable=trainable))
    async with InterceptionServer() as server:
        cache_conversations(server, ROLLOUT_DIALECTS)
        server.clients[client.key] = client
        context = ModelContext(model="m", client=client.config, sampling=vf.SamplingConfig(cache_salt="s", **sampling))
        async with server.acquire(RolloutSession(ctx=context, trace=trace)) as (base, secret, _):
            yield base, secret, lambda messages: Conversation(trace, client.endpoint.take(trace.id), messages)
    await client.close()
