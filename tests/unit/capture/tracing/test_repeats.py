"""An op is known again only where all that makes its site is as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ampscope.capture.torch_support.user_line import Place
from ampscope.capture.tracing import operators
from ampscope.capture.tracing.sites import Circumstances, Repeats
from ampscope.trace.schema import Phase

SUM = operators.describe(torch.ops.aten.sum.dim_IntList)
HERE = Place(pytest.fixture.__code__, 7)
NOW = Circumstances(SUM, Phase.FORWARD, "part", HERE, "sum", torch.float16)
FLOATS = [torch.ones(2, 3)]
GIVEN: tuple[Any, ...] = (NOW, (FLOATS[0], [1]), {"dtype": None}, FLOATS, [torch.ones(2)])


def known(*given: Any) -> int | None:
    repeats = Repeats()
    repeats.ran(*GIVEN, site=4)
    return repeats.site(*given)


def test_what_is_as_it_was_is_known() -> None:
    assert known(*GIVEN) == 4
    assert known(NOW, (torch.zeros(2, 3), [1]), {"dtype": None}, [torch.zeros(2, 3)], [torch.zeros(2)]) == 4


@pytest.mark.parametrize(
    ("at", "other"),
    [
        (0, NOW._replace(module="other")),
        (0, NOW._replace(autocast=None)),
        (0, NOW._replace(phase=Phase.LOSS)),
        (0, NOW._replace(place=Place(pytest.fixture.__code__, 8))),
        (0, NOW._replace(forward_site=1)),
        (1, (FLOATS[0], [0])),
        (1, (FLOATS[0], [1], True)),
        (2, {"dtype": torch.float32}),
        (3, [torch.ones(2, 3, dtype=torch.float16)]),
        (3, [torch.ones(3, 2)]),
        (4, [torch.ones(3)]),
    ],
)
def test_what_differs_is_not(at: int, other: Any) -> None:
    assert known(*GIVEN[:at], other, *GIVEN[at + 1 :]) is None
