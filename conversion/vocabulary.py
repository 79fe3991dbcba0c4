"""A model's vocabulary and its tokenizer's: which ids have a token, and what generation has to know about it."""

import json
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


def complete_generation_config(folder: Path, tokenizer, vocab_size: int) -> None:
    """
    Edits a folder's generation_config.json so that no id without token is drawn (`suppress_tokens`), and special ids
    that it lacks are the tokenizer's. All else stays, also what the library would refuse to save.
    """
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    unused = {*ids_without_token(tokenizer, vocab_size), *(settings.get("suppress_tokens") or ())}
    if unused:
        settings["suppress_tokens"] = sorted(unused)
    for field in SPECIAL_IDS:
        if settings.get(field) is None and getattr(tokenizer, field) is not None:
            settings[field] = getattr(tokenizer, field)
    # No longer derived from the model's config, which would take precedence when it is loaded.
    settings.pop("_from_model_config", None)
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
