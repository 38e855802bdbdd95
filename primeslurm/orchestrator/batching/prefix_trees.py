"""Packs documents with the same prompt as trees, where that costs less: the prompt is in a row once.

The last token of a prompt is in every branch, because it predicts the first sampled token, which differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from primeslurm.orchestrator.batching.packing import Document, PackedRow, PrefixTree, RowLengths, cost, pack

# Attention reads a copy of the prefix's keys for each branch. So many keys for each token of a tree bound the memory of
# the copies to a fraction of the other activations.
KEYS_PER_TOKEN = 8
# Trees must cost less than this share of the rows without trees, because copying keys takes a few percent.
PAYS = 0.95


def pack_trees(docs: Sequence[Document], lengths: RowLengths, ranks: int) -> list[list[PackedRow]]:
    """Pack documents as `pack` does. Share the prefixes of as many documents as cost least."""
    # Large trees have fewest tokens, but cannot be spread over many ranks or fill rows.
    plain, groups = pack(docs, lengths, ranks), _by_prompt(docs)
    best, least, limit = plain, PAYS * _cost(plain), 2
    while limit < 2 * max(map(len, groups), default=0):
        packed = pack([tree for group in groups for tree in _trees(group, limit, lengths.longest)], lengths, ranks)
        if _cost(packed) < least:
            best, least = packed, _cost(packed)
        limit *= 2
    return best


def _by_prompt(docs: Sequence[Document]) -> list[list[Document]]:
    """Return the documents in groups with the same tokens before the first trained one."""
    groups: dict[object, list[Document]] = {}
    for doc in docs:
        prompt = _prompt(doc)
        # A prefix leaves the prompt's last token to the branches.
        key = doc.token_ids[:prompt].tobytes() if prompt > 1 and not doc.images else id(doc)
        groups.setdefault(key, []).append(doc)
    return list(groups.values())


def _prompt(doc: Document) -> int:
    """Return the number of tokens before the first trained one, 0 if none is trained."""
    trained = doc.mask if doc.cross_entropy is None else doc.mask | (doc.cross_entropy > 0)
    return int(np.argmax(trained))


def _trees(group: Sequence[Document], limit: int, longest: int) -> Iterator[Document | PrefixTree]:
    """Share the prefix of up to `limit` documents of a group in each tree that fits into a row."""
    prefix, members = _prompt(group[0]) - 1, list[Document]()
    for doc in group:
        tree = PrefixTree((*members, doc), prefix)
        fits = len(tree) <= longest and sum(map(len, tree.documents)) <= KEYS_PER_TOKEN * len(tree)
        if members and (len(members) == limit or not fits):
            yield _tree(members, prefix)
            members = []
        members.append(doc)
    yield _tree(members, prefix)


def _tree(members: Sequence[Document], prefix: int) -> Document | PrefixTree:
    return members[0] if len(members) == 1 else PrefixTree(tuple(members), prefix)


def _cost(packed: Sequence[Sequence[PackedRow]]) -> float:
    """Return the cost of all rounds. The ranks compute one row each in a round, padding included."""

    def of(row: PackedRow) -> float:
        return row.length + sum(cost(each) - len(each) for each in row.documents)

    return sum(max(map(of, rows)) for rows in zip(*packed, strict=True))
