"""The words that Hangman accepts, for machines on which NLTK has not downloaded any."""

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
    """Write the files that NLTK would download, in a directory for NLTK_DATA."""
    directory = data / "corpora" / "words"
    directory.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (directory / name).write_text("".join(f"{word}\n" for word in WORDS))
