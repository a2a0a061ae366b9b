"""The limits that a run has to keep: light to import, for pytest reads them before a test runs."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.errors import AmpscopeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Holds the limits that a run has to keep; one that is None is not checked."""

    strict: bool = False  #: whether a run at risk fails as well
    max_skipped: float | None = None  #: share, 0 to 1; without the steps in which a scale first finds its place
    no_new_overflow: bool = False
    min_headroom: float | None = None  #: bits

    @classmethod
    def asked(
        cls,
        *,
        strict: bool = False,
        max_skipped: str | float | None = None,
        no_new_overflow: bool = False,
        min_headroom: float | None = None,
    ) -> Limits:
        """Limits as people write them: a share is ``"1%"`` or 0.01.

        Raises:
            AmpscopeError: a number that a limit cannot have.
        """
        if min_headroom is not None and not min_headroom >= 0:
            raise AmpscopeError(f"min_headroom is {min_headroom!r}; it counts factors of two, and is 0 or more")
        return cls(
            strict=strict,
            max_skipped=None if max_skipped is None else _share(max_skipped),
            no_new_overflow=no_new_overflow,
            min_headroom=min_headroom,
        )


def _share(asked: str | float) -> float:
    text = str(asked).strip()
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = float("nan")
    if not 0 <= number <= 1:
        raise AmpscopeError(f"{asked!r} is no share of steps; write 1% or 0.01")
    return number
