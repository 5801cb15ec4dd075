"""What tests of several rooms share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
