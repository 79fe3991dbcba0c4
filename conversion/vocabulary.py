"""A model's vocabulary and its tokenizer's: which ids have a token, and what generation has to know about it."""

import json
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoTokenizer

from ..configuration_egmla import SPECIAL_IDS


def load_tokenizer(folder: Path):
    """The folder's tokenizer, or None if it has none; never one that is code in the folder."""
    if not any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        return None
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def ids_without_token(tokenizer, vocab_size: int) -> list[int]:
    """Rows of a padded vocabulary that no token stands for: they have logits and no text."""
    return sorted(set(range(vocab_size)) - set(tokenizer.get_vocab().values()))


def suppressed_ids(tokenizer, vocab_size: int, earlier: Iterable[int] | None) -> list[int]:
    """
    Ids that are never to be drawn: those without token, and what a generation_config said before. Of the latter not
    the run that ends the vocabulary: that was padding, in which tokens that were added since have found room.
    """
    earlier, end = set(earlier or ()), vocab_size
    while end - 1 in earlier:
        end -= 1
    return sorted({*ids_without_token(tokenizer, vocab_size), *(token_id for token_id in earlier if token_id < end)})


def leading_ids(tokenizer) -> list[int]:
    """The bos that a tokenizer puts in front of every text, and no other does: [] or one id."""
    ids = tokenizer("", verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids[:1] if ids and ids[0] == bos != tokenizer.eos_token_id else []


def complete_generation_config(folder: Path, tokenizer, vocab_size: int) -> None:
    """
    Edits a folder's generation_config.json so that no id without token is drawn (`suppress_tokens`), and special ids
    that it lacks are the tokenizer's. All else stays, also what the library would refuse to save.
    """
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    if suppressed := suppressed_ids(tokenizer, vocab_size, settings.pop("suppress_tokens", None)):
        settings["suppress_tokens"] = suppressed
    for field in SPECIAL_IDS:
        if settings.get(field) is None and getattr(tokenizer, field) is not None:
            settings[field] = getattr(tokenizer, field)
    # No longer derived from the model's config, which would take precedence when it is loaded.
    settings.pop("_from_model_config", None)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
