from __future__ import annotations

import os
import sys
from pathlib import Path

# Before transformers is imported: nothing is looked up.
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
