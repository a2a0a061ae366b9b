"""How far healed trainings are from float32: every fault that the tests plant, in every model that it fits.

    python benchmarks/remedies/healing.py [--once] [PLANT...]

Each fault (all of them, or those with a given word in their names) comes at step 3 of a training of 40 steps and
stays to its end; with ``--once`` it is there in that one step of 12. Each is trained in each model and each half dtype
with ``heal=True``, unwatched, and, where float32 has the fault, too, with what is right written in its place; and in
float32, with what is right in its place. Compared is the loss of the batches that were learned, in float32. A line per
training goes to stderr. The table has, per fault, the healed trainings, how many of them ended with finite weights and
loss and with their loss scale, how far their loss is from float32's, how far one is that was mended by hand in the same
dtype, how many of the unhealed ones ended finite and how far those are, and what the healing did, per training.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

import ampscope
from tests.integration.planted_faults.models import ARCHITECTURES, Architecture
from tests.integration.planted_faults.state import healed_training as trainings
from tests.integration.planted_faults.table import BF16, PLANTS, Plant

#: Of the loss in float32.
NEAR = 0.02


class Result(NamedTuple):
    """One fault in one model and one dtype."""

    is_finite: bool
    keeps_scale: bool
    distance: float  #: of the healed training from float32, as a share
    by_hand: float  #: likewise; NaN where float32 alone is a cure
    unhealed: float  #: likewise; NaN where that is not finite to its end
    cures: Counter[str]

    @property
    def is_well(self) -> bool:
        return self.is_finite and self.keeps_scale and self.distance <= NEAR


def results(plant: Plant, *, lasting: bool) -> Iterator[Result]:
    """What becomes of a fault, in one model and one dtype after the other."""
    for where in filter(plant.fits, ARCHITECTURES):
        wide = trainings.in_float32(where, plant, lasting=lasting).loss
        for dtype in plant.dtypes:
            result = _trained(where, dtype, plant, wide, lasting=lasting)
            told = ", ".join(f"{count} {kind}" for kind, count in result.cures.items())
            line = f"{plant}, {where}, {dtype}: {'' if result.is_well else 'NOT '}well, {result.distance:.2%}; {told}"
            print(line, file=sys.stderr, flush=True)
            yield result


def _trained(where: Architecture, dtype: torch.dtype, plant: Plant, wide: float, *, lasting: bool) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        healed = trainings.healed(where, dtype, plant, run, lasting=lasting)
        cures = Counter(str(cure.kind) for cure in ampscope.diagnose(run).cures)
    unhealed = trainings.unhealed(where, dtype, plant, lasting=lasting)
    by_hand = trainings.by_hand(where, dtype, plant, lasting=lasting) if BF16 in plant.dtypes else None
    return Result(
        healed.is_finite,
        trainings.keeps_scale(plant, dtype, healed.scale, by_hand=by_hand.scale if by_hand else math.inf),
        abs(healed.loss / wide - 1),
        abs(by_hand.loss / wide - 1) if by_hand else math.nan,
        abs(unhealed.loss / wide - 1) if unhealed.is_finite else math.nan,
        cures,
    )


def row(plant: Plant, found: list[Result]) -> str:
    """A fault's row of the table."""
    together: Counter[str] = sum((each.cures for each in found), Counter())
    cures = ", ".join(f"`{kind}` {count / len(found):.3g}" for kind, count in together.most_common())
    cells = (
        str(plant),
        str(len(found)),
        str(sum(each.is_finite for each in found)),
        str(sum(each.keeps_scale for each in found)),
        _shares([each.distance for each in found]),
        _shares([each.by_hand for each in found]),
        str(sum(not math.isnan(each.unhealed) for each in found)),
        _shares([each.unhealed for each in found]),
        cures or "none",
    )
    return f"| {' | '.join(cells)} |"


def _shares(distances: list[float]) -> str:
    """Median and largest of those that are known."""
    known = [each for each in distances if not math.isnan(each)]
    return f"{median(known):.2%}, {max(known):.2%}" if known else "-"


_HEAD = (
    "| fault | runs | finite | scale kept | from float32: median, worst | mended by hand | unhealed finite "
    "| unhealed from float32 | cures a run |"
)


def main() -> int:
    """Prints the table; exit code 0 if every healed training ended well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plants", nargs="*", help="words of the names of faults; default: all")
    parser.add_argument("--once", action="store_true", help="the fault in one step")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")  # of float32 under autocast, and what frameworks say of themselves
    everything = (*PLANTS, *trainings.OF_LOOPS)
    chosen = [each for each in everything if not asked.plants or any(word in each.name for word in asked.plants)]
    print(_HEAD, "|---" * 9 + "|", sep="\n")
    well = True
    for plant in chosen:
        found = list(results(plant, lasting=not asked.once))
        well = well and all(each.is_well for each in found)
        print(row(plant, found), flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
