"""Emulated environment worker: `python -m primeslurm.testbed.emulated.environment` with the real worker's command line.

It receives jobs by the real protocol, and samples every turn from the job's router through the real client. Only the
environment's side of the conversation is invented.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from primeslurm.base import files, logs
from primeslurm.orchestrator.algorithms import from_recipe
from primeslurm.orchestrator.rollouts import transcripts
from primeslurm.orchestrator.rollouts.job_protocol import Job, RolloutError
from primeslurm.orchestrator.rollouts.job_runner import JobRunner
from primeslurm.orchestrator.rollouts.transcripts import Transcript
from primeslurm.orchestrator.worker.generate_endpoint import SESSION_HEADER, AnswerTally, Completion, GenerateEndpoint
from primeslurm.recipe import Recipe
from primeslurm.records.rollouts import Message
from primeslurm.testbed.emulated.rollout_script import FAILURES, Script, reward, script
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from primeslurm.wire.transport.addresses import AddressBook


@dataclass
class Conversation:
    """The tokens of a rollout so far, with mask, log-probability and policy version of each."""

    token_ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    observed: list[bool] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    """Number of tokens of each message."""
    turns: int = 0
    """Number of completions of the policy."""

    def given(self, tokens: list[int]) -> None:
        """Add tokens of the environment."""
        self.observed += [self.turns > 0] * len(tokens)
        self._say("tool" if self.turns else "user", tokens)
        self._add(tokens, [False] * len(tokens), [0.0] * len(tokens), [-1] * len(tokens))

    def sampled(self, completion: Completion) -> None:
        """Add a completion of the policy."""
        tokens = completion.token_ids
        self.turns += 1
        self.observed += [False] * len(tokens)
        self._say("assistant", tokens)
        self._add(tokens, [True] * len(tokens), completion.logprobs, completion.versions)

    def transcript(self) -> bytes:
        """Return the conversation as text: each token is a word."""
        pieces = {token: _word(token) for token in self.token_ids}
        path = list(range(len(self.messages)))
        return transcripts.encode(Transcript(self.messages, self.lengths, [path], pieces=pieces))

    def _say(self, role: str, tokens: list[int]) -> None:
        text = "".join(map(_word, tokens)).strip()
        self.messages.append(Message(role=role, content=text, sampled=role == "assistant"))
        self.lengths.append(len(tokens))

    def _add(self, tokens: list[int], mask: list[bool], logprobs: list[float], versions: list[int]) -> None:
        self.token_ids += tokens
        self.mask += mask
        self.logprobs += logprobs
        self.versions += versions

    def rollout(self, info: RolloutInfo, needs_observed: bool) -> Rollout:
        """Return the rollout as arrays [tokens]. `needs_observed` marks the tokens of the environment's answers."""
        return Rollout(
            info,
            np.array(self.token_ids, np.int32),
            np.array(self.mask, np.bool_),
            np.array(self.logprobs, np.float32),
            np.array(self.versions, np.int32),
            observed=np.array(self.observed, np.bool_) if needs_observed else None,
        )


def _word(token: int) -> str:
    return f" w{token}"


class EmulatedEnvironment:
    """Runs the rollouts of one environment of a recipe."""

    def __init__(self, recipe: Recipe, addresses: AddressBook) -> None:
        self._recipe = recipe
        self._needs_observed = from_recipe(recipe).needs_observed
        self._addresses = addresses
        self._endpoints: dict[str, GenerateEndpoint] = {}
        self.tally = AnswerTally()

    async def rollout(self, job: Job) -> tuple[Rollout, ...]:
        """Play the conversation of a job.

        Raises:
            RolloutError: this rollout fails on purpose, so that emulated runs handle failures, too.
        """
        started = time.monotonic()
        plan = script(self._recipe.seed, job.environment, job.example if job.task is None else job.task, job.id)
        if plan.fails:
            raise RolloutError(f"emulated failure: {FAILURES:.0%} of the rollouts of an emulated run fail on purpose")
        talk, finish = await self._converse(job, plan)
        versions = [version for version in talk.versions if version >= 0]
        info = RolloutInfo(
            id=job.id,
            group=job.group,
            environment=job.environment,
            opened_version=job.opened_version,
            reward=reward(job.id, sum(versions) / len(versions)),
            turns=talk.turns,
            finish_reason=finish,
            seconds=time.monotonic() - started,
            transcript=talk.transcript(),
        )
        return (talk.rollout(info, self._needs_observed),)

    async def close(self) -> None:
        for endpoint in self._endpoints.values():
            await endpoint.close()

    async def _converse(self, job: Job, plan: Script) -> tuple[Conversation, str]:
        talk = Conversation()
        talk.given(plan.prompt[: self._recipe.max_len // 2])
        for output in [*plan.tool_outputs, []]:
            completion = await self._sample(job, talk.token_ids)
            talk.sampled(completion)
            if len(talk.token_ids) + len(output) >= self._recipe.max_len:
                return talk, "length"
            talk.given(output)
        return talk, completion.finish_reason or "stop"

    async def _sample(self, job: Job, tokens: list[int]) -> Completion:
        if job.router not in self._endpoints:
            timeout_s = self._recipe.orchestrator.request_s
            where = functools.partial(self._addresses.url, job.router)
            self._endpoints[job.router] = GenerateEndpoint(where, self._recipe.max_len, timeout_s, tally=self.tally)
        environment = self._recipe.environment(job.environment)
        sampling = self._recipe.sampling(environment).model_dump(exclude_none=True)
        body = {"token_ids": tokens, "sampling_params": sampling, "cache_salt": job.cache_salt}
        self.tally.begin(job.id, job.task_key)
        try:
            return await self._endpoints[job.router].generate(body, {SESSION_HEADER: job.id})
        finally:
            self.tally.end(job.id)


async def _serve(options: argparse.Namespace) -> None:
    recipe = Recipe.model_validate_json(files.read_bytes(options.recipe))
    environment = EmulatedEnvironment(recipe, AddressBook(options.attempt_dir))
    try:
        where = (options.environment, options.worker, options.orchestrator)
        await JobRunner(*where, environment.rollout, node=options.node, answers=environment.tally.take).serve()
    finally:
        await environment.close()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="primeslurm.testbed.emulated.environment", allow_abbrev=False)
    parser.add_argument("--recipe", type=Path, required=True)
    parser.add_argument("--environment", required=True, help="label of one of the recipe's environments")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--orchestrator", required=True, help="ZMQ address")
    parser.add_argument("--attempt-dir", type=Path, required=True)
    parser.add_argument("--node", default="", help="index in the plan of the node that this is on")
    options = parser.parse_args(argv)
    logs.configure()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options))


if __name__ == "__main__":
    main()
