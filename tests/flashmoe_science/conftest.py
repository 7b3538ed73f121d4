from __future__ import annotations

import sys
from pathlib import Path

# For attention_reference.py: in importlib's import mode a test's folder is not on the path.
sys.path.insert(0, str(Path(__file__).parent))
