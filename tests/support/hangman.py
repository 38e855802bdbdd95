"""The words that Hangman takes, where NLTK has downloaded none."""

from __future__ import annotations

from pathlib import Path

WORDS = (
    "apple",
    "arise",
    "cater",
    "elation",
    "house",
    "instead",
    "later",
    "orient",
    "roast",
    "table",
    "trail",
    "water",
)


def write_words(data: Path) -> None:
    """Write what NLTK would download to a directory for NLTK_DATA."""
    directory = data / "corpora" / "words"
    directory.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (directory / name).write_text("".join(f"{word}\n" for word in WORDS))
