"""Generates docs/reference/cli.md from the help of each command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from primeslurm.base.errors import EXIT_CODES
from primeslurm.cli.lazy_verbs import EXAMPLES, GROUPS, VERBS, load_verb

INTRODUCTION = """This page lists every command, its options and its exit codes.

Results are printed on stdout, and prose on stderr. With `--json`, stdout is one JSON document. `logs`
prints one per line. An error is JSON, too:
`{"error": ..., "exit_code": ..., "violations": [{"field", "value", "why", "fix"}]}`.

Colours are used on a terminal only, and not if `NO_COLOR` is set. Output that goes to a file or a pipe has 240 columns;
`COLUMNS` sets another width.

`primeslurm VERB --help` shows the same text as this page. `primeslurm --install-completion` sets up completion of verbs
and options in your shell."""


def cli_reference() -> str:
    lines = ["# Command line", "", INTRODUCTION, ""]
    for group, verbs in GROUPS.items():
        lines += [f"| {group} | |", "|---|---|"]
        lines += [f"| [`{name}`](#{name}) | {verb.help} |" for name, verb in verbs.items()] + [""]
    lines += ["## Exit codes", "", "| code | meaning |", "|---|---|"]
    lines += [f"| {int(code)} | {_cell(meaning)} |" for code, meaning in EXIT_CODES.items()] + [""]
    for name in VERBS:
        lines += [f"## {name}", "", *_command(load_verb(name), f"primeslurm {name}", "###")]
    return "\n".join(lines)


def _command(command: Any, name: str, heading: str) -> Iterator[str]:
    """Yield a command and, if it is a group, its subcommands."""
    context = typer.Context(command, info_name=name)
    usage = command.get_usage(context).removeprefix("Usage: ").translate({ord("{"): None, ord("}"): None})
    yield from (command.help or "", "", "```text", usage, "```", "")
    params = [param for param in command.get_params(context) if "--help" not in param.opts]
    if params:
        yield from ("| argument or option | meaning |", "|---|---|", *(_param(param, context) for param in params), "")
    if command.epilog:
        yield from ("```bash", command.epilog.removeprefix(f"{EXAMPLES}\n"), "```", "")
    for child, inner in getattr(command, "commands", {}).items():
        yield from (f"{heading} {name.split()[-1]} {child}", "", *_command(inner, f"{name} {child}", f"{heading}#"))


def _param(param: Any, context: Any) -> str:
    if param.param_type_name == "argument":
        names = f"`{param.metavar or param.name.upper()}`"
    else:
        names = ", ".join(f"`{option} {param.metavar}`" if param.metavar else f"`{option}`" for option in param.opts)
    default = param.get_default(context, call=False)
    if not getattr(param, "show_default", True) or default in (None, False, [], ()) or "Default:" in param.help:
        return f"| {names} | {_cell(param.help)} |"
    return f"| {names} | {_cell(param.help)} Default: `{default}`. |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
