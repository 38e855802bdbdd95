"""From the groups of a batch to the sequences that are trained, as the run's algorithm says."""

from __future__ import annotations

from collections.abc import Sequence

from primeslurm.orchestrator.algorithms import Algorithm, Credit
from primeslurm.orchestrator.batching.packing import Document
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.wire.rollouts import Rollout


def documents(groups: Sequence[RolloutGroup], seq_len: int, version: int, algorithm: Algorithm) -> list[Document]:
    """All sequences of the groups, cut to seq_len, to be trained on policy `version`.

    Raises:
        UsageError: an algorithm of the user's own made an error.
    """
    cut = [group.cut(seq_len) for group in groups]
    found = algorithm.assign(cut)
    return [
        _document(sequence, credit, _is_on_policy(original, version))
        for before, group, credits in zip(groups, cut, found, strict=True)
        for original, sequence, credit in zip(before.sequences, group.sequences, credits, strict=True)
    ]


def _is_on_policy(rollout: Rollout, version: int) -> bool:
    """A rollout that was in flight over an update has KV of the older policy even under its newer tokens."""
    return rollout.info.opened_version == version and not rollout.is_mixed


def _document(sequence: Rollout, credit: Credit, on_policy: bool) -> Document:
    return Document(
        sequence.token_ids,
        credit.mask,
        sequence.logprobs,
        credit.advantages,
        on_policy,
        cross_entropy=credit.cross_entropy,
        routed_experts=sequence.routed_experts,
        ref_logprobs=sequence.ref_logprobs,
        images=sequence.info.images,
    )
