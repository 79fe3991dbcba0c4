"""From documents to blocks of tokens: split by a hash of their content, tokenised, joined and cut."""

import glob
import hashlib
import math
import os
from pathlib import Path

import numpy as np
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .recipe import DataRecipe, RecipeError


END_OF_TEXT = "<|endoftext|>"  # Between documents; also what generation starts and stops with.
PADDING = "<|padding|>"  # Never in training text. Not end-of-text, so that masking padding keeps documents' ends.
FILE_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_documents(recipe: DataRecipe) -> Dataset:
    """
    Reads all documents into a dataset with the one column `text`.

    Raises:
        RecipeError: no file matches, files of several or of unknown kinds, or no such column.
    """
    if recipe.dataset is not None:
        documents = load_dataset(recipe.dataset, split=recipe.dataset_split)
    else:
        paths = sorted({path for pattern in recipe.files for path in glob.glob(pattern, recursive=True)})
        if not paths:
            raise RecipeError(f"`data.files`: no file matches {recipe.files} in {os.getcwd()}.")
        formats = {FILE_FORMATS.get(Path(path).suffix) for path in paths}
        if len(formats) != 1 or None in formats:
            raise RecipeError(f"`data.files` must all be of one kind of {sorted(FILE_FORMATS)}.")
        options = {"sample_by": "document"} if formats == {"text"} else {}
        documents = load_dataset(formats.pop(), data_files=paths, split="train", **options)
    if recipe.text_column not in documents.column_names:
        raise RecipeError(f"`data.text_column` is {recipe.text_column!r}, but there are {documents.column_names}.")
    documents = documents.select_columns(recipe.text_column)
    return documents if recipe.text_column == "text" else documents.rename_column(recipe.text_column, "text")


def is_validation(text: str, validation_share: float) -> bool:
    """
    Whether a document is validation text: the first 8 bytes of the SHA-256 of its text, as a fraction of 2^64, lie
    below `validation_share`. So a document stays on its side whatever else is in the data, and so do its copies.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < validation_share * 2**64


def split_documents(documents: Dataset, validation_share: float) -> tuple[Dataset, Dataset]:
    """
    Splits documents into training and validation text by [`is_validation`].

    Raises:
        RecipeError: one side would be empty.
    """
    held_out = [is_validation(text, validation_share) for text in documents["text"]]
    train = documents.select([row for row, is_held_out in enumerate(held_out) if not is_held_out])
    validation = documents.select([row for row, is_held_out in enumerate(held_out) if is_held_out])
    if not len(train) or not len(validation):
        raise RecipeError(
            f"`data.validation_share` {validation_share} leaves {len(train)} documents to train on and "
            f"{len(validation)} to validate with, of {len(documents)}."
        )
    return train, validation


def train_tokenizer(documents: Dataset, vocab_size: int) -> PreTrainedTokenizerFast:
    """
    Trains a byte-level BPE tokenizer, as GPT-2's, on the documents.

    End-of-text is bos and eos; the padding token serves batches of prompts only.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents["text"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def pack_documents(documents: Dataset, tokenizer, length: int, keep_all: bool) -> Dataset:
    """
    Tokenises documents, joins them with end-of-text before, between and after them, and cuts the stream into blocks of
    `length`. A block begins with the last token of the one before it, so every token of the text is predicted once.

    Args:
        keep_all: fill the last block up with end-of-text that is not predicted, where else it would be dropped, once
            for every thousand documents.

    Returns:
        Blocks as `input_ids` and `labels` (-100: not predicted), [length] each.

    Raises:
        RecipeError: the text does not fill a block.
    """

    def pack(batch: dict[str, list]) -> dict[str, list]:
        stream = [tokenizer.eos_token_id]
        for ids in tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]:
            stream += [*ids, tokenizer.eos_token_id]
        blocks = [stream[start : start + length] for start in range(0, len(stream) - 1, length - 1)]
        rest = length - len(blocks[-1])
        if rest and not keep_all:
            blocks.pop()
        labels = [list(block) for block in blocks]
        if rest and keep_all:
            labels[-1] += [-100] * rest
            blocks[-1] = blocks[-1] + [tokenizer.eos_token_id] * rest
        return {"input_ids": blocks, "labels": labels}

    blocks = documents.map(pack, batched=True, batch_size=None if keep_all else 1000, remove_columns="text")
    if not len(blocks):
        raise RecipeError(f"`data.sequence_length` {length} is longer than all of the text.")
    return blocks


def unigram_loss(train_blocks: Dataset, validation_blocks: Dataset, vocab_size: int) -> float:
    """Validation loss, in nats a token, of predicting each token by its (add-one) frequency in the training text."""
    counts = np.bincount(np.array(train_blocks["labels"])[:, 1:].ravel(), minlength=vocab_size) + 1.0
    labels = np.array(validation_blocks["labels"])[:, 1:].ravel()
    return float(-np.log(counts / counts.sum())[labels[labels != -100]].mean())


def bits_per_byte(loss: float, tokens: int, documents: Dataset) -> float:
    """Loss in bits a byte of UTF-8 text, from nats a token; each document's end counts with its text."""
    return loss * tokens / math.log(2) / sum(len(text.encode()) for text in documents["text"])
