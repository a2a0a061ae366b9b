"""Relation classification with a small BERT, in two variants that differ in five lines.

`train_as_found` is the loop that circulates on the web: it clips the *scaled* gradients, and steps the schedule even
when the scaler skipped the optimizer. Nothing crashes and no value is ever NaN; the gradients that reach the optimizer
are merely tens of thousands of times too small. `train` is the same loop, written as the AMP recipe says.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertConfig, BertModel

from tests.integration.loops.exception_pairs import RELATIONS, Encoded, load
from tests.integration.loops.trained import Trained, Watch, seed_everything

ACCUMULATION = 2
MAX_NORM = 1.0


class RelationClassifier(nn.Module):
    """A BERT encoder, dropout and a linear layer over the pooled [CLS] token."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
        )
        self.bert = BertModel(config)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Linear(config.hidden_size, len(RELATIONS))

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        encoded = self.bert(input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask)
        logits: Tensor = self.classifier(self.dropout(encoded.pooler_output))
        return logits


def warm_up(optimizer: torch.optim.Optimizer, warm_up_steps: int, total_steps: int) -> LambdaLR:
    """The learning rate rises linearly, then falls linearly to zero."""

    def factor(step: int) -> float:
        if step < warm_up_steps:
            return step / max(1, warm_up_steps)
        return max(0.0, (total_steps - step) / max(1, total_steps - warm_up_steps))

    return LambdaLR(optimizer, factor)


def _prepare(steps: int, batch_size: int, seed: int) -> tuple[Encoded, RelationClassifier, list[Tensor]]:
    seed_everything(seed)
    data = load()
    model = RelationClassifier(data.vocabulary)
    model.train()
    batches = [torch.randint(0, len(data.labels), (batch_size,)) for _ in range(steps * ACCUMULATION)]
    return data, model, batches


def train(
    watch: Watch | None = None, *, steps: int = 12, batch_size: int = 8, seed: int = 0, init_scale: float = 2.0**16
) -> Trained:
    data, model, batches = _prepare(steps, batch_size, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    scheduler = warm_up(optimizer, steps // 5, steps)
    criterion = nn.CrossEntropyLoss(weight=data.class_weights)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    if watch is not None:
        watch(model, scaler)
    losses: list[float] = []
    skipped: list[int] = []
    total = 0.0
    for number, batch in enumerate(batches, 1):
        input_ids, token_type_ids, attention_mask, labels = data.rows(batch)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask)
            loss = criterion(logits, labels) / ACCUMULATION
        scaler.scale(loss).backward()
        total += loss.item()

        if number % ACCUMULATION == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < scale:
                skipped.append(len(losses))
            else:
                scheduler.step()
            optimizer.zero_grad()
            losses.append(total)
            total = 0.0
    return Trained(model, optimizer, scaler, losses, skipped)


def train_as_found(
    watch: Watch | None = None, *, steps: int = 12, batch_size: int = 8, seed: int = 0, init_scale: float = 2.0**16
) -> Trained:
    data, model, batches = _prepare(steps, batch_size, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
    scheduler = warm_up(optimizer, steps // 5, steps)
    criterion = nn.CrossEntropyLoss(weight=data.class_weights)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    if watch is not None:
        watch(model, scaler)
    losses: list[float] = []
    skipped: list[int] = []
    total = 0.0
    for number, batch in enumerate(batches, 1):
        input_ids, token_type_ids, attention_mask, labels = data.rows(batch)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(input_ids=input_ids, token_type_ids=token_type_ids, attention_mask=attention_mask)
            loss = criterion(logits, labels) / ACCUMULATION
        scaler.scale(loss).backward()
        total += loss.item()

        if number % ACCUMULATION == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            if scaler.get_scale() < scale:
                skipped.append(len(losses))
            optimizer.zero_grad()
            losses.append(total)
            total = 0.0
    return Trained(model, optimizer, scaler, losses, skipped)
