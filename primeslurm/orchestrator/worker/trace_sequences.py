"""Token sequences to train on, from a verifiers episode.

verifiers keeps a rollout as a tree of messages, each with exactly the tokens that the engine saw or sampled. A path
from root to leaf is one sequence. The tree branches where the conversation was rewritten, or where a prompt could not
extend the sampled tokens. Sampled tokens of a shared beginning are trained in the first branch, and are context in the
others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import verifiers.v1 as vf
from verifiers.v1.errors import ProviderError

from primeslurm.base import durable, files
from primeslurm.orchestrator.rendering.context_window import TRUNCATING, has_overflowed
from primeslurm.orchestrator.rollouts.job_protocol import EngineError, Job, PromptError, RolloutError
from primeslurm.orchestrator.worker.generate_endpoint import NO_ANSWER, Completion
from primeslurm.wire.batches import inline_images, routed_experts
from primeslurm.wire.batches.frames import Bool
from primeslurm.wire.batches.inline_images import ImageSpan
from primeslurm.wire.batches.rollout import LARGEST_REWARD, MAX_METRICS, Rollout, RolloutInfo, prefill_tag
from primeslurm.wire.batches.routed_experts import RoutedExperts

LONGEST_NAME = 200  # characters of a metric's name that are kept


def trainable_traces(episode: vf.Episode) -> list[vf.Trace]:
    """Return the traces of an episode that train the policy: one, or one for each time that a trainable agent acted.

    A trace is left out if its first prompt did not fit into the context window, because nothing was sampled. Raise
    PromptError if no prompt of the episode fitted, EngineError if the episode failed because no engine gave a usable
    answer, and RolloutError if the episode failed otherwise, or has no trainable trace.
    """
    overflows = [call.error.message for trace in episode.traces if _never_fitted(trace) for call in trace.calls[-1:]]
    if overflows and not any(trace.num_turns for trace in episode.traces):
        raise PromptError(overflows[0])
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
        if any(error.type == ProviderError.__name__ and error.message.startswith(NO_ANSWER) for error in errors):
            raise EngineError(reasons)
        raise RolloutError(reasons or "the episode is not ok")
    trainable = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
    traces = [trace for trace in trainable if not _never_fitted(trace)]
    if not traces:
        raise RolloutError("no trace of the episode has a trainable agent")
    return traces


def sequences(
    job: Job,
    trace: vf.Trace,
    completions: Sequence[Completion],
    seconds: float,
    observed: bool,
    number: int = 0,
    describe: Callable[[vf.Trace, Sequence[Sequence[int]]], bytes] = lambda trace, paths: b"",
) -> tuple[Rollout, ...]:
    """Return the token sequences of a finished trace.

    `observed`: mark the tokens from the environment after the first answer. `describe` returns the transcript of the
    trace, given the nodes of each sequence. Raise RolloutError if nothing was sampled, a sampled message is not among
    the completions, or the environment reports an invalid reward or invalid tokens.
    """
    sampled = _completions_by_node(trace, completions)
    if not sampled:
        raise RolloutError("nothing was sampled")
    info = RolloutInfo(
        id=job.id,
        group=job.group,
        environment=job.environment,
        opened_version=job.opened_version,
        reward=_reward(trace),
        metrics=_metrics(trace),
        turns=len(sampled),
        finish_reason=_finish_reason(trace),
        seconds=seconds,
        agent="" if trace.agent is None else trace.agent.name,
        trace=number,
    )
    index = {id(node): i for i, node in enumerate(trace.nodes)}
    trained: set[int] = set()
    result: list[Rollout] = []
    paths: list[list[int]] = []
    for branch in trace.branches:
        path = [index[id(node)] for node in branch.nodes]
        if not branch.trainable or not any(i in sampled and i not in trained for i in path):
            continue
        sequence = _sequence(info, trace, path, sampled, trained)
        result.append(replace(sequence, observed=_observed(trace, path, trained)) if observed else sequence)
        trained.update(path)
        paths.append(path)
    if result and (transcript := describe(trace, paths)):
        result[0] = replace(result[0], info=msgspec.structs.replace(result[0].info, transcript=transcript))
    return tuple(result)


def _never_fitted(trace: vf.Trace) -> bool:
    return trace.num_turns == 0 and has_overflowed(trace)


def _finish_reason(trace: vf.Trace) -> str:
    """Return why the last answer ended: "length" if a limit on tokens ended the answer or the trace."""
    if has_overflowed(trace) or trace.stop_condition in TRUNCATING:
        return "length"
    return next((call.finish_reason for call in reversed(trace.calls) if call.finish_reason), "stop")


def _reward(trace: vf.Trace) -> float:
    # A single reward of NaN or infinity would make all advantages of its group NaN, and then the policy.
    reward = float(trace.reward)
    if not abs(reward) <= LARGEST_REWARD:
        raise RolloutError(f"its reward is {reward}")
    return reward


def _metrics(trace: vf.Trace) -> dict[str, float]:
    """Return the metrics that can be averaged later: neither infinite nor close to it."""
    values = {name[:LONGEST_NAME]: float(value) for name, value in trace.metrics.items() if value is not None}
    if len(values) > MAX_METRICS:
        raise RolloutError(f"it has {len(values)} metrics, more than {MAX_METRICS}")
    return {name: value for name, value in values.items() if abs(value) <= LARGEST_REWARD}


def _sequence(
    info: RolloutInfo, trace: vf.Trace, path: Sequence[int], sampled: dict[int, Completion], trained: set[int]
) -> Rollout:
    tokens, mask, logprobs = [], [], []
    versions: list[int] = []
    for i in path:
        node = trace.nodes[i]
        fresh = i in sampled and i not in trained
        values = iter(zip(node.logprobs, sampled[i].versions, strict=True) if fresh else ())
        prefill_version = sampled[i].prefill_version if fresh else None
        for token, is_sampled in zip(node.token_ids, node.mask, strict=True):
            if is_sampled and prefill_version is not None and versions and versions[-1] < 0:
                versions[-1], prefill_version = prefill_tag(prefill_version), None
            logprob, version = next(values) if fresh and is_sampled else (0.0, -1)
            tokens.append(token)
            mask.append(fresh and is_sampled)
            logprobs.append(logprob)
            versions.append(version)
    if not all(isinstance(token, int | np.integer) and 0 <= token < 2**31 for token in tokens):
        raise RolloutError("it has invalid tokens")
    return Rollout(
        msgspec.structs.replace(info, images=_images(trace, path)),
        np.array(tokens, np.int32),
        np.array(mask, np.bool_),
        np.array(logprobs, np.float32),
        np.array(versions, np.int32),
        routed_experts=_routed_experts([trace.nodes[i] for i in path]),
    )


def _observed(trace: vf.Trace, path: Sequence[int], trained: set[int]) -> Bool:
    """Mark tokens of the environment's messages after the first answer, each in one sequence only, without images."""
    parts, answered = [], False
    for i in path:
        node = trace.nodes[i]
        is_text = ~np.isin(node.token_ids, list(trace.mm_token_type_id_map))
        parts.append(is_text & (answered and not node.sampled and i not in trained))
        answered = answered or node.sampled
    return np.concatenate(parts)


def _images(trace: vf.Trace, path: Sequence[int]) -> tuple[ImageSpan, ...]:
    """Return the images of a path. Raise RolloutError unless each image has one run of image tokens."""
    nodes = [trace.nodes[i] for i in path]
    contents = [node.message.content for node in nodes if isinstance(node.message.content, list)]
    sources = [part.image_url.url for content in contents for part in content if part.type == "image_url"]
    if not sources and not trace.mm_token_type_id_map:
        return ()
    runs: list[tuple[int, int]] = []
    first = 0
    for node in nodes:
        if not node.sampled:
            is_image = np.isin(node.token_ids, list(trace.mm_token_type_id_map)).astype(np.int8)
            edges = np.flatnonzero(np.diff(is_image, prepend=0, append=0)) + first
            runs += [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
        first += len(node.token_ids)
    if len(sources) != len(runs):
        raise RolloutError(f"{len(sources)} images in messages, but {len(runs)} in their tokens")
    return tuple(ImageSpan(source, start, end) for source, (start, end) in zip(sources, runs, strict=True))


def _routed_experts(nodes: Sequence[vf.MessageNode]) -> RoutedExperts | None:
    parts = [node.routed_experts for node in nodes]
    like = next((part for part in parts if part is not None), None)
    return None if like is None else routed_experts.join(parts, [len(node.token_ids) for node in nodes], like)


def _completions_by_node(trace: vf.Trace, completions: Sequence[Completion]) -> dict[int, Completion]:
    """Return the completion of each sampled node, found by tokens and log-probabilities."""
    left = list(completions)
    found = {}
    for i, node in enumerate(trace.nodes):
        if not any(node.mask):
            continue
        sampled = [token for token, is_sampled in zip(node.token_ids, node.mask, strict=True) if is_sampled]
        match = next((c for c in left if c.token_ids == sampled and c.logprobs == node.logprobs), None)
        if match is None:
            raise RolloutError("a sampled message is not among the engine's answers")
        left.remove(match)
        found[i] = match
    return found


def stored(rollout: Rollout, directory: Path) -> Rollout:
    """Write a rollout's images, which are data URIs, to files named by their digest, and return it with their paths.

    Raise RolloutError if an image is invalid, and OSError if a file cannot be written.
    """
    if not rollout.info.images:
        return rollout
    images = tuple(_as_file(image, directory) for image in rollout.info.images)
    return replace(rollout, info=msgspec.structs.replace(rollout.info, images=images))


def _as_file(image: ImageSpan, directory: Path) -> ImageSpan:
    try:
        data = inline_images.decode(image.source)
    except ValueError as error:
        raise RolloutError(str(error)) from error
    digest = hashlib.sha256(data).hexdigest()
    path = directory / digest
    if not files.exists(path):
        durable.make_directory(directory)
        durable.write(path, data)
    return msgspec.structs.replace(image, source=str(path), sha256=digest)
