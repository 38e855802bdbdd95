"""Reads the code blocks of a page and the test markers above them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```", re.DOTALL | re.MULTILINE)
MARKER = re.compile(r"<!-- docs-test: (?P<keyword>\w+)(?:[ ,]+(?P<detail>[^>]*?))? -->\s*\Z")
TITLE = re.compile(r'title="([^"]+)"')
LANGUAGES = {"bash", "yaml", "python", "json", "toml", "text"}
KEYWORDS = {"skip", "output", "exit"}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    title: str
    """File whose content the block is; empty for other blocks."""
    body: str
    keyword: str
    """Keyword of the marker above the block; empty if there is none."""
    detail: str
    """Text of the marker after its keyword: the reason for a skip, or an exit code."""

    @property
    def where(self) -> str:
        """Page and line, in the format that editors open."""
        return f"{self.page}:{self.line}"

    def problem(self) -> str:
        """Return why the block cannot be tested as written; empty if it can."""
        if self.language not in LANGUAGES:
            return f"language {self.language!r} is none of {', '.join(sorted(LANGUAGES))}"
        if self.keyword and self.keyword not in KEYWORDS:
            return f"marker {self.keyword!r} is none of {', '.join(sorted(KEYWORDS))}"
        if self.keyword == "skip" and len(self.detail.split()) < 2:
            return "a skipped block needs a reason of at least two words"
        if self.keyword == "output" and self.language != "text":
            return "only a text block can be compared with an output"
        if self.keyword == "exit" and not (self.language == "bash" and self.detail.isdecimal()):
            return "an exit code belongs to a bash block"
        return ""


def blocks_of(page: Path) -> list[Block]:
    """Return all code blocks of a page, in order."""
    text = page.read_text()
    blocks = []
    for fence in FENCE.finditer(text):
        language, _, info = fence["info"].strip().partition(" ")
        title = TITLE.search(info)
        marker = MARKER.search(text[: fence.start()])
        blocks.append(
            Block(
                page=page,
                line=text.count("\n", 0, fence.start()) + 1,
                language=language,
                title=title[1] if title else "",
                body=re.sub(rf"^{fence['indent']}", "", fence["body"], flags=re.MULTILINE),
                keyword=marker["keyword"] if marker else "",
                detail=(marker["detail"] or "").strip() if marker else "",
            )
        )
    return blocks


def matches(shown: str, printed: str) -> bool:
    """Return whether the lines of a page occur in an output, in order.

    `...` within a line matches any text. A line of `...` matches any number of lines. Other lines must be adjacent.
    Trailing spaces and column widths are ignored.
    """
    parts = []
    for line in shown.strip().splitlines():
        words = r"[ \t]+".join(re.escape(word) for word in line.split()).replace(r"\.\.\.", "[^\n]*")
        parts.append(r"(?:[^\n]*\n)*?" if line.strip() == "..." else rf"[ \t]*{words}[ \t]*(?:\n|\Z)")
    return re.search("(?m:^)" + "".join(parts), printed) is not None
