"""The pages of the app in the order in which they are offered; a later page joins without moving another."""

from __future__ import annotations

from enum import Enum


class Page(Enum):
    """A page: its file below the app, its title, its icon."""

    OVERVIEW = ("app_pages/overview.py", "Overview", ":material/monitor_heart:")
    INCIDENT = ("app_pages/incident.py", "Incident", ":material/search:")
    REPLAY = ("app_pages/replay.py", "Replay", ":material/play_circle:")
    SCALE = ("app_pages/scale.py", "Scale", ":material/show_chart:")
    PRECISION = ("app_pages/precision.py", "Precision", ":material/tune:")
    USAGE = ("app_pages/usage.py", "Usage", ":material/fact_check:")
    RUNS = ("app_pages/runs.py", "Runs", ":material/list:")

    @property
    def file(self) -> str:
        """The page's file."""
        return self.value[0]

    @property
    def title(self) -> str:
        """Its name in the navigation."""
        return self.value[1]

    @property
    def icon(self) -> str:
        """Its icon, one of those that come with Streamlit."""
        return self.value[2]
