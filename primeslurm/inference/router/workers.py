"""The workers that a router should have, and how they differ from those that it has."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from primeslurm.wire.decoding import DamagedError, decode_json

# Longest response to /list_workers that is read [bytes]. A thousand workers need a hundredth of it.
LARGEST_LIST = 16 << 20


class _Listed(msgspec.Struct):
    urls: list[str]


@dataclass(frozen=True)
class Workers:
    """The workers of a router, as URLs."""

    urls: frozenset[str]
    disaggregated: bool = False
    """Whether prefill and decode engines are separate. Such a router can drop workers, but cannot add any."""


@dataclass(frozen=True)
class WorkerDifference:
    """Workers that a router lacks, and workers that it should not have, as URLs."""

    missing: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.missing or self.foreign)


def planned(argv: Sequence[str]) -> Workers:
    """Return the workers that a router's command line names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--worker-urls", nargs="*", default=[])
    parser.add_argument("--prefill", nargs="+", action="append", default=[])
    parser.add_argument("--decode", nargs="+", action="append", default=[])
    options, _ = parser.parse_known_args(argv)
    separate = [words[0] for words in (*options.prefill, *options.decode)]  # a bootstrap port may follow the URL
    return Workers(frozenset((*options.worker_urls, *separate)), disaggregated=bool(separate))


def compare(wanted: Workers, listed_urls: Iterable[str]) -> WorkerDifference:
    """Compare the wanted workers with the URLs that a router lists."""
    # A router may list the data-parallel ranks of a server as `http://host:port@rank`.
    urls = {url.partition("@")[0].rstrip("/") for url in listed_urls}
    return WorkerDifference(tuple(sorted(wanted.urls - urls)), tuple(sorted(urls - wanted.urls)))


def listed(body: bytes) -> list[str] | None:
    """Return the URLs in a response to /list_workers; None if the response is invalid."""
    try:
        return decode_json(body, _Listed).urls
    except DamagedError:
        return None
