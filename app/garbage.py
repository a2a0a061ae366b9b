"""How often Python looks for garbage: what an analysis makes is many objects, and lives as long as it is shown."""

from __future__ import annotations

import gc

#: Objects made before the collector looks at the youngest, and looks before it does at older ones. As Python has it, a
#: sixth of the time of a verdict goes into looks in vain.
_BETWEEN_LOOKS = (50_000, 20, 100)


def collect_seldom() -> None:
    """Look for garbage less often."""
    gc.set_threshold(*_BETWEEN_LOOKS)


def set_aside() -> None:
    """Look at everything once, and at what is alive now not again until the next time.

    Streamlit collects after each visit, and until that has ended nothing of the page is sent: a fifth of a second where
    a large run has been looked at.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
