"""
Conversion of checkpoints: from other layouts to EG-MLA, back, and from MLA to EG-MLA.

Everything goes through EG-MLA's names: a source layout says where its tensors are, a target layout where they go, and
views in between change what has to change (see `weights.py`). Tensors pass one at a time.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.dynamic_module_utils import custom_object_save

from ..configuration_egmla import EGMLAConfig
from ..files import leftovers, new_folder, refuse_existing
from ..plan import count_parameters
from .calibration import read_windows
from .checking import (
    EXACT_THRESHOLD,
    ROUNDED_THRESHOLD,
    Comparison,
    TextScore,
    check_ids,
    compare,
    folder_logits,
    read_reference,
)
from .checkpoint import WEIGHT_DTYPES, Checkpoint, ConversionError, write_checkpoint
from .gating import Bases, GateStart, stands_for
from .gqa import llama_tensors, read_llama_config
from .layouts import (
    LAYOUTS,
    LIBRARY_LAYOUTS,
    Layout,
    detect_layout,
    get_layout,
    not_read,
    not_written,
    read_config,
    read_fp8,
    read_raw_config,
    write_config,
)
from .stages import (
    LatentStart,
    LlamaStart,
    planned_config,
    start_from_llama,
    start_gate,
)
from .verify import check_kernels
from .vocabulary import complete_generation_config, load_tokenizer
from .weights import (
    Inventory,
    Weights,
    build_model,
    empty_model,
    expected_tensors,
    layer_pattern,
    match_tensors,
    source_weights,
    with_config,
    with_dtypes,
    with_own_head,
    with_rotary_pairs,
)


# Files that belong to a model beside its weights and its config.
CARRIED = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken", "*.model"),
    *("chat_template*", "additional_chat_templates", "generation_config.json", "LICENSE*", "NOTICE*"),
)
EXACT_LLAMA_THRESHOLD = 1e-3  # of the MLA model that keeps everything: the constant channel weighs a thousandfold


class CheckFailed(ConversionError):
    """The converted model does not compute what its source computes; nothing was written."""


@dataclass
class Report:
    """
    What a conversion did.

    Attributes:
        source_layout, target_layout: names.
        tensors: number of tensors written.
        dtypes: their dtypes.
        inventory: what the source held beside what was expected.
        new: tensors that the source does not have, `{n}` for a layer.
        carried: files taken over.
        left: files of the source that were not taken over.
        notes: settings without a counterpart, and whatever else a user should know.
        stages: scores on held-out calibration text at every stage of a start from MLA or from the Llama form.
        comparison: logits against the source's; None if they were not compared.
    """

    source_layout: str
    target_layout: str
    tensors: int = 0
    dtypes: tuple[str, ...] = ()
    inventory: Inventory = field(default_factory=Inventory)
    new: tuple[str, ...] = ()
    carried: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stages: dict[str, TextScore] = field(default_factory=dict)
    comparison: Comparison | None = None


def convert(
    source: str | Path,
    target: str | Path,
    *,
    revision: str | None = None,
    layout: str | None = None,
    to: str | None = None,
    config_file: str | Path | None = None,
    rope_layout: str = "keep",
    dtype: torch.dtype | None = None,
    latent: LatentStart | None = None,
    gate: str = "none",
    gate_dim: int = 256,
    gate_norm: str = "layer_norm",
    calibration: str | Path | torch.Tensor | None = None,
    calibration_tokens: int = 16384,
    drop: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
    overwrite: bool = False,
    check: bool = True,
    threshold: float | None = None,
    max_rise: float | None = None,
    reference_logits: str | Path | None = None,
    staged: Callable[[str, TextScore], None] = lambda stage, score: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """
    Converts a checkpoint folder into another, which appears under its name only when it is complete and checked.

    Args:
        source: folder of the checkpoint, or its id on the Hub.
        target: folder to make.
        revision: branch, tag or commit on the Hub; by default `main`.
        layout: layout of the source, by name or as a .yaml file; by default its config.json tells.
        to: layout of the target; by default `"egmla"`.
        config_file: the source's config.json, if it lies elsewhere (not for the library's own layouts).
        rope_layout: `"pairs"` or `"halves"`: how rotary channels lie in the target; `"keep"` as in the source, or as
            the target's layout wants them.
        dtype: of the target's tensors; by default the source's, bfloat16 for what is stored in 8 bits.
        latent: what a model of the Llama form becomes; needs `calibration`.
        gate: `"multiply"` or `"add"` starts an EG-MLA model from an MLA model.
        gate_dim, gate_norm: of its gates, as in [`EGMLAConfig`].
        calibration: text file, or ids [N, S], to fit a latent or a gate LayerNorm on and to measure loss.
        calibration_tokens: tokens of the file to use; the last quarter measures loss and is not fitted on.
        drop: patterns of source tensors that may be left out.
        max_shard_size: bytes in a weight file.
        overwrite: replace a target that exists.
        check: compare logits with the source's.
        threshold: largest relative difference of logits; by default 1e-4, or 2e-2 if tensors were computed and rounded
            to 16 bits, and none for a start with a gate LayerNorm, which is not exact in general. For a source of the
            Llama form, that of the MLA model that keeps everything.
        max_rise: largest rise of the loss on held-out text from the source to the last stage, in nats a token; by
            default there is no bound.
        reference_logits: safetensors file with `input_ids` and `logits` of the source, in the place of running it.
        staged: called with every stage of a source of the Llama form.
        progress: called with the number of tensors written and to be written.

    Raises:
        ConversionError: the source cannot be converted; the message names tensor, field or file, and the remedy.
        CheckFailed: the logits differ, or the loss rose too much.
        FileExistsError: the target exists.
        HubError: the source is no folder, and the Hub does not give it.
    """
    target = Path(target)
    refuse_existing(target.absolute(), overwrite)
    source = _source_folder(source, revision)
    if source.resolve().is_relative_to(target.resolve()):
        raise ConversionError("The source is the target or lies in it: choose another target.")

    source_layout, raw_config = _source_layout(source, layout, config_file)
    target_layout = get_layout(to or "egmla")
    gates = GateStart(gate, gate_dim, gate_norm)
    if threshold is not None and not threshold >= 0:
        raise ConversionError(f"--threshold must be a number of 0 or more, but is {threshold}.")
    if source_layout.name == "llama":
        if latent is None or calibration is None:
            raise ConversionError(
                "A model of the Llama form becomes MLA with a latent (--latent or --latent-energy) that is fitted on "
                "text (--calibration)."
            )
        if reference_logits is not None:
            raise ConversionError("A model of the Llama form is run itself: leave --reference-logits out.")
    elif latent is not None:
        raise ConversionError(f"A latent is for models of the Llama form, and layout {source_layout.name} has one.")
    report = Report(source_layout.name, target_layout.name)
    report.notes += [f"a killed run left {path}, which can be deleted" for path in leftovers(target)]
    if unread := not_read(source_layout, raw_config):
        report.notes.append(f"settings of the source that EG-MLA has no counterpart for: {', '.join(unread)}")

    checkpoint = Checkpoint(source, source_layout.checkpoint_key, read_fp8(source_layout, raw_config, dtype))
    text = (calibration, calibration_tokens)
    if source_layout.name == "llama":
        checked = (EXACT_LLAMA_THRESHOLD if threshold is None else threshold) if check else None
        result = _from_llama(checkpoint, raw_config, latent, gates, text, drop, dtype, checked, staged, report)
    else:
        result = _from_mla(checkpoint, source_layout, raw_config, gates, text, drop, dtype, report)
    _check_rise(report.stages, max_rise)
    weights, bases = result.weights, result.bases
    weights = _for_layout(weights, target_layout, rope_layout)
    written_config = write_config(target_layout, weights.config)
    lost = not_written(target_layout, weights.config) if target_layout.name != "egmla" else []
    if lost:
        report.notes.append(f"settings that layout {target_layout.name} has no place for: {', '.join(lost)}")

    shapes = expected_tensors(weights.config)
    names = {target_layout.theirs(name): name for name in shapes}
    empty = {
        theirs: torch.empty(shapes[name], dtype=weights.dtype(name), device="meta") for theirs, name in names.items()
    }
    report.new = tuple(sorted({layer_pattern(name) for name in shapes if name not in result.known}))
    report.tensors = len(names)
    report.dtypes = tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in empty.values()}))

    if check and reference_logits is not None:
        input_ids, reference = read_reference(Path(reference_logits))
    elif check:
        input_ids = check_ids(weights.config.vocab_size, weights.config.max_position_embeddings)
        reference = result.logits(input_ids)

    with new_folder(target, overwrite) as folder:
        done = iter(range(1, len(names) + 1))
        write_checkpoint(
            folder,
            empty,
            lambda theirs: _finite(theirs, weights.read(names[theirs])),
            max_shard_size,
            written=lambda name: progress(next(done), len(names)),
        )
        if bases is not None:
            before, after = (max(spreads) for spreads in zip(*bases.spreads.values()))
            report.notes.append(
                f"largest over smallest singular value of the up-projection, worst layer: {before:.4g} before the "
                f"change of basis, {after:.4g} after; at 1 the gate's LayerNorm changes nothing"
            )
        written = Checkpoint(folder)  # the files can be opened and hold all tensors
        if written.tensors.keys() != empty.keys():
            raise ConversionError(f"{folder} does not hold what was written: the disk may be full or failing.")
        model_dtype = weights.dtype("model.layers.0.self_attn.o_proj.weight")
        raw_written = _write_configs(folder, target_layout, weights.config, written_config, model_dtype)
        _carry_files(source, folder, weights.config, checkpoint.files, report)
        if check:
            if target_layout.name in LAYOUTS:
                logits = folder_logits(folder, target_layout, written, raw_written, input_ids)
            else:  # no code runs it: read it back as EG-MLA
                model = build_model(source_weights(written, target_layout, weights.config)[0])
                logits = model(input_ids, use_cache=False).logits.detach()
            if source_layout.name == "llama":
                threshold = EXACT_THRESHOLD  # the one given was for the model that keeps everything
            elif threshold is None and bases is None:
                threshold = _default_threshold(checkpoint, report, dtype, empty)
            comparison = compare(logits, reference, threshold)
            if not comparison.passed:
                raise CheckFailed(
                    f"The converted model does not agree with its source: {comparison}. Nothing was written. "
                    "If the difference is meant, give --threshold or --no-check."
                )
            report.comparison = report.comparison or comparison
    return report


@dataclass(frozen=True)
class _Result:
    """
    What a source becomes.

    Attributes:
        weights: of the model to write.
        known: tensors that the source has.
        logits: gives the logits [B, S, V] that the written folder must have, of ids [B, S].
        bases: of a start with a gate LayerNorm from MLA.
    """

    weights: Weights
    known: Collection[str]
    logits: Callable[[torch.Tensor], torch.Tensor]
    bases: Bases | None = None


def _from_mla(
    checkpoint: Checkpoint,
    layout: Layout,
    raw_config: dict[str, Any],
    gates: GateStart,
    text: tuple[str | Path | torch.Tensor | None, int],
    drop: Sequence[str],
    dtype: torch.dtype | None,
    report: Report,
) -> _Result:
    """The model of an MLA checkpoint, with gates if asked for; `text` is calibration text and its tokens to use."""
    config, scales = read_config(layout, checkpoint.folder, raw_config)
    original, report.inventory = source_weights(checkpoint, layout, config, scales, drop, dtype)
    weights, bases = original, None
    if gates.kind != "none":
        wide = source_weights(checkpoint, layout, config, scales, drop, torch.float32)[0]
        # Calibration builds a model at each stage, so that bases are worth their memory.
        bases = Bases(wide, keep=text[0] is not None) if gates.norm == "layer_norm" else None
        windows = None if text[0] is None else read_windows(*text, checkpoint.folder, config)
        weights, report.stages = start_gate(wide, gates, bases, windows, report.notes)
        weights = with_dtypes(weights, lambda name: original.dtype(stands_for(name)))
    elif text[0] is not None:
        raise ConversionError("Calibration text is for a start with a gate: give --gate multiply too.")

    def logits(input_ids: torch.Tensor) -> torch.Tensor:
        return folder_logits(checkpoint.folder, layout, checkpoint, raw_config, input_ids)

    return _Result(weights, expected_tensors(original.config), logits, bases)


def _from_llama(
    checkpoint: Checkpoint,
    raw_config: dict[str, Any],
    latent: LatentStart,
    gates: GateStart,
    text: tuple[str | Path | torch.Tensor, int],
    drop: Sequence[str],
    dtype: torch.dtype | None,
    threshold: float | None,
    staged: Callable[[str, TextScore], None],
    report: Report,
) -> _Result:
    """
    The MLA or EG-MLA model of a checkpoint of the Llama form. With a `threshold`, the MLA model that keeps everything
    is held to the source's logits first.
    """
    theirs = read_llama_config(raw_config)
    known = llama_tensors(theirs)
    same = {name: name for name in known}
    report.inventory = match_tensors(checkpoint, LAYOUTS["llama"], same, known, theirs.tie_word_embeddings, drop)
    windows = read_windows(*text, checkpoint.folder, theirs)
    input_ids = check_ids(theirs.vocab_size, theirs.max_position_embeddings)

    def dtype_of(name: str) -> torch.dtype:
        return dtype or checkpoint.tensors[name].dtype

    made = start_from_llama(checkpoint, theirs, latent, gates, windows, input_ids, dtype_of, staged)
    report.stages = made.stages
    report.notes.append(_tell_latent(made))
    if threshold is not None:
        report.comparison = compare(made.exact, made.reference, threshold)
        if not report.comparison.passed:
            raise CheckFailed(
                "The MLA model that keeps all of the source does not agree with it, so the source computes something "
                f"that the Llama form does not: {report.comparison}. Nothing was written."
            )

    def logits(input_ids: torch.Tensor) -> torch.Tensor:
        return build_model(made.weights)(input_ids, use_cache=False).logits.detach()

    return _Result(made.weights, known, logits)


@dataclass(frozen=True)
class ConversionPlan:
    """
    What a conversion would give, before any work.

    Attributes:
        source_parameters: parameters of the source.
        source_tables: parameters of its gate tables, which are among these.
        source_cache: elements that it caches for one token in all layers.
        config: of the result.
    """

    source_parameters: int
    source_tables: int
    source_cache: int
    config: EGMLAConfig


def plan_conversion(
    source: str | Path,
    *,
    revision: str | None = None,
    layout: str | None = None,
    config_file: str | Path | None = None,
    latent: LatentStart | None = None,
    gates: GateStart | None = None,
) -> ConversionPlan:
    """
    Plans a conversion by the source's config.json alone; arguments as in [`convert`].

    Raises:
        ConversionError: the source cannot be converted so.
        HubError: the source is no folder, and the Hub does not give it.
    """
    source = _source_folder(source, revision, config_only=True)
    source_layout, raw_config = _source_layout(source, layout, config_file)
    gates = gates or GateStart()
    if source_layout.name == "llama":
        theirs = read_llama_config(raw_config)
        if latent is None or latent.width is None:
            raise ConversionError(
                "A plan needs the width of the latent (--latent): by energy, only calibration tells."
            )
        config = planned_config(theirs, latent, gates)
        parameters, tables = sum(math.prod(shape) for shape in llama_tensors(theirs).values()), 0
        cache = 2 * theirs.num_key_value_heads * theirs.head_dim * theirs.num_hidden_layers
    else:
        if latent is not None:
            raise ConversionError(
                f"A latent is for models of the Llama form, and layout {source_layout.name} has one."
            )
        config, scales = read_config(source_layout, source, raw_config)
        counted, cache = count_parameters(config), config.cache_elements_per_token
        parameters, tables = counted.total, counted.tables
        if scales and config.tie_word_embeddings:
            config = with_config(config, tie_word_embeddings=False)  # they go into embedding and head
    if gates.kind != "none":
        if config.kv_gate != "none":
            raise ConversionError(f"The source has gates already (`kv_gate` is {config.kv_gate!r}).")
        config = with_config(config, kv_gate=gates.kind, kv_gate_dim=gates.dim, kv_gate_norm=gates.norm)
    return ConversionPlan(parameters, tables, cache, config)


def _tell_latent(made: LlamaStart) -> str:
    """What a latent keeps of a model of the Llama form."""
    kept = ", ".join(f"{index}: {count}" for index, count in enumerate(made.counts) if count)
    return (
        f"the latent of {made.weights.config.kv_lora_rank} keeps {made.kept:.2%} of the weighted energy of keys and "
        f"values; rotary pairs by frequency, the fastest being 0: {kept}"
    )


def _check_rise(stages: dict[str, TextScore], max_rise: float | None) -> None:
    """Raises if the loss rose by more than `max_rise` from the first stage to the last, which is what is written."""
    if max_rise is None:
        return
    if len(stages) < 2:
        raise ConversionError("The rise of the loss is measured on text: give --calibration too.")
    first, *_, last = stages.values()
    if not last.loss - first.loss <= max_rise:
        told = "; ".join(f"{score.loss:.4f} {stage}" for stage, score in stages.items())
        raise CheckFailed(
            f"The loss on held-out text rises by {last.loss - first.loss:.4f} nats a token, above --max-rise "
            f"{max_rise:g} ({told}). Nothing was written. A wider latent and more rotary channels cost less, a gate "
            "without LayerNorm (--gate-norm none) nothing."
        )


def _default_threshold(
    checkpoint: Checkpoint, report: Report, dtype: torch.dtype | None, written: dict[str, torch.Tensor]
) -> float:
    """Logits differ by the order of sums only, unless tensors in 16 bits were rounded anew."""
    narrow = any(tensor.dtype.itemsize < 4 for tensor in written.values())
    sources = {info.dtype for info in checkpoint.tensors.values()}
    narrowed = dtype is not None and any(torch.promote_types(source, dtype) != dtype for source in sources)
    return ROUNDED_THRESHOLD if narrow and (report.inventory.scaled or narrowed) else EXACT_THRESHOLD


def _finite(name: str, tensor: torch.Tensor) -> torch.Tensor:
    # Of the smallest and the largest value, which not-a-number takes over: no copy of the tensor, as `isfinite` makes.
    if not torch.isfinite(torch.stack(tensor.aminmax())).all():
        raise ConversionError(
            f"Tensor {name} holds values that are not finite in {str(tensor.dtype).removeprefix('torch.')}: the "
            "source is damaged, or its values need a wider --dtype."
        )
    return tensor


def _source_folder(source: str | Path, revision: str | None, config_only: bool = False) -> Path:
    """The folder of a source, fetched if it is the id of a model on the Hub."""
    from . import hub

    if Path(source).is_dir():
        if revision is not None:
            raise ConversionError(
                f"{source} is a folder, which has no revision {revision}: --revision is for the Hub."
            )
        return Path(source)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source), re.ASCII) or str(source).startswith("."):
        raise ConversionError(f"{source} is neither a folder nor, as owner/name, the id of a model on the Hub.")
    return hub.fetch_checkpoint(str(source), revision, config_only)


def _source_layout(source: Path, layout: str | None, config_file: str | Path | None) -> tuple[Layout, dict[str, Any]]:
    """Layout of a source and the content of its config.json, empty where a layout's constants say everything."""
    path = Path(config_file) if config_file is not None else source / "config.json"
    found = get_layout(layout) if layout is not None else None
    raw_config = {} if found is not None and not found.config and not path.is_file() else read_raw_config(path)
    if problems := check_kernels(raw_config):
        raise ConversionError(f"{source}: {problems[0]} Take the field out.")
    if found is None:
        found = detect_layout(source, raw_config)
    if config_file is not None and found.name in LIBRARY_LAYOUTS:
        raise ConversionError(f"Layout {found.name} reads the config.json of its folder: put {config_file} there.")
    return found, raw_config


def _for_layout(weights: Weights, layout: Layout, rope_layout: str) -> Weights:
    """Rotary channels and head as the target's layout wants them."""
    if rope_layout not in ("keep", "halves", "pairs"):
        raise ConversionError(f"`rope_layout` must be keep, halves or pairs, but is {rope_layout!r}.")
    wanted = layout.constants.get("rope_interleave")
    if rope_layout != "keep":
        chosen = rope_layout == "pairs"
        if wanted not in (None, chosen):
            raise ConversionError(f"Layout {layout.name} holds rotary {'pairs' if wanted else 'halves'} only.")
        wanted = chosen
    if wanted is not None:
        weights = with_rotary_pairs(weights, wanted)
    if layout.constants.get("tie_word_embeddings") is False:
        weights = with_own_head(weights)
    if layout.read_only:
        raise ConversionError(
            f"Layout {layout.name} can be read, not written: write egmla, or deepseek_v3 without gates."
        )
    return weights


def _write_configs(
    folder: Path, layout: Layout, config: EGMLAConfig, written: dict[str, Any] | None, dtype: torch.dtype
) -> dict[str, Any]:
    """Writes config.json, generation_config.json and, for EG-MLA, the code beside them; returns the config.json."""
    path = folder / "config.json"
    if layout.name == "egmla":
        model = empty_model(config)
        model.config.architectures, model.config.dtype = [type(model).__name__], dtype
        custom_object_save(model, folder, config=model.config)
        model.config.save_pretrained(folder)
        GenerationConfig.from_model_config(config).save_pretrained(folder)
    elif layout.name in LIBRARY_LAYOUTS:
        from transformers import AutoConfig, AutoModelForCausalLM

        written |= {
            "first_k_dense_replace": config.num_hidden_layers,
            "num_key_value_heads": config.num_attention_heads,
        }
        if layout.name == "deepseek_v3":
            written["num_mtp_layers"] = 0
        theirs = AutoConfig.for_model(layout.name, **written)
        theirs.architectures, theirs.dtype = [AutoModelForCausalLM._model_mapping[type(theirs)].__name__], dtype
        theirs.save_pretrained(folder)
        GenerationConfig.from_model_config(theirs).save_pretrained(folder)
    else:
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return read_raw_config(path)


def _carry_files(source: Path, folder: Path, config: EGMLAConfig, converted: Sequence[str], report: Report) -> None:
    """Copies tokenizer, chat template, generation config and licence, and says which files stay behind."""
    for path in sorted(source.iterdir()):
        if path.is_dir() and path.name in CARRIED:
            shutil.copytree(path, folder / path.name)
            report.carried.append(f"{path.name}/")
        elif path.is_file() and any(fnmatchcase(path.name, pattern) for pattern in CARRIED):
            shutil.copyfile(path, folder / path.name)
            report.carried.append(path.name)
        elif path.name not in converted and not (folder / path.name).exists():
            report.left.append(f"{path.name}/" if path.is_dir() else path.name)
    try:
        tokenizer = load_tokenizer(folder)
    except (OSError, ValueError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        report.notes.append(f"the tokenizer was taken over, but does not load without code of its own: {first_line}")
        return
    if tokenizer is None:
        return
    if len(tokenizer) > config.vocab_size:
        report.notes.append(
            f"the tokenizer has {len(tokenizer)} tokens, the model {config.vocab_size}: call "
            "`model.resize_token_embeddings(len(tokenizer))` before using the rest"
        )
    if (folder / "generation_config.json").is_file():
        complete_generation_config(folder, tokenizer, config.vocab_size)


DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in WEIGHT_DTYPES}
