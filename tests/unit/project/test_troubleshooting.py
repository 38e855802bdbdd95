"""The messages on the troubleshooting page exist in the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
CELLS = re.findall(r"^\| (`.+?) \|", PAGE.read_text(), re.MULTILINE)
MESSAGES = [message for cell in CELLS for message in re.findall(r"`(.+?)`", cell)]
SLURM_OWN = {"sinfo: error", "AssocGrp...", "QOSMax..."}
"""Output of Slurm's commands, and reasons that the code matches by a pattern."""


@cache
def source() -> str:
    """Return the source of the package."""
    return "\n".join(module.read_text() for module in (ROOT / "primeslurm").rglob("*.py"))


def test_the_page_has_at_least_25_messages() -> None:
    assert len(MESSAGES) >= 25


@pytest.mark.parametrize("message", sorted(set(MESSAGES) - SLURM_OWN))
def test_a_quoted_message_occurs_in_the_code(message: str) -> None:
    missing = [part for part in message.split("...") if part.strip() and part.strip() not in source()]
    assert missing == []
