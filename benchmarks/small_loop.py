"""CPU cost of single-turn rollouts of a small model, for an environment worker and for the orchestrator's end.

    python -m benchmarks small_loop --beside OTHER_CHECKOUT --write

A real worker process runs `arithmetic` with SmolLM2's tokenizer, and a real worker pool sends its jobs and decodes its
results. The engine is a fake in a process of its own: it answers every request at once with the same tokens. With
`--beside`, worker and pool of another checkout are measured, too, in alternating rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import setproctitle

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "small_loop.json"
MODEL = ROOT / ".primeslurm" / "smollm2" / "model"
GROUP = 16
WARM_UP = 64  # rollouts before the first round
ANSWER = "The sum of these two numbers is 42."


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks small_loop", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=512, help="rollouts in a round")
    parser.add_argument("--inflight", type=int, default=32, help="rollouts at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout to measure, too")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("--part", choices=("engine", "measure"), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.part == "engine":
        serve_fake_engine()
    elif options.part == "measure":
        asyncio.run(measure(options.rollouts, options.inflight))
    else:
        report(options)


def report(options: argparse.Namespace) -> None:
    """Measure each checkout in alternating rounds, and print the lowest costs of each."""
    checkouts = {"before": options.beside.resolve()} if options.beside else {}
    checkouts["now"] = ROOT
    parts = {name: start_part("measure", checkout, options) for name, checkout in checkouts.items()}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in parts}
    try:
        for _ in range(options.rounds):
            for name, part in parts.items():
                print("go", file=part.stdin, flush=True)
                rounds[name].append(json.loads(line_of(part)))
    finally:
        for part in parts.values():
            part.stdin.close()  # type: ignore[union-attr]  # it ends its own processes
            part.wait()
    result: dict[str, Any] = {
        "command": f"python -m benchmarks small_loop {'--beside OTHER_CHECKOUT ' if options.beside else ''}--write",
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "inflight": options.inflight,
        "checkouts": [{"checkout": name, **lowest(found)} for name, found in rounds.items()],
    }
    print(json.dumps(result, indent=2))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def lowest(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the lowest of each value, and rollouts per CPU second. Other work on the machine only adds CPU time."""
    found = {name: round(min(each[name] for each in rounds), 2) for name in rounds[0]}
    return found | {"rollouts_per_cpu_s": round(1e3 / found["worker_ms"])}


def start_part(name: str, checkout: Path, options: argparse.Namespace | None = None) -> subprocess.Popen[str]:
    """Start a part of this benchmark with the code of a checkout."""
    argv = [sys.executable, __file__, "--part", name]
    argv += ["--rollouts", str(options.rollouts), "--inflight", str(options.inflight)] if options else []
    env = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    # `python -m` looks in the current directory first.
    return subprocess.Popen(argv, cwd=checkout, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(part: subprocess.Popen[str]) -> str:
    assert part.stdout is not None
    if not (line := part.stdout.readline()):
        raise RuntimeError(f"{' '.join(map(str, part.args))} ended with {part.wait()}")  # type: ignore[arg-type]
    return line


async def measure(rollouts: int, inflight: int) -> None:
    """Run a round for each line of the standard input, and print its cost."""
    from primeslurm.orchestrator.rollouts.worker_pool import WorkerPool

    engine = start_part("engine", Path(os.environ["PYTHONPATH"]))
    with TemporaryDirectory() as directory:
        address = f"ipc://{directory}/pool"
        pool, numbers = WorkerPool(address), count()
        worker = start_worker(Path(directory), address, port=int(line_of(engine)))
        try:
            while not pool.available:
                await pool.receive()
            await run(pool, numbers, WARM_UP, inflight)
            while await asyncio.to_thread(sys.stdin.readline):
                before = cpu_s(worker.pid), time.process_time()
                await run(pool, numbers, rollouts, inflight)
                spent = cpu_s(worker.pid) - before[0], time.process_time() - before[1]
                values = {"worker_ms": 1e3 * spent[0] / rollouts, "orchestrator_ms": 1e3 * spent[1] / rollouts}
                print(json.dumps(values), flush=True)
        finally:
            for process in (worker, engine):
                process.kill()
                process.wait()
            pool.close()


async def run(pool: Any, numbers: count[int], rollouts: int, inflight: int) -> None:
    """Run rollouts, and fail if one fails."""
    from primeslurm.orchestrator.rollouts.job_protocol import Job
    from primeslurm.orchestrator.rollouts.worker_pool import RolloutEnded

    async def send() -> None:
        number = next(numbers)
        group = number // GROUP
        await pool.send(Job(f"j{number}", f"g{group}", "arithmetic", group, 0, "router-0", f"run.1:{group}"))

    for _ in range(inflight):
        await send()
    left = rollouts
    while left:
        for event in await pool.receive():
            if isinstance(event, RolloutEnded):
                assert isinstance(event.outcome, tuple), event.outcome
                left -= 1
                if left >= inflight:
                    await send()


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, without its children [s]."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def start_worker(directory: Path, address: str, port: int) -> subprocess.Popen[bytes]:
    """Start an environment worker whose router is the fake engine."""
    from primeslurm.recipe import Recipe

    attempt = directory / "run" / "attempts" / "1"
    attempt.mkdir(parents=True)
    addresses = {"hosts": {"router-0": "127.0.0.1"}, "ports": {"router-0": {"http": port}}}
    (attempt / "addresses.json").write_text(json.dumps(addresses))
    recipe = {"name": "r", "seq_len": 256, "model": {"path": str(MODEL)}, "environments": [{"id": "arithmetic"}]}
    recipe |= {"orchestrator": {"sampling": {"max_tokens": 32}}}
    (directory / "recipe.json").write_text(Recipe.model_validate(recipe).model_dump_json(by_alias=True))
    argv = [sys.executable, "-m", "primeslurm.orchestrator.worker.main", "--recipe", str(directory / "recipe.json")]
    argv += ["--environment", "arithmetic", "--orchestrator", address, "--attempt-dir", str(attempt)]
    return subprocess.Popen(argv, env={**os.environ, "TMPDIR": str(directory)})


def serve_fake_engine() -> None:
    """Answer every request at once with the same tokens, on a free port, which is printed."""
    from aiohttp import web
    from tokenizers import Tokenizer

    setproctitle.setproctitle("fake engine of benchmarks small_loop")
    tokens = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(f"{ANSWER}<|im_end|>").ids
    content = [{"token": str(token), "logprob": -0.5} for token in tokens]
    choice = {"index": 0, "finish_reason": "stop", "token_ids": tokens, "logprobs": {"content": content}}
    choice["weight_versions"] = [{"version": "1", "start": 0, "end": len(tokens)}]
    body = json.dumps({"request_id": "r", "choices": [choice]}).encode()

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(site._server.sockets[0].getsockname()[1], flush=True)  # type: ignore[union-attr]
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main(sys.argv[1:])
