"""`python -m primeslurm.orchestrator`."""

import sys

from primeslurm.imports import uncollected

with uncollected():
    from primeslurm.orchestrator.main import main

sys.exit(main())
