"""Every code block of the pages for readers does what the page says (`tests.support.pages`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model
from tests.support.pages.blocks import blocks_of, matches
from tests.support.pages.reader import Reader

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *(page for name in ("index", "quickstart", "install") if (page := DOCS / f"{name}.md").exists()),
    *sorted((DOCS / "tutorials").glob("*.md")),
    *sorted((DOCS / "how-to").glob("*.md")),
]
TEMPLATE = (
    "{% for m in messages %}<bos>{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>assistant:{% endif %}"
)
LONG = ("docs/tutorials/sft-then-rl.md", "docs/tutorials/own-environment.md", "docs/how-to/environments.md")
"""Pages whose commands take longest. Campaigns read them."""
FEW = 0.12
"""Largest share of skipped blocks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Yield a small model with a chat template, for all models that pages download."""
    directory = make_model(tmp_path_factory.mktemp("pages") / "model")
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def pages() -> list[Any]:
    names = [str(page.relative_to(ROOT)) for page in PAGES]
    return [pytest.param(name, marks=pytest.mark.campaign) if name in LONG else name for name in names]


@pytest.mark.parametrize("name", pages())
def test_blocks_of_a_page_work(name: str, model: Path, tmp_path: Path) -> None:
    page = ROOT / name
    reader = Reader(tmp_path, model)
    for block in blocks_of(page):
        assert not block.problem(), f"{block.where}: {block.problem()}"
        if block.keyword != "skip":
            reader.read(block)


def test_few_blocks_are_skipped() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language != "text"]
    skipped = [block for block in blocks if block.keyword == "skip"]
    assert len(skipped) <= FEW * len(blocks), "\n".join(f"{block.where}: {block.detail}" for block in skipped)


@pytest.mark.parametrize(
    "text",
    [
        "```\nls\n```",
        "<!-- docs-test: skip -->\n```bash\nls\n```",
        "<!-- docs-test: slow, needs time -->\n```bash\nls\n```",
        "<!-- docs-test: output -->\n```bash\nls\n```",
        "<!-- docs-test: exit, two -->\n```bash\nls\n```",
    ],
)
def test_untestable_block_is_refused(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A page\n\n{text}\n")
    assert [block.problem() != "" for block in blocks_of(page)] == [True]


def test_wrong_page_is_detected(model: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\ncd recipes\nexport WORD=two\n```\n\n```bash\necho one; echo $WORD  three; basename $PWD\n```\n\n"
        "<!-- docs-test: output -->\n```text\ntwo three\nrec...\n```\n\n"
        "<!-- docs-test: exit 3 -->\n```bash\nexit 3\n```\n\n"
        "```yaml\ntrainer: {optimiser: {lr: 1.0e-3}}\n```\n\n```bash\nprimeslurm chek x.yaml\n```\n"
    )
    home = tmp_path / "home"
    home.mkdir()
    reader = Reader(home, model)
    *right, part, command = blocks_of(page)
    for block in right:
        reader.read(block)
    with pytest.raises(ValueError, match="optimiser"):
        reader.read(part)
    with pytest.raises(AssertionError, match="exit code 2, expected 0"):
        reader.read(command)


@pytest.mark.parametrize(
    ("shown", "matching"), [("b  c", True), ("b\n...\ne", True), ("b\ne", False), ("...d", True), ("f", False)]
)
def test_lines_of_an_output_are_compared(shown: str, matching: bool) -> None:
    assert matches(shown, "a\nb   c\nb\nc\nd\ne\n") is matching
