"""Responses of engines and teachers, and their metrics, as the orchestrator and environment workers read them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers.base import ParsedToolCall, ToolCallParseStatus
from verifiers.v1.runtimes import Runtime
from verifiers.v1.types import ToolCall

from primeslurm.inference.router.supervisor import WorkerDifference, Workers, compare, listed_urls
from primeslurm.models.deepseek_v3 import renderer as deepseek_v31_renderer
from primeslurm.orchestrator.environments.shell import ShellConfig, ShellHarness
from primeslurm.orchestrator.rendering import program_protocols
from primeslurm.orchestrator.teacher import Teacher, TeacherError
from primeslurm.orchestrator.telemetry.engine_load import LoadWindow, parse, scrape
from primeslurm.orchestrator.weight_updates.engine_client import EngineClient, EngineDownError
from primeslurm.orchestrator.worker.generate_endpoint import (
    Completion,
    GenerateEndpoint,
    NoAnswerError,
    RefusedError,
    completion_of,
)
from primeslurm.orchestrator.worker.router_session import RouterSession
from primeslurm.wire.batches import routed_experts
from primeslurm.wire.decoding import DamagedError
from primeslurm.wire.transport import http
from tests.unit.fuzz.mutations import bounded, fuzzed, texts, trees


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


ANSWER: dict[str, Any] = {
    "choices": [
        {
            "token_ids": [5, 6, 7],
            "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1}, {"logprob": 0.0}]},
            "weight_versions": [{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 3}],
            "finish_reason": "stop",
            "routed_experts": npy(np.zeros((4, 3, 2), np.uint8)),
        }
    ],
    "prompt_token_ids": [1, 2],
    "mm_placeholders": {"image": [{"offset": 0, "length": 2}]},
}
PROMPT = 2


def encoded(value: Any) -> bytes:
    """Encode JSON as Python does: with NaN and lone surrogates."""
    return json.dumps(value, default=lambda each: each.decode("latin-1")).encode()


def is_a_completion(found: Completion) -> None:
    n = len(found.token_ids)
    assert len(found.logprobs) == len(found.versions) == n
    assert all(0 <= token < 2**31 for token in found.token_ids) and all(map(math.isfinite, found.logprobs))
    assert np.isfinite(np.array(found.logprobs, np.float32)).all() and min(found.versions, default=0) >= 0
    if found.routed_experts is not None:
        assert found.routed_experts.shape[0] == n + len(found.prompt_ids or [0] * PROMPT)


def with_routed(text: str, **others: Any) -> dict[str, Any]:
    """Return a response with one choice that has these routed experts."""
    return {**ANSWER, "choices": [{**ANSWER["choices"][0], "routed_experts": text, **others}]}


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",\n", "\t:\r\n ")])
@pytest.mark.parametrize("finish", ["stop", 'a"routed_experts":"b', '"routed_experts":"', "\\", ',"routed_experts":"'])
@pytest.mark.parametrize("first", [True, False])
def test_routed_experts_are_found_at_any_position(separators: tuple[str, str], finish: str, first: bool) -> None:
    experts = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    answer = with_routed(npy(experts), finish_reason=finish)
    answer["choices"] += [{**ANSWER["choices"][0], "routed_experts": npy(experts + 1)}] * (not first)
    found = completion_of(json.dumps(answer, separators=separators).encode(), PROMPT, 0)
    assert found.routed_experts is not None and found.finish_reason == finish
    assert np.array_equal(found.routed_experts[:4], experts) and (found.routed_experts[4:] == 255).all()


@pytest.mark.parametrize("tokens", [400, 401, 402])
@pytest.mark.parametrize("says", [None, b"(900, 1, 2)", b"(402, 1, 1)", b"(3  , 1, 2)", b"(9**9, 1, 2)"])
def test_stated_sizes_of_routed_experts_are_not_trusted(tokens: int, says: bytes | None) -> None:
    experts = np.arange(tokens * 2, dtype=np.uint16).reshape(tokens, 1, 2)
    raw = base64.b64decode(npy(experts))
    if says is not None:
        raw = raw.replace(f"({tokens}, 1, 2)".encode(), says.replace(b"9**9", b"999999999"))
    answer = {**with_routed(base64.b64encode(raw).decode()), "prompt_token_ids": [1] * (tokens - 2)}
    content = json.dumps(answer, separators=(",", ":")).encode()
    if says is None:
        found = completion_of(content, PROMPT, 0).routed_experts
        assert found is not None and np.array_equal(found[:tokens], experts)
    else:
        with pytest.raises(DamagedError, match="routed experts"):
            completion_of(content, PROMPT, 0)


@pytest.mark.parametrize(
    "answer",
    [
        {**with_routed("", routed_experts=None), "routed_experts": ANSWER["choices"][0]["routed_experts"]},
        {**with_routed("", routed_experts=0), "prompt_logprobs": {"routed_experts": "x"}},
        with_routed("", routed_experts=0),
        with_routed(ANSWER["choices"][0]["routed_experts"] + '"'),
        with_routed(""),
    ],
    ids=["beside_the_choice", "and_a_number", "a_number", "with_a_quote", "empty"],
)
def test_invalid_routed_experts(answer: dict[str, Any]) -> None:
    with pytest.raises(DamagedError, match=r"routed experts|answer is invalid"):
        completion_of(json.dumps(answer).encode(), PROMPT, 0)


@fuzzed(1.5)
@given(trees(ANSWER).map(encoded) | texts(encoded(ANSWER)))
def test_answers_of_engines(content: bytes) -> None:
    with bounded(len(content), factor=64):
        for routed_from in (None, 0):
            try:
                is_a_completion(completion_of(content, PROMPT, routed_from))
            except DamagedError:
                continue


def header(shape: str, descr: str = "|u1", data: bytes = bytes(24)) -> str:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data).decode()


@pytest.mark.parametrize(
    "experts",
    [
        header("(4, 99999999, 9999999)"),
        header("(4, 3, 2)", "|O"),
        header("(4, 6)"),
        header("(4, 3, 3)"),
        npy(np.zeros((5, 3, 2), np.uint8)),
        "all of them",
        header("(" * 5000),
    ],
    ids=["2**50 bytes", "objects", "two axes", "too few", "other tokens", "words", "an expression"],
)
def test_unusable_experts_are_refused(experts: str) -> None:
    """`orchestrator/test_damaged_answers.py` has other unusable answers."""
    content = encoded(with_routed(experts))
    with bounded(len(content), factor=64), pytest.raises(DamagedError):
        completion_of(content, PROMPT, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("order", ["C", "F"])
def test_routed_experts_are_read_as_numpy_writes_them(dtype: type, order: Any) -> None:
    array = np.array(np.arange(5 * 3 * 2).reshape(5, 3, 2), dtype, order=order)
    found = routed_experts.from_npy(npy(array).encode(), 5)
    assert found.dtype == dtype and np.array_equal(found, array)


@fuzzed()
@given(texts(base64.b64decode(ANSWER["choices"][0]["routed_experts"])))
def test_routed_experts(data: bytes) -> None:
    with bounded(len(data), factor=64), contextlib.suppress(DamagedError):
        assert routed_experts.from_npy(base64.b64encode(data), 4).shape[0] == 4


METRICS = b"""# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:generation_tokens_total{engine="0"} 1e3
vllm:num_requests_waiting_by_reason{reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
"""


@fuzzed(0.5)
@given(st.lists(texts(METRICS) | st.sampled_from([METRICS.replace(b"3.0", b"x"), METRICS.replace(b"3.0", b"NaN")])))
def test_metrics(found: list[bytes]) -> None:
    window = LoadWindow()
    for second, each in enumerate(found):
        try:
            sample = parse(each.decode(errors="replace"))
        except ValueError:
            continue
        assert all(map(math.isfinite, sample.values()))
        window.add(float(second), {"decode-r0-0": sample})
        window.by_role(), window.by_replica()


# tests over real sockets


@asynccontextmanager
async def saying(answer: bytes, head: bytes = b"", length: int | None = None) -> AsyncIterator[str]:
    """Run a server that gives every client the same response."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            size = len(answer) if length is None else length
            writer.write(b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\n\r\n" % (head, size) + answer)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


CONTENTS = st.one_of(
    trees(ANSWER).map(encoded), texts(encoded(ANSWER)), st.sampled_from([b"", b"null", b"[" * 50_000, b"\xff\xfe"])
)
HEADS = st.sampled_from([b"", b"content-encoding: gzip\r\n", b"content-type: text/plain; charset=hex\r\n"])


@fuzzed(0.5)
@given(CONTENTS, HEADS)
def test_engine_status_is_a_value_or_an_error(content: bytes, head: bytes) -> None:
    async def ask() -> None:
        async with saying(content, head) as url:
            endpoint = GenerateEndpoint(lambda: url, 64, timeout_s=0.2, routed=True)
            try:
                body = {"token_ids": [1] * PROMPT, "sampling_params": {}}
                is_a_completion(await endpoint.generate(body, {}))
            except (NoAnswerError, RefusedError):
                pass
            finally:
                await endpoint.close()
            engine = EngineClient(lambda: url, "/m")
            with contextlib.suppress(EngineDownError):
                await engine.status()
            await engine.close()
            async with httpx.AsyncClient(trust_env=False, verify=False) as client:
                assert set((await scrape(client, {"decode": url})).samples) <= {"decode"}

    asyncio.run(ask())


TEACHER = {"choices": [{"prompt_logprobs": [None, {"5": {"logprob": -0.5, "rank": 1}}, {"6": {"logprob": -1.0}}]}]}


@fuzzed(0.5)
@given(trees(TEACHER).map(encoded) | texts(encoded(TEACHER)))
def test_answers_of_teachers(content: bytes) -> None:
    async def ask() -> None:
        async with saying(content) as url:
            teacher = Teacher(lambda: [url], http.internal_client(5.0))
            try:
                found = await teacher.logprobs([4, 5, 6])
                assert found.shape == (3,) and np.isfinite(found).all()
            except TeacherError:
                pass
            finally:
                await teacher.close()

    asyncio.run(ask())


async def test_endless_response_is_aborted() -> None:
    async with (
        saying(bytes(4 << 20), length=2**40) as url,
        http.internal_client(9.0, largest=1 << 20) as client,
        contextlib.aclosing(RouterSession(9.0, largest=1 << 20)) as session,
    ):
        with bounded(1 << 20, factor=16), pytest.raises(httpx.ReadError, match="too long"):
            await client.get(url)
        with bounded(1 << 20, factor=16), pytest.raises(aiohttp.ClientError, match="too long"):
            await session.post(url, b"", {})


async def test_compressed_response_is_invalid() -> None:
    async with (
        saying(b"\x1f\x8b" + bytes(100), b"content-encoding: gzip\r\n") as url,
        http.internal_client(9.0) as client,
        contextlib.aclosing(RouterSession(9.0)) as session,
    ):
        with pytest.raises(httpx.DecodingError, match="compressed"):
            await client.get(url)
        with pytest.raises(aiohttp.ClientError, match="compressed"):
            await session.post(url, b"", {})


def test_gate_status_is_decoded() -> None:
    from primeslurm.inference.version_gate import GateState
    from primeslurm.wire.weight_transfer.messages import EngineStatus

    state = GateState()
    assert msgspec.json.decode(msgspec.json.encode(state.report()), type=EngineStatus) == state.report()


WORKERS = {"urls": ["http://127.0.0.1:1", "http://127.0.0.2:1@3"], "total": 2}


@fuzzed()
@given(trees(WORKERS).map(encoded) | texts(encoded(WORKERS)))
def test_lists_of_routers(data: bytes) -> None:
    with bounded(len(data), factor=64):
        found = listed_urls(data)
        assert found is None or isinstance(compare(Workers(frozenset(WORKERS["urls"])), found), WorkerDifference)


@pytest.mark.parametrize("arguments", ["", "[]", "null", "[" * 100_000, '{"command": ["ls"]}', "\ud800", None])
async def test_any_tool_call_arguments_are_handled(arguments: Any) -> None:
    """No command is run, so no program is needed."""
    harness, nothing = ShellHarness(ShellConfig(id="shell")), cast(Runtime, None)
    assert (await harness.run_command({"name": "sh", "arguments": arguments}, nothing)).startswith("error: ")


CALL = b'{"city": "Rome", "days": [1, 2]}'


@fuzzed()
@given(texts(CALL).map(lambda data: data.decode(errors="replace")) | st.just("[" * 100_000))
def test_protocol_arguments(text: str) -> None:
    assert isinstance(program_protocols._arguments(ToolCall(id="c", name="look_up", arguments=text)), dict)
    call = deepseek_v31_renderer.parse_call(
        ParsedToolCall(raw=f"look_up{deepseek_v31_renderer.SEPARATOR}{text}", name=None, arguments=None)
    )
    assert call.name == "look_up" and call.status in set(ToolCallParseStatus)
