"""From documents to blocks of tokens: split by a hash of their content, tokenised, joined and cut."""

import glob
import hashlib
import json
import math
import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..conversion.vocabulary import leading_ids
from .recipe import DataRecipe, RecipeError


END_OF_TEXT = "<|endoftext|>"  # Between documents; also what generation starts and stops with.
PADDING = "<|padding|>"  # Never in training text. Not end-of-text, so that masking padding keeps documents' ends.
FILE_FORMATS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def matching_files(patterns: list[str]) -> list[str]:
    """The files that `data.files` names, sorted."""
    return sorted({path for pattern in patterns for path in glob.glob(pattern, recursive=True)})


def load_documents(recipe: DataRecipe, seed: int = 0) -> Dataset | IterableDataset:
    """
    Reads all documents into a dataset with the one column `text`; a stream comes shuffled by `seed`.

    Raises:
        RecipeError: no file matches, files of several or of unknown kinds, no such dataset, no such column, or a row
            without text in it (of a stream, when it comes to that row).
    """
    if recipe.dataset is not None:
        try:
            documents = load_dataset(
                recipe.dataset, recipe.dataset_config, split=recipe.dataset_split, streaming=recipe.streaming
            )
        except (DatasetsError, OSError, ValueError, RuntimeError) as error:
            raise RecipeError(f"`data.dataset`: {recipe.dataset} cannot be loaded: {error}") from error
    else:
        paths = matching_files(recipe.files)
        if not paths:
            raise RecipeError(f"`data.files`: no file matches {recipe.files} in {os.getcwd()}.")
        formats = {FILE_FORMATS.get(Path(path).suffix) for path in paths}
        if len(formats) != 1 or None in formats:
            raise RecipeError(f"`data.files` must all be of one kind of {sorted(FILE_FORMATS)}.")
        # A byte-order mark is no text.
        options = {"sample_by": "document", "encoding": "utf-8-sig"} if formats == {"text"} else {}
        try:
            documents = load_dataset(
                formats.pop(), data_files=paths, split="train", streaming=recipe.streaming, **options
            )
        except (DatasetsError, StopIteration, OSError, ValueError) as error:
            names = paths[0] if len(paths) == 1 else f"one of {len(paths)} files, {paths[0]} the first of them,"
            raise RecipeError(f"`data.files`: {names} cannot be read: {error.__cause__ or error!r}") from error
    columns = documents.column_names or list(next(iter(documents)))  # a stream may not know before its first row
    if recipe.text_column not in columns:
        raise RecipeError(f"`data.text_column` is {recipe.text_column!r}, but there are {columns}.")
    documents = documents.select_columns(recipe.text_column)
    documents = refuse_other_than_text(documents, recipe.text_column)
    if recipe.text_column != "text":
        documents = documents.rename_column(recipe.text_column, "text")
    return documents.shuffle(seed, buffer_size=recipe.shuffle_buffer) if recipe.streaming else documents


def refuse_other_than_text(documents: Dataset | IterableDataset, column: str) -> Dataset | IterableDataset:
    """
    The same documents; a stream checks them as it gives them.

    Raises:
        RecipeError: a row has no text in the column, but null or a value of another kind.
    """

    def check(value: Any, row: int | None = None) -> bool:
        if not isinstance(value, str):
            where = "a row of the stream" if row is None else f"row {row}, from 0 and over all files,"
            raise RecipeError(
                f"`data.text_column`: {where} has {value!r} in {column!r}, which is no text. Take such rows out, or "
                "name another column."
            )
        return True

    if isinstance(documents, IterableDataset):
        return documents.filter(check, input_columns=column)
    dtype = getattr(documents.features[column], "dtype", None)
    if documents.data.column(column).null_count or dtype not in ("string", "large_string"):
        for row, value in enumerate(documents[column]):
            check(value, row)
    return documents


def is_validation(text: str, validation_share: float) -> bool:
    """
    Whether a document is validation text: the first 8 bytes of the SHA-256 of its text, as a fraction of 2^64, lie
    below `validation_share`. So a document stays on its side whatever else is in the data, and so do its copies.
    """
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < validation_share * 2**64


def held_out_documents(documents: Dataset | IterableDataset, validation_share: float, limit: int | None) -> Dataset:
    """The first `limit` documents (None: all) that [`is_validation`] holds out; of a stream, the first it gives."""
    if isinstance(documents, IterableDataset):
        held_out = documents.filter(lambda text: is_validation(text, validation_share), input_columns="text")
        return Dataset.from_dict({"text": [row["text"] for row in islice(held_out, limit)]})
    rows = (row for row, text in enumerate(documents["text"]) if is_validation(text, validation_share))
    return documents.select(list(islice(rows, limit)))


def split_documents(
    documents: Dataset | IterableDataset, validation_share: float, limit: int | None = None
) -> tuple[Dataset | IterableDataset, Dataset]:
    """
    Splits documents into training and validation text by [`is_validation`]; of the latter, `limit` at most are used.
    A stream's training text stays a stream.

    Raises:
        RecipeError: one side would be empty, or have no text.
    """

    def is_training(text: str) -> bool:
        return not is_validation(text, validation_share)

    validation = held_out_documents(documents, validation_share, limit)
    if isinstance(documents, IterableDataset):
        train = documents.filter(is_training, input_columns="text")
        is_empty = next(iter(train), None) is None
    else:
        train = documents.select([row for row, text in enumerate(documents["text"]) if is_training(text)])
        is_empty = not len(train)
    if len(validation) and not any(validation["text"]):
        raise RecipeError("`data.validation_share`: all documents that it holds out are empty. Take them out.")
    if is_empty or not len(validation):
        raise RecipeError(
            f"`data.validation_share` {validation_share} leaves {'no' if is_empty else 'some'} documents to train on "
            f"and {len(validation)} to validate with."
        )
    return train, validation


def hash_documents(documents: Dataset) -> str:
    """SHA-256 of the documents' texts, in their order; hexadecimal."""
    digest = hashlib.sha256()
    for text in documents["text"]:
        digest.update(hashlib.sha256(text.encode()).digest())  # one by one, so that the borders between them count
    return digest.hexdigest()


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all that decides which ids a text becomes; hexadecimal."""
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        del content["padding"], content["truncation"]  # of the last call
    else:
        content = tokenizer.get_vocab()
    content = json.dumps([content, tokenizer.eos_token_id], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


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


def pack_documents(
    documents: Dataset | IterableDataset, tokenizer, length: int, keep_all: bool
) -> Dataset | IterableDataset:
    """
    Tokenises documents, joins them with end-of-text before, between and after them (and, where the tokenizer begins
    every text with a bos, with that in front of each), and cuts the stream into blocks of `length`. A block begins
    with the last token of the one before it, so every token of the text is predicted once; a bos is not.

    Args:
        keep_all: fill the last block up with end-of-text that is not predicted, where else it would be dropped, once
            for every thousand documents.

    Returns:
        Blocks as `input_ids` and `labels` (-100: not predicted), [length] each. A stream's begin again when it ends.

    Raises:
        RecipeError: the text does not fill a block.
    """

    leading = leading_ids(tokenizer)

    def pack(batch: dict[str, list]) -> dict[str, list]:
        stream = [tokenizer.eos_token_id]
        for ids in tokenizer(batch["text"], add_special_tokens=False, verbose=False)["input_ids"]:
            stream += [*leading, *ids, tokenizer.eos_token_id]
        blocks = [stream[start : start + length] for start in range(0, len(stream) - 1, length - 1)]
        rest = length - len(blocks[-1])
        if rest and not keep_all:
            blocks.pop()
        labels = [[-100 if token_id in leading else token_id for token_id in block] for block in blocks]
        if rest and keep_all:
            labels[-1] += [-100] * rest
            blocks[-1] = blocks[-1] + [tokenizer.eos_token_id] * rest
        return {"input_ids": blocks, "labels": labels}

    is_stream = isinstance(documents, IterableDataset)
    batch_size = None if keep_all and not is_stream else 1000
    blocks = documents.map(pack, batched=True, batch_size=batch_size, remove_columns="text")
    if next(iter(blocks), None) is None:
        raise RecipeError(
            f"`data.sequence_length` {length} is longer than all of the text, which is packed a thousand documents at "
            "a time."
        )
    # Without end, in the same order each time, so that a run that is continued finds its place.
    return blocks.repeat(None) if is_stream else blocks


def count_tokens(blocks: Dataset, vocab_size: int) -> np.ndarray:
    """How often each id is predicted in the blocks, [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for batch in blocks.select_columns("labels").with_format("numpy").iter(1000):  # all at once would fill the memory
        labels = batch["labels"][:, 1:]
        counts += np.bincount(labels[labels != -100], minlength=vocab_size)
    return counts


def unigram_loss(train_blocks: Dataset, validation_blocks: Dataset, vocab_size: int) -> float:
    """Validation loss, in nats a token, of predicting each token by its (add-one) frequency in the training text."""
    counts = count_tokens(train_blocks, vocab_size) + 1.0
    wanted = count_tokens(validation_blocks, vocab_size)
    return float(-(np.log(counts / counts.sum()) * wanted).sum() / wanted.sum())


def bits_per_byte(loss: float, tokens: int, documents: Dataset) -> float:
    """Loss in bits a byte of UTF-8 text, from nats a token; each document's end counts with its text."""
    return loss * tokens / math.log(2) / sum(len(text.encode()) for text in documents["text"])
