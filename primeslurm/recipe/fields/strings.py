"""What every string and whole number of a recipe or site must be, so that it reaches processes as it was written.

Syntax of single fields is in `syntax.py`. These rules are the same for all of them, and so a new field has them too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from primeslurm.base.errors import Violation

MAX_LENGTH = 1024
"""Slurm refuses longer values of an option."""
MAX_VALUE_LENGTH = 8192
"""Of environment variables and of options of vLLM."""
MAX_INTEGER = 2**63 - 1
"""MessagePack and numpy have no larger integers."""

_VALUES = ("env", "prefill_env", "decode_env", "vllm_extra")
"""Mappings whose values go to processes as they are: they may begin with a dash, and be long."""
_OPTIONS = ("extra", "options")
"""Lists of whole options."""
_SECRET_NAME = re.compile(r"(^|[_-])(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)($|[_-])", re.IGNORECASE)
_NUMBER = re.compile(r"-[\d.]+(e-?\d+)?", re.IGNORECASE)

Path = tuple[str, ...]


def string_problems(model: BaseModel) -> list[Violation]:
    """Find every string and number of a recipe or site that cannot be carried, and every secret."""
    found = []
    for path, value in strings(model):
        why, fix = _problem(path, value)
        if why:
            shown = repr(value)
            found.append(Violation(".".join(path), shown if len(shown) <= 60 else shown[:57] + "...", why, fix))
    return found + _too_large(model) + _secrets(model, ())


def _too_large(model: BaseModel) -> list[Violation]:
    """Find every whole number that messages between processes cannot carry."""
    numbers = [(path, value) for path, value in leaves(model) if isinstance(value, int) and abs(value) > MAX_INTEGER]
    return [
        Violation(
            ".".join(path), f"{value:.3g}", "is too large", f"nearest: {MAX_INTEGER if value > 0 else -MAX_INTEGER}"
        )
        for path, value in numbers
    ]


def strings(value: object) -> Iterator[tuple[Path, str]]:
    """List every string below a model, keys of mappings included, with the path as the user writes it."""
    return ((path, leaf) for path, leaf in leaves(value) if isinstance(leaf, str))


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, str | int]]:
    """List every string and whole number below a model, keys of mappings included, with the path as it is written."""
    if isinstance(value, str | int):
        yield path, value
    elif isinstance(value, BaseModel):
        for name, info in type(value).model_fields.items():
            yield from leaves(getattr(value, name), (*path, info.alias or name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield (*path, str(key)), str(key)
            yield from leaves(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, str(i)))


def _problem(path: Path, value: str) -> tuple[str, str]:
    """Why this string cannot stand there and what to do; empty if it can."""
    if "args" in path:  # handed to the environment as JSON, never to a shell or a command line
        return ("", "") if _encodable(value) else ("is not valid Unicode", "")
    as_value = any(name in path[:-1] for name in _VALUES)
    if not value.isprintable():
        return "must be one line of printable text", "leave out control and invisible characters"
    if len(value) > (MAX_VALUE_LENGTH if as_value else MAX_LENGTH):
        return f"is longer than {MAX_VALUE_LENGTH if as_value else MAX_LENGTH} characters", ""
    if "prologue" in path:  # shell, by definition
        return "", ""
    if "${" in value:
        return "${...} is not expanded here", "write the value itself, or set it in the site's prologue"
    if value.startswith("-") and not _may_begin_with_dash(path, value):
        return "would be taken for an option", "it must not begin with a dash"
    return "", ""


def _may_begin_with_dash(path: Path, value: str) -> bool:
    if "vllm_extra" in path:  # a word of a command line, unless it is nested: then it is part of a JSON text
        below = path[path.index("vllm_extra") + 1 :]
        in_json = any(not part.isdigit() for part in below[1:])
        return in_json or bool(_NUMBER.fullmatch(value))
    return any(name in path for name in (*_VALUES, *_OPTIONS))


def _encodable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _secrets(value: object, path: Path) -> list[Violation]:
    """Values of variables whose names say that they are secret: they would stand in the plan, for all to read."""
    found = []
    if isinstance(value, BaseModel):
        for name, info in type(value).model_fields.items():
            below = (*path, info.alias or name)
            item = getattr(value, name)
            if name in _VALUES and isinstance(item, Mapping):
                given = [key for key, text in item.items() if isinstance(text, str) and text]
                found += [_secret((*below, key)) for key in given if _SECRET_NAME.search(key)]
            else:
                found += _secrets(item, below)
    return found


def _secret(path: Path) -> Violation:
    name = path[-1]
    fix = f"`pass_env: [{name}]`, and export {name} where you submit"
    return Violation(".".join(path), "", "looks like a secret, which would be written into plan and script", fix)
