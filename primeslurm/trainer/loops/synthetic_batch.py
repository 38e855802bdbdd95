"""A batch without rollouts, with the shapes of real ones. The trainer compiles with it while engines start."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from primeslurm.recipe import Recipe
from primeslurm.trainer.components.router_replay import ReplayRouter
from primeslurm.trainer.policy.policy_model import PolicyModel
from primeslurm.trainer.weights import model_directory
from primeslurm.wire.batches.batch import Batch, BatchInfo, Row, lengths_of, positions_of
from primeslurm.wire.batches.routed_experts import RoutedExperts

DOCUMENTS = 4  # documents per row
# FlashAttention 4 has another kernel for more than 256 documents, and takes seconds to compile it.
MANY_DOCUMENTS = 257


def synthetic_batch(recipe: Recipe, policy: PolicyModel) -> Batch:
    """Return one micro batch of whole rows for this rank. Ranks differ only in the batch's rank numbers.

    If joined rows can hold many documents, there is a second micro batch with many.
    """
    # A batch cannot have more rows than rollouts. Compiled layers treat another number as a new shape.
    length, rollouts = recipe.seq_len, -(-recipe.orchestrator.batch_size // policy.dp_world)
    count, joined = min(recipe.trainer.rows_at_once(length), rollouts), recipe.trainer.joined_rows(length) > 1
    if joined:
        length, count = count * length, 1
    config = model_directory.load_config(policy.source).get_text_config()
    rng = np.random.default_rng(0)  # not torch's generator, whose state belongs to the run
    documents = [DOCUMENTS] * count
    if joined and rollouts + 1 >= MANY_DOCUMENTS:  # padding is a document, too
        documents.append(MANY_DOCUMENTS)
    info = BatchInfo(0, policy.dp_rank, policy.dp_world, len(documents) * length, rows_at_once=1 if joined else 0)
    rows = [_row(rng, length, number, config.vocab_size, _unknown_experts(policy, length)) for number in documents]
    if recipe.trainer.prefix_sharing:
        rows = [_with_branches(row) for row in rows]
    return Batch(info, rows)


def _with_branches(row: Row) -> Row:
    """Make the first quarter of each document a prefix, and the others its branches."""
    lengths = lengths_of(row.positions)
    branches = np.concatenate([4 * np.arange(length, dtype=np.int32) // length for length in lengths])
    return replace(row, positions=positions_of(lengths, branches), branches=branches)


def _row(rng: np.random.Generator, length: int, documents: int, vocabulary: int, experts: RoutedExperts | None) -> Row:
    lengths = [len(part) for part in np.array_split(np.arange(length), min(documents, length))]
    ones = np.ones(length, np.float32)
    return Row(
        # Different tokens, so that routers use all experts. Special tokens, such as those for images, are at both ends.
        token_ids=rng.integers(vocabulary // 4, vocabulary // 2, length, dtype=np.int32),
        positions=positions_of(lengths),
        mask=np.arange(length) % 2 == 0,  # half, because the logits of all tokens may not fit into memory
        logprobs=-ones,
        advantages=ones,
        temperatures=ones,
        on_policy=np.ones(length, bool),
        routed_experts=experts,
    )


def _unknown_experts(policy: PolicyModel, length: int) -> RoutedExperts | None:
    """Return experts as engines report them for unknown tokens, so that the router chooses. None without replay."""
    routers = [module for module in policy.model.modules() if isinstance(module, ReplayRouter)]
    if not routers:
        return None
    # The layer axis has every layer of the model.
    shape = (length, len(policy.model.layers), routers[0].top_k)
    if routers[0].num_experts <= 256:
        return np.full(shape, np.iinfo(np.uint8).max, np.uint8)
    return np.full(shape, np.iinfo(np.uint16).max, np.uint16)
