"""Peak rates of GPUs by the name that CUDA reports, from the vendor's data sheets, dense (without sparsity)."""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """Peak rates of matrix products [TFLOP/s]."""

    bf16: float
    fp8: float | None
    """None if the GPU has no FP8 products."""


# By words of the device name. The entry with most words that fit is taken: "NVIDIA H100 PCIe" is not an SXM board.
_PEAKS: dict[tuple[str, ...], Peak] = {
    ("a100",): Peak(312, None),
    ("a800",): Peak(312, None),
    ("l4",): Peak(121, 242),
    ("l40",): Peak(181, 362),
    ("l40s",): Peak(362, 733),
    ("h20",): Peak(148, 296),
    ("h100",): Peak(989, 1979),
    ("h100", "pcie"): Peak(756, 1513),
    ("h100", "nvl"): Peak(835, 1671),
    ("h800",): Peak(989, 1979),
    ("h200",): Peak(989, 1979),
    ("h200", "nvl"): Peak(835, 1671),
    ("gh200",): Peak(989, 1979),
    ("b200",): Peak(2250, 4500),
    ("gb200",): Peak(2500, 5000),
    ("b300",): Peak(2250, 4500),
    ("gb300",): Peak(2500, 5000),
}


def peak_of(device: str) -> Peak | None:
    """Return the peak of a GPU, for example of "NVIDIA H200" or "h200"; None if it is unknown."""
    words = set(re.split(r"[\s\-_/]+", device.lower()))
    fitting = [name for name in _PEAKS if words.issuperset(name)]
    return _PEAKS[max(fitting, key=len)] if fitting else None
