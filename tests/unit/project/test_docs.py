"""Every command in README and docs exists with its options, and links lead somewhere."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from typer._click.exceptions import MissingParameter
from typer.core import TyperGroup

from primeslurm.cli import app
from tests.support.pages.blocks import blocks_of
from tests.support.pages.reader import validate

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
INLINE = re.compile(r"`(primeslurm [^`]+|\./just [^`]+)`")


def commands() -> list[tuple[str, str]]:
    """Return (page, command) for every primeslurm or just command. docs/reference/cli.md is generated."""
    pairs = []
    for page in PAGES:
        if page.name == "cli.md":
            continue
        text = page.read_text()
        lines = [line for _, body in FENCE.findall(text) for line in body.splitlines()]
        for line in [*lines, *INLINE.findall(FENCE.sub("", text))]:
            if re.match(r"(primeslurm|\./just) ", line):
                pairs.append((str(page.relative_to(ROOT)), line.split("#")[0].split(">")[0].strip()))
    return pairs


def test_there_are_commands_to_check() -> None:
    assert len(commands()) > 15


@pytest.mark.parametrize(("page", "command"), commands())
def test_every_command_shown_can_be_typed(page: str, command: str) -> None:
    words = shlex.split(command)
    if words[0] == "./just":
        names = subprocess.run([".venv/bin/just", "--summary"], cwd=ROOT, capture_output=True, text=True, check=True)
        assert words[1] in names.stdout.split()
        return
    parser = typer.main.get_command(app)
    rest = words[1:]
    while isinstance(parser, TyperGroup) and rest and not rest[0].startswith("-"):
        assert rest[0] in parser.commands, command
        _, parser, rest = parser.resolve_command(typer.Context(parser), rest)
    only_named = len(words) == 2  # prose names a verb without its arguments
    with contextlib.suppress(typer.Exit, *([MissingParameter] if only_named else [])):
        parser.make_context(words[1], rest)  # raises for an unknown option or a missing argument


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_yaml_shown_is_valid() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language == "yaml"]
    assert len(blocks) >= 2
    for block in blocks:
        validate(yaml.safe_load(block.body))


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_recipes_say_what_they_are_for(recipe: Path) -> None:
    assert recipe.read_text().startswith("# ")
