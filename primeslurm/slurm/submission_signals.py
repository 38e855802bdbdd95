"""Delay signals during a submission: between the call of sbatch and its answer nobody knows the job's id."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass
class HeldSignals:
    """Text that `signals_held` prints if it has delayed a signal. The delayed block sets it."""

    done: str = ""  # result of the block, for example a submission; empty: nothing was done


@contextmanager
def signals_held(run: str) -> Iterator[HeldSignals]:
    """Delay signals that would end this process. The first one is delivered after the block.

    Only the main thread can set handlers. In another thread nothing is delayed, because Python's handlers, such as that
    of Ctrl-C, do not run there.
    """
    held = HeldSignals()
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not came:
            _say(f"{signal.Signals(number).name} is delayed until it is known whether {run} is submitted")
        came.append(number)

    before = {number: signal.getsignal(number) for number in HELD}
    # Ignored signals stay ignored (nohup). Handlers that were not set from Python cannot be restored.
    held_back = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in held_back:
        signal.signal(number, note)
    try:
        yield held
    finally:
        for number, handler in held_back.items():
            signal.signal(number, handler)
    if came:
        if held.done:
            _say(held.done)
        signal.raise_signal(came[0])


def _say(text: str) -> None:
    print(f"\nnote: {text}", file=sys.stderr, flush=True)
