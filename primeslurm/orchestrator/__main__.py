"""`python -m primeslurm.orchestrator`."""

import sys

from primeslurm.orchestrator.main import main

sys.exit(main())
