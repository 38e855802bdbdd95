"""Packing loses, repeats and moves no token."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primeslurm.orchestrator.algorithms import Algorithm, Echo, Grpo, MaxRl, from_recipe
from primeslurm.orchestrator.batching import packing
from primeslurm.orchestrator.batching.batches import Batches, StepShard, documents, loss_tokens
from primeslurm.orchestrator.batching.packing import Common, Document, PrefixTree, RowLengths, encode, row_cost
from primeslurm.orchestrator.batching.prefix_trees import pack_trees
from primeslurm.orchestrator.rollouts.groups import RolloutGroup
from primeslurm.recipe import Recipe
from primeslurm.wire.batches.batch import BatchInfo, RankShard, Row
from primeslurm.wire.batches.rollout import Rollout, RolloutInfo
from tests.support.batches import pack, received
from tests.support.recipes import recipe_data

SEQ_LEN = 32


def document(start: int, length: int) -> Document:
    tokens = np.arange(start, start + length, dtype=np.int32)
    mask = tokens % 3 == 0
    mask[:1] = False
    return Document(tokens, mask, -tokens.astype(np.float32), np.full(length, start, np.float32), on_policy=False)


def documents_of(row: Row) -> list[tuple[list[int], list[bool], list[float], set[float]]]:
    """Return the documents of a row, cut where positions restart. The last one may be padding."""
    starts = [i for i, position in enumerate(row.positions) if position == 0]
    pieces = [slice(a, b) for a, b in zip(starts, [*starts[1:], SEQ_LEN], strict=True)]
    return [
        (
            row.token_ids[p].tolist(),
            row.mask[p].tolist(),
            row.logprobs[p].tolist(),
            set(row.advantages[p].tolist()),
        )
        for p in pieces
    ]


@given(lengths=st.lists(st.integers(1, SEQ_LEN), max_size=30), ranks=st.integers(1, 4))
def test_every_token_is_packed_once(lengths: list[int], ranks: int) -> None:
    docs = [document(1 + 100 * i, length) for i, length in enumerate(lengths)]
    packed = pack(docs, SEQ_LEN, ranks, temperature=0.7)
    assert len({len(rows) for rows in packed}) == 1 and len(packed) == ranks
    rows = [row for mine in packed for row in mine]
    assert all(len(getattr(row, name)) == SEQ_LEN for row in rows for name in ("token_ids", "positions", "mask"))
    assert all((row.temperatures == np.float32(0.7)).all() for row in rows)
    pieces = sorted(piece for row in rows for piece in documents_of(row) if any(piece[0]))
    expected = sorted(
        (doc.token_ids.tolist(), doc.mask.tolist(), doc.logprobs.tolist(), set(doc.advantages.tolist())) for doc in docs
    )
    assert pieces == expected
    assert sum(int(row.mask.sum()) for row in rows) == loss_tokens(docs)
    assert not any(row.mask[row.positions == 0].any() for row in rows), "a first token is never trained"


@given(
    lengths=st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=12),
    pieces=st.sampled_from([2, 4]),
    quantum=st.sampled_from([None, 4, 8]),
)
def test_pieces_are_the_rows_and_one_more_token(lengths: list[int], pieces: int, quantum: int | None) -> None:
    docs = [document(1 + 100 * i, length) for i, length in enumerate(lengths)]
    routed = [np.full((len(doc), 3, 2), i, np.uint8) for i, doc in enumerate(docs)]
    docs = [replace(doc, routed_experts=routed[i] if i % 3 else None) for i, doc in enumerate(docs)]
    whole = [row for mine in pack(docs, SEQ_LEN, 2, 0.7, quantum) for row in mine]
    cut = [[row for mine in pack(docs, SEQ_LEN, 2, 0.7, quantum, cp, pieces) for row in mine] for cp in range(pieces)]
    for number, row in enumerate(whole):
        length = len(row.positions) // pieces
        for cp in range(pieces):
            mine, expected = cut[cp][number], row.cp_shard(cp, pieces)
            assert np.array_equal(mine.positions, row.positions), "positions are of the whole row"
            assert len(mine.token_ids) == length + (cp < pieces - 1), "with the target of the last token"
            for name, array in expected.arrays().items():
                assert np.array_equal(array, getattr(mine, name)), name


@given(lengths=st.lists(st.integers(1, SEQ_LEN), min_size=1, max_size=40), ranks=st.integers(1, 5))
def test_rows_are_no_longer_than_needed(lengths: list[int], ranks: int) -> None:
    docs = [document(1 + 100 * i, length) for i, length in enumerate(lengths)]
    fixed, packed = (pack(docs, SEQ_LEN, ranks, 0.7, quantum) for quantum in (None, 4))
    assert {len(rows) for rows in packed} == {len(rows) for rows in fixed}, "no rank has more rows"
    tokens = sorted(int(token) for mine in packed for row in mine for token in row.token_ids if token)
    assert tokens == sorted(int(token) for doc in docs for token in doc.token_ids)
    for row in (row for mine in packed for row in mine):
        used = int(np.flatnonzero(row.token_ids)[-1]) + 1 if row.token_ids.any() else 0
        assert len(row.positions) == max(4, -(-used // 4) * 4) <= SEQ_LEN


def test_documents_are_spread_over_all_ranks() -> None:
    docs = [document(1 + 100 * i, 8) for i in range(13)]  # 104 tokens: four rows of 32, for three ranks
    packed = packing.pack(docs, RowLengths(SEQ_LEN, 4), 3)
    assert sorted(row.length for mine in packed for row in mine) == [16, 16, 16, 16, 16, 24]
    costs = [sum(row_cost([len(doc) for doc in row.documents]) for row in mine) for mine in packed]
    assert max(costs) - min(costs) <= row_cost([8]) * 1.001
    for mine in packed:
        lengths = [row.length for row in mine]
        assert lengths == sorted(lengths, reverse=True), "rows of a round cost about the same"


@pytest.mark.parametrize(
    ("seq_len", "trainer", "expected"),
    [
        (131_072, {"parallelism": {"cp": 8}}, (131_072, 16_384)),
        (131_072, {"compile": True}, (131_072, None)),
        (131_075, {}, (131_075, None)),
        (65_536, {"parallelism": {"cp": 4}}, (65_536, 8192)),
        (65_536, {"parallelism": {"cp": 8}}, (65_536, None)),
        (65_536, {"parallelism": {"cp": 8}, "micro_batch_tokens": 8192}, (65_536, 8192)),
        (4096, {}, (4096, None)),
        (4096, {"compile": True}, (16_384, 4096)),
        (3000, {"compile": True}, (15_000, 3000)),
        (4096, {"compile": True, "parallelism": {"cp": 2}}, (4096, None)),
    ],
)
def test_lengths_of_rows(seq_len: int, trainer: dict[str, object], expected: tuple[int, int | None]) -> None:
    recipe = Recipe.model_validate(recipe_data(seq_len=seq_len, trainer=trainer))
    assert RowLengths.of(recipe) == expected


@given(lengths=st.lists(st.integers(1, 256), min_size=200, max_size=300), ranks=st.integers(1, 2))
@settings(max_examples=30)
def test_micro_batches_are_filled_and_not_exceeded(lengths: list[int], ranks: int) -> None:
    recipe = Recipe.model_validate(recipe_data(seq_len=256, trainer={"compile": True}))
    limit = recipe.trainer.micro_batch_tokens
    packed = packing.pack([document(1, length) for length in lengths], RowLengths.of(recipe), ranks)
    rows = [row for mine in packed for row in mine]
    assert max(row.length for row in rows) <= limit
    used = [sum(map(len, row.documents)) for row in rows]
    assert sum(used) == sum(lengths)
    assert len(packed[0]) <= -(-sum(lengths) // (ranks * (limit - 255))), "all rows but one could be full"
    # The padding is a document, whose positions must not exceed those of a sequence.
    assert all(row.length - tokens < 256 for row, tokens in zip(rows, used, strict=True))


def test_short_documents_share_one_micro_batch_or_two_alike() -> None:
    recipe = Recipe.model_validate(recipe_data(seq_len=256, trainer={"compile": True}))
    for mean, expected in ((63, [16_128]), (67, [8704, 8704])):  # 64 and 75 rows of 256 tokens
        docs = [document(1, mean + offset) for offset in range(-16, 17) for _ in range(8)][:256]
        assert [row.length for row in packing.pack(docs, RowLengths.of(recipe), 1)[0]] == expected


def group(lengths: list[int], rewards: list[float]) -> RolloutGroup:
    rollouts = []
    for i, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        info = RolloutInfo(f"r{i}", "g", "e", 0, reward)
        ones = np.ones(length, np.int32)
        rollouts.append((Rollout(info, ones * i, ones.astype(bool), ones.astype(np.float32) * -1, ones * 0),))
    return RolloutGroup("g", "e", 0, 0, tuple(rollouts))


def test_long_sequences_are_cut_and_advantages_are_centred() -> None:
    docs = documents([group([5, 2 * SEQ_LEN], [1.0, 0.0])], SEQ_LEN, 0, Grpo())
    assert [len(doc) for doc in docs] == [5, SEQ_LEN]
    assert [set(doc.advantages.tolist()) for doc in docs] == [{0.5}, {-0.5}]
    assert loss_tokens(docs) == 4 + SEQ_LEN - 1


def advantages(whole: RolloutGroup, algorithm: Algorithm) -> list[float]:
    """Return one advantage per rollout."""
    (credits,) = algorithm.assign([whole])
    per_rollout = [set(credit.advantages.tolist()) for credit in credits]
    assert all(len(values) == 1 for values in per_rollout)
    return [value for values in per_rollout for value in values]


def test_max_rl_has_no_advantages_without_a_positive_mean() -> None:
    lengths = [2] * 4
    rare = group(lengths, [0.0, 0.0, 0.0, 2.0])
    assert advantages(group(lengths, [0.5] * 4), MaxRl()) == [0.0] * 4
    assert advantages(group(lengths, [-1.0, 0.0, 0.0, 1.0]), MaxRl()) == [0.0] * 4
    centred = [doc.advantages.tolist() for doc in documents([rare], SEQ_LEN, 0, MaxRl())]
    assert centred == [[-1.0] * 2, [-1.0] * 2, [-1.0] * 2, [3.0] * 2]


def scored(whole: RolloutGroup) -> RolloutGroup:
    """Give the token at position i the teacher log-probability -i / 4."""
    rollouts = []
    for (branch,) in whole.rollouts:
        ref = np.where(branch.mask, -np.arange(len(branch.mask)) / 4, 0).astype(np.float32)
        rollouts.append((replace(branch, ref_logprobs=ref),))
    return replace(whole, rollouts=tuple(rollouts))


def test_teacher_logprobs_stay_with_their_tokens() -> None:
    whole = group([6, 3 * SEQ_LEN], [1.0, 0.0])
    docs = documents([scored(whole)], SEQ_LEN, 0, Grpo())
    assert {tuple(set(doc.advantages.tolist())) for doc in docs} == {(0.5,), (-0.5,)}
    long, short, padding = (rows[0] for rows in pack(docs, SEQ_LEN, 3, 1.0))
    assert long.ref_logprobs is not None and short.ref_logprobs is not None and padding.ref_logprobs is not None
    assert long.ref_logprobs.tolist() == [-i / 4 for i in range(SEQ_LEN)]
    assert short.ref_logprobs.tolist() == [*(-i / 4 for i in range(6)), *[0.0] * (SEQ_LEN - 6)]
    assert not padding.ref_logprobs.any()
    assert pack(documents([whole], SEQ_LEN, 0, Grpo()), SEQ_LEN, 1, 1.0)[0][0].ref_logprobs is None


def test_echo_weights_average_over_observed_tokens() -> None:
    whole = group([8, 12], [1.0, 0.0])
    first, second = (branches[0] for branches in whole.rollouts)
    observed = np.arange(8) >= 6
    marked = replace(first, mask=~observed, observed=observed)  # 5 trained tokens, and 11 in the second
    groups = [replace(whole, rollouts=((marked,), (second,)))]
    (row,) = pack(documents(groups, SEQ_LEN, 0, Echo(Grpo(), 0.1)), SEQ_LEN, 1, 0.5)[0]
    assert row.echo_weights is not None
    assert row.echo_weights.sum() == pytest.approx(0.1 * 16)
    assert sorted(set(row.echo_weights.tolist())) == pytest.approx([0, 0.1 * 16 / 2])
    assert (row.temperatures == np.where(row.echo_weights > 0, 1.0, 0.5)).all()
    assert not (row.mask & (row.echo_weights > 0)).any()
    assert pack(documents(groups, SEQ_LEN, 0, Grpo()), SEQ_LEN, 1, 0.5)[0][0].echo_weights is None


def test_routed_experts_stay_with_their_tokens() -> None:
    whole = group([6, 3 * SEQ_LEN, 5], [1.0, 0.0, 0.0])
    first, second, third = (branches[0] for branches in whole.rollouts)

    def choices(length: int, start: int) -> np.ndarray:
        return (np.arange(start, start + length, dtype=np.uint16)[:, None, None] + np.zeros((3, 2), np.uint16)).copy()

    # the third has no routed experts
    replayed = [replace(first, routed_experts=choices(6, 100)), replace(second, routed_experts=choices(96, 500)), third]
    docs = documents([replace(whole, rollouts=tuple((r,) for r in replayed))], SEQ_LEN, 0, Grpo())
    long, short = (rows[0] for rows in pack(docs, SEQ_LEN, 2, 1.0))
    assert long.routed_experts is not None and short.routed_experts is not None
    assert long.routed_experts.shape == (SEQ_LEN, 3, 2) and long.routed_experts.dtype == np.uint16
    assert long.routed_experts[:, 2, 1].tolist() == list(range(500, 500 + SEQ_LEN))
    unknown = [65535] * (SEQ_LEN - 6)
    assert short.routed_experts[:, 1, 0].tolist() == [*range(100, 106), *unknown]
    assert all(row.routed_experts is None for rows in pack(docs[2:], SEQ_LEN, 2, 1.0) for row in rows)


def test_mixed_rollouts_are_not_on_policy() -> None:
    whole = group([6, 6], [1.0, 0.0])
    mixed = whole.rollouts[1][0]
    versions = np.array([0, 0, 0, 1, 1, 1], np.int32)
    groups = [replace(whole, rollouts=(whole.rollouts[0], (replace(mixed, versions=versions),)))]
    assert [doc.on_policy for doc in documents(groups, SEQ_LEN, 0, Grpo())] == [True, False]
    assert [doc.on_policy for doc in documents(groups, SEQ_LEN, 1, Grpo())] == [False, False]
    row = pack(documents(groups, SEQ_LEN, 0, Grpo()), SEQ_LEN, 1, 1.0)[0][0]
    assert row.on_policy.tolist() == [True] * 6 + [False] * (SEQ_LEN - 6)


def test_batch_is_the_same_at_every_request() -> None:
    groups = [group([5, 9, 30], [1.0, 0.0, 0.0])]
    recipe = Recipe.model_validate(recipe_data(max_steps=10, seq_len=SEQ_LEN))
    first, second = (Batches(recipe, from_recipe(recipe)) for _ in range(2))
    for batches in (first, second):
        batches.add(1, [RolloutGroup.from_bytes(g.to_bytes()) for g in groups])
    for rank in range(2):
        a, b = first.get(StepShard(1, RankShard(rank, 2))), second.get(StepShard(1, RankShard(rank, 2)))
        assert a is not None and b is not None and [*map(bytes, a)] == [*map(bytes, b)]
        assert first.get(StepShard(1, RankShard(rank, 2))) is a, "a repeat returns the encoded shard"
        info = received(a).info
        assert info.loss_tokens == 4 + 8 + 29 and info.max_steps == 10
    first.add(2, groups)
    first.add(3, groups)
    assert first.get(StepShard(3, RankShard(0, 2))) is not None
    assert first.encoded(StepShard(1, RankShard(0, 2))) is None and first.get(StepShard(1, RankShard(0, 2))) is None


def test_tokens_keep_the_temperature_of_their_environment() -> None:
    groups = [replace(group([3, 2], [1.0, 0.0]), environment=label) for label in ("cold", "warm", "usual")]
    docs = documents(groups, SEQ_LEN, 0, Grpo(), {"cold": 0.25, "warm": 1.5})
    ((row,),) = pack(docs, SEQ_LEN, 1, 0.7)
    starts = np.flatnonzero(row.positions == 0)
    temperatures = [float(row.temperatures[start]) for start in starts]
    ends = [*starts[1:], SEQ_LEN]
    assert all((row.temperatures[a:b] == row.temperatures[a]).all() for a, b in zip(starts, ends, strict=True))
    assert sorted(temperatures) == pytest.approx([0.25, 0.25, 0.7, 0.7, 0.7, 1.5, 1.5])


def rollouts(groups: list[tuple[int, list[int]]]) -> list[Document]:
    """Return documents of one untrained token or more, and of trained ones: (prompt's length, lengths of answers)."""
    docs = []
    for number, (prompt, answers) in enumerate(groups):
        for member, answer in enumerate(answers):
            tokens = np.append(np.arange(prompt) + 1000 * (number + 1), np.arange(answer) + 100_000 * (len(docs) + 1))
            mask, values = np.arange(len(tokens)) >= prompt, np.full(len(tokens), member, np.float32)
            experts = np.full((len(tokens), 1, 1), len(docs) % 256, np.uint8)
            docs.append(Document(tokens.astype(np.int32), mask, values, values, False, routed_experts=experts))
    return docs


def rollouts_of(row: Row) -> list[tuple[list[int], list[bool]]]:
    """Return tokens and mask of the rollouts of a row: each branch after its prefix. Experts are those of the first."""
    branches = np.zeros_like(row.positions) if row.branches is None else row.branches
    found, starts = [], [*np.flatnonzero(row.positions == 0), len(row.positions)]
    assert row.routed_experts is not None
    for start, end in pairwise(starts):
        own = branches[start:end]
        for branch in range(1, int(own.max()) + 1) if own.any() else [0]:
            index = start + np.flatnonzero((own == 0) | (own == branch))
            assert row.positions[index].tolist() == list(range(len(index))), "positions continue after the prefix"
            assert not row.mask[start : start + int((own == 0).sum())].any() or not own.any(), "no prefix is trained"
            experts, tokens = row.routed_experts[index, 0, 0], row.token_ids[index]
            assert len(set(experts[row.mask[index]])) <= 1
            found.append((tokens.tolist(), row.mask[index].tolist()))
    return found


@settings(max_examples=100)
@given(
    groups=st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(1, 12), min_size=1, max_size=9)), max_size=8),
    ranks=st.integers(1, 3),
    multiple=st.sampled_from([None, 8]),
)
def test_trees_have_all_rollouts(groups: list[tuple[int, list[int]]], ranks: int, multiple: int | None) -> None:
    docs, lengths = rollouts(groups), RowLengths(SEQ_LEN, multiple)
    packed, plain = pack_trees(docs, lengths, ranks), packing.pack(docs, lengths, ranks)
    trees = any(isinstance(each, PrefixTree) for rows in packed for row in rows for each in row.documents)
    common = Common.of(docs, 0.7, has_branches=trees)
    rows = (
        [row for mine in packed for row in received(encode(mine, BatchInfo(1, 0, 1, 0), common)).rows] if docs else []
    )
    pieces = sorted(piece for row in rows for piece in rollouts_of(row) if any(piece[0]))
    assert pieces == sorted((doc.token_ids.tolist(), doc.mask.tolist()) for doc in docs)
    assert {len(mine) for mine in packed} == {len(packed[0])} and len(packed[0]) <= len(plain[0])


@pytest.mark.parametrize(
    ("groups", "ranks", "expected"),
    [
        ([(2001, [500] * 16)] * 2, 1, 2 * (2000 + 16 * 501)),
        ([(41, [12] * 16)] * 16, 1, 16 * (40 + 16 * 13)),
        ([(8001, [30] * 16)], 1, 2 * 8000 + 16 * 31),  # eight keys for each token
        ([(2001, [500] * 16)] * 2, 8, 8 * (2000 + 4 * 501)),  # all ranks have a tree
        ([(2001, [500] * 16)], 16, 16 * 2501),  # each rank has one rollout
        ([(31, [2000] * 16)], 1, 16 * 2031),  # saves less than it costs
    ],
)
def test_prompts_are_shared_where_it_pays(groups: list[tuple[int, list[int]]], ranks: int, expected: int) -> None:
    rows = [row for mine in pack_trees(rollouts(groups), RowLengths(16_384, 4096), ranks) for row in mine]
    assert sum(len(each) for row in rows for each in row.documents) == expected
