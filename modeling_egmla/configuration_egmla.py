"""Configuration of EG-MLA models (Embedding-Gated Multi-head Latent Attention, arXiv:2509.16686)."""

import importlib.resources
import json
import math
from numbers import Real

import transformers
from huggingface_hub.dataclasses import strict
from packaging.version import Version
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters


SUPPORTED_TRANSFORMERS = (Version("5.24.0"), Version("6"))  # from (included), to (excluded)
if not SUPPORTED_TRANSFORMERS[0] <= Version(transformers.__version__) < SUPPORTED_TRANSFORMERS[1]:
    raise ImportError(
        f"EG-MLA models need transformers >= {SUPPORTED_TRANSFORMERS[0]}, < {SUPPORTED_TRANSFORMERS[1]}, but "
        f"{transformers.__version__} is installed: run `pip install 'transformers>=5.24,<6'`."
    )

KV_GATES = ("multiply", "add", "none")
KV_GATE_NORMS = ("layer_norm", "none")
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys that each rope type reads, beside `rope_type` and `rope_theta`: (required, optional).
ROPE_KEYS = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        {"factor"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
        | {"original_max_position_embeddings"},
    ),
    "longrope": (
        {"short_factor", "long_factor", "original_max_position_embeddings"},
        {"attention_factor", "factor"},
    ),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
}


@strict
class EGMLAConfig(PreTrainedConfig):
    r"""
    Configuration of an EG-MLA decoder. The defaults are the paper's Base model with a latent of 64 and gate tables of
    256 (preset `egmla-base-kv64-emb256`). A field that cannot work raises a `ValueError` that names it; one
    of another type, the `StrictDataclassFieldValidationError` of all configurations.

    Args:
        vocab_size (`int`, defaults to 50304):
            Rows of the token embedding and of every gate table.
        hidden_size (`int`, defaults to 768): Width of the residual stream.
        intermediate_size (`int`, defaults to 1920): Width of the SwiGLU MLP.
        num_hidden_layers (`int`, defaults to 12): Number of decoder layers.
        num_attention_heads (`int`, defaults to 12): Number of attention heads, H.
        q_lora_rank (`int`, *optional*):
            Rank of the low-rank query projection; `None` (or 0) projects queries directly.
        kv_lora_rank (`int`, defaults to 64): Width of the cached latent, d_c in the paper.
        qk_nope_head_dim (`int`, defaults to 64): Key channels a head that carry no position.
        qk_rope_head_dim (`int`, defaults to 64): Width of the rotary key that all heads share; even.
        v_head_dim (`int`, defaults to 64): Value channels a head.
        kv_gate (`str`, defaults to `"multiply"`):
            How the gate of a token id meets the up-projected K/V: `"multiply"` (the paper's EG-MLA), `"add"` (its
            ablation) or `"none"` (plain MLA: no table, no gate norm, whatever the other `kv_gate_*` fields say).
        kv_gate_dim (`int`, defaults to 256): Width of a gate table's rows, d_e in the paper.
        kv_gate_norm (`str`, defaults to `"layer_norm"`):
            `"layer_norm"` normalises the gated K/V over their whole width; `"none"` leaves them as they are.
        kv_gate_norm_eps (`float`, defaults to 1e-5): Epsilon of that LayerNorm.
        layer_group_size (`int`, defaults to 1):
            Number of adjacent layers that share one latent, one rotary key and one up-projection; divides
            `num_hidden_layers`.
        rope_parameters (`dict`, *optional*):
            Rotary settings as in the library: `rope_type`, `rope_theta` and what the type needs. With `"yarn"` and
            `mscale_all_dim`, attention scores are corrected as in DeepSeek-V3.
        rope_interleave (`bool`, defaults to `False`):
            Rotary channels lie in pairs (as in original DeepSeek weights) instead of halves (as in Llama).
        rms_norm_eps (`float`, defaults to 1e-6):
            Epsilon of the layers' RMSNorms. The norms of the latent and of the low-rank query use 1e-6 always, as in
            the library's MLA models.
        hidden_act (`str`, defaults to `"silu"`): Activation of the MLP.
        max_position_embeddings (`int`, defaults to 4096): Context length.
        initializer_range (`float`, defaults to 0.02): Standard deviation of the initial weights.
        tie_word_embeddings (`bool`, defaults to `True`): Whether the head shares the token embedding.
        attention_bias (`bool`, defaults to `False`):
            Biases on `q_a_proj`, `kv_a_proj_with_mqa` and `o_proj`, as in the library's MLA models.
        attention_dropout (`float`, defaults to 0.0): Dropout of attention weights in training.
        use_cache (`bool`, defaults to `True`): Whether a forward pass returns a cache by default.
        bos_token_id, eos_token_id, pad_token_id (*optional*): Special ids, inside the vocabulary.

    Source: arXiv:2509.16686, section 3 and appendices; names as in the library's DeepSeek models.

    ```python
    >>> from modeling_egmla import EGMLAConfig, EGMLAForCausalLM

    >>> config = EGMLAConfig.from_preset("egmla-base-kv64-emb256")
    >>> model = EGMLAForCausalLM(config)  # random weights
    ```
    """

    model_type = "egmla"
    keys_to_ignore_at_inference = ["cache"]
    # `kv_gate_norm` spans all heads: attention that is cut by heads would normalise each rank's share alone. So
    # attention stays whole on each rank, and only the MLP is cut.
    base_model_tp_plan = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    # Gate tables are units of their own: gathered for one lookup each, and not with the weights of a whole layer.
    base_model_fsdp_plan = {
        "embed_tokens": "free_full_weight",
        "layers.*.self_attn.kv_gate_embed": "free_full_weight",
        "layers.*": "free_full_weight",
        "norm": "keep_full_weight",
    }

    vocab_size: int = 50304
    hidden_size: int = 768
    intermediate_size: int = 1920
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    q_lora_rank: int | None = None
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 64
    kv_gate: str = "multiply"
    kv_gate_dim: int = 256
    kv_gate_norm: str = "layer_norm"
    kv_gate_norm_eps: float = 1e-5
    layer_group_size: int = 1
    rope_parameters: RopeParameters | dict | None = None
    rope_interleave: bool = False
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    max_position_embeddings: int = 4096
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        if self.q_lora_rank == 0:
            self.q_lora_rank = None
        if kwargs.get("per_layer_config"):
            raise ValueError("`per_layer_config` is not supported: all layers of an EG-MLA model have one shape.")
        for derived in ("head_dim", "qk_head_dim", "num_key_value_heads"):
            given = kwargs.pop(derived, None)
            if given is not None and given != getattr(self, derived):
                raise ValueError(
                    f"`{derived}` is derived: it is {getattr(self, derived)} here, but {given} was given."
                )
        super().__post_init__(**kwargs)
        self.check()
        if self.layer_group_size > 1:  # the group's other layers read it too, when its own layer is sharded again
            shared = {"layers.*.self_attn.kv_b_proj": "free_full_weight"}
            self.base_model_fsdp_plan = shared | self.base_model_fsdp_plan

    def check(self):
        """Raises a `ValueError` that names the first field that cannot work."""
        if self.q_lora_rank == 0:
            self.q_lora_rank = None
        self.validate_architecture()
        self.validate_token_ids()
        self.validate_rope()

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """
        As the library's; `kwargs` override fields, and are checked like them. `rope_parameters` without a type or a
        base have the default type and the checkpoint's base.
        """
        rope = kwargs.pop("rope_parameters", None)
        loaded = super().from_dict(config_dict, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        if isinstance(rope, dict):
            rope = {"rope_type": rope.get("type", "default"), **rope}
            rope.pop("type", None)
            rope = {"rope_theta": config.rope_parameters["rope_theta"], **rope}
        if rope is not None:
            config.rope_parameters = rope
        config.check()
        return loaded

    @property
    def head_dim(self) -> int:
        """Rotary width, under the name by which the library's rotary embeddings read it."""
        return self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head; its presence tells the library that this is an MLA model."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_key_value_heads(self) -> int:
        """Every query head has a key and value head of its own."""
        return self.num_attention_heads

    @property
    def kv_width(self) -> int:
        """Width D of the up-projected K/V of all heads, which is also the gate's: H * (d_nope + d_v)."""
        return self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim)

    @property
    def num_layer_groups(self) -> int:
        """Number of latents cached for a token."""
        return -(-self.num_hidden_layers // self.layer_group_size)  # a draft of few layers may cut a group

    @property
    def cache_elements_per_token(self) -> int:
        """Elements that the cache holds for one token in all layers: (d_c + d_rope) a layer group."""
        return (self.kv_lora_rank + self.qk_rope_head_dim) * self.num_layer_groups

    @classmethod
    def from_preset(cls, name: str) -> "EGMLAConfig":
        """
        Returns the configuration that the package ships under `name`, e.g. `"egmla-base-kv64-emb256"`.

        Raises:
            ValueError: there is no such preset; the message lists those there are.
            ImportError: the egmla package is not installed (code loaded with `trust_remote_code` has no presets).
        """
        try:
            presets = importlib.resources.files("modeling_egmla.configuration")
        except ModuleNotFoundError as error:
            raise ImportError(
                "Presets come with the egmla package, which is not installed here: install it, or load a "
                "configuration from a folder with `EGMLAConfig.from_pretrained`."
            ) from error
        names = sorted(entry.name for entry in presets.iterdir() if entry.joinpath("config.json").is_file())
        if name not in names:
            raise ValueError(f"There is no preset {name!r}. Presets: {', '.join(names)}.")
        return cls.from_dict(json.loads(presets.joinpath(name, "config.json").read_text(encoding="utf-8")))

    def validate_architecture(self):
        """Checks of single fields and of fields against each other, run at construction."""
        gated = self.kv_gate != "none"  # without a gate, what the other gate fields say does not count
        for field in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "layer_group_size",
            "max_position_embeddings",
            *(["kv_gate_dim"] if gated else []),
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"`{field}` must be at least 1, but is {getattr(self, field)}.")
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ValueError(f"`q_lora_rank` must be None, 0 or positive, but is {self.q_lora_rank}.")
        for field in ("rms_norm_eps", "initializer_range", *(["kv_gate_norm_eps"] if gated else [])):
            if not 0 < getattr(self, field) < 1:
                raise ValueError(f"`{field}` must lie between 0 and 1, but is {getattr(self, field)}.")
        if not 0 <= self.attention_dropout < 1:
            raise ValueError(f"`attention_dropout` must lie in [0, 1), but is {self.attention_dropout}.")
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"`qk_rope_head_dim` must be even, since rotary channels are rotated in pairs, but is "
                f"{self.qk_rope_head_dim}."
            )
        if self.kv_gate not in KV_GATES:
            raise ValueError(f"`kv_gate` must be one of {KV_GATES}, but is {self.kv_gate!r}.")
        if gated and self.kv_gate_norm not in KV_GATE_NORMS:
            raise ValueError(f"`kv_gate_norm` must be one of {KV_GATE_NORMS}, but is {self.kv_gate_norm!r}.")
        if self.num_hidden_layers % self.layer_group_size:
            raise ValueError(
                f"`layer_group_size` must divide `num_hidden_layers`, but {self.layer_group_size} does not divide "
                f"{self.num_hidden_layers}."
            )
        if self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be an activation that the library knows, but is {self.hidden_act!r}.")

    def validate_token_ids(self):
        """Special ids must lie inside the vocabulary."""
        self.check_special_ids(self.vocab_size)

    def check_special_ids(self, vocab_size: int) -> None:
        """Raises a `ValueError` that names the first special id outside a vocabulary of this size."""
        for field in SPECIAL_IDS:
            value = getattr(self, field)
            for token_id in value if isinstance(value, list) else [value]:
                if token_id is not None and not 0 <= token_id < vocab_size:
                    raise ValueError(
                        f"`{field}` is {token_id}, which lies outside the vocabulary: ids run from 0 to "
                        f"{vocab_size - 1} (`vocab_size` {vocab_size}). Change `{field}`, or keep more ids."
                    )

    def validate_rope(self):
        """Rotary settings; stricter than the library, which logs a warning for most settings that cannot work."""
        rope = self.rope_parameters or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
            raise ValueError(
                f"`rope_parameters['rope_type']` must be one of {tuple(ROPE_KEYS)}, but is {rope_type!r}."
            )
        required, optional = ROPE_KEYS[rope_type]
        if missing := required - rope.keys():
            raise ValueError(f"`rope_parameters` of type {rope_type!r} lacks {sorted(missing)}.")
        known = required | optional | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if unknown := rope.keys() - known:
            raise ValueError(
                f"`rope_parameters` of type {rope_type!r} does not read {sorted(unknown)}: leave them out."
            )
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                "`rope_parameters['partial_rotary_factor']` must be 1: `qk_rope_head_dim` says how wide the rotary "
                f"part is. It is {rope['partial_rotary_factor']}."
            )

        def check(key: str, low: float, strictly: bool = True):
            if key not in rope:
                return
            value = rope[key]
            if value is None and key in optional - {"original_max_position_embeddings"}:
                return
            is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < low or (strictly and value == low):
                bound = f"{'above' if strictly else 'at least'} {low:g}"
                raise ValueError(f"`rope_parameters[{key!r}]` must be a number {bound}, but is {value!r}.")

        check("rope_theta", 1 if rope_type == "yarn" else 0)
        check("factor", 1, strictly=False)
        for key in ("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
            check(key, 0)
        for key in ("mscale", "mscale_all_dim"):
            check(key, 0, strictly=False)
        check("original_max_position_embeddings", 0)
        if not isinstance(rope.get("truncate", True), bool):
            raise ValueError(f"`rope_parameters['truncate']` must be a bool, but is {rope['truncate']!r}.")
        if rope_type == "dynamic" and self.qk_rope_head_dim <= 2:
            raise ValueError("`qk_rope_head_dim` must be above 2 for `rope_parameters` of type 'dynamic'.")
        if rope_type == "yarn" and (rope.get("beta_fast") or 32) < (rope.get("beta_slow") or 1):
            raise ValueError("`rope_parameters['beta_fast']` must not be below `rope_parameters['beta_slow']`.")
        if rope_type == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
            raise ValueError(
                "`rope_parameters['high_freq_factor']` must be above `rope_parameters['low_freq_factor']`."
            )
        pairs = self.qk_rope_head_dim // 2
        for key in ("short_factor", "long_factor"):
            factors = rope.get(key)
            if key in required and not (
                isinstance(factors, list)
                and len(factors) == pairs
                and all(isinstance(f, Real) and math.isfinite(f) and f > 0 for f in factors)
            ):
                raise ValueError(
                    f"`rope_parameters[{key!r}]` must be a list of {pairs} positive numbers, one for each pair of "
                    "rotary channels."
                )


__all__ = ["EGMLAConfig"]
