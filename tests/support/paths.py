"""Where the checkout lies that is tested."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
APP = ROOT / "app"
SAMPLES = ROOT / "sample_logs"
