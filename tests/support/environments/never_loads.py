"""An environment whose import hangs, as if it waited for a server."""

import time


def wait() -> None:
    time.sleep(3600)


wait()
