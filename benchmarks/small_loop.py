"""CPU cost of single-turn rollouts of a small model, for an environment worker and for the orchestrator.

    python -m benchmarks small_loop --beside OTHER_CHECKOUT --write

worker: a real worker process runs `arithmetic` with SmolLM2's tokenizer, four rollouts of each prompt. A real worker
pool sends its jobs and decodes its results. The engine is a fake in a process of its own: it answers every request at
once with the same tokens.

orchestrator: the whole pipeline in one process, with batches of 256 in groups of 16, the emulated trainer and one
emulated engine. Jobs go to real `JobRunner`s in another process, which answer at once with a rollout of 52 tokens. So
its rate is the highest that one orchestrator reaches on this machine beside the other processes.

With `--beside`, another checkout is measured, too, in alternating rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
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
OF_A_GROUP = 4  # rollouts of a group that one of four workers gets
COSTS = ("worker_ms", "orchestrator_ms")  # CPU time of a rollout
WARM_UP = 64  # rollouts before the first round
ANSWER = "The sum of these two numbers is 42."
HOST = "127.0.0.1"
PROMPT, ANSWERED = 40, 12  # tokens of a rollout that job runners make up
ORCHESTRATED = {
    "name": "small-loop",
    "max_steps": 100_000,
    "seq_len": 256,
    "environments": [{"id": "arithmetic", "workers": 2}],
    "checkpoint": {"interval": 50},
    "orchestrator": {
        "batch_size": 256,
        "group_size": GROUP,
        "max_inflight_rollouts": 512,
        "concurrency": "static",
        "max_off_policy_steps": 16,
        "sampling": {"max_tokens": 32},
    },
}


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks small_loop", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=512, help="rollouts in a round")
    parser.add_argument("--inflight", type=int, default=32, help="rollouts at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout to measure, too")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("--orchestrated", type=int, default=4096, help="rollouts in a round of the orchestrator")
    for hidden in ("--part", "--address"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.part == "engine":
        serve_fake_engine()
    elif options.part == "worker":
        asyncio.run(measure(options.rollouts, options.inflight))
    elif options.part == "orchestrator":
        asyncio.run(measure_orchestrator(options.orchestrated))
    elif options.part == "runners":
        asyncio.run(serve_runners(options.address))
    elif options.part == "trainer":
        train(options.address, options.run_dir)
    else:
        report(options)


def report(options: argparse.Namespace) -> None:
    """Measure each checkout in alternating rounds, and print the medians of each."""
    checkouts = {"before": options.beside.resolve()} if options.beside else {}
    checkouts["now"] = ROOT
    rounds: dict[str, list[dict[str, float]]] = {name: [{} for _ in range(options.rounds)] for name in checkouts}
    for part in ("worker", "orchestrator"):
        for index in range(options.rounds):
            for name, checkout in checkouts.items():
                process = start_part(part, checkout, options)
                rounds[name][index] |= json.loads(line_of(process))
                process.wait()
    result: dict[str, Any] = {
        "command": f"python -m benchmarks small_loop {'--beside OTHER_CHECKOUT ' if options.beside else ''}--write",
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "inflight": options.inflight,
        "rounds": options.rounds,
        "checkouts": [{"checkout": name, **medians(found)} for name, found in rounds.items()],
    }
    print(json.dumps(result, indent=2))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each value, the lowest costs, and the cores that 1,000 rollouts per second take."""
    found = {name: round(statistics.median(each[name] for each in rounds), 3) for name in rounds[0]}
    # Other work on the machine only adds CPU time.
    lowest = {f"lowest_{name}": round(min(each[name] for each in rounds), 3) for name in COSTS}
    return found | lowest | {"cores_for_1000_per_s": round(sum(found[name] for name in COSTS), 2)}


def start_part(
    name: str, checkout: Path, options: argparse.Namespace | None = None, *words: str
) -> subprocess.Popen[str]:
    """Start a part of this benchmark with the code of a checkout."""
    argv = [sys.executable, __file__, "--part", name, *words]
    for option in ("rollouts", "inflight", "orchestrated") if options else ():
        argv += [f"--{option}", str(getattr(options, option))]
    env = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    # `python -m` looks in the current directory first.
    return subprocess.Popen(argv, cwd=checkout, env=env, stdout=subprocess.PIPE, text=True)


def line_of(part: subprocess.Popen[str]) -> str:
    assert part.stdout is not None
    if not (line := part.stdout.readline()):
        raise RuntimeError(f"{' '.join(map(str, part.args))} ended with {part.wait()}")  # type: ignore[arg-type]
    return line


async def measure(rollouts: int, inflight: int) -> None:
    """Run rollouts of a worker, and print their cost."""
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
            before = cpu_s(worker.pid), time.process_time()
            await run(pool, numbers, rollouts, inflight)
            spent = cpu_s(worker.pid) - before[0], time.process_time() - before[1]
            values = {"worker_ms": 1e3 * spent[0] / rollouts, "pool_ms": 1e3 * spent[1] / rollouts}
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
        group = number // OF_A_GROUP
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


async def measure_orchestrator(rollouts: int) -> None:
    """Run a whole orchestrator, and print the cost of its rollouts."""
    from primeslurm.orchestrator.arguments import OrchestratorArguments
    from primeslurm.orchestrator.pipeline.orchestrator import OrchestratorPipeline
    from primeslurm.recipe import Recipe

    with TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        wire, workers = (f"ipc://{directory}/{name}" for name in ("wire", "workers"))
        port = free_port()
        (run_dir / "attempts" / "1").mkdir(parents=True)
        hosts, ports = (dict.fromkeys(("router-0", "engine-r0-0"), value) for value in (HOST, {"http": port}))
        (run_dir / "attempts" / "1" / "addresses.json").write_text(json.dumps({"hosts": hosts, "ports": ports}))
        recipe = Recipe.model_validate(ORCHESTRATED | {"model": {"path": directory}})
        (run_dir / "recipe.resolved.json").write_text(recipe.model_dump_json(by_alias=True))
        engine = ["--host", HOST, "--port", str(port), "--max-model-len", "256", "--middleware", "VersionGate"]
        checkout = Path(os.environ["PYTHONPATH"])
        processes: list[subprocess.Popen[Any]] = [
            subprocess.Popen([sys.executable, "-m", "primeslurm.testbed.emulated.engine", *engine]),
            start_part("trainer", checkout, None, "--address", wire, "--run-dir", str(run_dir)),
            start_part("runners", checkout, None, "--address", workers),
        ]
        arguments = OrchestratorArguments(run_dir, 1, "r", wire, workers, ["router-0"], ["engine-r0-0"])
        pipeline = OrchestratorPipeline(recipe, arguments)
        running = asyncio.create_task(pipeline.run())

        async def finish(rollouts: int) -> None:
            goal = pipeline.dispatcher.counts["finished"] + rollouts
            while pipeline.dispatcher.counts["finished"] < goal:
                if running.done():
                    running.result()
                await asyncio.sleep(0.01)

        try:
            await finish(WARM_UP * GROUP)
            before = time.monotonic(), time.process_time()
            await finish(rollouts)
            wall_s, cpu_s = time.monotonic() - before[0], time.process_time() - before[1]
            values = {"orchestrator_ms": 1e3 * cpu_s / rollouts, "rollouts_per_s": rollouts / wall_s}
            print(json.dumps(values), flush=True)
        finally:
            running.cancel()
            for process in processes:
                process.kill()
                process.wait()
            os._exit(0)  # without waiting for requests to processes that have ended


async def serve_runners(address: str) -> None:
    """Run the job runners of two workers, whose rollouts end at once."""
    import numpy as np

    from primeslurm.orchestrator.rollouts.job_protocol import Job
    from primeslurm.orchestrator.rollouts.job_runner import JobRunner
    from primeslurm.wire.batches.rollout import Rollout, RolloutInfo

    tokens = np.arange(PROMPT + ANSWERED, dtype=np.int32)
    sampled = tokens >= PROMPT
    logprobs = np.where(sampled, -0.5, 0.0).astype(np.float32)

    async def rollout(job: Job) -> tuple[Rollout, ...]:
        reward = float(hash(job.id) % 2)
        info = RolloutInfo(job.id, job.group, "arithmetic", job.opened_version, reward, {"correct": reward})
        return (Rollout(info, tokens, sampled, logprobs, np.where(sampled, job.opened_version, -1).astype(np.int32)),)

    runners = [JobRunner("arithmetic", number, address, rollout, node=str(number)) for number in range(2)]
    await asyncio.gather(*(runner.serve() for runner in runners))


def train(address: str, run_dir: Path) -> None:
    """Take every batch at once, as the emulated trainer of one rank."""
    from primeslurm.recipe import Recipe
    from primeslurm.testbed.emulated import training_loop
    from primeslurm.testbed.emulated.rank_group import Ranks
    from primeslurm.wire.link.trainer_link import TrainerLink

    training_loop.TOKENS_PER_S_AND_RANK, training_loop.STEP_S = 1e9, 0.0
    recipe = Recipe.model_validate_json((run_dir / "recipe.resolved.json").read_bytes())
    ranks = Ranks(HOST, free_port(), 0)
    training_loop.EmulatedTrainer(recipe, run_dir, 1, TrainerLink(address), ranks, 1).run()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


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
