"""The environment worker's process: `python -m primeslurm.orchestrator.worker.main ...`."""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from primeslurm.base import files, logs
from primeslurm.base.imports import uncollected

with uncollected():
    import verifiers.v1 as vf
    from verifiers.v1.clients import Client, ModelContext

from primeslurm.orchestrator import algorithms, environments
from primeslurm.orchestrator.environments import checks
from primeslurm.orchestrator.environments.sandbox import containers, uv_scripts
from primeslurm.orchestrator.environments.sandbox.install import install
from primeslurm.orchestrator.rendering.renderer_selection import select_renderer
from primeslurm.orchestrator.rollouts import job_runner
from primeslurm.orchestrator.rollouts.job_protocol import Job, RolloutError
from primeslurm.orchestrator.rollouts.job_runner import JobRunner
from primeslurm.orchestrator.worker import tool_servers
from primeslurm.orchestrator.worker.generate_endpoint import AnswerTally
from primeslurm.orchestrator.worker.rollout_validation import RolloutValidator
from primeslurm.orchestrator.worker.teacher_hints import with_teacher_prompts
from primeslurm.orchestrator.worker.token_client import TokenClient, serving
from primeslurm.orchestrator.worker.trace_sequences import sequences, stored, trainable_traces
from primeslurm.orchestrator.worker.trace_transcripts import TranscriptWriter, no_transcript
from primeslurm.recipe import Recipe
from primeslurm.recipe.rules.sandboxes import ENV_KEY
from primeslurm.recipe.sections.evaluation import EvaluationEnvironment
from primeslurm.recipe.sections.orchestrator import AnyEnvironment, Environment, StateField
from primeslurm.recipe.sections.sandboxes import ApptainerRuntime, Limits, sees_packages
from primeslurm.recipe.sections.teacher import PolicyTeacher
from primeslurm.wire.batches.rollout import Rollout
from primeslurm.wire.transport import secret
from primeslurm.wire.transport.addresses import AddressBook

# Time between SIGTERM and exit, in which rollouts are cancelled and their containers removed. The agent waits 15 s.
EXIT_S = 12


class Worker:
    """Runs the jobs of its `JobRunner` in one environment."""

    def __init__(
        self,
        recipe: Recipe,
        environment: AnyEnvironment,
        number: int,
        address: str,
        addresses: AddressBook,
        images: Path,
        node: str = "",
    ) -> None:
        self._recipe = recipe
        self._needs_observed = algorithms.from_recipe(recipe).needs_observed
        self._images = images
        self._addresses = addresses
        options = {"interception": {"type": "server"}, **dict(environment.args.get(ENV_KEY, {}))}  # type: ignore[call-overload]
        agent = environments.agent_options(environment)
        self._env = environments.load(environment.id, {**environment.args, ENV_KEY: options}, agent)
        self._evaluates = isinstance(environment, EvaluationEnvironment)
        self._sampling = recipe.sampling(environment).model_dump(exclude_none=True)
        self._tasks = environments.TaskStream(self._env.taskset, recipe.seed, _is_shuffled(environment))
        self._clients: dict[str, TokenClient] = {}
        self._tally = AnswerTally()
        self._by_config: dict[str, Client] = {}
        model = recipe.model
        self._validator = RolloutValidator(model.path)
        self._rendering = select_renderer(model.path, model.renderer, model.renderer_options, model.vlm is not None)
        tasks = self._task_count(environment)
        kept = recipe.monitor.rollouts
        keeps = kept.evaluations if self._evaluates else kept.per_step > 0
        self._describe = TranscriptWriter(model.path).describe if keeps else no_transcript
        self._runner = JobRunner(
            environment.label, number, address, self._rollout, tasks, node, answers=self._tally.take
        )
        self.runtimes = checks.needs(environment, self._env).runtimes  # types of runtimes of the rollouts' programs
        self.serves = False  # whether the environment has started

    def _task_count(self, environment: AnyEnvironment) -> int | None:
        """Return the number of tasks if the orchestrator needs it."""
        if isinstance(environment, EvaluationEnvironment):
            return self._tasks.count(environment.examples)
        has_curriculum = isinstance(environment, Environment) and environment.curriculum is not None
        return self._tasks.count() if has_curriculum and self._env.taskset.bounded else None

    async def run(self) -> None:
        async with serving(self._env) as self._by_config:
            self.serves = True
            try:
                await self._runner.serve()
            finally:
                for client in self._clients.values():
                    await client.close()

    def _client(self, router: str) -> TokenClient:
        if router not in self._clients:
            recipe = self._recipe
            client = TokenClient(
                router,
                functools.partial(self._addresses.url, router),
                recipe.model.path,
                recipe.max_len,
                recipe.orchestrator.request_s,
                routed=recipe.trainer.router_replay and not self._evaluates,
                images=recipe.model.vlm is not None,
                rendering=self._rendering,
                trained=None if self._evaluates else self._sampling,
                tally=self._tally,
                vocab=self._validator.vocab,
                kv_aware=recipe.inference.reads_kv_events,
                adapter=recipe.sends_adapter,
            )
            self._clients[router] = self._by_config[client.key] = client
        return self._clients[router]

    async def _rollout(self, job: Job) -> tuple[Rollout, ...]:
        client = self._client(job.router)
        started = time.monotonic()
        traces: list[str] = []
        sampling = vf.SamplingConfig(**self._sampling, cache_salt=job.cache_salt)
        context = ModelContext(model=self._recipe.model.path, client=client.config, sampling=sampling)
        task = self._tasks[job.example] if job.task is None else self._tasks.task(job.task)

        def begin(trace: vf.Trace) -> None:
            traces.append(trace.id)
            self._tally.begin(trace.id, job.task_key)
            client.endpoint.begin(trace.id, _extra_headers(self._recipe, job, trace.id))

        try:
            episode = await self._env.run_episode(task, context, on_trace=begin)
        finally:
            completions = {trace: client.endpoint.take(trace) for trace in traces}
            for trace in traces:
                self._tally.end(trace)
        seconds = time.monotonic() - started
        teacher = None if self._evaluates else self._recipe.teacher
        rollouts: list[Rollout] = []
        for number, trace in enumerate(trainable_traces(episode)):
            of_trace = sequences(
                job, trace, completions[trace.id], seconds, self._needs_observed, number, self._describe
            )
            if isinstance(teacher, PolicyTeacher):
                of_trace = await with_teacher_prompts(teacher, client, trace, of_trace)
            rollouts += of_trace
        if not rollouts:
            raise RolloutError("nothing that was sampled can be trained")
        return tuple(self._validator.checked(stored(rollout, self._images)) for rollout in rollouts)


def _extra_headers(recipe: Recipe, job: Job, trajectory: str) -> dict[str, str]:
    """Return the headers of `extra_headers_from_state`. Characters that a header cannot hold are percent-encoded."""
    state: dict[StateField, str] = {
        "trajectory_id": trajectory,
        "rollout_id": job.id,
        "group_id": job.group,
        "example_id": job.task_key,
        "environment": job.environment,
    }
    names = recipe.orchestrator.extra_headers_from_state
    return {name: quote(state[field], safe="@:+") for name, field in names.items()}


def _is_shuffled(environment: AnyEnvironment) -> bool:
    # Runs whose recipe does not have the field were started before there was a choice, and keep their order.
    return isinstance(environment, Environment) and environment.shuffle and "shuffle" in environment.model_fields_set


def hidden_directories(recipe: Recipe, run_dir: Path) -> list[Path]:
    """Return the directories with secrets of the run, and of its deployment and the other tenants."""
    return [run_dir] if recipe.tenant is None else [run_dir, recipe.tenant.deployment]


def _scratch(name: str) -> Path:
    directory = Path(tempfile.gettempdir()) / "environments" / name
    shutil.rmtree(directory, ignore_errors=True)
    return directory


async def _serve(worker: Worker, name: str) -> None:
    """Run a worker until SIGTERM, and remove all containers that are marked with `name`."""
    serving = asyncio.ensure_future(worker.run())
    terminated = asyncio.Event()

    def end() -> None:
        if not terminated.is_set():  # both the agent and Slurm may send SIGTERM
            terminated.set()
            signal.alarm(EXIT_S)  # the kernel then ends a process that has not exited
            serving.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    try:
        await serving
    finally:
        containers.remove_stale(worker.runtimes, name)  # containers that were being created
        if terminated.is_set():
            os._exit(128 + signal.SIGTERM)  # without waiting for threads that import or read


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="primeslurm.orchestrator.worker.main")
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--environment", required=True, help="label of an environment of the recipe")
    parser.add_argument("--worker", type=int, default=0, help="number of this worker")
    parser.add_argument("--orchestrator", required=True, help="ZMQ address")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--node", default="", help="index of this node in the plan")
    options = parser.parse_args(argv)
    secret.keep()
    logs.configure()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    recipe = Recipe.model_validate_json(files.read_bytes(options.recipe))
    environment = recipe.environment(options.environment)
    run_dir = options.attempt_dir.resolve().parents[1]
    # The node's own disk is fast, and the agent empties its temporary directory when the attempt ends.
    name = f"{environment.label}-{options.worker}"
    scratch = _scratch(name)
    install(environment.runtime, scratch, run_dir / "containers", hidden_directories(recipe, run_dir))
    addresses, images = AddressBook(options.attempt_dir), run_dir / "images"
    shown = uv_scripts.environment_directories() if sees_packages(environment.runtime) else ()
    limits = environment.runtime.limits if isinstance(environment.runtime, ApptainerRuntime) else Limits()
    containers.patch_runtimes(name, shown, limits)
    containers.hide_secrets(environment.runtime.secrets if environment.runtime else ())
    tool_servers.watch()
    worker = None
    try:
        with uncollected():  # the environment and the tokenizer import large packages, too
            worker = Worker(recipe, environment, options.worker, options.orchestrator, addresses, images, options.node)
        containers.remove_stale(worker.runtimes, name)
        asyncio.run(_serve(worker, name))
    except KeyboardInterrupt:
        return
    except (Exception, SystemExit) as error:
        if worker is None or not worker.serves:
            job_runner.give_notice(environment.label, options.worker, options.orchestrator, error)
        raise


if __name__ == "__main__":
    main()
