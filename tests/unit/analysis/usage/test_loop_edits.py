"""A usage mistake mended in the loop's own file: lines inserted, moved or dedented, all others left as they are."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

from ampscope.analysis.results import CodeLine
from ampscope.analysis.usage.loop_edits import clipped, diff_of
from ampscope.cures.rewriting.edit import applied
from ampscope.cures.rewriting.source_file import files_below, read
from ampscope.trace.vocabulary import Cause, MistakeForm


class Mistake(NamedTuple):
    """A loop, the line at which a mistake was seen, and the loop without it; empty: the loop stays as it is."""

    cause: Cause
    line: str
    loop: str
    mended: str
    form: MistakeForm | None = None


CLIP, EACH = Cause.MISUSE_CLIP_BEFORE_UNSCALE, Cause.MISUSE_UPDATE_EACH_MICROBATCH
UNDER, ORDER, NO_UNSCALE = Cause.MISUSE_BACKWARD_UNDER_AUTOCAST, Cause.MISUSE_SCHEDULER_ORDER, Cause.MISUSE_NO_UNSCALE
MENDED = [
    Mistake(
        CLIP,
        "clip_grad_norm_(net.parameters(), 1.0)",
        """
        for x in data:
            s.scale(loss(x)).backward()
            clip_grad_norm_(net.parameters(), 1.0)
            s.step(opt)
            s.update()
        """,
        """
        for x in data:
            s.scale(loss(x)).backward()
            s.unscale_(opt)
            clip_grad_norm_(net.parameters(), 1.0)
            s.step(opt)
            s.update()
        """,
    ),
    Mistake(
        CLIP,
        "1.0,  # a comment",
        """
        def train(self, data):
        \tif data:
        \t\tself.s.scale(data).backward()
        \t\tif self.clip:
        \t\t\tnorm = torch.nn.utils.clip_grad_norm_(
        \t\t\t\tnet.parameters(),
        \t\t\t\t1.0,  # a comment
        \t\t\t)
        \t\tself.s.unscale_(self.opt)
        \t\tself.s.step(self.opt)
        """,
        """
        def train(self, data):
        \tif data:
        \t\tself.s.scale(data).backward()
        \t\tself.s.unscale_(self.opt)
        \t\tif self.clip:
        \t\t\tnorm = torch.nn.utils.clip_grad_norm_(
        \t\t\t\tnet.parameters(),
        \t\t\t\t1.0,  # a comment
        \t\t\t)
        \t\tself.s.step(self.opt)
        """,
    ),
    Mistake(
        NO_UNSCALE,
        "p.grad.clamp_(-1, 1)",
        """
        s.scale(loss).backward()
        for p in net.parameters():
            p.grad.clamp_(-1, 1)
        s.step(opt)
        """,
        """
        s.scale(loss).backward()
        s.unscale_(opt)
        for p in net.parameters():
            p.grad.clamp_(-1, 1)
        s.step(opt)
        """,
    ),
    Mistake(
        UNDER,
        "s.scale(loss).backward()",
        """
        for x in data:
            with torch.autocast("cuda"):
                loss = f(x)

                s.scale(loss).backward()
                s.step(
                    opt
                )
            s.update()
        """,
        """
        for x in data:
            with torch.autocast("cuda"):
                loss = f(x)

            s.scale(loss).backward()
            s.step(
                opt
            )
            s.update()
        """,
    ),
    Mistake(
        EACH,
        "s.update()",
        """
        for i, x in enumerate(data):
            s.scale(f(x)).backward()
            s.unscale_(opt)
            clip_grad_norm_(p, 1.0)
            if i % 4 == 3:
                s.step(opt)
                opt.zero_grad()
            s.update()
        """,
        """
        for i, x in enumerate(data):
            s.scale(f(x)).backward()
            if i % 4 == 3:
                s.unscale_(opt)
                clip_grad_norm_(p, 1.0)
                s.step(opt)
                s.update()
                opt.zero_grad()
        """,
    ),
    Mistake(
        ORDER,
        "sched.step()",
        """
        for x in data:
            s.scale(f(x)).backward()
            s.step(opt)
            s.update()
            sched.step()
        """,
        """
        for x in data:
            s.scale(f(x)).backward()
            scale_before = s.get_scale()
            s.step(opt)
            s.update()
            if s.get_scale() >= scale_before:
                sched.step()
        """,
    ),
    Mistake(
        NO_UNSCALE,
        "opt.step()  # past it",
        "s.scale(loss).backward()\nopt.step()  # past it\n",
        "s.scale(loss).backward()\ns.step(opt)\ns.update()\n",
        MistakeForm.STEPPED_PAST_SCALER,
    ),
    Mistake(
        NO_UNSCALE,
        "extra.backward()",
        "s.scale(loss).backward()\nextra.backward()\ns.step(opt)\n",
        "s.scale(loss).backward()\ns.scale(extra).backward()\ns.step(opt)\n",
        MistakeForm.LOSS_NOT_SCALED,
    ),
    Mistake(
        Cause.MISUSE_MISSING_SCALER,
        "s.step(opt)",
        "loss.backward()\ns.step(opt)\ns.update()\n",
        "s.scale(loss).backward()\ns.step(opt)\ns.update()\n",
        MistakeForm.NOTHING_SCALED,
    ),
    Mistake(
        Cause.MISUSE_MULTIPLE_SCALERS_UPDATE,
        "s.step(b)",
        "s.scale(loss).backward()\ns.step(a)\ns.update()\ns.step(b)\ns.update()\n",
        "s.scale(loss).backward()\ns.step(a)\ns.step(b)\ns.update()\n",
        MistakeForm.UPDATE_IN_BETWEEN,
    ),
    Mistake(
        Cause.MISUSE_MULTIPLE_SCALERS_UPDATE,
        "s.step(b)",
        "s.scale(loss).backward()\ns.step(a)\ns.update()\ns.step(b)\n",
        "s.scale(loss).backward()\ns.step(a)\ns.step(b)\ns.update()\n",
        MistakeForm.UPDATE_IN_BETWEEN,
    ),
    Mistake(
        EACH,
        "s.step(opt)",
        "for x in data:\n    s.scale(f(x)).backward()\n    s.step(opt)\n",
        "for x in data:\n    s.scale(f(x)).backward()\n    s.step(opt)\n    s.update()\n",
        MistakeForm.UPDATE_MISSING,
    ),
]
NONE = Cause.MISUSE_MISSING_SCALER
WITHOUT = """
import torch
from torch.nn.utils import clip_grad_norm_
import ampscope as scope
WATCH
for x in data:
    opt.zero_grad()
    with torch.autocast("cuda", torch.float16):
        loss = net(x).mean()
    loss.backward()
    STEP
"""
MENDED += [
    Mistake(
        NONE,
        "opt.step()",
        WITHOUT.replace("WATCH", "run = scope.watch(net, every=5)").replace("STEP", "opt.step()"),
        WITHOUT.replace("WATCH", 'scaler = torch.amp.GradScaler("cuda")\nrun = scope.watch(net, scaler, every=5)')
        .replace("loss.backward()", "scaler.scale(loss).backward()")
        .replace("STEP", "scaler.step(opt)\n    scaler.update()"),
        MistakeForm.NO_SCALER,
    ),
    Mistake(
        NONE,
        "opt.step()",
        WITHOUT.replace("WATCH", "scope.watch(net)").replace(
            "STEP", "if x:\n        clip_grad_norm_(p, 1.0)\n        opt.step()"
        ),
        WITHOUT.replace("WATCH", 'scaler = torch.amp.GradScaler("cuda")\nscope.watch(net, scaler)')
        .replace("loss.backward()", "scaler.scale(loss).backward()")
        .replace(
            "STEP",
            "if x:\n        scaler.unscale_(opt)\n        clip_grad_norm_(p, 1.0)\n"
            "        scaler.step(opt)\n        scaler.update()",
        ),
        MistakeForm.NO_SCALER,
    ),
]
SPANS = Cause.MISUSE_AUTOCAST_SPANS_STEP
DECISION, NOT_SCALED = MistakeForm.DECISION_ON_SCALED, MistakeForm.LOSS_NOT_SCALED
MENDED += [
    Mistake(
        UNDER,
        "s.scale(loss).backward()",
        """
        from torch import autocast as half
        with half("cuda"):
            loss = f(x)
            s.scale(loss).backward()
        """,
        """
        from torch import autocast as half
        with half("cuda"):
            loss = f(x)
        s.scale(loss).backward()
        """,
    ),
    Mistake(
        SPANS,
        "s.step(opt)",
        """
        with torch.autocast("cuda", torch.float16):
            for x in data:
                opt.zero_grad()

                loss = f(x)
                s.scale(loss).backward()
                if x:
                    s.step(opt)
                s.update()
        """,
        """
        for x in data:
            with torch.autocast("cuda", torch.float16):
                opt.zero_grad()

                loss = f(x)
            s.scale(loss).backward()
            if x:
                s.step(opt)
            s.update()
        """,
    ),
    Mistake(
        Cause.MISUSE_MULTIPLE_SCALERS_UPDATE,
        "s.unscale_(opt)  # again",
        "s.scale(loss).backward()\ns.unscale_(opt)\nclip(p)\ns.unscale_(opt)  # again\ns.step(opt)\n",
        "s.scale(loss).backward()\ns.unscale_(opt)\nclip(p)\ns.step(opt)\n",
        MistakeForm.UNSCALE_TWICE,
    ),
    Mistake(
        EACH,
        "s.update()",
        """
        from torch.nn.utils import clip_grad_norm_ as limit
        for i, x in enumerate(data):
            s.scale(f(x)).backward()
            s.unscale_(opt)
            limit(p, 1.0)
            if i % 4 == 3:
                s.step(opt)
            s.update()
        """,
        """
        from torch.nn.utils import clip_grad_norm_ as limit
        for i, x in enumerate(data):
            s.scale(f(x)).backward()
            if i % 4 == 3:
                s.unscale_(opt)
                limit(p, 1.0)
                s.step(opt)
                s.update()
        """,
    ),
]
MENDED += [
    Mistake(
        NO_UNSCALE,
        "s.step(opt)",
        "s.scale(loss).backward()\nextra.backward()\ns.step(opt)\n",
        "s.scale(loss).backward()\ns.scale(extra).backward()\ns.step(opt)\n",
        NOT_SCALED,
    ),
    Mistake(
        NO_UNSCALE,
        "if n < 1:",
        "s.scale(loss).backward()\nn = norm(p)\nif n < 1:\n    s.step(opt)\ns.update()\n",
        "s.scale(loss).backward()\ns.unscale_(opt)\nn = norm(p)\nif n < 1:\n    s.step(opt)\ns.update()\n",
        DECISION,
    ),
]
STAYS = [
    Mistake(
        NO_UNSCALE, "s.step(opt)", "s.scale(x).backward()\na.backward()\nb.backward()\ns.step(opt)\n", "", NOT_SCALED
    ),
    Mistake(
        NO_UNSCALE,
        "if n > 1:",
        "for x in d:\n    s.scale(x).backward()\n    if n > 1:\n        continue\n    s.step(opt)\n    s.update()\n",
        "",
        DECISION,
    ),
    Mistake(
        NO_UNSCALE, "if n < 1:", "s.scale(x).backward()\nif n < 1:\n    s.step(opt)\n    s.update()\n", "", DECISION
    ),
    Mistake(SPANS, "s.step(opt)", "with torch.autocast('cuda'):\n    s.scale(f(x)).backward()\n    s.step(opt)\n", ""),
    Mistake(
        SPANS,
        "s.step(opt)",
        "with torch.autocast('cuda'):\n    for x in data:\n        s.scale(f(x)).backward()\n        s.step(opt)\n",
        "",
    ),
    Mistake(CLIP, "clip(p)", "def clips(p):\n    clip(p)\ns.scale(loss).backward()\ns.step(opt)\n", ""),
    Mistake(CLIP, "clip(p); s.step(opt)", "s.scale(loss).backward()\nclip(p); s.step(opt)\n", ""),
    Mistake(CLIP, "clip(p)", "s.scale(loss).backward()\nclip(p)\ns.step(one)\ns.step(two)\n", ""),
    Mistake(CLIP, "clip(p)", "s.scale(loss).backward()\nclip(p)\ns.step(opts[0])\n", ""),
    Mistake(CLIP, "clip(p)", "s.scale(loss).backward()\nclip(p)\nif i:\n    s.step(opt)\n", ""),
    Mistake(CLIP, "clip(p)", "s.scale(a).backward()\nt.scale(b).backward()\nclip(p)\ns.step(opt)\n", ""),
    Mistake(UNDER, "s.scale(loss).backward()", "with torch.autocast('cuda'):\n    s.scale(loss).backward()\n", ""),
    Mistake(UNDER, "s.scale(loss).backward()", "with torch.no_grad():\n    x = 1\n    s.scale(loss).backward()\n", ""),
    Mistake(
        UNDER,
        "s.scale(loss).backward()",
        "with torch.autocast('cuda'):\n    x = 1\n    s.scale(loss).backward()\n    print('''a\n    b''')\n",
        "",
    ),
    Mistake(EACH, "s.update()", "for x in data:\n    s.scale(x).backward()\n    s.step(opt)\n    s.update()\n", ""),
    Mistake(ORDER, "sched.step()", "s.scale(x).backward()\nsched.step()\ns.step(opt)\ns.update()\n", ""),
    Mistake(
        Cause.MISUSE_MISSING_SCALER,
        "s.unscale_(opt)",
        "(a + b).backward()\ns.unscale_(opt)\ns.step(opt)\ns.update()\n",
        "",
        MistakeForm.NOTHING_SCALED,
    ),
    *(
        Mistake(NONE, "opt.step()", WITHOUT.replace("WATCH", watch).replace("STEP", step), "", MistakeForm.NO_SCALER)
        for watch, step in (
            ("", "opt.step()"),  # another part of the program watches
            ("scope.watch(net, None)", "opt.step()"),
            ("scope.watch(net)\nscaler = preprocessing.StandardScaler()", "opt.step()"),
            ("scope.watch(net)", "opt.step()\n    schedule.step()"),
            ("scope.watch(net)", "more.backward()\n    opt.step()"),
            ("scope.watch(net)", "clip_grad_norm_(p, 1.0)\n    if x:\n        opt.step()"),
        )
    ),
    Mistake(Cause.MISUSE_SCALER_STATE_NOT_RESTORED, "s.step(opt)", "s.scale(x).backward()\ns.step(opt)\n", ""),
]


def diff(root: Path, mistake: Mistake, recorded: str | None = None) -> str | None:
    loop = dedent(mistake.loop).lstrip("\n")
    (root / "loop.py").write_text(loop)
    numbers = [number for number, line in enumerate(loop.splitlines(), 1) if line.strip() == mistake.line]
    with files_below(root):
        return diff_of(mistake.cause, mistake.form, CodeLine("loop.py", numbers[-1], recorded or mistake.line))


def name(mistake: Mistake) -> str:
    return f"{mistake.form or mistake.cause} {mistake.line}"


@pytest.mark.parametrize("mistake", MENDED, ids=name)
def test_a_mistake_is_mended(tmp_path: Path, mistake: Mistake) -> None:
    change, source = diff(tmp_path, mistake), read(tmp_path / "loop.py")
    assert change is not None
    assert source is not None
    assert applied(change, source) == dedent(mistake.mended).lstrip("\n")


@pytest.mark.parametrize("mistake", STAYS, ids=name)
def test_what_is_not_clear_stays(tmp_path: Path, mistake: Mistake) -> None:
    assert diff(tmp_path, mistake) is None


@pytest.mark.parametrize("mistake", MENDED, ids=name)
def test_a_loop_that_reads_otherwise_is_left_alone(tmp_path: Path, mistake: Mistake) -> None:
    assert diff(tmp_path, mistake, recorded="another line") is None


@pytest.mark.parametrize(
    ("loop", "was", "now"),
    [
        (
            "loss = net(x)\ns.scale(loss).backward()\ns.step(o)\n",
            "s.step(o)",
            "s.unscale_(o)\ntorch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\ns.step(o)",
        ),
        (
            "loss = net(x)\nloss.backward()\nif x:\n    o.step()\n",
            "    o.step()",
            "    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n    o.step()",
        ),
        ("loss = net(x)\ns.scale(loss).backward()\nclip_grad_norm_(p, 1.0)\ns.step(o)\n", "", None),
        ("loss = net(x)\nloss.backward()\no.step()\nsched.step()\n", "", None),
        ("loss = other(x)\nloss.backward()\no.step()\n", "", None),
    ],
)
def test_gradients_are_clipped_where_the_loop_steps(tmp_path: Path, loop: str, was: str, now: str | None) -> None:
    text = f"import torch\n{loop}"
    (tmp_path / "loop.py").write_text(text)
    with files_below(tmp_path):
        change = clipped(CodeLine("loop.py", 2, loop.splitlines()[0]), ["net"], 1.0)
        source = read(tmp_path / "loop.py")
    assert source is not None
    assert (applied(change, source) if change is not None else None) == (text.replace(was, now) if now else None)
