"""The rollouts of a run: a list that parameters filter, and single transcripts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from primeslurm.records.rollouts import RolloutTranscript
from primeslurm.run.rollouts.archive import RolloutArchive, RolloutPage
from primeslurm.run.rollouts.query import RolloutQuery

# Rollouts of a page, if the browser does not say how many.
LIMIT = 100
MOST = 1000
_CONDITIONS = frozenset(RolloutQuery.__struct_fields__) - {"steps"}


class NotValidError(ValueError):
    """A parameter of a request has a wrong value."""


class RolloutPages:
    """Reads the rollouts of one run for several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._archive = RolloutArchive(run_dir)
        self._lock = threading.Lock()

    def page(self, parameters: Mapping[str, str]) -> RolloutPage:
        """Return the rollouts that parameters of a request ask for. Raises NotValidError, RunError."""
        query = query_of(parameters)
        offset, limit = number(parameters, "offset") or 0, number(parameters, "limit")
        limit, newest = min(LIMIT if limit is None else limit, MOST), parameters.get("order") != "oldest"
        with self._lock:
            return self._archive.page(query, offset=offset, limit=limit, newest=newest)

    def transcript(self, rollout_id: str) -> RolloutTranscript:
        """Return one rollout with its conversations. Raises RunError."""
        with self._lock:
            return self._archive.get(rollout_id)


def query_of(parameters: Mapping[str, str]) -> RolloutQuery:
    """Return the conditions in the parameters of a request. An empty parameter is no condition.

    Raises:
        NotValidError: a parameter has a wrong value.
    """
    given: dict[str, object] = {name: text for name, text in parameters.items() if text and name in _CONDITIONS}
    first, last = number(parameters, "first_step"), number(parameters, "last_step")
    if first is not None or last is not None:
        given["steps"] = (first or 0, sys.maxsize if last is None else last)
    try:
        query = msgspec.convert(given, RolloutQuery, strict=False)
    except msgspec.ValidationError as error:
        raise NotValidError(str(error)) from None
    for name in parameters.keys() & given.keys():
        value = getattr(query, name)
        if value is None or value != value:  # msgspec also reads `null` and `nan`
            raise NotValidError(f"{name} = {parameters[name][:50]}: is not valid")
    return query


def number(parameters: Mapping[str, str], name: str) -> int | None:
    """Return a parameter that is a number from 0 on; None if it is not given. Raises NotValidError."""
    text = parameters.get(name, "")
    if not text:
        return None
    if len(text) > 15 or not (text.isascii() and text.isdecimal()):
        raise NotValidError(f"{name} = {text[:50]}: is not a number")
    return int(text)
