"""Weights in four bits: two codes a byte, the first in its low half, and a scale for each group of columns of a row.

MXFP4 (OCP Microscaling Formats 1.0; gpt-oss): `NAME_blocks` [experts, rows, groups, 16] of E2M1, and `NAME_scales`
[experts, rows, groups] of E8M0. The model has such a stack as NAME, with rows and columns exchanged.

INT4 (compressed-tensors' pack-quantized; Kimi-K2-Thinking and later): `NAME_packed` [rows, columns / 8] of int32, eight
codes from the lowest bits on, each 8 more than its value, and `NAME_scale` [rows, groups]. `NAME_shape` says again what
the shapes of the two do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from primeslurm.trainer.weights.safetensors_header import TensorLocation

Code = Literal["int4", "mxfp4"]
VALUES: Mapping[Code, tuple[float, ...]] = {
    "int4": tuple(float(code - 8) for code in range(16)),
    "mxfp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}
"""What the codes stand for, before they are scaled."""
_PACKED, _BLOCKS = "_packed", "_blocks"
_MX_BYTES = 16
"""Bytes of a group of 32 codes in E2M1."""
_IN_CACHE = 1 << 17
"""Codes that a CPU core looks up at once."""


@dataclass(frozen=True)
class FourBits:
    """A weight in four bits, beside the place of its codes."""

    code: Code
    rows: tuple[int, ...]
    """Its shape as it is stored, without the columns."""
    columns: int
    scales: TensorLocation
    """[*rows, groups of columns]."""

    @property
    def turned(self) -> bool:
        """Whether the model has rows and columns exchanged."""
        return self.code == "mxfp4"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight, as the model has it."""
        return (*self.rows[:-1], self.columns, self.rows[-1]) if self.turned else (*self.rows, self.columns)


def unpacked(places: Mapping[str, TensorLocation]) -> tuple[dict[str, TensorLocation], dict[str, FourBits]]:
    """Tell weights in four bits by the names and shapes of their parts.

    Args:
        places: of all tensors, as they are stored.

    Returns:
        The places of all weights, of those in four bits that of their codes as bytes, [*rows, columns / 2]; and what
        else there is of the latter.
    """
    weights, four_bits = dict(places), {}
    for name, place in places.items():
        found = _int4(name, place, places) or _mxfp4(name, place, places)
        if found is None:
            continue
        weight = name.removesuffix(_PACKED).removesuffix(_BLOCKS)
        for part in (name, f"{weight}_scale", f"{weight}_scales", f"{weight}_shape"):
            weights.pop(part, None)
        four_bits[weight] = found
        weights[weight] = TensorLocation(place.file, place.offset, (*found.rows, found.columns // 2), "U8")
    return weights, four_bits


def _int4(name: str, place: TensorLocation, places: Mapping[str, TensorLocation]) -> FourBits | None:
    scales = places.get(name.removesuffix(_PACKED) + "_scale")
    if not name.endswith(_PACKED) or scales is None or place.dtype != "I32" or len(place.shape) != 2:
        return None
    columns = 8 * place.shape[1]
    return FourBits("int4", place.shape[:1], columns, scales) if _fit(scales, place.shape[:1], columns) else None


def _mxfp4(name: str, place: TensorLocation, places: Mapping[str, TensorLocation]) -> FourBits | None:
    scales = places.get(name.removesuffix(_BLOCKS) + "_scales")
    if not name.endswith(_BLOCKS) or scales is None or len(place.shape) < 4 or place.shape[-1] != _MX_BYTES:
        return None
    rows, columns = place.shape[:-2], 2 * _MX_BYTES * place.shape[-2]
    return FourBits("mxfp4", rows, columns, scales) if _fit(scales, rows, columns) else None


def _fit(scales: TensorLocation, rows: tuple[int, ...], columns: int) -> bool:
    """Whether there is a scale for each group of a multiple of four columns."""
    return scales.shape[:-1] == rows and columns % (4 * max(1, scales.shape[-1])) == 0


@torch.no_grad()
def dequantize(code: Code, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes stand for: each is looked up, and multiplied by its group's scale.

    Args:
        code: which they are.
        codes: [..., bytes], two a byte.
        scales: [..., groups], as they are stored.

    Returns:
        [..., columns], in the scales' dtype, in which their product is rounded once; of MXFP4 in bfloat16, exactly.
    """
    if code == "mxfp4":
        scales = scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    table = _table(code, scales.dtype, codes.device)
    values = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=scales.dtype, device=codes.device)
    rows = max(1, _IN_CACHE // values.shape[-1]) if codes.device.type == "cpu" else values.numel()
    flat = (tensor.reshape(-1, tensor.shape[-1]).split(rows) for tensor in (values, codes, scales))
    for target, some, factors in zip(*flat, strict=True):
        looked_up = some.contiguous().view(torch.int16).flatten().to(torch.int32).bitwise_and_(0xFFFF)
        torch.index_select(table, 0, looked_up, out=target.view(table.dtype).view(-1))
        target.view(*factors.shape, -1).mul_(factors[..., None])
    return values


def columns_of(
    codes: FourBits, raw: torch.Tensor, scales: torch.Tensor, columns: slice, device: torch.device
) -> torch.Tensor:
    """Dequantise some columns, where they are wanted.

    Args:
        codes: what is stored.
        raw: codes of some rows, [..., bytes of all columns].
        scales: of these rows, [..., all groups].
        columns: that are wanted.
        device: where.
    """
    size = codes.columns // scales.shape[-1]
    groups = slice(columns.start // size, -(-columns.stop // size))
    begin = groups.start * size
    raw, scales = raw[..., begin // 2 : groups.stop * size // 2], scales[..., groups]
    values = dequantize(codes.code, raw.to(device), scales.to(device))
    return values[..., columns.start - begin : columns.stop - begin]


@functools.cache
def _table(code: Code, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What two bytes stand for: four numbers, as one of as many bytes."""
    values = torch.tensor(VALUES[code], dtype=dtype)
    numbers = torch.arange(1 << 16)
    four = torch.stack([values[(numbers >> shift) & 0xF] for shift in (0, 4, 8, 12)], 1)
    return four.view(torch.int64 if dtype.itemsize == 2 else torch.complex128).flatten().to(device)
