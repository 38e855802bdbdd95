"""Help texts on a terminal of 80 columns."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from primeslurm.cli.lazy_verbs import GROUPS, VERBS, load_verb, readable, split_examples
from tests.support.cli import primeslurm
from tests.support.golden import assert_golden


@pytest.mark.parametrize("words", [(), ("submit",), ("cluster",)], ids=lambda words: "-".join(("help", *words)))
def test_help_matches_the_golden_file(words: tuple[str, ...], tmp_path: Path) -> None:
    shown = primeslurm(*words, "--help", cwd=tmp_path, columns=80)
    assert (shown.code, shown.err) == (0, "")
    assert_golden(f"cli/{'-'.join(('help', *words))}.txt", shown.out)


def test_groups_follow_the_work() -> None:
    assert list(GROUPS) == ["Prepare", "Run", "Watch", "Results", "Cluster"]


@pytest.mark.parametrize("name", VERBS)
def test_help_line_of_a_verb_fits_a_terminal(name: str) -> None:
    text = VERBS[name].help
    assert len(text) <= 66 and text.endswith(".") and text[0].isupper()


@pytest.mark.parametrize("name", VERBS)
def test_every_option_has_help(name: str) -> None:
    def commands(command: object) -> list[object]:
        inner = getattr(command, "commands", {})
        return [command, *(each for child in inner.values() for each in commands(child))]

    for command in commands(load_verb(name)):
        assert all(param.help for param in command.params), command  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", [(), ("check",), ("cluster", "down")])
def test_flag_has_no_value_in_help(words: tuple[str, ...], tmp_path: Path) -> None:
    assert "bool" not in primeslurm(*words, "--help", cwd=tmp_path).out


def test_examples_are_split_from_the_text() -> None:
    docstring = "Do it.\n\nLong\ntext.\n\nExamples:\n    primeslurm do\n    primeslurm do --it"
    assert split_examples(docstring) == ("Do it.\n\nLong text.", "primeslurm do\nprimeslurm do --it")
    assert split_examples("Do it.") == ("Do it.", "")


def test_verb_with_subcommands_shows_flags_without_values() -> None:
    app = typer.Typer()

    @app.callback()
    def whole(deep: bool = typer.Option(False, "--deep")) -> None:
        pass

    @app.command("part")
    def part(wide: bool = typer.Option(False, "--wide")) -> None:
        pass

    for words in (["--help"], ["part", "--help"]):
        shown = CliRunner().invoke(readable(app), words, catch_exceptions=False).stdout
        assert "--help" in shown and "bool" not in shown
