"""Writes a page for each cause into ``docs/causes``, and their list: ``make docs``.

What the catalogue knows (`ampscope.analysis.causes`) comes from there. What a cause means and how it comes about is
written in ``notes/FAMILY.md``, a section for each. The sample is ``samples/FAMILY/CAUSE.py``, and its diagnosis was
recorded in ``recorded/FAMILY/CAUSE.txt``.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from ampscope.analysis.causes.catalogue import CATALOGUE
from ampscope.analysis.causes.cause_entry import CauseEntry, Occurrence
from ampscope.analysis.causes.mathematics import DivisorSummed, SlopeAtEnd
from ampscope.analysis.causes.overflow import LossGrew
from ampscope.analysis.causes.usage_forms import FORMS
from ampscope.analysis.results import Remedy
from ampscope.trace.schema import Phase
from ampscope.trace.vocabulary import Cause, MistakeForm, Severity

HERE = Path(__file__).parent
PAGES = HERE.parent / "causes"
_NOTICE = "<!-- Made by `make docs` from the catalogue and docs/making: change those. -->"
_COMES_ABOUT = "\n=== comes about\n"
#: What is left out of a recorded diagnosis: it is about that one run.
_LEFT_OUT = ("What changed", "Evidence", "Path", "Checked", "Also", "Harmless")


@dataclass(frozen=True)
class Family:
    """Causes of one kind, and what is true of all of them."""

    name: str
    title: str
    about: str
    in_app: str  #: where the app shows one

    @property
    def notes(self) -> dict[Cause, tuple[str, str]]:
        """What each cause of the family means, and how it comes about, in the order of the file."""
        sections = re.split(r"^## (\w+)\n", (HERE / "notes" / f"{self.name}.md").read_text("utf-8"), flags=re.MULTILINE)
        found = {}
        for name, text in zip(sections[1::2], sections[2::2], strict=True):
            meaning, _, comes_about = text.partition(_COMES_ABOUT)
            found[Cause(name)] = (meaning.strip(), comes_about.strip())
        return found


_INCIDENT = (
    "*Overview* begins with it: the sentence, your line, the change. *Incident* shows the operands, the way to the "
    "loss and what was tried; *Replay* goes through the step op by op and stops at this one."
)
FAMILIES = (
    Family(
        "range", "A number that its dtype does not hold", "Float32 would be fine; half precision is not.", _INCIDENT
    ),
    Family("mathematics", "Mathematics that is not defined", "Float32 fails there, too.", _INCIDENT),
    Family("outside", "From outside", "What the step was given was bad, or what ran it.", _INCIDENT),
    Family(
        "ahead",
        "Warnings",
        "Nothing is broken yet: the verdict is `at_risk`, unless something worse is known.",
        "*Overview* says it as a warning with its line, and *Ranges* or *Scale* shows the course behind it.",
    ),
    Family(
        "usage",
        "Mistakes in using autocast and the scaler",
        "Found by what the loop calls, even where every number is finite.",
        "*Usage* has a card for it, with your line, what a correct loop does, and a list of all that was checked.",
    ),
    Family(
        "harmless",
        "Harmless",
        "Nothing to change. They are told once, so that nobody looks for them.",
        "*Overview* lists it under what is harmless, and *Scale* marks the skips.",
    ),
    Family("unknown", "Not told yet", "", _INCIDENT),
)
_SEVERITIES = {Severity.ERROR: "a problem", Severity.WARNING: "a warning", Severity.INFO: "harmless"}
#: Causes that no short script shows, and why.
NO_SAMPLE = {
    Cause.BENIGN_SINGLE_SKIP: "It takes a step that cannot be run again as it was, which no short script is sure of."
}
#: Causes that show in several ways, each with cures of its own, in the order in which a page tells them.
_SAMPLE = Occurrence()
_ALSO_SEEN = {
    Cause.DIV_ZERO: (_SAMPLE, Occurrence(reason=DivisorSummed()), Occurrence(reason=SlopeAtEnd(of="acos"))),
    Cause.DIVERGENCE: (Occurrence(reason=LossGrew(usual=1.0, last=1e9)), _SAMPLE),
    Cause.FP16_OVERFLOW: (_SAMPLE, Occurrence(op="aten.pow.Tensor_Scalar"), Occurrence(op="aten.sum.dim_IntList")),
}
#: The same of forms of mistakes.
_ALSO_DONE = {
    Cause.MISUSE_NO_UNSCALE: (
        MistakeForm.STEPPED_PAST_SCALER,
        MistakeForm.UNSCALED_BY_HAND,
        MistakeForm.LOSS_OF_SCALED_GRADIENTS,
        MistakeForm.KEPT_OF_SCALED,
    ),
    Cause.NOTHING_TRAINS: (
        MistakeForm.ALL_FROZEN,
        MistakeForm.NO_GRADIENT,
        MistakeForm.GRADIENTS_ZEROED,
        MistakeForm.OTHER_PARAMETERS,
        MistakeForm.ROUNDED_AWAY,
        MistakeForm.NO_LEARNING_RATE,
    ),
    Cause.AMP_WITHOUT_EFFECT: (MistakeForm.AUTOCAST_FLOAT32,),
    Cause.MISUSE_MULTIPLE_SCALERS_UPDATE: (
        MistakeForm.UPDATE_IN_BETWEEN,
        MistakeForm.UNSCALED_FOR_ANOTHER,
        MistakeForm.SCALED_TWICE,
        MistakeForm.ANOTHER_SCALER,
        MistakeForm.UPDATE_MISSING,
    ),
}


def path_of(family: Family, cause: Cause) -> Path:
    """Where a page, a sample or a recorded diagnosis lies, below its folder and without its ending."""
    return Path(cause.value) if family.name == cause.value else Path(family.name, cause.value)


def pages() -> dict[Path, str]:
    """Every page by its path below ``docs/causes``."""
    found = {Path("index.md"): _index()}
    for family in FAMILIES:
        for cause, (meaning, comes_about) in family.notes.items():
            found[path_of(family, cause).with_suffix(".md")] = _page(family, CATALOGUE[cause], meaning, comes_about)
    return found


def _index() -> str:
    parts = [(HERE / "notes" / "index.md").read_text("utf-8").strip(), _NOTICE]
    for family in FAMILIES:
        rows = [
            f"| [{CATALOGUE[cause].noun}]({path_of(family, cause).as_posix()}.md) | `{cause.value}` "
            f"| {_SEVERITIES[CATALOGUE[cause].severity]} |"
            for cause in family.notes
        ]
        table = "\n".join(["| cause | in JSON and traces | |", "|---|---|---|", *rows])
        parts += [f"## {family.title}", family.about, table] if family.about else [f"## {family.title}", table]
    return "\n\n".join(parts) + "\n"


def _page(family: Family, entry: CauseEntry, meaning: str, comes_about: str) -> str:
    recorded = _recorded(family, entry.cause)
    parts = [
        f"# {entry.noun[:1].upper()}{entry.noun[1:]}",
        _NOTICE,  # after the heading, from which the navigation has the page's name
        f"`{entry.cause.value}`, {_SEVERITIES[entry.severity]}.",
        meaning,
        f"## How it comes about\n\n{comes_about}",
        "## How it looks",
        *([f"`ampscope diagnose` of the sample below says:\n\n```text\n{excerpt(recorded)}```"] if recorded else []),
        f"In [the app](../{'' if family.name == entry.cause.value else '../'}run/app.md): {family.in_app}",
        *_cures(entry, recorded),
        *_sample(family, entry.cause),
        f"## How it is recognised\n\n{_recognised(entry)}",
    ]
    return "\n\n".join(parts) + "\n"


def _recorded(family: Family, cause: Cause) -> str:
    file = HERE / "recorded" / path_of(family, cause).with_suffix(".txt")
    return "" if cause in NO_SAMPLE else file.read_text("utf-8")


def excerpt(text: str) -> str:
    """A diagnosis without the parts that are about one run alone; the harmless is shown where there is nothing else."""
    parts = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    kept = [part for part in parts if not part.startswith(_LEFT_OUT)]
    return text if len(kept) == 1 else "".join(kept).rstrip() + "\n"


def _cures(entry: CauseEntry, recorded: str) -> list[str]:
    op = re.search(r"^ +(aten\.\S+)", recorded, re.MULTILINE)
    remedies = _advice(entry, Occurrence(op=op[1] if op else ""))
    if not remedies:
        told = (
            "Nothing has to be changed." if entry.severity is Severity.INFO else "What helps depends on what was seen."
        )
        return [f"## What cures it\n\n{told}"]
    listed = "\n".join(_remedy(number, remedy) for number, remedy in enumerate(remedies, start=1))
    return [f"## What cures it\n\n{listed}".rstrip()]


def _advice(entry: CauseEntry, of_sample: Occurrence) -> list[Remedy]:
    """What cures a cause in whichever way it shows, each once."""
    seen = (of_sample if each is _SAMPLE else each for each in _ALSO_SEEN.get(entry.cause, (_SAMPLE,)))
    fixes = (FORMS[form].fix for form in _ALSO_DONE.get(entry.cause, ()))
    told = [*(remedy for each in seen for remedy in entry.advice(each)), *filter(None, fixes)]
    return list({remedy.text: remedy for remedy in told}.values())


def _remedy(number: int, remedy: Remedy) -> str:
    text = f"{number}. {remedy.text}\n"
    if not remedy.code:
        return text
    code = "\n".join(f"    {line}".rstrip() for line in remedy.code.splitlines())
    return (
        f"{text}\n    <!-- not run: a line to adapt, whose names are the reader's -->\n    ```python\n{code}\n    ```\n"
    )


def _sample(family: Family, cause: Cause) -> list[str]:
    if cause in NO_SAMPLE:
        return [f"## A sample\n\n{NO_SAMPLE[cause]}"]
    sample = path_of(family, cause).with_suffix(".py")
    code = (HERE / "samples" / sample).read_text("utf-8")
    torchrun = re.match(r"# (torchrun .*)\n", code)
    start = torchrun[1] if torchrun else f"python {sample.name}"
    return [
        f"## A sample\n\nSave it as `{sample.name}`; `{start}`, then `ampscope diagnose`.",
        f"<!-- sample: {sample.as_posix()} -->\n```python\n{code}```",
    ]


def _recognised(entry: CauseEntry) -> str:
    if entry.recognised_in == "capture":
        waits = entry.cause is Cause.MISUSE_SCHEDULER_ORDER
        told = "its diagnosis says how much it matters" if waits else "one line in the terminal says so at once"
        seen = f"By what the loop calls, and when, while it runs; {told}."
    elif entry.rules:
        phases = {rule.phase for rule in entry.rules}
        only = ", in backward" if phases == {Phase.BACKWARD} else ""
        seen = f"By the op at which the value was born{only}: what it is, and what it was given."
    else:
        seen = "By looking at the run as a whole, not at one op."
    if entry.severity is Severity.INFO or entry.recognised_in == "capture":
        return seen
    precision = {
        True: "A wider dtype cures it by its nature.",
        None: "Whether float32 cures it, a replay of the very step tells.",
        False: "That a step is finite in float32 proves nothing here.",
    }
    return f"{seen} {precision[entry.cured_by_precision]}"


def main() -> None:
    """Writes every page that has changed, and takes away what is no cause any more."""
    made = pages()
    for path in {*PAGES.rglob("*.md")} - {PAGES / page for page in made}:
        path.unlink()
    for name, text in made.items():
        page = PAGES / name
        if not page.exists() or page.read_text("utf-8") != text:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, "utf-8")
            sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    main()
