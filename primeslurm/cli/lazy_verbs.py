"""The verbs, each with the first paragraph of its help: a verb's own module is imported when it is called."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import takewhile
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from primeslurm.errors import UsageError, Violation

PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
VERBS: dict[str, tuple[str, str]] = {
    "init": ("init:init", "Write a site file for this cluster, and a first recipe."),
    "install": ("install:install", "Install what nodes need at run time, and small models."),
    "recipes": ("recipes:app", "List, show and copy the ready recipes."),
    "submit": ("submit:submit", "Validate a recipe, place it, and submit it as one job."),
    "eval": (
        "submit:eval_",
        "Evaluate the model of a recipe, or a policy of a run, as a job of engines and environments alone.",
    ),
    "resume": (
        "submit:resume",
        "Go on with a run that has ended, from its last committed step, as a new attempt.",
    ),
    "status": ("watch:status", "Show what a run is doing."),
    "summary": (
        "watch:summary",
        "Show what a run achieved: reward (or loss), versions, staleness, mismatch, restarts.",
    ),
    "logs": ("watch:logs", "Print the logs of a run's processes, each line with the name of its process."),
    "attach": (
        "attach:attach",
        "Open a shell where a process runs, in the job's allocation, with that process's environment and directory.",
    ),
    "doctor": (
        "doctor:doctor",
        "Name the first failure of a run, what followed from it, and what helps; exit code 1 if there is one.",
    ),
    "diff": (
        "diff:diff_",
        "Compare two recipes or runs by what they would do: nodes, processes, commands, job options.",
    ),
    "report": (
        "export:report",
        "Write one HTML page about a run, with plots; it needs neither network nor scripts to be read.",
    ),
    "export": (
        "export:export",
        "Write a checkpoint of a run as a Hugging Face model, with config and tokenizer. It needs no GPU.",
    ),
    "convert": (
        "export:convert",
        "Write a model in bfloat16 that is stored in INT4, MXFP4 or FP8: for RL, whose engines take policies.",
    ),
    "images": (
        "images:images",
        "Build the container images of Harbor tasks that come with a Dockerfile, each once; exit code 1 if any fails.",
    ),
    "cancel": (
        "runs:cancel",
        "Write a last checkpoint, then end a run and its job. `resume` continues from the checkpoint.",
    ),
    "runs": ("runs:runs", "List all runs."),
    "nodes": ("nodes:nodes", "List the nodes that failed lately, which new jobs keep away from."),
    "plan": (
        "inspect:plan",
        "Show the placement that a recipe gives: node x process x port x GPU, and derived totals.",
    ),
    "render": ("inspect:render_", "Print the batch script, byte for byte as it would be submitted."),
    "check": (
        "inspect:check",
        "Check recipe, placement, compatibility, memory and model files; exit code 2 if it cannot run.",
    ),
    "schema": ("inspect:schema", "Print the JSON schema of recipes, for editors."),
    "cluster": ("cluster:app", "Run a real Slurm cluster with fake GPUs on this machine."),
}
"""Name to place (module of this package and name in it) and help, in the order shown."""


class HelpingGroup(TyperGroup):
    """Commands that a first word chooses among. Without a word, help is what was asked for: click calls it an error."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Take in the words."""
        return super().parse_args(ctx, args or ["--help"])


class VerbGroup(HelpingGroup):
    """The commands of `VERBS`. Lists show what is said there; the command that is called is the real one."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name, help=text) for name, (_, text) in VERBS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first word names, and the rest of the words."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_verb(name) if name and command else command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the verb. What is wrong with its words is JSON, too, for who asked for that."""
        try:
            return super().invoke(ctx)
        except typer.TyperException as error:
            if asks_for_json(sys.argv):
                from primeslurm.cli.output import report_json

                report_json(UsageError([Violation("command", "", error.format_message())]))
            raise  # what called this group prints it for people


def asks_for_json(words: Sequence[str]) -> bool:
    """Whether a command's words have `--json`, before those of another command."""
    return "--json" in takewhile(lambda word: word != "--", words)


@contextmanager
def without_plugins() -> Iterator[None]:
    """Have pydantic look for no plugins meanwhile: it would read the entry points of every package that is installed.

    Jobs get the environment of the command that submits them, and their models may have plugins.
    """
    asked = os.environ.get(PLUGINS)
    os.environ[PLUGINS] = "__all__"
    try:
        yield
    finally:
        del os.environ[PLUGINS]
        if asked is not None:
            os.environ[PLUGINS] = asked


def load_verb(name: str) -> Any:
    """Load a verb as a command."""
    module, _, attribute = VERBS[name][0].partition(":")
    with without_plugins():  # nearly all models of ours are made here
        found = getattr(import_module(f"primeslurm.cli.verbs.{module}"), attribute)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False)
        found.command(name, help=inspect.getdoc(function))(function)
    return typer.main.get_command(found)
