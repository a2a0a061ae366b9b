"""The pages of the app in the order in which they are offered; a later page joins without moving another."""

from __future__ import annotations

from enum import Enum


class Page(Enum):
    """A page, named as its file is: its title, and its icon, one of those that come with Streamlit."""

    OVERVIEW = ("Overview", ":material/monitor_heart:")
    INCIDENT = ("Incident", ":material/search:")
    RANGES = ("Ranges", ":material/height:")
    REPLAY = ("Replay", ":material/play_circle:")
    SCALE = ("Scale", ":material/show_chart:")
    PRECISION = ("Precision", ":material/tune:")
    PLAN = ("Plan", ":material/stacked_bar_chart:")
    USAGE = ("Usage", ":material/fact_check:")
    RANKS = ("Ranks", ":material/lan:")
    COMPARE = ("Compare", ":material/compare_arrows:")
    RUNS = ("Runs", ":material/list:")
    WALL = ("Wall", ":material/tv:")

    def __init__(self, title: str, icon: str) -> None:
        self.title = title
        self.icon = icon

    @property
    def stem(self) -> str:
        """The name of its file."""
        return self.name.lower()

    @property
    def file(self) -> str:
        """Its file, below the app."""
        return f"app_pages/{self.stem}.py"

    def is_offered(self, world: int) -> bool:
        """Whether there is anything on it for a run of ``world`` ranks; by its address it is there all the same."""
        return self is not Page.RANKS or world > 1

    @property
    def is_of_one_rank(self) -> bool:
        """Whether it shows one rank of several, which is chosen; an incident has its own, Ranks all."""
        return self not in {Page.INCIDENT, Page.RANKS, Page.COMPARE, Page.RUNS}

    @property
    def is_default(self) -> bool:
        """Whether the app opens with it."""
        return self is Page.OVERVIEW

    @property
    def url_path(self) -> str:
        """Its path below the app's address, as Streamlit derives it."""
        return "" if self.is_default else self.stem
