"""A vLLM API server that a fork server starts: `python -m tests.support.vllm_server ARGS`.

It leads its own process group, which `Server.stop` ends.
"""

from __future__ import annotations

import os
import sys
import threading

from vllm.entrypoints.launchers.api_server.entry import main

if __name__ == "__main__":
    os.setsid()
    if "COVERAGE_PROCESS_START" not in os.environ:  # the fork server may be measured
        sys.settrace(None)
        threading.settrace(None)
    main()
