"""Types of fields with a syntax: times, amounts of memory, dependencies, names and others.

A value that Slurm would misread or refuse is a violation with the nearest valid form. Free texts such as comments and
paths only obey the rules for all strings (`strings.py`).
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from primeslurm.recipe.fields.suggestions import suggestion

_INVALID_TIME = "must be HH:MM:SS or D-HH:MM:SS, in quotes"
_TIME = re.compile(r"(?:(\d+)-)?(\d{1,2}):(\d{2}):(\d{2})")
_MEMORY = re.compile(r"\d+[KMGT]?")
# Common forms that Slurm does not accept, such as 200GB or 200 GiB.
_LOOSE_MEMORY = re.compile(r"(\d+)\s*([kKmMgGtT])i?[bB]?")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NAME = re.compile(r"\w[\w.@+:-]*")
_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_HOSTS = re.compile(r"[\w.,\[\]-]+")
_CONSTRAINT = re.compile(r"[\w.&|*()\[\],:=+-]+")
_SWITCHES = re.compile(r"(\d+)(?:@(.+))?")
_LICENSES = re.compile(r"[\w.-]+(?:@[\w.-]+)?(?::\d+)?(?:,[\w.-]+(?:@[\w.-]+)?(?::\d+)?)*")
_MAIL = re.compile(r"[^\s,@]+(?:@[^\s,@]+)?")
# A job id, with the index of an array task or the offset of a heterogeneous component.
_JOB = re.compile(r"\d+(?:_\d+)?(?:\+\d+)?")
_OPTION = re.compile(r"--([A-Za-z][A-Za-z0-9-]*)(?:=.*)?")
_MOUNT = re.compile(r"(/[^:,]*)(?::(/[^:,]*))?(?::[\w+-]+)?")
_DEPENDENCIES = ("after", "afterany", "afterburstbuffer", "aftercorr", "afternotok", "afterok")
_HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]{1,100}", re.ASCII)
# Headers that HTTP, the run's authentication, vLLM or our own processes use.
_RESERVED_HEADERS = re.compile(
    "(proxy-|accept|content-|x-primeslurm-).*|authorization|cookie|host|connection|keep-alive|expect|te|trailer|upgrade"
    "|transfer-encoding|x-request-id|x-data-parallel-rank",
    re.IGNORECASE,
)
# Port numbers that users may listen on.
FIRST_PORT, LAST_PORT = 1024, 65535

# Options of sbatch that the plan sets, and the field to use instead; empty if there is none.
_RESERVED = {
    "job-name": "name",
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "deployment"),
    **dict.fromkeys(("gres", "gpus", "gpus-per-socket", "gpus-per-task"), "gpus_per_node under deployment"),
    "gpus-per-node": "gpus_per_node under deployment, and request_gpus of the site's nodes",
    **{
        option: f"{option.replace('-', '_')} of a component"
        for option in (
            *("partition", "cpus-per-task", "mem", "mem-per-gpu", "mem-per-cpu"),
            *("constraint", "nodelist", "switches", "exclusive"),
        )
    },
    **{
        option: option.replace("-", "_")
        for option in (
            *("time", "time-min", "account", "qos", "reservation", "exclude", "comment", "dependency"),
            *("licenses", "nice", "priority", "requeue"),
        )
    },
    "no-requeue": "requeue",
    "mail-user": "mail.user",
    "mail-type": "mail.types",
    "signal": "checkpoint_signal_s",
    "wait": "`submit --wait`",
    "test-only": "`submit --dry-run`",
    "parsable": "`submit --json`",
    **dict.fromkeys(("export", "export-file"), "env of the site file"),
    "het-group": "deployment.layout",
    "clusters": "slurm_conf of the site file",
    **dict.fromkeys(("output", "error", "open-mode", "chdir", "input", "array", "wrap", "no-kill"), ""),
    **dict.fromkeys(("help", "usage", "version"), ""),
}


def minutes(value: str) -> int:
    """Return a Slurm time in minutes, rounded up. Raises ValueError."""
    match = _TIME.fullmatch(value)
    if match is None:
        raise ValueError(f"not a Slurm time: {value}")
    days, hours, mins, secs = (int(part or 0) for part in match.groups())
    return days * 1440 + hours * 60 + mins + (1 if secs else 0)


def bytes_of(memory: str) -> int:
    """Return an amount of memory in bytes. Slurm's default unit is MiB. Raises ValueError."""
    if not _MEMORY.fullmatch(memory):
        raise ValueError(f"not an amount of memory: {memory}")
    number = memory.rstrip("KMGT")
    return int(number) * _UNITS[memory[len(number) :] or "M"]


def share_of(memory: str, part: int, whole: int) -> str:
    """Return `part / whole` of an amount of memory, in the same unit if the result is whole, else in MiB."""
    number = memory.rstrip("KMGT")
    if int(number) * part % whole == 0:
        return f"{int(number) * part // whole}{memory[len(number) :]}"
    return f"{bytes_of(memory) * part // whole // _UNITS['M']}M"


def times(memory: str, count: int) -> str:
    """Return `count` times an amount of memory, in the same unit."""
    number = memory.rstrip("KMGT")
    return f"{int(number) * count}{memory[len(number) :]}"


def syntax_error(why: str, fix: str = "") -> PydanticCustomError:
    """Return the error that a validator raises."""
    return PydanticCustomError("syntax", "{why}", {"why": why, "fix": fix})


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _time(value: object) -> object:
    if isinstance(value, int) and not isinstance(value, bool):
        # YAML reads 12:00:00 without quotes as a number of seconds.
        fix = f'nearest: "{_clock(value)}"' if value > 0 else ""
        raise syntax_error(_INVALID_TIME, fix)
    if isinstance(value, str) and not _TIME.fullmatch(value):
        parts = value.split(":")
        short = len(parts) == 2 and all(part.isdigit() for part in parts)
        fix = f'nearest: "{_clock(3600 * int(parts[0]) + 60 * int(parts[1]))}"' if short else ""
        raise syntax_error(_INVALID_TIME, fix)
    return value


def _memory(value: str) -> str:
    if not _MEMORY.fullmatch(value):
        near = _LOOSE_MEMORY.fullmatch(value)
        fix = f"nearest: {near[1]}{near[2].upper()}" if near else ""
        raise syntax_error("must be a whole number with K, M, G or T, for example 200G", fix)
    return value


def _run_name(value: str) -> str:
    if not _RUN_NAME.fullmatch(value):
        near = re.sub(r"[^a-z0-9._-]+", "-", value.lower()).strip("._-")[:63]
        why = "must be at most 63 of a-z, 0-9 and . _ -, the first a letter or a digit"
        raise syntax_error(why, f"nearest: {near}" if near else "")
    return value


def _json(value: object) -> object:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise syntax_error(
            "cannot be written as JSON", "valid: finite numbers, text, true, false, null, lists, mappings"
        ) from None
    return value


def _matching(pattern: re.Pattern[str], why: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise syntax_error(why)
        return value

    return AfterValidator(check)


def _dependency(value: str) -> str:
    separators = {character for character in value if character in ",?"}
    if len(separators) > 1:
        raise syntax_error("mixes , (all conditions) and ? (any condition)", "use one of them")
    for part in re.split(r"[,?]", value):
        kind, *jobs = part.split(":")
        if part == "singleton":
            continue
        if kind not in _DEPENDENCIES:
            fix = suggestion(kind.lower(), (*_DEPENDENCIES, "singleton"))
            raise syntax_error(f"{kind!r} is not a kind of dependency", fix)
        if not jobs or not all(_JOB.fullmatch(job) for job in jobs):
            raise syntax_error(f"{kind} needs job ids", f"for example {kind}:123 or {kind}:123:456")
    return value


def _switches(value: str) -> str:
    match = _SWITCHES.fullmatch(value)
    if match is None or (match[2] and not _TIME.fullmatch(match[2])):
        raise syntax_error("must be COUNT or COUNT@HH:MM:SS", 'for example "1@02:00:00"')
    return value


def _option(value: str) -> str:
    match = _OPTION.fullmatch(value)
    if match is None:
        raise syntax_error("must be one long option of sbatch", "for example --wckey=x")
    # sbatch accepts every unambiguous prefix of an option's name.
    reserved = match[1] if match[1] in _RESERVED else next((n for n in _RESERVED if n.startswith(match[1])), None)
    if reserved is not None:
        field = _RESERVED[reserved]
        raise syntax_error(f"--{reserved} is set by the plan", f"use {field}" if field else "leave it out")
    return value


def _header(value: str) -> str:
    if not _HEADER.fullmatch(value):
        raise syntax_error(
            "must be the name of an HTTP header: at most 100 letters, digits and -", "for example X-Group-ID"
        )
    if _RESERVED_HEADERS.fullmatch(value):
        raise syntax_error("is set by HTTP, the run or the engine", "use another name, for example X-Group-ID")
    return value


def _port(value: int) -> int:
    if value < FIRST_PORT:
        raise syntax_error("only root may listen on ports below 1024", f"nearest: {FIRST_PORT}")
    if value > LAST_PORT:
        raise syntax_error("is not a port number", f"nearest: {LAST_PORT}")
    return value


def _mount(value: str) -> str:
    if not _MOUNT.fullmatch(value):
        raise syntax_error("must be /source, /source:/target or /source:/target:flags", "paths must not contain : or ,")
    return value


SlurmTime = Annotated[str, BeforeValidator(_time)]
Memory = Annotated[str, AfterValidator(_memory)]
Port = Annotated[int, AfterValidator(_port)]
Name = Annotated[str, Field(max_length=200), _matching(_NAME, "must be one name of letters, digits and . _ - @ + :")]
Names = Annotated[
    str, _matching(re.compile(rf"{_NAME.pattern}(,{_NAME.pattern})*"), "must be names, separated by commas")
]
RunName = Annotated[str, AfterValidator(_run_name)]
Hosts = Annotated[str, _matching(_HOSTS, "must be a host list, for example node[001-003],login1")]
Constraint = Annotated[str, _matching(_CONSTRAINT, "must be features joined by & or |, for example nvme&ib")]
Dependency = Annotated[str, AfterValidator(_dependency)]
Switches = Annotated[str, AfterValidator(_switches)]
Licenses = Annotated[str, _matching(_LICENSES, "must be NAME or NAME:COUNT, separated by commas")]
MailUser = Annotated[str, _matching(_MAIL, "must be one user or mail address")]
MailType = Literal[
    "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "INVALID_DEPEND", "STAGE_OUT", "ALL",
    "TIME_LIMIT", "TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50",
]  # fmt: skip
Module = Annotated[str, _matching(re.compile(r"\w[\w.+/@-]*"), "must be one module, for example cuda/13.0")]
SearchPath = Annotated[str, _matching(re.compile(r"/[^:]*"), "must be one absolute directory without :")]
EnvironmentName = Annotated[
    str, _matching(re.compile(r"[A-Za-z_][A-Za-z0-9_]*"), "is not a valid name of an environment variable")
]
HeaderName = Annotated[str, AfterValidator(_header)]
OptionName = Annotated[
    str, _matching(re.compile(r"[A-Za-z][\w-]*"), "must be the long name of an option, with underscores")
]
HttpUrl = Annotated[
    str,
    _matching(
        re.compile(r"https?://[^\s/?#]+(/[^\s?#]*)?"), "must be an http or https URL, for example http://host:8000/v1"
    ),
]
Label = Annotated[str, _matching(re.compile(r"[A-Za-z0-9][\w.-]*"), "must be one word of letters, digits and . _ -")]
EnvironmentId = Annotated[
    str, _matching(re.compile(r"[A-Za-z0-9][\w.@/-]*"), "must be the name of an environment, for example reverse-text")
]
ImportPath = Annotated[
    str, _matching(re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*"), "must be package.module:function")
]
TrackingUri = Annotated[
    str,
    _matching(
        re.compile(r"https?://[^/\s]+\S*|databricks(://\S+)?"), "must be an http or https address, or databricks"
    ),
]
Directory = Annotated[
    str,
    _matching(re.compile(r"[^\\]*"), "must not contain \\, which Slurm reads as an escape in names of log files"),
]
Json = Annotated[object, AfterValidator(_json)]
Option = Annotated[str, AfterValidator(_option)]
Mount = Annotated[str, AfterValidator(_mount)]
