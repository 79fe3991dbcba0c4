"""
Weights of an EG-MLA model that are read one tensor at a time, and views of them.

A view is the same model with other tensors: it holds a config and two functions, and computes a tensor when it is
read. What a conversion does is a chain of views, so that it never holds more than the tensors that one result is made
of.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch

from ..configuration_egmla import EGMLAConfig
from ..modeling_egmla import EGMLAForCausalLM
from .checkpoint import WEIGHT_DTYPES, Checkpoint, ConversionError
from .layouts import Layout


@dataclass(frozen=True)
class Weights:
    """
    An EG-MLA model's config and tensors, by EG-MLA's names.

    Attributes:
        config: of the model whose tensors these are.
        read: gives a tensor.
        dtype: says a tensor's dtype without reading it.
    """

    config: EGMLAConfig
    read: Callable[[str], torch.Tensor]
    dtype: Callable[[str], torch.dtype]


@dataclass(frozen=True)
class Inventory:
    """
    What a source checkpoint holds beside what was expected, in its own names.

    Attributes:
        dropped: tensors left out because a `drop` pattern says so.
        derived: tensors left out because the model recomputes them.
        duplicates: heads left out because they equal the embedding that they are tied to.
        scaled: tensors that take up a factor of the source's code (EG-MLA's names, `{n}` for a layer).
        dequantised: tensors that were stored in 8 bits.
    """

    dropped: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    scaled: tuple[str, ...] = ()
    dequantised: tuple[str, ...] = ()


def empty_model(config: EGMLAConfig) -> EGMLAForCausalLM:
    """The model of a config on the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        return EGMLAForCausalLM(config)


def expected_tensors(config: EGMLAConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config holds; a tied head is not among them."""
    shapes = {name: tuple(tensor.shape) for name, tensor in empty_model(config).state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    return shapes


def source_weights(
    checkpoint: Checkpoint,
    layout: Layout,
    config: EGMLAConfig,
    scales: Mapping[str, float] | None = None,
    drop: Iterable[str] = (),
    dtype: torch.dtype | None = None,
) -> tuple[Weights, Inventory]:
    """
    Matches a checkpoint in some layout with the tensors that an EG-MLA model has.

    Args:
        checkpoint: what the source holds.
        layout: under which names.
        config: of the model.
        scales: factors that go into tensors, by EG-MLA's names with `{n}` for a layer.
        drop: patterns (`*` for anything) of tensors that may be left out, in the source's names.
        dtype: of the tensors that are read, in the place of their own.

    Raises:
        ConversionError: tensors are missing, unexpected, of a wrong shape, or not of a floating-point dtype; all are
            named.
    """
    scales = scales or {}
    tied = config.tie_word_embeddings
    if tied and scales:
        config = with_config(config, tie_word_embeddings=False)  # embedding and head take up different factors
    wanted = expected_tensors(config)
    theirs = {name: layout.theirs(name) for name in wanted}
    if tied and scales:
        theirs["lm_head.weight"] = layout.theirs("model.embed_tokens.weight")

    inventory = match_tensors(checkpoint, layout, theirs, wanted, tied, drop)

    def factor(name: str) -> float:
        return scales.get(name, scales.get(layer_pattern(name), 1.0))

    def read(name: str) -> torch.Tensor:
        tensor = checkpoint.read(theirs[name])
        if factor(name) != 1.0:
            wide = torch.promote_types(tensor.dtype, torch.float32)
            tensor = tensor.to(wide, copy=True).mul_(factor(name))
        return tensor.to(dtype_of(name))

    def dtype_of(name: str) -> torch.dtype:
        return dtype or checkpoint.tensors[theirs[name]].dtype

    scaled = tuple(sorted({layer_pattern(name) for name in wanted if factor(name) != 1.0}))
    return Weights(config, read, dtype_of), replace(inventory, scaled=scaled)


def match_tensors(
    checkpoint: Checkpoint,
    layout: Layout,
    theirs: Mapping[str, str],
    wanted: Mapping[str, tuple[int, ...]],
    tied: bool,
    drop: Iterable[str] = (),
) -> Inventory:
    """
    Matches what a checkpoint holds with the tensors that a model has.

    Args:
        checkpoint: what the source holds.
        layout: its layout.
        theirs: the model's name of a tensor to the layout's.
        wanted: the model's name of a tensor to its shape.
        tied: whether the head is tied to the embedding.
        drop: as in [`source_weights`].

    Raises:
        ConversionError: as [`source_weights`].
    """
    head, embedding = layout.tensors.get("lm_head.weight"), layout.tensors.get("model.embed_tokens.weight")
    used = set(theirs.values())
    missing = [name for name in theirs.values() if name not in checkpoint.tensors]
    rest = [name for name in checkpoint.tensors if name not in used]
    derived = tuple(name for name in rest if layout.is_derived(name))
    dropped = tuple(name for name in rest if name not in derived and any(fnmatchcase(name, p) for p in drop))
    for pattern in drop:
        if not any(fnmatchcase(name, pattern) for name in rest):
            raise ConversionError(f"--drop {pattern} names no tensor of the source that could be left out.")
    duplicates = tuple(
        name
        for name in rest
        if tied
        and name == head
        and embedding in checkpoint.tensors
        and torch.equal(checkpoint.read(name), checkpoint.read(embedding))
    )
    unexpected = [name for name in rest if name not in (*derived, *dropped, *duplicates)]
    wrong = [
        f"{theirs[name]} has shape {checkpoint.tensors[theirs[name]].shape} instead of {shape}"
        for name, shape in wanted.items()
        if theirs[name] in checkpoint.tensors and checkpoint.tensors[theirs[name]].shape != shape
    ]
    wrong += [
        f"{name} has dtype {str(checkpoint.tensors[name].dtype).removeprefix('torch.')}, which is a quantised weight "
        "or no weight at all"
        for name in theirs.values()
        if name in checkpoint.tensors and checkpoint.tensors[name].dtype not in WEIGHT_DTYPES
    ]
    problems = [f"missing: {_some(missing)}. config.json asks for them"] if missing else []
    if unexpected:
        advice = layout.advice or "leave them out with --drop 'PATTERN' if the model does not need them"
        if tied and head in unexpected:
            advice = f"{head} differs from {embedding} although `tie_word_embeddings` is true: set it to false"
        problems.append(f"unexpected: {_some(unexpected)}; {advice}")
    if wrong:
        problems.append(f"not what config.json says: {_some(wrong)}")
    if problems:
        raise ConversionError(
            f"The tensors in {checkpoint.folder} do not fit layout {layout.name}.\n" + ".\n".join(problems) + "."
        )

    return Inventory(
        dropped=dropped,
        derived=derived,
        duplicates=duplicates,
        dequantised=tuple(name for name in checkpoint.dequantised if name in used),
    )


def with_config(config: EGMLAConfig, **changes) -> EGMLAConfig:
    """A copy of a config with some fields changed, checked again."""
    values = config.to_dict()
    for derived in ("model_type", "transformers_version", "architectures", "auto_map"):
        values.pop(derived, None)
    return EGMLAConfig(**{**values, **changes})


def with_rotary_pairs(weights: Weights, interleave: bool) -> Weights:
    """
    The same model with rotary channels in pairs (`interleave`) or in halves.

    Rows of the query projection and of `kv_a_proj_with_mqa` change places and nothing else, so that logits stay the
    same bit for bit.
    """
    config = weights.config
    if config.rope_interleave == interleave:
        return weights
    rope = config.qk_rope_head_dim
    order = torch.arange(rope).view(2, -1).T if interleave else torch.arange(rope).view(-1, 2).T
    order = order.flatten()

    def read(name: str) -> torch.Tensor:
        tensor = weights.read(name)
        if name.endswith((".q_proj.weight", ".q_b_proj.weight")):
            heads = tensor.unflatten(0, (config.num_attention_heads, config.qk_head_dim)).clone()
            heads[:, -rope:] = heads[:, -rope:][:, order]
            return heads.flatten(0, 1)
        if ".kv_a_proj_with_mqa." in name:
            return torch.cat((tensor[:-rope], tensor[-rope:][order]))
        return tensor

    return Weights(with_config(config, rope_interleave=interleave), read, weights.dtype)


def with_own_head(weights: Weights) -> Weights:
    """The same model whose head is a tensor of its own."""
    if not weights.config.tie_word_embeddings:
        return weights

    def source(name: str) -> str:
        return "model.embed_tokens.weight" if name == "lm_head.weight" else name

    config = with_config(weights.config, tie_word_embeddings=False)
    return Weights(config, lambda name: weights.read(source(name)), lambda name: weights.dtype(source(name)))


def with_dtypes(weights: Weights, dtype: Callable[[str], torch.dtype]) -> Weights:
    """The same model rounded (or widened) to other dtypes."""
    return Weights(weights.config, lambda name: weights.read(name).to(dtype(name)), dtype)


def build_model(weights: Weights) -> EGMLAForCausalLM:
    """The model in memory, in float32 and evaluation mode."""
    model = EGMLAForCausalLM(weights.config)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in expected_tensors(weights.config):
            parameters[name].copy_(weights.read(name))
    return model.eval()


def layer_pattern(name: str) -> str:
    """A tensor's name with `{n}` in the place of its layer."""
    prefix, dot, rest = name.removeprefix("model.layers.").partition(".")
    return f"model.layers.{{n}}.{rest}" if dot and prefix.isdigit() else name


def _some(names: list[str], limit: int = 12) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
