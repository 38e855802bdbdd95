"""Protobuf messages of the Tinker API: forward and backward passes, their results, and samples.

Field numbers and types are those of the client's `tinker_public.proto`. Only the fields that this service uses are
listed: protobuf skips unknown ones. Enums are listed as int32, and maps as repeated entries, which is the same on the
wire.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from primeslurm.tinker.requests import Config, Datum, RequestError

_PACKAGE = "primeslurm.tinker"
# Message: its fields as "number name type". `*` marks repeated fields.
_SCHEMA = {
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "Tensor": ("1 dense bytes", "2 sparse_csr SparseCsr", "3 dtype int32", "4 shape int64*"),
    "TensorEntry": ("1 key string", "2 value Tensor"),
    "Text": ("1 tokens bytes",),
    "Chunk": ("1 encoded_text Text",),
    "Datum": ("1 model_input Chunk*", "2 loss_fn_inputs TensorEntry*"),
    "ConfigValue": ("1 number double", "2 text string"),
    "ConfigEntry": ("1 key string", "2 value ConfigValue"),
    "ForwardBackwardRequest": (
        "1 model_id string",
        "2 seq_id int32",
        "3 data Datum*",
        "4 loss_fn string",
        "6 forward_only bool",
        "7 loss_fn_config_v2 ConfigEntry*",
    ),
    "BatchedTensor": ("1 data bytes", "2 offsets bytes", "3 dtype int32", "4 trailing_shape int64*"),
    "BatchedEntry": ("1 key string", "2 value BatchedTensor"),
    "ArrayRecord": ("2 fields BatchedEntry*", "3 num_datums int64"),
    "MetricEntry": ("1 key string", "2 value double"),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs ArrayRecord*",
        "3 metrics MetricEntry*",
    ),
    "SampledSequence": ("1 stop_reason int32", "2 tokens bytes", "3 logprobs bytes"),
    "SampleResponse": ("1 sequences SampledSequence*", "2 prompt_logprobs bytes"),
}
_TYPES = {"double": 1, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
_MESSAGE, _OPTIONAL, _REPEATED = 11, 1, 3
_FLOAT32, _INT64 = 1, 2
_DTYPES = {_FLOAT32: np.float32, _INT64: np.int64}
_STOP_REASONS = {"stop": 0, "length": 1}
# Values that one message may expand to. Sparse tensors can be far larger than their message.
_LARGEST = 1 << 26


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name=f"{_PACKAGE}.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field in fields:
            number, label, kind = field.split()
            added = message.field.add(name=label, number=int(number))
            added.label = _REPEATED if kind.endswith("*") else _OPTIONAL
            kind = kind.removesuffix("*")
            added.type = _TYPES.get(kind, _MESSAGE)
            if kind in _SCHEMA:
                added.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _SCHEMA}


MESSAGES = _classes()


@dataclass(frozen=True)
class PassRequest:
    """A forward pass, or a forward and backward pass."""

    model_id: str
    seq_id: int
    loss: str
    config: Config
    backward: bool
    message: Any

    @classmethod
    def read(cls, body: bytes) -> PassRequest:
        try:
            message = MESSAGES["ForwardBackwardRequest"].FromString(body)
        except DecodeError as error:
            raise RequestError("body", "", f"is no ForwardBackwardRequest: {error}") from None
        config = {entry.key: entry.value.text or entry.value.number for entry in message.loss_fn_config_v2}
        return cls(message.model_id, message.seq_id, message.loss_fn, config, not message.forward_only, message)

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths of the sequences [tokens]."""
        return [sum(len(chunk.encoded_text.tokens) for chunk in each.model_input) // 4 for each in self.message.data]

    def data(self, longest: int) -> list[Datum]:
        """Decode the data. Raises RequestError if they are damaged, or if a sparse tensor has over `longest` rows."""
        data, size = list[Datum](), 0
        for index, message in enumerate(self.message.data):
            data.append(_datum(f"data[{index}]", message, longest))
            size += sum(array.size for array in data[-1].inputs.values())
            if size > _LARGEST:
                raise RequestError("data", f"{size} values", f"a message may have {_LARGEST}; send less data at once")
        return data


def encode_datum(message: Any, datum: Datum) -> None:
    """Fill in a message `Datum`."""
    message.model_input.add().encoded_text.tokens = datum.tokens.astype(np.int32).tobytes()
    for name, array in datum.inputs.items():
        value = message.loss_fn_inputs.add(key=name).value
        value.dense, value.dtype = array.tobytes(), _INT64 if array.dtype == np.int64 else _FLOAT32
        value.shape.extend(array.shape)


def _datum(where: str, message: Any, longest: int) -> Datum:
    if not all(chunk.HasField("encoded_text") for chunk in message.model_input):
        raise RequestError(f"{where}.model_input", "", "has a chunk that is no text; this service trains on text only")
    inputs = {}
    for entry in message.loss_fn_inputs:
        try:
            inputs[entry.key] = _array(entry.value, longest)
        except Exception as error:  # numpy raises many kinds
            raise RequestError(f"{where}.loss_fn_inputs.{entry.key}", "", f"is no valid tensor: {error}") from None
    tokens = b"".join(chunk.encoded_text.tokens for chunk in message.model_input)
    if len(tokens) % 4:
        raise RequestError(f"{where}.model_input", f"{len(tokens)} bytes", "a token has 4 bytes")
    return Datum(np.frombuffer(tokens, np.int32), inputs)


def _array(tensor: Any, longest: int) -> NDArray[Any]:
    """Return a tensor as a dense array. Missing entries of a sparse tensor are 0."""
    dtype, shape = _DTYPES[tensor.dtype], tuple(tensor.shape)
    if not tensor.HasField("sparse_csr"):
        values = np.frombuffer(tensor.dense, dtype)
        return values.reshape(shape) if shape else values
    sparse = tensor.sparse_csr
    ends, columns = (np.frombuffer(buffer, np.int64) for buffer in (sparse.crow_indices, sparse.col_indices))
    values = np.frombuffer(sparse.values, dtype)
    rows, width = shape
    if rows > longest or rows * width > _LARGEST:
        raise ValueError(f"shape {list(shape)} is too large; the model's longest sequence has {longest} tokens")
    counts = np.diff(ends)
    if (
        len(ends) != rows + 1
        or (ends[0], ends[-1], len(values)) != (0, len(columns), len(columns))
        or (counts < 0).any()
        or (len(columns) and not 0 <= columns.min() <= columns.max() < width)
    ):
        raise ValueError(f"its indices do not fit shape {list(shape)}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(rows), counts), columns] = values
    return dense


def pass_output(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Encode the result of a pass: the log-probabilities of each datum's targets, and metrics."""
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for array in logprobs:  # one record each, because their trailing shapes may differ
        field = output.loss_fn_outputs.add(num_datums=1).fields.add(key="logprobs").value
        field.data, field.dtype = array.tobytes(), _FLOAT32
        field.offsets = np.array([0, array.nbytes], np.int64).tobytes()
        field.trailing_shape.extend(array.shape[1:])
    for key, value in metrics.items():
        output.metrics.add(key=key, value=value)
    encoded: bytes = output.SerializeToString()
    return encoded


def sample_output(
    sequences: Sequence[tuple[str, Sequence[int], Sequence[float]]], prompt_logprobs: Sequence[float] | None
) -> bytes:
    """Encode samples (stop reason, tokens, log-probabilities). The first token's log-probability in a prompt is NaN."""
    output = MESSAGES["SampleResponse"]()
    for reason, tokens, logprobs in sequences:
        output.sequences.add(
            stop_reason=_STOP_REASONS[reason],
            tokens=np.array(tokens, np.int32).tobytes(),
            logprobs=np.array(logprobs, np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        output.prompt_logprobs = np.array(prompt_logprobs, np.float32).tobytes()
    encoded: bytes = output.SerializeToString()
    return encoded
