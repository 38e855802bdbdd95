"""An environment that ends the interpreter on import, and leaves a temporary directory."""

import os
import sys
import tempfile

tempfile.mkdtemp()
print("no licence found", file=sys.stderr, flush=True)
os._exit(3)
