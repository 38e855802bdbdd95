"""Which workers a router should have, which it has, and what to do about the difference. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from primeslurm.wire.decoding import DamagedError, decode_json

LARGEST_LIST = 16 << 20
"""Bytes of a router's list: a thousand workers are a hundredth of it."""


class _Listed(msgspec.Struct):
    urls: list[str]


@dataclass(frozen=True)
class Workers:
    """The workers of a router, as URLs."""

    urls: frozenset[str]
    disaggregated: bool = False
    """Prefill and decode are apart. Such a router can be told to forget workers, and not to take any."""


@dataclass(frozen=True)
class WorkerDifference:
    """What a router has otherwise than it should."""

    missing: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.foreign)


def planned(argv: Sequence[str]) -> Workers:
    """Read from a router's command line which workers it should have."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--worker-urls", nargs="*", default=[])
    parser.add_argument("--prefill", nargs="+", action="append", default=[])
    parser.add_argument("--decode", nargs="+", action="append", default=[])
    known, _ = parser.parse_known_args(argv)
    apart = [words[0] for words in (*known.prefill, *known.decode)]  # a bootstrap port may follow
    return Workers(frozenset((*known.worker_urls, *apart)), disaggregated=bool(apart))


def compare(wanted: Workers, has: Iterable[str]) -> WorkerDifference:
    """Compare what a router should have with what it lists.

    Args:
        wanted: what it should have.
        has: URLs; with data parallel ranks of one server told apart, `http://host:port@rank`.
    """
    found = {url.partition("@")[0].rstrip("/") for url in has}
    return WorkerDifference(tuple(sorted(wanted.urls - found)), tuple(sorted(found - wanted.urls)))


def listed(body: bytes) -> list[str] | None:
    """Read a router's answer to /list_workers: URLs; None if it is none."""
    try:
        return decode_json(body, _Listed).urls
    except DamagedError:
        return None
