"""A small real text data set that needs no download: how are two of Python's exceptions related?

A sample is a pair of docstrings; its label follows from ``issubclass``. As in most relation data, one class ("none")
is by far the largest, hence the class weights.
"""

from __future__ import annotations

import builtins
import re
from dataclasses import dataclass

import torch
from torch import Tensor

RELATIONS = ("none", "parent", "child", "sibling")
SPECIAL = ("[PAD]", "[CLS]", "[SEP]")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Padded token rows, the way a BERT takes them; all int64, rows are samples."""

    input_ids: Tensor
    token_type_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    class_weights: Tensor  #: float32, one a relation
    vocabulary: int

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.input_ids[index], self.token_type_ids[index], self.attention_mask[index], self.labels[index]


def load(*, unrelated: int = 160, length: int = 32) -> Encoded:
    """Encode every related pair and the first ``unrelated`` of the others."""
    classes = _exceptions()
    pairs = [(a, b, _relation(a, b)) for a in classes for b in classes if a is not b]
    related = [pair for pair in pairs if pair[2] in ("parent", "child")]
    siblings = [pair for pair in pairs if pair[2] == "sibling"][::7]
    strangers = [pair for pair in pairs if pair[2] == "none"][::7][:unrelated]
    return _encode(related + siblings + strangers, length)


def _exceptions() -> list[type[BaseException]]:
    found = [c for c in vars(builtins).values() if isinstance(c, type) and issubclass(c, BaseException) and c.__doc__]
    by_name = {c.__name__: c for c in found}  # IOError and EnvironmentError are other names of OSError
    return [by_name[name] for name in sorted(by_name)]


def _relation(a: type, b: type) -> str:
    if a in b.__bases__:
        return "parent"
    if b in a.__bases__:
        return "child"
    return "sibling" if a.__bases__ == b.__bases__ else "none"


def _words(exception: type) -> list[str]:
    return re.findall(r"[a-z]+", f"{exception.__name__} {exception.__doc__}".lower())


def _encode(pairs: list[tuple[type, type, str]], length: int) -> Encoded:
    words = sorted({word for a, b, _ in pairs for word in _words(a) + _words(b)})
    number = {word: place for place, word in enumerate([*SPECIAL, *words])}
    half = (length - 3) // 2
    ids = torch.zeros(len(pairs), length, dtype=torch.int64)
    kinds, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, (a, b, _) in enumerate(pairs):
        first = ["[CLS]", *_words(a)[:half], "[SEP]"]
        second = [*_words(b)[:half], "[SEP]"]
        tokens = torch.tensor([number[word] for word in first + second])
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
        kinds[row, len(first) : len(tokens)] = 1
    labels = torch.tensor([RELATIONS.index(relation) for _, _, relation in pairs])
    counts = torch.bincount(labels, minlength=len(RELATIONS))
    weights = len(labels) / (len(RELATIONS) * counts.float())
    return Encoded(ids, kinds, mask, labels, weights, len(number))
