"""Hostile run and session folders, for `tools/harden.py`: python tests/hard/fuzz_folders.py SEED COUNT"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fuzz import nightly

if __name__ == "__main__":
    sys.exit(nightly("folders"))
