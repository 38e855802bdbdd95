"""Random changes to valid messages. A reader must return a value or raise its one documented exception."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("PRIMESLURM_FUZZ_EXAMPLES", "0"))
"""Number of random examples per test; 0: few, and the same every time. See CONTRIBUTING.md."""

SCALAR = st.sampled_from(
    [
        *(0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**40, 2**63, 2**64 - 1, True, None),
        *(0.0, -0.5, 1e308, float("nan"), float("inf"), float("-inf")),
        *(
            "",
            "x",
            "<i4",
            "|O",
            "O",
            "<f4,<f4",
            "(9,9)<f4",
            "../../etc/passwd",
            "/etc/passwd",
            "\0",
            "A" * 5000,
            b"\xff",
        ),
        *([], {}, [[]], {"": None}),
    ]
)
ANYTHING = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner))


def fuzzed(share: float = 1.0) -> settings:
    """Return settings of a test. Slow tests run only a `share` of the usual number of examples."""
    few = max(1, int(20 * share))
    return settings(
        max_examples=max(few, int(EXAMPLES * share)),
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each place within nested lists and dicts."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*path, key))


def changed(value: Any, path: Sequence[Any], change: Callable[[Any], Any]) -> Any:
    """Return a copy of nested lists and dicts with one place changed."""
    if not path:
        return change(value)
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], change)
    return copy


@st.composite
def trees(draw: st.DrawFn, valid: Any) -> Any:
    """Draw nested lists and dicts with up to three places replaced, removed, doubled or nested."""
    found = valid
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(found))))
        kind = draw(st.sampled_from(["replace", "replace", "remove", "double", "nest", "name"]))
        new = draw(ANYTHING)

        def change(old: Any, kind: str = kind, new: Any = new) -> Any:
            if kind == "remove" and isinstance(old, dict | list) and old:
                return dict(list(old.items())[1:]) if isinstance(old, dict) else old[1:]
            if kind == "double" and isinstance(old, list):
                return [*old, *old]
            if kind == "nest":
                return [old]
            if kind == "name" and isinstance(old, dict):
                return {**old, str(new)[:20]: new}
            return new

        found = changed(found, path, change)
    return found


@st.composite
def texts(draw: st.DrawFn, valid: bytes) -> bytes:
    """Draw bytes that are truncated, flipped or repeated, or whose lengths promise more than there is."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["cut", "flip", "insert", "length", "deep", "repeat"]))
        if kind == "cut":
            del data[place:]
        elif kind == "flip" and data:
            data[place % len(data)] ^= 1 << draw(st.integers(0, 7))
        elif kind == "insert":
            data[place:place] = draw(st.binary(max_size=8))
        elif kind == "length":
            head = draw(st.sampled_from([b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"]))
            data[place:place] = head + draw(st.sampled_from([b"\xff\xff\xff\xff", b"\x10\x00\x00\x00"]))
        elif kind == "deep":
            data[place:place] = draw(st.sampled_from([b"\x91", b"[", b'{"":'])) * draw(st.sampled_from([10, 20_000]))
        else:
            data[place:place] = data[: draw(st.integers(0, 64))]
    return bytes(data)


@st.composite
def messages(draw: st.DrawFn, valid: Sequence[bytes]) -> list[bytes]:
    """Draw the frames of a message: some changed, lost, doubled or reordered."""
    parts = list(valid)
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(["text", "text", "lose", "double", "swap", "empty", "add"]))
        place = draw(st.integers(0, max(0, len(parts) - 1)))
        if kind == "add" or not parts:
            parts.insert(place, draw(st.binary(max_size=16)))
        elif kind == "text":
            parts[place] = draw(texts(parts[place]))
        elif kind == "lose":
            del parts[place]
        elif kind == "double":
            parts.insert(place, parts[place])
        elif kind == "empty":
            parts[place] = b""
        else:
            random.Random(draw(st.integers(0, 99))).shuffle(parts)
    return parts


@contextmanager
def bounded(given: int, factor: int = 24, beside: int = 1 << 20) -> Iterator[None]:
    """Check that the body allocates less than `factor` times the given bytes plus `beside`."""
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        if not tracing:
            tracemalloc.stop()
    assert peak <= factor * given + beside, f"{peak} bytes for {given}"
