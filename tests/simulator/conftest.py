"""Kernel tests of this folder run in Numba's simulator only, which a process must begin with."""

import os

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

collect_ignore_glob = [] if SIMULATED else ["test_*_kernels.py"]
