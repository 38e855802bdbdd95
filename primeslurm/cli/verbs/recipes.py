"""`primeslurm recipes`: list, show and copy the ready recipes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from primeslurm.api.setup.ready_recipes import copy_recipe, list_recipes, recipe_text
from primeslurm.cli.options import JsonOpt
from primeslurm.cli.output import note, print_json

app = typer.Typer(
    help="List, show and copy the ready recipes.\n\n"
    "Every command that takes a recipe also takes the name of a ready one.\n\n"
    "Examples:\n    primeslurm recipes\n    primeslurm recipes copy glm5_pd my_run.yaml",
    invoke_without_command=True,
    add_completion=False,
)

NameArg = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a ready recipe, for example glm5_pd.", show_default=False)
]


@app.callback()
def list_(context: typer.Context, as_json: JsonOpt = False) -> None:
    """List the ready recipes, unless a subcommand was given."""
    if context.invoked_subcommand is not None:
        return
    recipes = list_recipes()
    if as_json:
        print_json(
            [
                {"name": r.name, "nodes": r.nodes, "gpus": r.gpus, "purpose": r.purpose, "path": str(r.path)}
                for r in recipes
            ]
        )
        return
    # rich takes long to import, and `show` and `--json` do not need it.
    from primeslurm.cli.views.tables import light_table, out

    table = light_table("recipe", "nodes", "GPUs", "purpose")
    for recipe in recipes:
        table.add_row(recipe.name, str(recipe.nodes), str(recipe.gpus), recipe.purpose)
    out.print(table)
    note("Print a recipe: primeslurm recipes show NAME. Copy it: primeslurm recipes copy NAME.")


@app.command("show")
def show_command(name: NameArg) -> None:
    """Print a ready recipe."""
    sys.stdout.write(recipe_text(name))


@app.command("copy")
def copy_command(
    name: NameArg,
    destination: Annotated[
        Path | None,
        typer.Argument(metavar="DEST", help="New file, or a directory. Default: ./NAME.yaml", show_default=False),
    ] = None,
) -> None:
    """Copy a ready recipe to a new file, and print its path."""
    typer.echo(copy_recipe(name, destination))
