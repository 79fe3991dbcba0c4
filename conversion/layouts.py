"""
Layouts of MLA checkpoints, as tables that are read in both directions.

A layout says under which names other code keeps the tensors and the settings of an EG-MLA model. The tables go from
EG-MLA's names to the others'; `{n}` stands for the number of a layer. All layouts store a weight as [out, in], and
what EG-MLA projects in one matrix also in one, so that names are all that differs, but for what `scales` lists.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from ..configuration_egmla import SPECIAL_IDS, EGMLAConfig
from .checkpoint import ConversionError, Fp8Blocks


ATTENTION = "model.layers.{n}.self_attn."
MLP = "model.layers.{n}.mlp."

# EG-MLA's names are the library's MLA names, and the gate's.
MLA_TENSORS = (
    "model.embed_tokens.weight",
    "model.layers.{n}.input_layernorm.weight",
    ATTENTION + "q_proj.weight",
    ATTENTION + "q_a_proj.weight",
    ATTENTION + "q_a_proj.bias",
    ATTENTION + "q_a_layernorm.weight",
    ATTENTION + "q_b_proj.weight",
    ATTENTION + "kv_a_proj_with_mqa.weight",
    ATTENTION + "kv_a_proj_with_mqa.bias",
    ATTENTION + "kv_a_layernorm.weight",
    ATTENTION + "kv_b_proj.weight",
    ATTENTION + "o_proj.weight",
    ATTENTION + "o_proj.bias",
    "model.layers.{n}.post_attention_layernorm.weight",
    MLP + "gate_proj.weight",
    MLP + "up_proj.weight",
    MLP + "down_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
)
LLAMA_TENSORS = tuple(name for name in MLA_TENSORS if ".self_attn." not in name) + tuple(
    f"{ATTENTION}{part}_proj.weight" for part in "qkvo"
)
GATE_TENSORS = (
    ATTENTION + "kv_gate_embed.weight",
    ATTENTION + "kv_gate_proj.weight",
    ATTENTION + "kv_gate_norm.weight",
    ATTENTION + "kv_gate_norm.bias",
)
ORIGINAL_TENSORS = {
    "model.embed_tokens.weight": "embed.weight",
    "model.layers.{n}.input_layernorm.weight": "layers.{n}.attn_norm.weight",
    ATTENTION + "q_proj.weight": "layers.{n}.attn.wq.weight",
    ATTENTION + "q_a_proj.weight": "layers.{n}.attn.wq_a.weight",
    ATTENTION + "q_a_layernorm.weight": "layers.{n}.attn.q_norm.weight",
    ATTENTION + "q_b_proj.weight": "layers.{n}.attn.wq_b.weight",
    ATTENTION + "kv_a_proj_with_mqa.weight": "layers.{n}.attn.wkv_a.weight",
    ATTENTION + "kv_a_layernorm.weight": "layers.{n}.attn.kv_norm.weight",
    ATTENTION + "kv_b_proj.weight": "layers.{n}.attn.wkv_b.weight",
    ATTENTION + "o_proj.weight": "layers.{n}.attn.wo.weight",
    "model.layers.{n}.post_attention_layernorm.weight": "layers.{n}.ffn_norm.weight",
    MLP + "gate_proj.weight": "layers.{n}.ffn.w1.weight",
    MLP + "up_proj.weight": "layers.{n}.ffn.w3.weight",
    MLP + "down_proj.weight": "layers.{n}.ffn.w2.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}

MLA_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_parameters",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "tie_word_embeddings",
    "attention_bias",
    "attention_dropout",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
# Fields that logits do not depend on: a layout may leave them out.
NO_LOGITS = {
    *("initializer_range", "attention_dropout", "use_cache", "max_position_embeddings"),
    *SPECIAL_IDS,
}
LLAMA_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps", "hidden_act", "max_position_embeddings"),
    *("initializer_range", "tie_word_embeddings", "attention_bias", "attention_dropout", "use_cache"),
    *SPECIAL_IDS,
)
GATE_FIELDS = ("kv_gate", "kv_gate_dim", "kv_gate_norm", "kv_gate_norm_eps", "layer_group_size")
ORIGINAL_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "inter_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "max_position_embeddings": "max_seq_len",
}
# What DeepSeek's own code takes where its config file is silent.
ORIGINAL_DEFAULTS = {
    "max_seq_len": 16384,
    "q_lora_rank": 0,
    "original_seq_len": 4096,
    "rope_theta": 10000.0,
    "rope_factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
}
# Settings that say nothing about a dense model's weights or logits: of experts, of other code, or derived.
IRRELEVANT = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type", "_name_or_path"),
    *("head_dim", "qk_head_dim", "num_key_value_heads", "pretraining_tp", "quantization_config", "rope_scaling"),
    *("rope_theta", "mlp_bias", "first_k_dense_replace", "moe_layer_freq", "moe_intermediate_size", "ep_size"),
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "n_group", "topk_group", "topk_method"),
    *("norm_topk_prob", "routed_scaling_factor", "scoring_func", "aux_loss_alpha", "seq_aux", "output_router_logits"),
    *("num_nextn_predict_layers", "num_mtp_layers", "num_experts", "num_local_experts"),
}
IRRELEVANT_ORIGINAL = {
    *("max_batch_size", "dtype", "scale_fmt", "moe_inter_dim", "n_dense_layers", "n_routed_experts"),
    *("n_shared_experts", "n_activated_experts", "n_expert_groups", "n_limited_groups", "score_func", "route_scale"),
}


def _same(names: tuple[str, ...]) -> dict[str, str]:
    return {name: name for name in names}


@dataclass(frozen=True)
class Layout:
    """
    Where other code keeps what an EG-MLA model consists of.

    Attributes:
        name: as `--layout` and `--to` take it; of a library model also its `model_type`.
        tensors: EG-MLA's name of a tensor, `{n}` for the layer, to the layout's name.
        config: field of [`EGMLAConfig`] to the key in the layout's config.json.
        constants: fields of [`EGMLAConfig`] that every checkpoint in this layout has, and its config.json does not
            say.
        derived: patterns (`{n}` for a number) of tensors that code recomputes and some checkpoints hold anyway.
        scales: EG-MLA's name of a tensor to the factor, computed from the library's config, that the model applies to
            what the tensor gives and EG-MLA does not: it goes into the tensor.
        irrelevant: keys of config.json that say nothing about a dense model.
        scale_suffix: ends the name of the scale of an 8-bit weight, in the place of "weight".
        checkpoint_key: entry of a .bin file under which its tensors lie.
        advice: what to do about tensors that the layout does not know, in the place of leaving them out.
        read_only: whether models come from it only.
    """

    name: str
    tensors: Mapping[str, str]
    config: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    scales: Mapping[str, Callable[[Any], float]] = field(default_factory=dict)
    irrelevant: frozenset[str] = frozenset()
    scale_suffix: str | None = None
    checkpoint_key: str | None = None
    advice: str | None = None
    read_only: bool = False

    def theirs(self, name: str) -> str:
        """
        Name in this layout of the tensor that EG-MLA calls `name`.

        Raises:
            ConversionError: the layout has no place for it.
        """
        if name in self.tensors:
            return self.tensors[name]
        for match in re.finditer(r"(?<=\.)\d+(?=\.)", name):
            pattern = f"{name[: match.start()]}{{n}}{name[match.end() :]}"
            if pattern in self.tensors:
                return self.tensors[pattern].replace("{n}", match.group())
        raise ConversionError(f"Layout {self.name} has no place for tensor {name}.")

    def is_derived(self, name: str) -> bool:
        return any(re.fullmatch(re.escape(p).replace(r"\{n\}", r"\d+"), name) for p in self.derived)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(
            name="egmla",
            tensors=_same(MLA_TENSORS + GATE_TENSORS),
            config=_same((*MLA_FIELDS, "rope_interleave", *GATE_FIELDS)),
            irrelevant=frozenset(IRRELEVANT),
        ),
        Layout(
            name="deepseek_v3",
            tensors=_same(MLA_TENSORS),
            config=_same((*MLA_FIELDS, "rope_interleave")),
            constants={"kv_gate": "none"},
            derived=(ATTENTION + "rotary_emb.inv_freq",),
            irrelevant=frozenset(IRRELEVANT),
            scale_suffix="weight_scale_inv",
        ),
        Layout(
            name="deepseek_v2",
            tensors=_same(MLA_TENSORS),
            config=_same(MLA_FIELDS),
            constants={"kv_gate": "none", "rope_interleave": True},
            derived=(ATTENTION + "rotary_emb.inv_freq",),
            irrelevant=frozenset(IRRELEVANT),
            scale_suffix="weight_scale_inv",
        ),
        Layout(
            name="minicpm3",
            tensors=_same(MLA_TENSORS),
            config=_same(MLA_FIELDS),
            constants={"kv_gate": "none", "rope_interleave": False},
            derived=(ATTENTION + "rotary_emb.inv_freq",),
            scales={
                "model.embed_tokens.weight": lambda config: config.scale_emb,
                ATTENTION + "o_proj.weight": lambda config: config.scale_depth / math.sqrt(config.num_hidden_layers),
                ATTENTION + "o_proj.bias": lambda config: config.scale_depth / math.sqrt(config.num_hidden_layers),
                MLP + "down_proj.weight": lambda config: config.scale_depth / math.sqrt(config.num_hidden_layers),
                "lm_head.weight": lambda config: config.dim_model_base / config.hidden_size,
            },
            irrelevant=frozenset(IRRELEVANT | {"scale_emb", "scale_depth", "dim_model_base"}),
            read_only=True,
        ),
        # Not of latent attention: what becomes of these names, `gqa.py` computes.
        Layout(
            name="llama",
            tensors=_same(LLAMA_TENSORS),
            config=_same(LLAMA_FIELDS),
            derived=(ATTENTION + "rotary_emb.inv_freq",),
            irrelevant=frozenset(IRRELEVANT | {"sliding_window"}),
            advice="of the Llama form are models without biases and without norms of queries and keys, and no others",
            read_only=True,
        ),
        Layout(
            name="deepseek",
            tensors=ORIGINAL_TENSORS,
            config=ORIGINAL_FIELDS,
            constants={
                "kv_gate": "none",
                "rope_interleave": True,
                "rms_norm_eps": 1e-6,
                "hidden_act": "silu",
                "tie_word_embeddings": False,
                "attention_bias": False,
                "layer_group_size": 1,
            },
            irrelevant=frozenset(IRRELEVANT_ORIGINAL | ORIGINAL_DEFAULTS.keys()),
            scale_suffix="scale",
        ),
    )
}
LIBRARY_LAYOUTS = ("egmla", "deepseek_v3", "deepseek_v2", "minicpm3", "llama")
LLAMA_TYPES = ("llama", "mistral")  # `model_type`s of the Llama form


def get_layout(name_or_file: str) -> Layout:
    """
    Returns a layout by name, or the one that a YAML file describes (see `conversion/paper_listing.yaml`).

    Raises:
        ConversionError: there is no such layout, or the file does not describe one; the message says where.
    """
    if name_or_file in LAYOUTS:
        return LAYOUTS[name_or_file]
    path = Path(name_or_file)
    if path.suffix not in (".yaml", ".yml"):
        raise ConversionError(
            f"There is no layout {name_or_file!r}: name one of {', '.join(LAYOUTS)}, or a .yaml file that holds one."
        )
    return _read_layout(path)


def detect_layout(folder: Path, raw_config: Mapping[str, Any]) -> Layout:
    """The layout that a config.json belongs to, by its `model_type` or DeepSeek's own names."""
    model_type = raw_config.get("model_type")
    if model_type in LLAMA_TYPES:
        return LAYOUTS["llama"]
    if model_type in LIBRARY_LAYOUTS:
        return LAYOUTS[model_type]
    if model_type is None and {"dim", "n_layers", "kv_lora_rank"} <= raw_config.keys():
        return LAYOUTS["deepseek"]
    raise ConversionError(
        f"The config.json of {folder} has `model_type` {model_type!r}, which is no layout known here "
        f"({', '.join(LAYOUTS)}): give --layout, or describe the checkpoint in a .yaml file."
    )


def read_raw_config(path: Path) -> dict[str, Any]:
    """The content of a config.json."""
    try:
        raw_config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConversionError(f"{path} is missing: without it nothing says what the tensors mean.") from error
    except ValueError as error:
        raise ConversionError(f"{path} is not JSON ({error}).") from error
    if not isinstance(raw_config, dict):
        raise ConversionError(f"{path} holds a {type(raw_config).__name__}, not an object of settings.")
    return raw_config


def read_fp8(layout: Layout, raw_config: Mapping[str, Any], dtype: torch.dtype | None = None) -> Fp8Blocks | None:
    """
    How the checkpoint's 8-bit weights are stored; None if it has none. `dtype` (bfloat16 by default) is what they
    become.

    Raises:
        ConversionError: the checkpoint is quantised in another way.
    """
    settings = raw_config.get("quantization_config")
    if settings is None:
        # DeepSeek's own config files say `"dtype": "fp8"`; their blocks are always 128 x 128.
        if layout.name == "deepseek" and raw_config.get("dtype") == "fp8":
            return Fp8Blocks(128, 128, layout.scale_suffix, dtype or torch.bfloat16)
        return None
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8" or not block or layout.scale_suffix is None:
        detail = f"{method!r}" if block else f"{method!r} without `weight_block_size`"
        raise ConversionError(
            f"The checkpoint is quantised: `quantization_config.quant_method` is {detail}. Of quantised checkpoints "
            "only DeepSeek's, fp8 with `weight_block_size`, can be read. Convert the bfloat16 model it was made from."
        )
    return Fp8Blocks(*block, layout.scale_suffix, dtype or torch.bfloat16)


def read_config(layout: Layout, folder: Path, raw_config: Mapping[str, Any]) -> tuple[EGMLAConfig, dict[str, float]]:
    """
    Returns the EG-MLA config of a checkpoint, and the factors that go into its tensors (EG-MLA's name to factor).

    Raises:
        ConversionError: a setting that EG-MLA cannot express, named.
    """
    if layout.name in LIBRARY_LAYOUTS:
        from transformers import AutoConfig

        try:
            theirs = AutoConfig.for_model(
                layout.name, **{key: value for key, value in raw_config.items() if key != "model_type"}
            )
        except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
            raise ConversionError(f"The library cannot read {folder / 'config.json'}: {error}") from error
        values = {key: getattr(theirs, key) for key in layout.config.values()}
        _refuse_other_architectures(theirs)
        scales = {name: float(factor(theirs)) for name, factor in layout.scales.items()}
    else:
        values = {**ORIGINAL_DEFAULTS, **raw_config} if layout.name == "deepseek" else dict(raw_config)
        scales = {}
    if missing := sorted({key for key in layout.config.values() if key not in values}):
        raise ConversionError(f"config.json lacks {', '.join(missing)}, which layout {layout.name} names.")
    changes = {ours: values[theirs] for ours, theirs in layout.config.items()} | dict(layout.constants)
    if layout.name == "deepseek":
        changes |= _read_original_rope(values)
    try:
        return EGMLAConfig(**changes), scales
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ConversionError(f"The settings of {folder} give no EG-MLA model: {error.__cause__ or error}") from error


def write_config(layout: Layout, config: EGMLAConfig) -> dict[str, Any] | None:
    """
    Returns a config.json in the layout, or None for a library model, whose config object writes itself.

    Raises:
        ConversionError: the layout cannot express a setting, named.
    """
    given = {ours: getattr(config, ours) for ours in (*MLA_FIELDS, "rope_interleave", *GATE_FIELDS)}
    if config.kv_gate == "none":
        given = {ours: value for ours, value in given.items() if not ours.startswith("kv_gate_")}
    for ours, value in layout.constants.items():
        if ours in given and given[ours] != value:
            raise ConversionError(
                f"Layout {layout.name} holds models whose `{ours}` is {value!r} only; here it is {given[ours]!r}."
            )
    defaults = EGMLAConfig()
    for ours, value in given.items():
        said = ours in layout.config or ours in layout.constants or ours in NO_LOGITS
        if layout.name == "deepseek" and ours == "rope_parameters":
            continue  # written below
        if not said and value != getattr(defaults, ours):
            raise ConversionError(
                f"Layout {layout.name} has no place for `{ours}`, which is {value!r} here: only models with "
                f"{getattr(defaults, ours)!r} can be written in it."
            )
    written = {theirs: given[ours] for ours, theirs in layout.config.items() if ours in given}
    if layout.name == "deepseek":
        written |= _write_original_rope(config)
        written |= {"q_lora_rank": config.q_lora_rank or 0, "n_dense_layers": config.num_hidden_layers}
    return written


def not_read(layout: Layout, raw_config: Mapping[str, Any]) -> list[str]:
    """Settings of a config.json that EG-MLA has no counterpart for, as `key=value`."""
    known = {*layout.config.values(), *layout.irrelevant}
    return [f"{key}={json.dumps(value)}" for key, value in raw_config.items() if key not in known]


def not_written(layout: Layout, config: EGMLAConfig) -> list[str]:
    """Settings of an EG-MLA model that logits do not depend on and the layout has no place for, as `field=value`."""
    values = {name: getattr(config, name) for name in sorted(NO_LOGITS) if name not in layout.config}
    return [f"{name}={json.dumps(value)}" for name, value in values.items() if value is not None]


def _refuse_other_architectures(theirs) -> None:
    """Raises for a library config that asks for what EG-MLA does not have."""
    dense = getattr(theirs, "first_k_dense_replace", None)
    if dense is not None and dense < theirs.num_hidden_layers:
        raise ConversionError(
            f"`first_k_dense_replace` is {dense}, so layers {dense} to {theirs.num_hidden_layers - 1} are mixtures of "
            "experts, which EG-MLA does not have. Only models whose layers are all dense can be converted."
        )
    if getattr(theirs, "mlp_bias", False):
        raise ConversionError("`mlp_bias` is true, but the MLP of an EG-MLA model has no biases.")
    if getattr(theirs, "num_key_value_heads", None) not in (None, theirs.num_attention_heads):
        raise ConversionError(
            f"`num_key_value_heads` is {theirs.num_key_value_heads}, but latent attention gives each of the "
            f"{theirs.num_attention_heads} heads keys and values of its own."
        )


def _read_original_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek's own code stretches rotary positions (YaRN) exactly if `max_seq_len` is above `original_seq_len`."""
    dense, layers = values.get("n_dense_layers"), values["n_layers"]
    if dense is not None and dense < layers:
        raise ConversionError(
            f"`n_dense_layers` is {dense}, so layers {dense} to {layers - 1} are mixtures of experts, which EG-MLA "
            "does not have. Only models whose layers are all dense can be converted."
        )
    rope = {"rope_type": "default", "rope_theta": float(values["rope_theta"])}
    if values["max_seq_len"] > values["original_seq_len"]:
        rope |= {
            "rope_type": "yarn",
            "factor": float(values["rope_factor"]),
            "original_max_position_embeddings": values["original_seq_len"],
            "beta_fast": values["beta_fast"],
            "beta_slow": values["beta_slow"],
            "mscale": float(values["mscale"]),
            "mscale_all_dim": float(values["mscale"]),
            "attention_factor": 1.0,
        }
    return {"rope_parameters": rope}


def _write_original_rope(config: EGMLAConfig) -> dict[str, Any]:
    rope = config.rope_parameters
    written = {"rope_theta": rope["rope_theta"], "original_seq_len": config.max_position_embeddings}
    if rope["rope_type"] == "default":
        return written
    stretched = config.max_position_embeddings > rope.get("original_max_position_embeddings", math.inf)
    attention_factor = rope.get("attention_factor", 1.0)
    if (
        rope["rope_type"] != "yarn"
        or not stretched
        or not rope.get("mscale")
        or rope.get("mscale") != rope.get("mscale_all_dim")
        or attention_factor != 1.0
        or not rope.get("truncate", True)
    ):
        raise ConversionError(
            "Layout deepseek knows `rope_parameters` of type default, or yarn with `mscale` equal to "
            "`mscale_all_dim`, `attention_factor` 1 and `max_position_embeddings` above "
            f"`original_max_position_embeddings`; here they are {dict(rope)}."
        )
    return written | {
        "original_seq_len": rope["original_max_position_embeddings"],
        "rope_factor": rope["factor"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        "mscale": rope["mscale"],
    }


def _read_layout(path: Path) -> Layout:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConversionError(f"There is no layout file {path}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path} is not YAML ({error}).") from error
    if not isinstance(content, dict) or not isinstance(content.get("tensors"), dict):
        raise ConversionError(f"{path} needs an entry `tensors`: EG-MLA's name of a tensor to the checkpoint's.")
    known = ("tensors", "config", "constants", "derived", "checkpoint_key")
    if unknown := sorted(content.keys() - set(known)):
        raise ConversionError(f"{path} has unknown entries: {', '.join(unknown)}. Known: {', '.join(known)}.")
    our_tensors, our_fields = {*MLA_TENSORS, *GATE_TENSORS}, {item.name for item in fields(EGMLAConfig)}
    for entry, allowed in (("tensors", our_tensors), ("config", our_fields), ("constants", our_fields)):
        table = content.get(entry) or {}
        if not isinstance(table, dict):
            raise ConversionError(f"`{entry}` in {path} must be a table, but is a {type(table).__name__}.")
        if unknown := sorted(map(str, table.keys() - allowed)):
            raise ConversionError(f"`{entry}` in {path} names what EG-MLA does not have: {', '.join(unknown)}.")
        if entry != "constants" and (wrong := [key for key, value in table.items() if not isinstance(value, str)]):
            raise ConversionError(f"`{entry}` in {path} must give a name for {', '.join(wrong)}.")
    tensors = content["tensors"]
    for ours, theirs in tensors.items():
        if ("{n}" in ours) != ("{n}" in theirs):
            raise ConversionError(f"`tensors` in {path}: {ours} and {theirs} must both have {{n}}, or neither.")
    if len(set(tensors.values())) < len(tensors):
        twice = sorted({name for name in tensors.values() if list(tensors.values()).count(name) > 1})
        raise ConversionError(f"`tensors` in {path} gives {', '.join(twice)} to more than one tensor of EG-MLA.")
    return Layout(
        name=path.name,  # with its ending, so that it is none of the names above
        tensors=tensors,
        config=content.get("config") or {},
        constants=content.get("constants") or {},
        derived=tuple(content.get("derived") or ()),
        irrelevant=frozenset({"model_type", "architectures", "dtype", "torch_dtype", "transformers_version"}),
        checkpoint_key=content.get("checkpoint_key"),
    )
