"""``python -m ampscope`` is the command ``ampscope``."""

from __future__ import annotations

from ampscope.cli.main import main

if __name__ == "__main__":
    main()
