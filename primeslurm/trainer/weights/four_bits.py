"""Four-bit weights: two codes per byte (the first in the low half), and one scale per group of columns of a row.

- MXFP4 (OCP Microscaling Formats 1.0; gpt-oss): E2M1 codes in `NAME_blocks` [experts, rows, groups, 16], and E8M0
  scales in `NAME_scales` [experts, rows, groups]. The model's weight NAME has rows and columns exchanged.
- INT4 (pack-quantized of compressed-tensors; Kimi-K2-Thinking and later): int32 in `NAME_packed` [rows, columns / 8],
  with eight codes from the lowest bits on, each the value plus 8, and scales in `NAME_scale` [rows, groups].
  `NAME_shape` is redundant.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from primeslurm.trainer.weights.safetensors_header import TensorLocation

Code = Literal["int4", "mxfp4"]
# Values of the 16 codes, before scaling
VALUES: Mapping[Code, tuple[float, ...]] = {
    "int4": tuple(float(code - 8) for code in range(16)),
    "mxfp4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0),
}
_PACKED, _BLOCKS = "_packed", "_blocks"
# Bytes of a group of 32 E2M1 codes
_MX_BYTES = 16
# Number of codes that a CPU core dequantizes at once. They fit its cache.
_IN_CACHE = 1 << 17


@dataclass(frozen=True)
class FourBits:
    """Format of a four-bit weight. `TensorFiles.places` has the location of its codes."""

    code: Code
    rows: tuple[int, ...]  # stored shape without the columns
    columns: int
    scales: TensorLocation  # location of the scales [*rows, groups]

    @property
    def transposed(self) -> bool:
        """Whether the model's weight has rows and columns exchanged."""
        return self.code == "mxfp4"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.rows[:-1], self.columns, self.rows[-1]) if self.transposed else (*self.rows, self.columns)


def unpacked(places: Mapping[str, TensorLocation]) -> tuple[dict[str, TensorLocation], dict[str, FourBits]]:
    """Find four-bit weights by the names and shapes of their stored tensors.

    Returns the locations of all weights, of four-bit weights that of their codes as bytes [*rows, columns / 2], and the
    formats of the four-bit weights.
    """
    weights, four_bits = dict(places), {}
    for name, place in places.items():
        codes = _int4(name, place, places) or _mxfp4(name, place, places)
        if codes is None:
            continue
        weight = name.removesuffix(_PACKED).removesuffix(_BLOCKS)
        for part in (name, f"{weight}_scale", f"{weight}_scales", f"{weight}_shape"):
            weights.pop(part, None)
        four_bits[weight] = codes
        weights[weight] = TensorLocation(place.file, place.offset, (*codes.rows, codes.columns // 2), "U8")
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
    # A lookup dequantizes four columns at once, so groups have to be multiples of four columns.
    return scales.shape[:-1] == rows and columns % (4 * max(1, scales.shape[-1])) == 0


@torch.no_grad()
def dequantize(code: Code, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize codes [..., columns / 2] with stored scales [..., groups].

    Returns values [..., columns], rounded once to the dtype of the scales. MXFP4 values are exact in bfloat16.
    """
    if code == "mxfp4":
        scales = scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    table = _table(code, scales.dtype, codes.device)
    values = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1], dtype=scales.dtype, device=codes.device)
    rows = max(1, _IN_CACHE // values.shape[-1]) if codes.device.type == "cpu" else values.numel()
    flat = (tensor.reshape(-1, tensor.shape[-1]).split(rows) for tensor in (values, codes, scales))
    for target, code_rows, factors in zip(*flat, strict=True):
        pairs = code_rows.contiguous().view(torch.int16).flatten().to(torch.int32).bitwise_and_(0xFFFF)
        torch.index_select(table, 0, pairs, out=target.view(table.dtype).view(-1))
        target.view(*factors.shape, -1).mul_(factors[..., None])
    return values


def columns_of(
    codes: FourBits, raw: torch.Tensor, scales: torch.Tensor, columns: slice, device: torch.device
) -> torch.Tensor:
    """Dequantize some columns of rows with codes `raw` [..., columns / 2] and scales [..., groups] on a device."""
    size = codes.columns // scales.shape[-1]
    groups = slice(columns.start // size, -(-columns.stop // size))
    begin = groups.start * size
    raw, scales = raw[..., begin // 2 : groups.stop * size // 2], scales[..., groups]
    values = dequantize(codes.code, raw.to(device), scales.to(device))
    return values[..., columns.start - begin : columns.stop - begin]


@functools.cache
def _table(code: Code, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a lookup table from two bytes to four values, viewed as one integer (or complex number) of their size."""
    values = torch.tensor(VALUES[code], dtype=dtype)
    numbers = torch.arange(1 << 16)
    four = torch.stack([values[(numbers >> shift) & 0xF] for shift in (0, 4, 8, 12)], 1)
    return four.view(torch.int64 if dtype.itemsize == 2 else torch.complex128).flatten().to(device)
