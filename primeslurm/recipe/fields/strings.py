"""Rules for all strings and whole numbers of a recipe or site file, so that processes receive them unchanged.

The rules apply to every field, also to new ones. The syntax of single fields is in `types.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from pydantic import BaseModel

from primeslurm.base.errors import Violation

# Longest string. Slurm refuses longer values of an option.
MAX_LENGTH = 1024
# Longest value of an environment variable or an option of vLLM.
MAX_VALUE_LENGTH = 8192
# Largest integer of MessagePack and numpy.
MAX_INTEGER = 2**63 - 1

# Mappings whose values are passed to processes unchanged. The values may begin with a dash.
_VALUES = ("env", "prefill_env", "decode_env", "vllm_extra")
# Lists of complete options.
_OPTIONS = ("extra", "options")
_SECRET_NAME = re.compile(r"(^|[_-])(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)($|[_-])", re.IGNORECASE)
_NUMBER = re.compile(r"-[\d.]+(e-?\d+)?", re.IGNORECASE)

Path = tuple[str, ...]


def string_problems(model: BaseModel) -> list[Violation]:
    """Return all strings and numbers that would not reach processes unchanged, and all secrets."""
    problems, too_large = [], []
    for path, value in _leaves(model):
        if isinstance(value, str):
            why, fix = _problem(path, value)
            if why:
                problems.append(Violation(".".join(path), shown(value), why, fix))
        elif abs(value) > MAX_INTEGER:
            fix = f"nearest: {MAX_INTEGER if value > 0 else -MAX_INTEGER}"
            too_large.append(Violation(".".join(path), f"{value:.3g}", "is too large", fix))
    return problems + too_large + _secrets(model, ())


def shown(value: object) -> str:
    """Return a value of the input as text for a message, at most 60 characters long."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, str | int]]:
    """List all strings and whole numbers below a model, including keys of mappings, with the path in the file."""
    if isinstance(value, str | int):
        yield path, value
    elif isinstance(value, BaseModel):
        for name, info in type(value).model_fields.items():
            yield from _leaves(getattr(value, name), (*path, info.alias or name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield (*path, str(key)), str(key)
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, (*path, str(i)))


def _problem(path: Path, value: str) -> tuple[str, str]:
    """Return why the string is invalid and how to fix it; empty texts if it is valid."""
    if "args" in path:
        # The environment receives it as JSON, never through a shell or a command line.
        return ("", "") if _encodable(value) else ("is not valid Unicode", "")
    max_length = MAX_VALUE_LENGTH if any(name in path[:-1] for name in _VALUES) else MAX_LENGTH
    if not value.isprintable():
        return "must be one line of printable text", "leave out control and invisible characters"
    if len(value) > max_length:
        return f"is longer than {max_length} characters", ""
    if "prologue" in path:  # lines of a shell script
        return "", ""
    # Plans use ${...} for placeholders that node agents replace.
    if "${" in value:
        return "${...} is not expanded here", "write the value itself, or set it in the site's prologue"
    if value.startswith("-") and not _may_begin_with_dash(path, value):
        return "would be read as an option", "it must not begin with a dash"
    return "", ""


def _may_begin_with_dash(path: Path, value: str) -> bool:
    if "vllm_extra" in path:
        # A top-level value is a word of vLLM's command line. Nested values are part of a JSON text.
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
    """Return values of environment variables whose names suggest a secret. Others could read them in the plan."""
    problems = []
    if isinstance(value, BaseModel):
        for name, info in type(value).model_fields.items():
            below = (*path, info.alias or name)
            item = getattr(value, name)
            if name in _VALUES and isinstance(item, Mapping):
                for key, text in item.items():
                    if isinstance(text, str) and text and _SECRET_NAME.search(key):
                        problems.append(_secret((*below, key)))
            else:
                problems += _secrets(item, below)
    return problems


def _secret(path: Path) -> Violation:
    name = path[-1]
    fix = f"`pass_env: [{name}]`, and export {name} where you submit"
    why = "looks like a secret, which would be written to the plan and the batch script"
    return Violation(".".join(path), "", why, fix)
