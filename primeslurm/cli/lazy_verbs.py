"""The verbs in groups, each with one line of help. A verb's module is imported only when the verb is called."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from primeslurm.base.errors import ExitCode, UsageError, Violation

PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
# Heading of the last section of a docstring. Help shows its lines as they are.
EXAMPLES = "Examples:"


class Verb(NamedTuple):
    """A command of `primeslurm`."""

    place: str  # module of `cli.verbs`, and name in it
    help: str  # one imperative line, the same as the first line of the function's docstring
    fails: Mapping[ExitCode, str] = MappingProxyType({})
    """Meaning of exit codes for this verb, beyond `EXIT_CODES`. Help shows it."""


_RUN_FAILED = {ExitCode.FAILED: "with `--wait`, the run did not complete."}
# Every verb by its group, in the order in which a person needs them.
GROUPS: dict[str, dict[str, Verb]] = {
    "Prepare": {
        "install": Verb("install:install", "Install what nodes need at run time, or a small model."),
        "init": Verb("init:init", "Write a site file for this cluster, and a first recipe."),
        "recipes": Verb("recipes:app", "List, show and copy the ready recipes."),
        "check": Verb(
            "inspect:check",
            "Check a recipe against site, model files and Slurm.",
            {ExitCode.BAD_INPUT: "the recipe cannot run."},
        ),
        "plan": Verb("inspect:plan", "Show whether a recipe fits, and what it needs."),
        "diff": Verb("diff:diff_", "Compare two recipes or runs.", {ExitCode.FAILED: "they differ."}),
        "render": Verb("inspect:render_", "Print the batch script that submit sends to Slurm."),
        "images": Verb(
            "images:images",
            "Build the container images of Harbor tasks.",
            {ExitCode.FAILED: "an image could not be built."},
        ),
        "convert": Verb("export:convert", "Convert an INT4, MXFP4 or FP8 checkpoint to bfloat16."),
        "schema": Verb("inspect:schema", "Print the JSON schema of recipes or of site files."),
    },
    "Run": {
        "submit": Verb("submit:submit", "Submit a recipe as one job, or run it on this machine.", _RUN_FAILED),
        "resume": Verb("submit:resume", "Resume a run from its last checkpoint.", _RUN_FAILED),
        "cancel": Verb("runs:cancel", "Stop a run cleanly and cancel its job."),
        "eval": Verb("submit:eval_", "Evaluate a model, or a policy of a run.", _RUN_FAILED),
        "tenant": Verb("tenant:app", "Train adapters of several tenants on one deployment."),
        "tinker": Verb("tinker:app", "Serve the Tinker API on this machine."),
    },
    "Watch": {
        "status": Verb(
            "watch:status",
            "Show what a run is doing.",
            {ExitCode.FAILED: "with `--watch`, the run did not complete."},
        ),
        "dashboard": Verb("dashboard:dashboard", "Serve a web page about all runs, with live curves."),
        "logs": Verb("watch:logs", "Print the logs of a run's processes."),
        "rollouts": Verb("rollouts:rollouts", "Read what the policy wrote, and how it was trained."),
        "doctor": Verb(
            "doctor:doctor",
            "Find out why a run failed, or check an installation.",
            {ExitCode.FAILED: "the run failed or is invalid, or a required part is missing or has another version."},
        ),
        "attach": Verb("attach:attach", "Open a shell next to a process of a run."),
        "runs": Verb("runs:runs", "List all runs."),
    },
    "Results": {
        "summary": Verb("watch:summary", "Show what a run achieved: reward or loss, staleness, speed."),
        "report": Verb("export:report", "Write the dashboard's pages about a run as one HTML file."),
        "export": Verb("export:export", "Export a checkpoint as a Hugging Face model."),
    },
    "Cluster": {
        "calibrate": Verb(
            "calibrate:calibrate",
            "Measure the rates of a cluster's nodes for the planner.",
            {ExitCode.FAILED: "the job did not complete."},
        ),
        "nodes": Verb("nodes:nodes", "List nodes that new jobs avoid because they failed."),
        "cluster": Verb("cluster:app", "Manage an embedded Slurm cluster on this machine."),
    },
}
VERBS: dict[str, Verb] = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}


class ReadableHelp(TyperCommand):
    """A command whose help shows flags without a type."""

    def get_params(self, ctx: Any) -> Any:
        return without_type_of_flags(super().get_params(ctx))


def without_type_of_flags(params: Any) -> Any:
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class ReadableGroup(TyperGroup):
    """A command with subcommands, with the same help as `ReadableHelp`."""

    def get_params(self, ctx: Any) -> Any:
        return without_type_of_flags(super().get_params(ctx))


class HelpingGroup(ReadableGroup):
    """A command with subcommands that shows its help if none is given. click would call that an error."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        return super().parse_args(ctx, args or ["--help"])


class VerbGroup(HelpingGroup):
    """The commands of `GROUPS`. A command is imported only when it is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Help and completion need names and help lines only, so these commands have no functions.
        self.commands = {
            name: TyperCommand(name, help=verb.help, rich_help_panel=group)
            for group, verbs in GROUPS.items()
            for name, verb in verbs.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_verb(name) if name and command else command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. With `--json`, a usage error is also printed as JSON."""
        try:
            return super().invoke(ctx)
        except typer.TyperException as error:
            if asks_for_json(sys.argv):
                from primeslurm.cli.output import report_json

                report_json(UsageError([Violation("command", "", error.format_message())]))
            raise  # what called this group prints it for people


def asks_for_json(words: Sequence[str]) -> bool:
    """True if `--json` is an option of this command. Words after `--` belong to another command."""
    return "--json" in takewhile(lambda word: word != "--", words)


@contextmanager
def without_plugins() -> Iterator[None]:
    """Turn off pydantic's plugins for a block, because pydantic searches every installed package for them.

    The variable is restored because jobs inherit the environment, and their models may have plugins.
    """
    before = os.environ.get(PLUGINS)
    os.environ[PLUGINS] = "__all__"
    try:
        yield
    finally:
        del os.environ[PLUGINS]
        if before is not None:
            os.environ[PLUGINS] = before


def load_verb(name: str) -> Any:
    """Import a verb and return its command."""
    module, _, attribute = VERBS[name].place.partition(":")
    with without_plugins():  # importing a verb defines nearly all pydantic models of the project
        verb = getattr(import_module(f"primeslurm.cli.verbs.{module}"), attribute)
    if isinstance(verb, typer.Typer):
        return typer.main.get_command(readable(verb))
    app = typer.Typer(add_completion=False)
    add_command(app, name, verb, VERBS[name].fails)
    return typer.main.get_command(app)


def readable(app: typer.Typer) -> typer.Typer:
    """Give an app and its commands the help of this module."""
    if not isinstance(app.info.cls, type):
        app.info.cls = ReadableGroup
    for command in app.registered_commands:
        if command.cls is TyperCommand:
            command.cls = ReadableHelp
    return app


def add_command(
    app: typer.Typer, name: str, function: Callable[..., None], fails: Mapping[ExitCode, str] = MappingProxyType({})
) -> None:
    """Add a function as a command. Its docstring is the help text, with `Examples:` after the options.

    The meanings of exit codes in `fails` become the last paragraphs of the help text.
    """
    text, examples = split_examples(inspect.getdoc(function) or "")
    text = "\n\n".join([text, *(f"Exit code {int(code)}: {meaning}" for code, meaning in fails.items())])
    app.command(name, cls=ReadableHelp, help=text, epilog=examples and f"{EXAMPLES}\n{examples}")(function)


def split_examples(docstring: str) -> tuple[str, str]:
    """Split a docstring into its text, one line per paragraph, and the lines of its section `Examples:`."""
    text, _, examples = docstring.partition(f"\n\n{EXAMPLES}\n")
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    return "\n\n".join(paragraphs), inspect.cleandoc(examples).replace("\n\n", "\n")
