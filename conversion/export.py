"""Writes a model as a folder that is complete: it loads, checks and publishes without anything else."""

import json
import os
import re
from pathlib import Path

import torch
import yaml

from ..configuration import find_model
from ..files import new_folder, refuse_place
from ..loading import in_dtype, stored_dtypes
from . import cards
from .verify import (
    VerificationError,
    check_code,
    check_privacy,
    check_special_ids,
    list_files,
    load_model,
    read_manifest,
    write_manifest,
)
from .vocabulary import complete_generation_config, load_tokenizer


MAX_SHARD_SIZE = "5GB"
DTYPES = ("float32", "bfloat16", "float16")  # that a card may name
LICENSE_FILES = ("LICENSE*", "LICENCE*", "NOTICE*")


def export(
    source: str | os.PathLike,
    folder: str | os.PathLike,
    *,
    dtype: str = "auto",
    max_shard_size: int | str = MAX_SHARD_SIZE,
    evaluation: str | os.PathLike | None = None,
    new_card: bool = False,
    overwrite: bool = False,
    **about,
) -> Path:
    """
    Exports a saved model, with its tokenizer, generation config, licence files and the sources of its card. A
    README.md that the source has is kept, unless `new_card`.

    Args:
        source: folder of a model, as `save_pretrained`, a training or a conversion leaves it, or the name of a model
            that ships with the package; only safetensors are read, and no code.
        folder: where to; it may be `source` itself.
        dtype: e.g. `"bfloat16"`; by default what the source's config.json says, stored as the source stores it.
        evaluation: results file of lm-evaluation-harness for the card.
        new_card: write the card anew even if the source has one.
        max_shard_size, overwrite, about: as in [`export_model`].

    Raises:
        FileExistsError: `folder` exists, and not `overwrite`.
        VerificationError: the source is no EG-MLA model, or the weights do not fit its config.
        ValueError: a README.md would be kept that lacks the licence or the evaluation, or names another dtype;
            what [`export_model`] raises.
    """
    source = Path(find_model(str(source)))
    if not source.is_dir():
        raise VerificationError(source, ["there is no such folder. To export from the Hub, `egmla pull` first."])
    check_target(Path(folder), overwrite)
    model = load_model(source, dtype)
    stored, save_dtype = stored_dtypes(source), str(model.dtype).removeprefix("torch.")
    if dtype == "auto" and len(stored) == 1 and getattr(torch, *stored).itemsize < model.dtype.itemsize:
        (save_dtype,) = stored  # narrower than what is computed with, as `egmla train` may store them
    extra_files = [path for pattern in LICENSE_FILES for path in source.glob(pattern)]
    extra_files += [source / name for name in cards.CARD_SOURCES if (source / name).is_file()]
    if (source / "README.md").is_file() and not new_card:
        if about or evaluation:
            raise ValueError(
                f"{source} has a README.md, which is kept, so neither a licence nor an evaluation would get into it: "
                "edit it, or write the card anew with `--new-card`."
            )
        text = (source / "README.md").read_text(encoding="utf-8")
        others = [name for name in DTYPES if name != save_dtype and re.search(rf"\b{name}\b", text)]
        if others and stored != {save_dtype}:
            raise ValueError(
                f"{source} has a README.md, which is kept and tells of {others[0]}, but the weights, which were "
                f"stored in {' and '.join(sorted(stored))}, would be in {save_dtype}: edit it, or write the card anew "
                "with `--new-card`."
            )
        extra_files.append(source / "README.md")
    return export_model(
        model,
        folder,
        load_tokenizer(source),
        save_dtype=save_dtype,
        max_shard_size=max_shard_size,
        extra_files=extra_files,
        evaluation=evaluation,
        overwrite=overwrite,
        **about,
    )


def export_model(
    model,
    folder: str | os.PathLike,
    tokenizer=None,
    *,
    save_dtype: str | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    extra_files: list[Path] | tuple[Path, ...] = (),
    evaluation: str | os.PathLike | None = None,
    overwrite: bool = False,
    **about,
) -> Path:
    """
    Exports a model: weights in shards, config with `auto_map`, flat code, tokenizer, generation config, card and
    manifest. All is written beside `folder` and checked there; then it takes the name in one step, so that a crash
    leaves the old folder or the new one.

    Args:
        model: one of this package's models.
        folder: where to.
        tokenizer: its tokenizer, if it has one. Ids without a token are then kept from being generated.
        save_dtype: of the stored weights; config.json keeps that of the model. By default the model's.
        max_shard_size: of a weights file, e.g. `"5GB"` or a number of bytes.
        extra_files: licence files, sources of the card ([`cards.CARD_SOURCES`]), or a README.md in place of a new
            card.
        evaluation: results file of lm-evaluation-harness for the card.
        overwrite: replace a folder that exists.
        about: values for a new card in place of those of an about.yaml, e.g. `license="apache-2.0"`.

    Returns:
        The folder.

    Raises:
        FileExistsError: the folder exists, and not `overwrite`.
        TypeError: the model is wrapped in something else (an adapter, a parallel wrapper).
        VerificationError: code, special ids or texts are not fit to be published; the message says what to do.
        ValueError: a source of the card is not what it should be.
    """
    from ..modeling_egmla import EGMLAPreTrainedModel

    if not isinstance(model, EGMLAPreTrainedModel):
        raise TypeError(f"Only EG-MLA models can be exported, not a {type(model).__name__}: unwrap or merge it first.")
    folder = Path(folder)
    check_target(folder, overwrite)
    with new_folder(folder, overwrite=overwrite) as staging:
        _write_model(model, staging, tokenizer, save_dtype, max_shard_size)
        for path in extra_files:
            _copy_without_paths(path, staging / path.name)
        if evaluation is not None:
            content = cards.read_evaluation(Path(evaluation))
            (staging / "evaluation.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if not (staging / "README.md").exists():
            card = cards.render_card(folder.resolve().name, model, staging, True, tokenizer is not None, **about)
            (staging / "README.md").write_text(card, encoding="utf-8")
        if problems := check_code(staging) + check_special_ids(staging) + check_privacy(staging):
            raise VerificationError(folder, problems)
        mode = staging.stat().st_mode & 0o666
        for name in list_files(staging):
            (staging / name).chmod(mode)  # the library leaves weights readable to their owner only
        write_manifest(staging, model)
    return folder


def check_target(folder: Path, overwrite: bool) -> None:
    """
    Raises:
        FileExistsError: there is something under this name that must not be, or cannot be, replaced.
    """
    refuse_place(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{folder} exists: name another folder, or replace it with `--overwrite`.")
    try:
        known = read_manifest(folder)["files"].keys()
    except VerificationError:
        raise FileExistsError(f"{folder} is not a folder that egmla wrote: remove it yourself.") from None
    if unknown := sorted(set(list_files(folder)) - known):
        raise FileExistsError(f"{folder} holds {unknown[0]}, which would be lost: move it away first.")


def _write_model(model, folder: Path, tokenizer, save_dtype: str | None, max_shard_size: int | str) -> None:
    """Weights, config, code, generation config and tokenizer, by the library's own `save_pretrained`."""
    state_dict = None
    if save_dtype is not None and getattr(torch, save_dtype) != model.dtype:
        state_dict = in_dtype(model.state_dict(), getattr(torch, save_dtype))
    model.save_pretrained(folder, state_dict=state_dict, max_shard_size=max_shard_size)

    if tokenizer is None:
        return
    tokenizer.save_pretrained(folder)
    _drop_fields(folder / "tokenizer_config.json", ("is_local", "local_files_only", "name_or_path"))
    if model.can_generate():
        complete_generation_config(folder, tokenizer, model.config.vocab_size)


def _drop_fields(path: Path, fields: tuple[str, ...]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if key not in fields}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _copy_without_paths(source: Path, target: Path) -> None:
    """Copies a text file; of absolute paths in JSON and YAML, only the last name remains."""
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".json":
        text = json.dumps(_without_paths(json.loads(text)), indent=2, ensure_ascii=False) + "\n"
    elif source.suffix == ".yaml":
        text = yaml.safe_dump(_without_paths(yaml.safe_load(text)), sort_keys=False, allow_unicode=True)
    target.write_text(text, encoding="utf-8")


def _without_paths(content):
    if isinstance(content, dict):
        return {key: _without_paths(value) for key, value in content.items()}
    if isinstance(content, list):
        return [_without_paths(value) for value in content]
    if isinstance(content, str):
        # In quotes a path may have spaces.
        content = re.sub(r"(?<=['\"])(?:~|[A-Za-z]:)?[/\\](?:[^'\"/\\]+[/\\])+", "", content)
        return re.sub(r"(?<![^\s=])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\]+[/\\])+", "", content)
    return content
