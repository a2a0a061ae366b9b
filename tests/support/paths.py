"""Where the checkout lies that is tested, and which modules it has."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ampscope"
APP = ROOT / "app"
SAMPLES = ROOT / "sample_logs"


def modules() -> dict[str, Path]:
    """The file of every module of package and app by its full name, the app's below ``app``."""
    files = sorted([*PACKAGE.rglob("*.py"), *APP.rglob("*.py")])
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
