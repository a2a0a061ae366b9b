"""What a program makes in one place and fails with in another: scalers, optimizers, tensors that it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ampscope.analysis.results import CodeLine
from ampscope.cures.rewriting.edit import applied
from ampscope.cures.rewriting.program import first_settings, half
from ampscope.cures.rewriting.source_file import HasPlace, files_below, read


def made(root: Path, text: str, line: str, write: Callable[[HasPlace], str | None]) -> str | None:
    """The program with a change that begins at the one row that has ``line`` in it; None where it stays."""
    (root / "train.py").write_text(text)
    (number,) = [number for number, row in enumerate(text.splitlines(), start=1) if line in row]
    with files_below(root):
        diff = write(CodeLine("train.py", number, text.splitlines()[number - 1].strip()))
        source = read(root / "train.py")
    assert source is not None
    return applied(diff, source) if diff is not None else None


@pytest.mark.parametrize(
    ("text", "was", "now"),
    [
        ("scaler = torch.amp.GradScaler('cuda')\nampscope.watch(net, scaler)\n", "'cuda')", "'cuda', init_scale=64.0)"),
        ("s = torch.cuda.amp.GradScaler(2.0**20)\nampscope.watch(net, scaler=s)\n", "2.0**20", "64.0"),
        (
            "s = ampscope.GradScaler(init_scale=2.0)\ndef train():\n    scope = ampscope.watch(net, s)\n",
            "=2.0",
            "=64.0",
        ),
        (
            (
                "class T:\n    def __init__(self):\n        self.s = torch.amp.GradScaler()\n"
                "    def fit(self):\n        ampscope.watch(self.net, self.s)\n"
            ),
            "GradScaler()",
            "GradScaler(init_scale=64.0)",
        ),
        ("scaler = Mine('cuda')\nampscope.watch(net, scaler)\n", "", None),
        ("a, scaler = build()\nampscope.watch(net, scaler)\n", "", None),
        ("scaler = torch.amp.GradScaler()\nscaler = other\nampscope.watch(net, scaler)\n", "", None),
        ("scaler = torch.amp.GradScaler(**options)\nampscope.watch(net, scaler)\n", "", None),
        ("def train(scaler):\n    ampscope.watch(net, scaler)\nscaler = torch.amp.GradScaler()\n", "", None),
        ("scaler = torch.amp.GradScaler(init_scale=64.0)\nampscope.watch(net, scaler)\n", "", None),
        ("scaler = torch.amp.GradScaler()\nampscope.watch(net)\n", "", None),
    ],
)
def test_a_scaler_begins_with_another_scale_where_it_is_made(
    tmp_path: Path, text: str, was: str, now: str | None
) -> None:
    whole = f"import ampscope\nimport torch\n{text}"
    after = made(tmp_path, whole, "watch(", lambda place: first_settings.with_scale(place, 64.0))
    assert after == (whole.replace(was, now) if now is not None else None)


@pytest.mark.parametrize(
    ("made_by", "now"),
    [
        ("o = torch.optim.Adam(p, lr=1)", "o = torch.optim.Adam(p, lr=1, eps=1e-4)"),
        ("o = torch.optim.RMSprop(p, 0.1, 0.9, 1e-8)", "o = torch.optim.RMSprop(p, 0.1, 0.9, 1e-4)"),
        ("o = torch.optim.Adam(p, eps=1e-4)", None),
        ("o = torch.optim.SGD(p, lr=1)", None),
        ("a = torch.optim.Adam(p); o = torch.optim.Adam(q)", None),
    ],
)
def test_an_optimizer_gets_another_eps_where_it_is_made(tmp_path: Path, made_by: str, now: str | None) -> None:
    text = f"import torch\n{made_by}\no.step()\n"
    after = made(tmp_path, text, ".step()", lambda place: first_settings.with_eps(place, 1e-4))
    assert after == (text.replace(made_by, now) if now is not None else None)


@pytest.mark.parametrize(
    ("made_by", "now"),
    [
        ("o = torch.optim.SGD(p, lr=1.0)", "o = torch.optim.SGD(p, lr=1e-4)"),
        ("o = torch.optim.SGD(p, 1.0, momentum=0.9)", "o = torch.optim.SGD(p, 1e-4, momentum=0.9)"),
        ("o = torch.optim.SGD(p, lr=0.5)", None),  # something has come to the rate
        (
            "o = torch.optim.SGD(p, lr=0.5)\nl = torch.optim.lr_scheduler.LambdaLR(o, f)",
            "o = torch.optim.SGD(p, lr=5e-5)\nl = torch.optim.lr_scheduler.LambdaLR(o, f)",
        ),
        ("o = torch.optim.SGD(p, lr=0.5)\nl = torch.optim.lr_scheduler.OneCycleLR(o, 1.0, 9)", None),
        ("o = torch.optim.SGD(p, lr=rate)", None),
        ("o = torch.optim.SGD(p)", None),
        ("o = torch.optim.Adam(p, lr=1.0)", None),
        ("o = Mine(p, lr=1.0)", None),
        ("a = torch.optim.SGD(p, lr=1.0); o = torch.optim.SGD(q, lr=1.0)", None),
    ],
)
def test_an_optimizer_gets_another_rate_where_it_has_the_one_that_was_too_large(
    tmp_path: Path, made_by: str, now: str | None
) -> None:
    text = f"import torch\n{made_by}\no.step()\n"
    after = made(tmp_path, text, ".step()", lambda place: first_settings.with_rate(place, "SGD", 1.0, 1e-4))
    assert after == (text.replace(made_by, now) if now is not None else None)


BANK = """import torch
class Bank:
    def __init__(self, n, dtype):
        self.held = MADE
    def push(self, x):
        WRITES
"""


@pytest.mark.parametrize(
    ("maker", "writes", "now"),
    [
        ("torch.zeros(n, dtype=torch.float16)", "self.held[:2] = x", "torch.zeros(n, dtype=torch.float32)"),
        ("torch.zeros(n).half()", "self.held.mul_(0.9).add_(x)", "torch.zeros(n).float()"),
        ("torch.zeros(n, dtype=dtype)", "self.held = self.held + x", "torch.zeros(n, dtype=torch.float32)"),
        ("torch.zeros(n, dtype=dtype)", "self.held += x", "torch.zeros(n, dtype=torch.float32)"),
        ("torch.zeros(n)", "self.held += x", None),
        ("torch.zeros(n, dtype=pick())", "self.held += x", None),
        ("torch.zeros(n, dtype=torch.float16)", "self.other += x", None),
        ("torch.zeros(n, dtype=torch.float16)", "push(self.held, x)", None),
    ],
)
def test_a_tensor_that_is_kept_is_made_in_float32(tmp_path: Path, maker: str, writes: str, now: str | None) -> None:
    text = BANK.replace("MADE", maker).replace("WRITES", writes)
    after = made(tmp_path, text, writes, half.tensor_in_float32)
    assert after == (text.replace(maker, now) if now is not None else None)


def test_one_that_is_made_in_two_places_is_left_alone(tmp_path: Path) -> None:
    text = BANK.replace("MADE", "torch.zeros(n, dtype=torch.float16)").replace("WRITES", "self.held += x")
    text += "    def reset(self):\n        self.held = torch.zeros(3, dtype=torch.float16)\n"
    assert made(tmp_path, text, "+= x", half.tensor_in_float32) is None


def test_a_name_of_another_function_is_another_tensor(tmp_path: Path) -> None:
    text = "import torch\ndef a():\n    m = torch.zeros(2).half()\n    return m\ndef b(m, x):\n    m += x\n"
    assert made(tmp_path, text, "+= x", half.tensor_in_float32) is None


@pytest.mark.parametrize(
    ("body", "now"),
    [
        ("    p = torch.clamp(p, 1e-4, 1.0 - 1e-4)\n    return -torch.log(1 - p)\n", ("1.0 - 1e-4", "0.999")),
        ("    p = p.clamp(max=0.9999)\n    return -torch.log(1 - p)\n", ("0.9999", "0.999")),
        ("    a = 0.9999\n    p = p.clamp(max=0.9999)\n    return -torch.log(1 - p)\n", None),
        ("    return -torch.log(1 - p)\n", None),
    ],
)
def test_a_number_of_the_function_is_replaced_where_it_stands_once(
    tmp_path: Path, body: str, now: tuple[str, str] | None
) -> None:
    text = f"import torch\nlimit = 0.9999\ndef f(p):\n{body}"
    after = made(tmp_path, text, "torch.log(", lambda place: first_settings.with_number(place, 0.9999, 1 - 2.0**-10))
    assert after == (text.replace(body, body.replace(*now)) if now is not None else None)


@pytest.mark.parametrize(
    ("text", "was", "now"),
    [
        ("net = Net().half().cuda()\nampscope.watch(net)\n", ".half()", ".float()"),
        ("net = Net()\nif amp:\n    net.half()\nampscope.watch(net)\n", ".half()", ".float()"),
        ("net = Net()\nnet = net.to('cuda', torch.float16)\nampscope.watch(net)\n", "float16", "float32"),
        ("net = make(path, torch_dtype=torch.bfloat16)\nampscope.watch(net)\n", "bfloat16", "float32"),
        ("net = make(path, torch_dtype=kind)\nampscope.watch(net)\n", "=kind", "=torch.float32"),
        ("net = Net()\ndef main():\n    net.half()\n    ampscope.watch(net)\n", ".half()", ".float()"),
        ("net = Net()\nampscope.watch(net)\n", "ampscope.watch", "net.float()\nampscope.watch"),
        ("net, other = Net().half(), 0\nampscope.watch(net)\n", "ampscope.watch", "net.float()\nampscope.watch"),
        ("one = Net().half()\nampscope.watch([one, two])\n", "", None),
        ("ampscope.watch(Net().half())\n", "", None),
    ],
)
def test_weights_are_float32_where_the_model_is_made(tmp_path: Path, text: str, was: str, now: str | None) -> None:
    whole = f"import ampscope\nimport torch\n{text}"
    after = made(tmp_path, whole, "watch(", half.weights_in_float32)
    assert after == (whole.replace(was, now) if now is not None else None)


@pytest.mark.parametrize(
    ("text", "was", "now"),
    [
        (
            "def loss(z, y):\n    ctc = nn.CTCLoss(blank=0)\n    return ctc(z, *y)\n",
            "blank=0)",
            "blank=0, zero_infinity=True)",
        ),
        ("ctc = nn.CTCLoss(0, 'sum', False)\ndef loss(z, y):\n    return ctc(z, *y)\n", "False", "True"),
        (
            (
                "class T:\n    def __init__(self):\n        self.ctc = nn.CTCLoss()\n"
                "    def loss(self, z, y):\n        return self.ctc(z, *y)\n"
            ),
            "CTCLoss()",
            "CTCLoss(zero_infinity=True)",
        ),
        ("ctc = nn.CTCLoss(zero_infinity=True)\ndef loss(z, y):\n    return ctc(z, *y)\n", "", None),
        ("ctc = Mine()\ndef loss(z, y):\n    return ctc(z, *y)\n", "", None),
    ],
)
def test_a_loss_leaves_out_what_has_no_alignment_where_it_is_made(
    tmp_path: Path, text: str, was: str, now: str | None
) -> None:
    whole = f"from torch import nn\n{text}"
    after = made(tmp_path, whole, "ctc(z", first_settings.with_zero_infinity)
    assert after == (whole.replace(was, now) if now is not None else None)


@pytest.mark.parametrize(
    ("loop", "now"),
    [
        ("for m, p in zip(held, net.parameters()):\n    m.mul_(0.9).add_(p)\n", "float"),
        ("for m in held:\n    m.mul_(0.9).add_(1)\n", "float"),
        ("for m, p in pairs(held, net.parameters()):\n    m.mul_(0.9).add_(p)\n", None),
    ],
)
def test_a_list_of_tensors_is_made_in_float32(tmp_path: Path, loop: str, now: str | None) -> None:
    head = "import torch\nheld = [p.detach().half() for p in net.parameters()]\n"
    after = made(tmp_path, head + loop, ".mul_", half.tensor_in_float32)
    assert after == (head.replace("half", now) + loop if now is not None else None)
