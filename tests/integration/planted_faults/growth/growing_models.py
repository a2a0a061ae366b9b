"""Transformers in which something grows, or falls, by the same share in every step, until float16 ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import nn

VOCABULARY, WIDTH, LAYERS, HEADS, TOKENS = 64, 32, 2, 2, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """A model and the weights that a plant changes; of fused projections, which columns."""

    name: str
    build: Callable[[], nn.Module]
    down: str  #: the linear by which the second layer writes into the residual stream
    queries_and_keys: tuple[tuple[str, slice], ...]  #: of the first layer
    attention: str  #: where their product is taken
    head: str  #: the output layer

    def __str__(self) -> str:
        return self.name


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        max_position_embeddings=TOKENS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return transformers.BertForMaskedLM(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


_ALL = slice(None)
GPT2 = Anatomy(
    name="GPT-2",
    build=_gpt2,
    down="transformer.h.1.mlp.c_proj",
    queries_and_keys=(("transformer.h.0.attn.c_attn", slice(0, 2 * WIDTH)),),
    attention="transformer.h.0.attn",
    head="lm_head",
)
BERT = Anatomy(
    name="BERT",
    build=_bert,
    down="bert.encoder.layer.1.output.dense",
    queries_and_keys=tuple((f"bert.encoder.layer.0.attention.self.{each}", _ALL) for each in ("query", "key")),
    attention="bert.encoder.layer.0.attention.self",
    head="cls.predictions.decoder",
)
LLAMA = Anatomy(
    name="Llama",
    build=_llama,
    down="model.layers.1.mlp.down_proj",
    queries_and_keys=tuple((f"model.layers.0.self_attn.{each}", _ALL) for each in ("q_proj", "k_proj")),
    attention="model.layers.0.self_attn",
    head="lm_head",
)


class Plant:
    """What happens in each step besides the training.

    Args:
        model: What is trained.
        where: Its anatomy.
    """

    #: The factor of its weights in a step, and once, at the start: what breaks does so within some hundred steps.
    rate, head_start = 1.0, 1.0

    def __init__(self, model: Any, where: Anatomy) -> None:
        self.weights = [weight for name, columns in self.places(where) for weight in _slices(model, name, columns)]
        self._multiply(self.head_start)

    def places(self, where: Anatomy) -> tuple[tuple[str, slice], ...]:
        """Whose weights; none in a healthy training."""
        return ()

    def step(self) -> None:
        """What it does in a step."""
        self._multiply(self.rate)

    def _multiply(self, factor: float) -> None:
        with torch.no_grad():
            for weight in self.weights:
                weight.mul_(factor)


def _slices(model: Any, name: str, columns: slice) -> list[torch.Tensor]:
    weight = model.get_submodule(name).weight
    return [weight[:, columns] if columns != _ALL else weight]


class Residual(Plant):
    """What a layer adds to the residual stream gains 2 % a step."""

    rate, head_start = 1.02, 256.0

    def places(self, where: Anatomy) -> tuple[tuple[str, slice], ...]:
        return ((where.down, _ALL),)


class Logits(Plant):
    """Queries and keys gain 1 % a step each, so that attention's logits gain 2 %."""

    rate, head_start = 1.01, 16.0

    def places(self, where: Anatomy) -> tuple[tuple[str, slice], ...]:
        return where.queries_and_keys


class Sinking(Plant):
    """A frozen output layer loses 3 % a step, and with it all gradients below."""

    rate, head_start = 0.97, 16.0

    def __init__(self, model: Any, where: Anatomy) -> None:
        model.get_submodule(where.head).weight.requires_grad_(False)
        super().__init__(model, where)

    def places(self, where: Anatomy) -> tuple[tuple[str, slice], ...]:
        return ((where.head, _ALL),)


class Frozen(Sinking):
    """The twin: a frozen output layer that stays as it is."""

    rate = 1.0


class Grown(Residual):
    """The twin: a stream that is large, and stays so."""

    rate = 1.0


class Sharp(Logits):
    """The twin: attention with large logits that do not grow."""

    rate = 1.0
