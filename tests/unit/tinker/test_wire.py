"""Tensors as clients send them."""

from __future__ import annotations

import numpy as np
import pytest

from primeslurm.tinker import wire
from primeslurm.tinker.requests import RequestError
from primeslurm.tinker.wire import MESSAGES, PassRequest

LONGEST = 8


def message(**tensor: object) -> bytes:
    request = MESSAGES["ForwardBackwardRequest"](model_id="run", seq_id=3)
    datum = request.data.add()
    for tokens in ([1, 2], [3]):
        datum.model_input.add().encoded_text.tokens = np.array(tokens, np.int32).tobytes()
    datum.loss_fn_inputs.add(key="weights").value.CopyFrom(MESSAGES["Tensor"](**tensor))
    encoded: bytes = request.SerializeToString()
    return encoded


def sparse(columns: list[int], ends: tuple[int, ...] = (0, 1, 1, 3), values: int = 3) -> dict[str, bytes]:
    return {
        "values": np.array([4.0, 5.0, 6.0][:values], np.float32).tobytes(),
        "crow_indices": np.array(ends, np.int64).tobytes(),
        "col_indices": np.array(columns, np.int64).tobytes(),
    }


def test_sparse_tensors_become_dense() -> None:
    (datum,) = PassRequest.read(message(dtype=1, shape=[3, 2], sparse_csr=sparse([1, 0, 1]))).data(LONGEST)
    assert datum.tokens.tolist() == [1, 2, 3]
    assert datum.inputs["weights"].tolist() == [[0, 4], [0, 0], [5, 6]]


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": 1, "shape": [3, 2], "sparse_csr": sparse([2, 0, 1])},
        {"dtype": 1, "shape": [2, 2], "sparse_csr": sparse([1, 0, 1])},
        {"dtype": 1, "shape": [3, 1 << 40], "sparse_csr": sparse([1, 0, 1])},
        {"dtype": 1, "shape": [3, 2], "sparse_csr": sparse([1, 0, 1], (0, 1, 1, 1 << 50))},
        {"dtype": 1, "shape": [3, 2], "sparse_csr": sparse([1, 0, 1], (0, 1, 0, 3))},
        {"dtype": 1, "shape": [3, 2], "sparse_csr": sparse([1, 0, 1], values=1)},
        {"dtype": 1, "shape": [9, 2], "sparse_csr": sparse([], (0,) * 10, 0)},
        {"dtype": 1, "shape": [4], "dense": b"1234"},
        {"dtype": 1, "dense": b"123"},
        {"dtype": 9, "shape": [1], "dense": b"1234"},
    ],
)
def test_damaged_tensor_is_refused(tensor: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"data\[0\].loss_fn_inputs.weights: is no valid tensor"):
        PassRequest.read(message(**tensor)).data(LONGEST)


def test_other_bytes_are_refused() -> None:
    with pytest.raises(RequestError, match="body: is no ForwardBackwardRequest"):
        PassRequest.read(b"\xff\xff")


def test_images_are_refused() -> None:
    request = MESSAGES["ForwardBackwardRequest"](model_id="run", seq_id=3)
    request.data.add().model_input.add()
    with pytest.raises(RequestError, match="trains on text only"):
        PassRequest.read(request.SerializeToString()).data(LONGEST)


def test_part_of_a_token_is_refused() -> None:
    request = MESSAGES["ForwardBackwardRequest"](model_id="run", seq_id=3)
    request.data.add().model_input.add().encoded_text.tokens = b"12345"
    with pytest.raises(RequestError, match=r"data\[0\].model_input = 5 bytes: a token has 4 bytes"):
        PassRequest.read(request.SerializeToString()).data(LONGEST)


def test_expanded_size_of_a_message_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    request = PassRequest.read(message(dtype=1, shape=[3, 2], sparse_csr=sparse([1, 0, 1])))
    request.message.data.add().CopyFrom(request.message.data[0])
    assert len(request.data(LONGEST)) == 2
    monkeypatch.setattr(wire, "_LARGEST", 11)
    with pytest.raises(RequestError, match="data = 12 values: a message may have 11"):
        request.data(LONGEST)
