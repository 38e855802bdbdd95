"""An environment that hangs when it is imported, as one that waits for a server does."""

import time


def wait() -> None:
    """Wait for ever."""
    time.sleep(3600)


wait()
