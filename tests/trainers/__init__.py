"""memfine_fx inside of trainers. What examples show is tested by the examples' own functions."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
