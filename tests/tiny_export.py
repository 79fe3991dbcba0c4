"""A tokenizer smaller than the tiny model's vocabulary, and ways to spoil an exported folder."""

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modeling_egmla.conversion.verify import MANIFEST, list_files


TOKENS = 60  # of the model's 97 ids


def tiny_tokenizer(tokens: int = TOKENS) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, of which it knows some (all with 258 tokens); `<s>` begins and ends texts."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())[: tokens - 2]
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", pad_token="<pad>", chat_template="{{ messages }}"
    )


def edit_json(path: Path, **changes) -> None:
    """Sets fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def accept_changes(folder: Path) -> None:
    """Rewrites the hashes of a manifest for what is in the folder now, as one who tampers with it would."""
    contents = {name: (folder / name).read_bytes() for name in list_files(folder)}
    entries = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
        for name, content in contents.items()
    }
    edit_json(folder / MANIFEST, files=entries)
