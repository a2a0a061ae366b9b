"""The loss taken out of its autocast region, and a batch without bad rows: loops that are changed, and that stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ampscope.analysis.results import CodeLine
from ampscope.cures.rewriting.edit import applied
from ampscope.cures.rewriting.program import around_model_call
from ampscope.cures.rewriting.source_file import HasPlace, files_below, read


def changed(root: Path, text: str, write: Callable[[HasPlace], str | None]) -> str | None:
    """The program with a change of the loop whose row has ``net(`` in it; None where it stays."""
    (root / "train.py").write_text(text)
    (number,) = [number for number, row in enumerate(text.splitlines(), start=1) if "net(" in row]
    with files_below(root):
        diff = write(CodeLine("train.py", number, text.splitlines()[number - 1].strip()))
        source = read(root / "train.py")
    assert source is not None
    return applied(diff, source) if diff is not None else None


HEAD = "import torch\nfor x, y in data:\n"
REGION = "    with torch.autocast('cuda'):\n"


@pytest.mark.parametrize(
    ("body", "after"),
    [
        (
            (
                "        out = net(x)\n        e = out.exp()\n        loss = (e - y * out).mean()\n"
                "    s.scale(loss).backward()\n"
            ),
            (
                "        out = net(x).float()\n    e = out.exp()\n    loss = (e - y * out).mean()\n"
                "    s.scale(loss).backward()\n"
            ),
        ),
        (
            "        a, b = net(x)\n        loss = f(a, b, y)\n",
            "        a, b = net(x)\n    a, b = a.float(), b.float()\n    loss = f(a, b, y)\n",
        ),
        (
            "        loss = criterion(net(x), y)  # why\n",
            "        output = net(x)\n    loss = criterion(output.float(), y)  # why\n",
        ),
        (
            (
                "        h = prepare(x)\n        out = net(\n            h,\n        )\n"
                "        loss = (\n            out - y\n        ).mean()\n"
            ),
            (
                "        h = prepare(x)\n        out = net(\n            h,\n        ).float()\n"
                "    loss = (\n        out - y\n    ).mean()\n"
            ),
        ),
    ],
)
def test_the_loss_leaves_the_region(tmp_path: Path, body: str, after: str) -> None:
    tensors = 2 if "a, b" in body else 1
    made = changed(
        tmp_path, HEAD + REGION + body, lambda place: around_model_call.loss_in_float32(place, ["net"], tensors)
    )
    assert made == HEAD + REGION + after


@pytest.mark.parametrize(
    ("body", "tensors"),
    [
        ("        out = net(x)\n    loss = out.exp().mean()\n", 1),  # it is outside
        ("        out = net(x)\n        loss = out.loss\n", 0),  # an object
        ("        out = net(x)\n        loss, n = out\n", 2),
        ("        a, b = net(x)\n        loss = a.mean()\n", 1),
        ("        a, *b = net(x)\n        loss = a.mean()\n", 2),
        ("        out = net(x)\n        if y is not None:\n            loss = out.mean()\n", 1),
        (
            "        h = other(x)\n        out = net(x)\n        loss = (out - h).mean()\n",
            1,
        ),  # h is half precision still
        ("        out = net(x)\n        loss = named(out, '''\n        text''')\n", 1),
        ("        out = net(x); loss = out.mean()\n", 1),
        ("        output = 1\n        loss = f(net(x), output)\n", 1),
    ],
)
def test_what_may_be_something_else_stays(tmp_path: Path, body: str, tensors: int) -> None:
    assert (
        changed(
            tmp_path, HEAD + REGION + body, lambda place: around_model_call.loss_in_float32(place, ["net"], tensors)
        )
        is None
    )


def test_a_second_region_around_it_would_hold_the_loss_still(tmp_path: Path) -> None:
    text = (
        "import torch\n@torch.autocast('cuda')\ndef step(x):\n"
        + REGION
        + "        out = net(x)\n        return_(out)\n"
    )
    assert changed(tmp_path, text, lambda place: around_model_call.loss_in_float32(place, ["net"], 1)) is None


KEPT = "    good = x.flatten(1).isfinite().all(1)\n    x, y = x[good], y[good]\n"


@pytest.mark.parametrize(
    ("text", "argument", "after"),
    [
        (HEAD + "    loss = f(net(x), y)\n", "args[0]", HEAD + KEPT + "    loss = f(net(x), y)\n"),
        (
            "for i, (x, y) in enumerate(data):\n    x = x.cuda()\n    with a:\n        out = net(y, image=x)\n",
            "kwargs['image']",
            (
                "for i, (x, y) in enumerate(data):\n    x = x.cuda()\n" + KEPT + "    with a:\n"
                "        out = net(y, image=x)\n"
            ),
        ),
        (
            HEAD + "    o.zero_grad()\n    loss = f(net(x.to(d)), y.to(d))\n",
            "args[0]",
            None,  # what it is given has no name
        ),
        (
            HEAD + "    o.zero_grad()\n    loss = f(net(x), y.to(d))\n",
            "args[0]",
            HEAD + KEPT + "    o.zero_grad()\n    loss = f(net(x), y.to(d))\n",  # on one device before any is moved
        ),
        ("for x in data:\n    loss = net(x)\n", "args[0]", None),  # what else has rows is not known
        ("for x, y in data:\n    z = x + 1\n    loss = net(z)\n", "args[0]", None),
        ("for x, y in data:\n    loss = net(x) + good\n", "args[0]", None),
        ("for x, y in data: loss = net(x)\n", "args[0]", None),
    ],
)
def test_bad_rows_are_left_out_where_the_loop_takes_its_batch(
    tmp_path: Path, text: str, argument: str, after: str | None
) -> None:
    assert changed(tmp_path, text, lambda place: around_model_call.finite_alone(place, ["net"], argument)) == after
