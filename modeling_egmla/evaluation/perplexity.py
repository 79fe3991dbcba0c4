"""Perplexity of running text in overlapping windows: every token is predicted once, with a full context before it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..loading import NOT_FINITE
from ..loss_egmla import IGNORED, token_losses


@dataclass(frozen=True)
class TextPerplexity:
    """
    How well a model predicts texts.

    Attributes:
        nats: negative log-likelihood of all tokens together.
        tokens: tokens that were predicted, which are all of the texts'; no end-of-text is added.
        words: runs of characters between white space.
        bytes: of the texts in UTF-8.
        documents: texts.
        context: tokens that a prediction sees at most.
        stride: tokens by which a window moves on; a token behind the first window sees `context - stride` at least.
    """

    nats: float
    tokens: int
    words: int
    bytes: int
    documents: int
    context: int
    stride: int

    @property
    def token_perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def word_perplexity(self) -> float | None:
        """None without words, and beyond what a float holds: scripts without spaces have words of whole lines."""
        try:
            return math.exp(self.nats / self.words)
        except (OverflowError, ZeroDivisionError):
            return None

    @property
    def byte_perplexity(self) -> float:
        return math.exp(self.nats / self.bytes)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / self.bytes / math.log(2)


class Window(NamedTuple):
    """Tokens in front of those to predict, and how many of the last are predicted."""

    ids: list[int]
    predicted: int


def windows(ids: list[int], context: int, stride: int) -> Iterator[Window]:
    """
    Cuts `ids`, of which all but the first are to be predicted once, into windows of at most `context + 1`: the first
    predicts all it can, each later one up to `stride` more.
    """
    last = len(ids) - 1
    done, end = 0, min(context, last)
    while done < last:
        yield Window(ids[max(0, end - context) : end + 1], end - done)
        done, end = end, min(end + stride, last)


@torch.no_grad()
def text_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str],
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> TextPerplexity:
    """
    Scores texts, each for itself, behind the bos (or else eos) token.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        texts: documents.
        context: tokens that a prediction sees at most; by default all that the model allows.
        stride: tokens by which a window moves on; by default half of the context. At `context`, windows do not
            overlap, as in lm-evaluation-harness.
        batch_size: windows at once; the result does not depend on it.

    Raises:
        ValueError: no text has a token, `context` is more than the model's, `stride` more than the context, or the
            model gives no numbers.
    """
    limit = model.config.max_position_embeddings
    context = limit if context is None else context
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= context <= limit:
        raise ValueError(f"The context must lie between 1 and the model's {limit} tokens, but is {context}.")
    if not 1 <= stride <= context:
        raise ValueError(f"The stride must lie between 1 and the context of {context} tokens, but is {stride}.")
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if prefix is None:
        raise ValueError("The tokenizer has neither bos nor eos, which the first token would be predicted from.")

    texts = list(texts)
    cut = []
    for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []:
        cut += windows([prefix, *ids], context, stride)
    if not cut:
        raise ValueError("There is no text to score.")
    cut.sort(key=lambda window: len(window.ids), reverse=True)  # little padding, and the largest batch first
    batches = [cut[start : start + batch_size] for start in range(0, len(cut), batch_size)]
    was_training = model.training
    model.eval()
    try:
        nats = sum(_batch_nats(model, batch) for batch in batches)
    finally:
        model.train(was_training)
    if not math.isfinite(nats):
        raise ValueError(NOT_FINITE)
    return TextPerplexity(
        nats=nats,
        tokens=sum(window.predicted for window in cut),
        words=sum(len(text.split()) for text in texts),
        bytes=sum(len(text.encode()) for text in texts),
        documents=len(texts),
        context=context,
        stride=stride,
    )


def _batch_nats(model: PreTrainedModel, batch: list[Window]) -> float:
    """Negative log-likelihood of what a batch of windows predicts; the longest comes first."""
    width = len(batch[0].ids) - 1
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    labels = torch.full((len(batch), width), IGNORED)
    for row, window in enumerate(batch):
        length = len(window.ids) - 1
        ids[row, :length] = torch.tensor(window.ids[:-1])
        labels[row, length - window.predicted : length] = torch.tensor(window.ids[-window.predicted :])
    # Padding stands on the right, where nothing that counts can see it.
    first = min(len(window.ids) - 1 - window.predicted for window in batch)
    logits = model(ids.to(model.device), use_cache=False, logits_to_keep=width - first).logits
    targets = labels[:, first:].flatten().to(logits.device)
    return token_losses(logits.flatten(0, 1), targets).double().sum().item()
