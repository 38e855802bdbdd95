"""Colours of states, levels and roles on a terminal."""

from __future__ import annotations

# By state of a process. Other states are red.
PROCESS_COLOURS = {"HEALTHY": "green", "DONE": "green"} | dict.fromkeys(
    ("STALE", "LOADING", "STARTING", "UNKNOWN"), "yellow"
)
EVENT_COLOURS = {"info": "", "warning": "yellow", "error": "red"}
FINDING_COLOURS = {"error": "bold red", "blocked": "bold magenta", "warning": "yellow", "note": "cyan"}
# By state of a rollout. Others have no colour.
ROLLOUT_COLOURS = {"failed": "red", "dropped": "yellow"}
# By role of a message in a conversation
MESSAGE_COLOURS = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
