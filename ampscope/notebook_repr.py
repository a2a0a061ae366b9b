"""How results show themselves in Jupyter: the view is looked up when a cell asks for it.

Jupyter asks the object itself, so this is the one place from which a result reaches up to its view. The view is named,
not imported: who never asks loads nothing, and results go on knowing nothing of how they are shown.
"""

from __future__ import annotations

import importlib

_VIEW = "ampscope.report.html.notebook"


class NotebookRepr:
    """A result that Jupyter shows as HTML; everywhere else its ``repr`` stays as it is."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        html: str | None = importlib.import_module(_VIEW).notebook_html(self)
        return html
