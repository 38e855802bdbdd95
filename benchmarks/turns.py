"""Cost of a turn for an environment worker, over a rollout of many turns with thoughts and tool calls.

A program, as a harness starts one, sends the whole conversation each turn, as OpenAI's protocol requires. An engine
plays a script of answers. Both are separate processes. Measured is what lies between them, in a separate process:
verifiers' interception server and the client behind it. Three clients:

- ours: `TokenClient`, with the renderer of the model's family;
- named: verifiers' TrainClient with a named renderer;
- default: verifiers' TrainClient without one. It uses the model's chat template, which supports no tools: the same
  texts are user messages, and thoughts are not sent back. It has fewer turns, because its cost grows with their cube.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "turns.json"
CLIENTS = ("ours", "named", "default")
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
WORDS = "the build fails because this module imports another one that was moved last week so look".split()  # noqa: SIM905


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks turns", description=__doc__)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--default-turns", type=int, default=40, help="at most so many of verifiers' default")
    parser.add_argument("--sampled", type=int, default=250, help="words that the model says a turn, about a token each")
    parser.add_argument("--observed", type=int, default=400, help="words that the tool answers")
    parser.add_argument("--clients", nargs="+", choices=CLIENTS, default=CLIENTS)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--part", choices=("engine", "program", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--told", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.part == "engine":
        engine(options.told)
    elif options.part == "program":
        asyncio.run(program(options.told))
    elif options.part == "measure":
        print(json.dumps(measured(**options.told)))
    else:
        report(options)


def report(options: argparse.Namespace) -> None:
    """Measure each client in a separate process."""
    found = {}
    for client in options.clients:
        turns = min(options.turns, options.default_turns) if client == "default" else options.turns
        told = {"client": client, "turns": turns, "sampled": options.sampled, "observed": options.observed}
        argv = [
            "-m",
            "benchmarks",
            "turns",
            "--part",
            "measure",
            "--told",
            json.dumps(told | {"profile": options.profile}),
        ]
        found[client] = json.loads(subprocess.check_output([sys.executable, *argv], cwd=ROOT))
    result = {
        "command": f"python -m benchmarks turns --turns {options.turns} --write",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "load_average": os.getloadavg()[0]},
        "python": platform.python_version(),
        "clients": found,
    }
    print(json.dumps(result, indent=2))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def measured(client: str, turns: int, sampled: int, observed: int, profile: bool) -> dict[str, Any]:
    """Measure one rollout through one client, in this process."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(measure(client, write_model(Path(directory)), turns, sampled, observed, profile))


def write_model(directory: Path) -> str:
    """Write a tokenizer of realistic size with the tiny model's chat template, and return its directory."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from scripts.models import tiny_model

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    texts = (path.read_text(errors="replace") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=8000, initial_alphabet=alphabet, show_progress=False)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=tiny_model.END, pad_token=tiny_model.PAD)
    fast.add_special_tokens({"additional_special_tokens": [tiny_model.START, "<|endoftext|>"]})
    fast.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in tiny_model.MARKS])
    fast.chat_template = tiny_model.CHAT_TEMPLATE
    fast.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return str(directory)


def saying(turn: int, words: int) -> str:
    """Return this many words, different ones each turn."""
    return " ".join(f"{WORDS[(turn * 7 + i) % len(WORDS)]}{turn if i % 10 == 0 else ''}" for i in range(words))


class Meter:
    """Counts rendered and tokenised tokens, and CPU seconds, between two requests to the engine."""

    def __init__(self) -> None:
        self.rendered = self.tokenised = 0
        self.turns: list[dict[str, float]] = []
        self._cpu = time.process_time()

    def watch(self, tokenizer_class: Any, renderer_class: Any) -> None:
        """Count the results of these classes' methods."""
        encode, render = tokenizer_class._encode_plus, renderer_class.render
        bridge = renderer_class.bridge_to_next_turn

        def encode_plus(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
            found = encode(tokenizer, *args, **kwargs)
            self.tokenised += len(found["input_ids"])
            return found

        def rendered(renderer: Any, *args: Any, **kwargs: Any) -> Any:
            found = render(renderer, *args, **kwargs)
            self.rendered += len(found.token_ids)
            return found

        def bridged(renderer: Any, prompt: list[int], completion: list[int], *args: Any, **kwargs: Any) -> Any:
            found = bridge(renderer, prompt, completion, *args, **kwargs)
            self.rendered += len(found.token_ids) - len(prompt) - len(completion) if found else 0
            return found

        tokenizer_class._encode_plus = encode_plus
        renderer_class.render, renderer_class.bridge_to_next_turn = rendered, bridged

    def turn(self, sent: int, bytes_sent: int) -> None:
        """Record a request, which ends the previous turn."""
        now = time.process_time()
        self.turns.append(
            {
                "rendered": self.rendered,
                "tokenised": self.tokenised,
                "sent": sent,
                "bytes": bytes_sent,
                "cpu_s": now - self._cpu,
            }
        )
        self.rendered = self.tokenised = 0
        self._cpu = now

    def summary(self) -> dict[str, Any]:
        """Return sums, and single turns from the first to the last."""
        last = len(self.turns) - 1
        shown = sorted({0, 1, last // 4, last // 2, 3 * last // 4, last})
        return {
            "turns": len(self.turns),
            "sum": {name: round(sum(turn[name] for turn in self.turns), 3) for name in self.turns[0]},
            "turn": {str(i + 1): {name: round(x, 4) for name, x in self.turns[i].items()} for i in shown},
        }


async def measure(client: str, model: str, turns: int, sampled: int, observed: int, profile: bool) -> dict[str, Any]:
    """Measure one rollout through one client."""
    import verifiers.v1 as vf
    from renderers.default import DefaultRenderer
    from renderers.qwen3 import Qwen3Renderer
    from transformers import PreTrainedTokenizerFast
    from verifiers.v1.clients import ModelContext, TrainClient, TrainClientConfig
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.interception import InterceptionServer
    from verifiers.v1.session import RolloutSession
    from verifiers.v1.trace import AgentInfo, TraceTask

    from primeslurm.orchestrator.rendering.conversation_cache import cache_conversations
    from primeslurm.orchestrator.rendering.program_protocols import ROLLOUT_DIALECTS
    from primeslurm.orchestrator.worker.token_client import TokenClient

    tools, meter = client != "default", Meter()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    script = [tokenizer.encode(answer(turn, sampled, tools), add_special_tokens=False) for turn in range(turns)]
    playing, url = await start("engine", {"script": script})
    if client == "ours":
        ours = TokenClient("router", lambda: url, model, max_len=10_000_000, timeout_s=600)
        config, found = ours.config, ours
    else:
        from renderers.configs import Qwen3RendererConfig

        renderer = Qwen3RendererConfig() if client == "named" else None
        config = TrainClientConfig(base_url=url, renderer=renderer, renderer_model_name=model)
        found = TrainClient(config)
    trace = vf.Trace(
        task=TraceTask(type="Task", data=vf.TaskData(prompt="Mend the build.")), agent=AgentInfo(config=AgentConfig())
    )
    async with InterceptionServer() as server:
        server.clients[config.model_dump_json()] = found
        if client == "ours":
            cache_conversations(server, ROLLOUT_DIALECTS)
        context = ModelContext(model=model, client=config, sampling=vf.SamplingConfig(cache_salt="s"))
        async with server.acquire(RolloutSession(ctx=context, trace=trace)) as (base, secret, _):
            told = {"url": f"{base}/v1", "secret": secret, "turns": turns, "observed": observed, "tools": tools}
            meter.watch(PreTrainedTokenizerFast, Qwen3Renderer if tools else DefaultRenderer)
            sending = _watch_requests(meter)
            profiler = _profiler() if profile else None
            talking, _ = await start("program", told)
            await talking.wait()
            if profiler is not None:
                profiler()
            sending()
    playing.terminate()
    await playing.wait()
    branches = [branch for branch in trace.branches if branch.trainable]
    tokens = max(len(branch.token_ids) for branch in branches)
    return {"tokens": tokens, "sequences": len(branches), **meter.summary()}


def _profiler() -> Callable[[], None]:
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()

    def show() -> None:
        profile.disable()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(45)

    return show


def _watch_requests(meter: Meter) -> Callable[[], None]:
    """Report each request to `meter`. Return a function that stops it."""
    send = httpx.AsyncClient.send

    async def watched(client: httpx.AsyncClient, request: httpx.Request, *args: Any, **kwargs: Any) -> httpx.Response:
        if request.url.path == "/inference/v1/generate":
            ids = request.content.partition(b'"token_ids":[')[2].partition(b"]")[0]
            meter.turn(ids.count(b",") + 1, len(request.content))
        return await send(client, request, *args, **kwargs)

    httpx.AsyncClient.send = watched  # type: ignore[method-assign]

    def stop() -> None:
        httpx.AsyncClient.send = send  # type: ignore[method-assign]

    return stop


def answer(turn: int, words: int, tools: bool) -> str:
    """Return the answer of a turn: thoughts and a call, or as many words."""
    if not tools:
        return f"{saying(turn, words)}<|im_end|>"
    call = json.dumps({"name": "shell", "arguments": {"command": saying(turn, words // 4)}})
    thoughts = saying(turn + 1, words - words // 4)
    return f"<think>\n{thoughts}\n</think>\n\n<tool_call>\n{call}\n</tool_call><|im_end|>"


async def start(part: str, told: dict[str, Any]) -> tuple[asyncio.subprocess.Process, str]:
    """Start the engine or the program. The engine prints its address."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(told, file)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks", "turns", "--part", part, "--told", json.dumps(file.name)),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        limit=1 << 20,
    )
    assert process.stdout is not None
    where = (await process.stdout.readline()).decode().strip() if part == "engine" else ""
    return process, where


class Player(BaseHTTPRequestHandler):
    """Plays a script of answers in vLLM's format."""

    protocol_version = "HTTP/1.1"
    script: Iterator[list[int]]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        tokens = next(self.script)
        content = [{"token": f"token_id:{token}", "token_id": token, "logprob": -0.25} for token in tokens]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": tokens,
            "logprobs": {"content": content},
            "weight_versions": [{"version": "3", "start": 0, "end": len(tokens)}],
        }
        self._send({"request_id": "r", "choices": [choice]})

    def do_GET(self) -> None:
        self._send({"data": []})

    def _send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def engine(path: str) -> None:
    """Serve a script on a free port."""
    Player.script = iter(json.loads(Path(path).read_text())["script"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Player)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


async def program(path: str) -> None:
    """Talk to the model as a harness's program does."""
    told = json.loads(Path(path).read_text())
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You mend builds."},
        {"role": "user", "content": "Mend the build."},
    ]
    offered = {"tools": [TOOL]} if told["tools"] else {}
    headers = {"Authorization": f"Bearer {told['secret']}"}
    async with httpx.AsyncClient(timeout=600, headers=headers, trust_env=False) as client:
        for turn in range(told["turns"]):
            body = {"model": "m", "messages": messages, **offered}
            reply = await client.post(f"{told['url']}/chat/completions", json=body)
            if reply.is_error:
                sys.exit(f"turn {turn + 1}: {reply.status_code}: {reply.text[:500]}")
            message = reply.json()["choices"][0]["message"]
            messages.append({name: value for name, value in message.items() if value is not None})
            seen = saying(turn + 2, told["observed"])
            if told["tools"]:
                call = message["tool_calls"][0]["id"]
                messages.append({"role": "tool", "tool_call_id": call, "content": seen})
            else:
                messages.append({"role": "user", "content": seen})
