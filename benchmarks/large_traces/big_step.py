"""One optimizer step of a deep transformer as rows of a trace: its sites, its dataflow, how large values are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.trace.schema import Cast, Node, ParamRow, Phase, SiteRow

HALF, FULL = "float16", "float32"
_WIDTH, _TOKENS = 1024, 2048
_MODEL = "/home/me/gpt/model.py"
#: Of a block: op, module, module's class, dtype, cast, base-2 exponent of its largest value, line, code.
_BLOCK = (
    ("aten.native_layer_norm.default", "norm1", "LayerNorm", FULL, "", 2, 41, "x = x + self.attn(self.norm1(x))"),
    ("aten._to_copy.default", "attn.qkv", "Linear", HALF, Cast.AUTOCAST, 2, 22, "q, k, v = self.qkv(x).chunk(3, -1)"),
    ("aten.addmm.default", "attn.qkv", "Linear", HALF, "", 4, 22, "q, k, v = self.qkv(x).chunk(3, -1)"),
    ("aten.bmm.default", "attn", "Attention", HALF, "", 8, 24, "scores = q @ k.transpose(-2, -1)"),
    ("aten.mul.Tensor", "attn", "Attention", HALF, "", 5, 25, "scores = scores * self.scale"),
    ("aten._to_copy.default", "attn", "Attention", FULL, Cast.AUTOCAST, 5, 26, "weights = scores.softmax(-1)"),
    ("aten._softmax.default", "attn", "Attention", FULL, "", 0, 26, "weights = scores.softmax(-1)"),
    ("aten._to_copy.default", "attn", "Attention", HALF, Cast.AUTOCAST, 0, 27, "y = weights @ v"),
    ("aten.bmm.default", "attn", "Attention", HALF, "", 3, 27, "y = weights @ v"),
    ("aten.addmm.default", "attn.proj", "Linear", HALF, "", 3, 28, "return self.proj(y)"),
    ("aten.add.Tensor", "", "Block", FULL, "", 4, 41, "x = x + self.attn(self.norm1(x))"),
    ("aten.native_layer_norm.default", "norm2", "LayerNorm", FULL, "", 2, 42, "x = x + self.mlp(self.norm2(x))"),
    ("aten._to_copy.default", "mlp.0", "Linear", HALF, Cast.AUTOCAST, 2, 42, "x = x + self.mlp(self.norm2(x))"),
    ("aten.addmm.default", "mlp.0", "Linear", HALF, "", 4, 42, "x = x + self.mlp(self.norm2(x))"),
    ("aten.gelu.default", "mlp.1", "GELU", HALF, "", 4, 42, "x = x + self.mlp(self.norm2(x))"),
    ("aten.addmm.default", "mlp.2", "Linear", HALF, "", 4, 42, "x = x + self.mlp(self.norm2(x))"),
    ("aten.add.Tensor", "", "Block", FULL, "", 5, 42, "x = x + self.mlp(self.norm2(x))"),
)
_LINEAR = ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")
#: Which op of the block overflows in an incident: the scores.
CULPRIT = 3


@dataclass(slots=True)
class Step:
    """A step's rows by sequence number, the same at every step but for how large the values are."""

    sites: list[SiteRow] = field(default_factory=list)
    params: list[ParamRow] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)  #: reader, its operand, writer
    exponents: list[float] = field(default_factory=list)
    culprits: list[int] = field(default_factory=list)  #: the op of each block that may overflow

    @property
    def numel(self) -> NDArray[np.int64]:
        """Elements of each output."""
        shapes = (site.out_shapes[0] for site in self.sites)
        return np.array([int(np.prod([int(side) for side in shape.split("x") if side])) for shape in shapes])

    def op(self, op: str, module: str = "", kind: str = "", *, reads: tuple[int, ...] = (), **facts: object) -> int:
        """Add an op that reads from those numbered ``reads``; returns its own number."""
        seq = len(self.sites)
        defaults = {
            "site": seq,
            "op": op,
            "name": "",
            "module": module,
            "module_type": kind,
            "phase": Phase.FORWARD,
            "file": _MODEL,
            "line": 0,
            "function": "forward",
            "code": "",
            "in_dtypes": tuple(self.sites[each].out_dtypes[0] for each in reads),
            "in_shapes": tuple(self.sites[each].out_shapes[0] for each in reads),
            "out_dtypes": (HALF,),
            "out_shapes": (f"{_TOKENS}x{_WIDTH}",),
            "scalars": "{}",
            "autocast": "",
            "cast": "",
            "grad_fn": "",
            "forward_site": None,
        }
        self.exponents.append(float(facts.pop("exponent", 0)))  # type: ignore[arg-type]  # a number, always
        self.sites.append(SiteRow(**{**defaults, **facts}))  # type: ignore[arg-type]  # named as the row's columns
        self.edges += [(seq, arg, writer) for arg, writer in enumerate(reads)]
        return seq


def transformer_step(rows: int) -> Step:
    """A step of about ``rows`` ops: as many blocks as that takes."""
    step = Step()
    last = step.op(Node.INPUT, name="args[0]", out_dtypes=(FULL,), exponent=2)
    forward: list[tuple[int, str]] = []
    for number in range(max(1, (rows - 3) // (2 * len(_BLOCK) + 2 * len(_LINEAR)))):
        last = _block(step, f"blocks.{number}", last, forward)
    loss: dict[str, Any] = {"phase": Phase.LOSS, "out_dtypes": (FULL,), "out_shapes": ("",), "line": 60, "exponent": 1}
    last = step.op("aten.nll_loss_forward.default", reads=(last,), code="loss = F.cross_entropy(logits, y)", **loss)
    step.op(Node.LOSS, name="loss", reads=(last,), **loss)
    for seq, param in reversed(forward):
        last = _backward(step, seq, param, last)
    return step


def _block(step: Step, block: str, last: int, forward: list[tuple[int, str]]) -> int:
    weights = {}
    for name in _LINEAR:
        weights[name] = step.op(Node.PARAMETER, f"{block}.{name}", "Linear", name=f"{block}.{name}.weight", exponent=-2)
        shape = f"{_WIDTH}x{_WIDTH}"
        full = ParamRow(
            len(step.params), "parameter", f"{block}.{name}.weight", f"{block}.{name}", shape, FULL, _WIDTH**2, True
        )
        step.params.append(full)
    for place, (op, module, kind, dtype, cast, exponent, line, code) in enumerate(_BLOCK):
        linear = module in weights and not cast
        last = step.op(
            op,
            f"{block}.{module}".rstrip("."),
            kind,
            reads=(last, weights[module]) if linear else (last,),
            out_dtypes=(dtype,),
            cast=cast,
            autocast=HALF,
            exponent=exponent,
            line=line,
            code=code,
        )
        forward.append((last, f"{block}.{module}.weight" if linear else ""))
        if place == CULPRIT:
            step.culprits.append(last)
    return last


def _backward(step: Step, seq: int, param: str, last: int) -> int:
    site = step.sites[seq]
    last = step.op(
        "aten.mm.default" if param else site.op,
        site.module,
        site.module_type,
        reads=(last,),
        phase=Phase.BACKWARD,
        out_dtypes=site.out_dtypes,
        cast=site.cast,
        exponent=step.exponents[seq] - 6,
        file="",
        function="",
        grad_fn="AddmmBackward0" if param else "Backward0",
        forward_site=seq,
    )
    if param:
        step.op(Node.GRADIENT, site.module, name=param, reads=(last,), phase=Phase.BACKWARD, exponent=-8)
    return last
