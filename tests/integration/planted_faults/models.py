"""The transformers that faults are planted in: freshly initialised, tiny, each with the places a plant has to know."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn

Batch = dict[str, Tensor]

VOCABULARY, WIDTH, LAYERS, HEADS = 200, 32, 2, 2
ROWS, TOKENS, CLASSES, PIXELS = 4, 16, 4, 16
ADDMM, MM = "aten.addmm.default", "aten.mm.default"
LAYER_NORM, WEIGHTED = "aten.native_layer_norm.default", "aten.mul.Tensor"  # an RMS norm ends with its weight


def text() -> Batch:
    """Token numbers that are their own labels."""
    ids = torch.randint(1, VOCABULARY, (ROWS, TOKENS))
    return {"input_ids": ids, "labels": ids.clone()}


def pictures() -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, PIXELS, PIXELS), "labels": torch.randint(0, CLASSES, (ROWS,))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A model and its anatomy, named by the model's own module paths."""

    name: str
    build: Callable[[], nn.Module]
    norm: str  #: a norm inside the second layer; its output goes into `up`
    normalises: str  #: the op that writes its output
    up: str  #: the first linear of the second layer's MLP (of its mixer, where there is none)
    beside: tuple[str, ...] = ()  #: further linears that read what `up` reads
    product: str  #: the op that `up` multiplies with
    entry: str  #: the module that reads the floating-point input first
    attention: str = ""  #: the first layer's attention, if it spells its softmax out and takes the user's mask
    batch: Callable[[], Batch] = text

    def __str__(self) -> str:
        return self.name


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        attn_implementation="eager",
    )
    return transformers.BertForMaskedLM(config)


def _gpt2(attention: str = "sdpa") -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=2 * TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        use_cache=False,
        attn_implementation=attention,
    )
    return transformers.GPT2LMHeadModel(config)


def _checkpointed(model: Any, *, reentrant: bool) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the method has a new name in later versions, not in earlier
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        hidden_dropout_prob=0.1,
        image_size=PIXELS,
        patch_size=PIXELS // 4,
        num_labels=CLASSES,
    )
    return transformers.ViTForImageClassification(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        intermediate_size=2 * WIDTH,
        attention_dropout=0.1,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=4, use_cache=False
    )
    return transformers.MambaForCausalLM(config)


def _gpt2_anatomy(name: str, build: Callable[[], nn.Module], attention: str = "") -> Architecture:
    return Architecture(
        name=name,
        build=build,
        norm="transformer.h.1.ln_2",
        normalises=LAYER_NORM,
        up="transformer.h.1.mlp.c_fc",
        product=ADDMM,
        entry="transformer",
        attention=attention,
    )


ARCHITECTURES = (
    Architecture(
        name="bert",
        build=_bert,
        norm="bert.encoder.layer.1.attention.output.LayerNorm",
        normalises=LAYER_NORM,
        up="bert.encoder.layer.1.intermediate.dense",
        product=ADDMM,
        entry="bert.embeddings",
        attention="bert.encoder.layer.0.attention.self",
    ),
    _gpt2_anatomy("gpt2", lambda: _gpt2("eager"), "transformer.h.0.attn"),
    _gpt2_anatomy("gpt2-checkpointed", lambda: _checkpointed(_gpt2(), reentrant=False)),
    _gpt2_anatomy("gpt2-reentrant", lambda: _checkpointed(_gpt2(), reentrant=True)),
    Architecture(
        name="t5",
        build=_t5,
        norm="encoder.block.1.layer.1.layer_norm",
        normalises=WEIGHTED,
        up="encoder.block.1.layer.1.DenseReluDense.wi",
        product=MM,
        entry="encoder.dropout",
    ),
    Architecture(
        name="vit",
        build=_vit,
        norm="vit.layers.1.layernorm_after",
        normalises=LAYER_NORM,
        up="vit.layers.1.mlp.fc1",
        product=ADDMM,
        entry="vit.embeddings.patch_embeddings.projection",
        batch=pictures,
    ),
    Architecture(
        name="llama",
        build=_llama,
        norm="model.layers.1.post_attention_layernorm",
        normalises=WEIGHTED,
        up="model.layers.1.mlp.gate_proj",
        beside=("model.layers.1.mlp.up_proj",),
        product=MM,
        entry="model.layers.0.input_layernorm",
    ),
    Architecture(
        name="mamba",
        build=_mamba,
        norm="backbone.layers.1.norm",
        normalises=WEIGHTED,
        up="backbone.layers.1.mixer.in_proj",
        product=MM,
        entry="backbone.layers.0.norm",
    ),
)
