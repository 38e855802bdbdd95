"""Descriptions of a policy's tensors in the store. Engines allocate memory according to them."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from primeslurm.wire.weight_transfer import collective
from primeslurm.wire.weight_transfer.catalogue import Catalogue, TensorInfo, buffer, outgoing, unpack
from primeslurm.wire.weight_transfer.collective import Channel, TransferError, unpacked
from tests.unit.fuzz.mutations import bounded, fuzzed, texts, trees

CATALOGUE: Catalogue = [
    [TensorInfo("embed", "bfloat16", (4, 2), 0)],
    [TensorInfo("l.0.w", "float32", (2,), 1), TensorInfo("l.experts.{}.w", "float8_e4m3fn", (3, 2, 2), 0, (0, 1, 5))],
]
RAW = msgspec.msgpack.encode(CATALOGUE)


def packed(tree: Any) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(tree), 1)


@fuzzed(2)
@given(trees(msgspec.msgpack.decode(RAW)).map(packed) | texts(RAW).map(zlib.compress) | texts(zlib.compress(RAW, 1)))
def test_catalogues(data: bytes) -> None:
    with bounded(len(data), factor=64, beside=4 << 20):
        try:
            found = unpacked(data)
        except TransferError:
            return
    for layer in found:
        for sender in range(2):
            for message in outgoing(layer, sender, frozenset({0, 5})):
                if sum(tensor.aligned_bytes for tensor in message) < 1 << 20:
                    room = buffer(message, torch.device("cpu"))
                    for each in unpack([(message, room)]):
                        assert [name for name, _ in each.each()]


WRONG = {
    "a function of torch in place of a dtype": ["embed", "load", [1], 0],
    "a tensor of 2**60 bytes": ["embed", "int8", [2**30, 2**30], 0],
    "an axis below 0": ["embed", "int8", [-4, -4], 0],
    "more experts than rows": ["e.{}", "int8", [1, 2], 0, [0, 1]],
    "experts without a place for their number": ["e", "int8", [2, 2], 0, [0, 1]],
    "a name that asks for more than a number": ["e.{}.{0.__class__}", "int8", [2, 2], 0, [0, 1]],
}


@pytest.mark.parametrize("info", list(WRONG.values()), ids=list(WRONG))
def test_unusable_catalogue_is_refused(info: list[Any]) -> None:
    assert unpacked(packed(msgspec.msgpack.decode(RAW))) == CATALOGUE
    with pytest.raises(TransferError, match="the catalogue cannot be read"):
        unpacked(packed([[info]]))


def test_oversized_catalogue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "LARGEST_CATALOGUE", 1 << 20)
    bomb = zlib.compress(bytes(64 << 20), 9)
    with bounded(1 << 20, factor=3), pytest.raises(TransferError, match="longer than"):
        unpacked(bomb)


def session(**left: bytes) -> Channel:
    """Return this rank's side of a session whose store has entries of other ranks."""
    found = Channel.__new__(Channel)
    found._store = dist.HashStore()
    for name, word in left.items():
        found._store.set(name.replace("_", "/"), word)  # type: ignore[arg-type]  # torch's stub knows str alone
    return found


EXPERTS = msgspec.msgpack.encode(frozenset({0, 5}))


@fuzzed()
@given(trees([0, 5]).map(msgspec.msgpack.encode) | texts(EXPERTS))
def test_experts_of_receivers(data: bytes) -> None:
    with bounded(len(data), factor=64):
        try:
            found = session(experts_2=data).experts(2)
        except TransferError:
            return
        for layer in CATALOGUE:
            for message in outgoing(layer, 0, found):
                assert sum(tensor.aligned_bytes for tensor in message) <= 1024


@fuzzed()
@given(texts(b"rank 1: it hung up") | st.binary(max_size=40))
def test_why_others_left(data: bytes) -> None:
    assert isinstance(session(failed=data)._reason(), str)
