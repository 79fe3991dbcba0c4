"""
EG-MLA models (Embedding-Gated Multi-head Latent Attention, arXiv:2509.16686).

Norms, rotary embedding, MLP and eager attention are DeepSeek-V3's from the library; what differs is the attention: its
up-projected keys and values meet a gate that is looked up by token id, and its cache keeps latents and ids.

Shapes: B batch, S query length, T cached length with the new tokens, H heads, C `kv_lora_rank`, R `qk_rope_head_dim`,
D = H * (`qk_nope_head_dim` + `v_head_dim`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.distributed import DistributedConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel, slice_logits_to_keep
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3MLP,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
    yarn_apply_mscale,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .cache_egmla import EGMLACache
from .configuration_egmla import EGMLAConfig
from .decoding_egmla import check_decoding, decode, select_decoding
from .gate_egmla import EGMLAGateProjection, TokenGate, project, token_gates
from .generation_egmla import EGMLAGenerationMixin
from .inputs_egmla import check_cache, find_token_ids, starts_documents
from .loss_egmla import causal_lm_loss
from .placement_egmla import EGMLAGatePlacement


logger = logging.get_logger(__name__)

# What an exported folder tells the Auto classes.
AUTO_MAP = {
    "AutoConfig": "configuration_egmla.EGMLAConfig",
    "AutoModel": "modeling_egmla.EGMLAModel",
    "AutoModelForCausalLM": "modeling_egmla.EGMLAForCausalLM",
    "AutoModelForSequenceClassification": "modeling_egmla.EGMLAForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_egmla.EGMLAForTokenClassification",
}


# Trainer shifts labels that it smooths for the classes in this list alone; others would learn to repeat their input.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(EGMLAConfig.model_type, "EGMLAForCausalLM")


class EGMLARMSNorm(DeepseekV3RMSNorm):
    pass


class EGMLARotaryEmbedding(DeepseekV3RotaryEmbedding):
    pass


class EGMLAMLP(DeepseekV3MLP):
    pass


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleave: bool) -> torch.Tensor:
    """
    Rotates the channels of `x` by position.

    Args:
        x: [B, heads, S, R].
        cos, sin: [B or 1, S, R], as the rotary embedding gives them (the first half repeated).
        interleave: channels 2i and 2i + 1 of `x` form a pair, not i and i + R/2. The result has halves either way,
            since only the products of rotated queries and keys count.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleave:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    return x * cos + rotate_half(x) * sin


class EGMLAAttention(TokenGate):
    """
    Multi-head latent attention whose up-projected keys and values are gated by token id (arXiv:2509.16686, section 3).

    The first layer of a layer group projects the latent and the rotary key, caches them and up-projects; the others
    (`owns_latent` False) reuse all three with gates, norms, queries and output of their own.
    """

    def __init__(self, config: EGMLAConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.group_idx = layer_idx // config.layer_group_size
        self.owns_latent = layer_idx % config.layer_group_size == 0
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = 1
        self.attention_dropout = config.attention_dropout
        self.is_causal = True

        self.q_lora_rank = config.q_lora_rank
        self.kv_lora_rank = config.kv_lora_rank
        self.qk_nope_head_dim = config.qk_nope_head_dim
        self.qk_rope_head_dim = config.qk_rope_head_dim
        self.qk_head_dim = config.qk_head_dim
        self.v_head_dim = config.v_head_dim
        self.scaling = yarn_apply_mscale(config.rope_parameters, self.qk_head_dim**-0.5)

        if self.q_lora_rank is None:
            self.q_proj = nn.Linear(config.hidden_size, self.num_heads * self.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(config.hidden_size, self.q_lora_rank, bias=config.attention_bias)
            self.q_a_layernorm = EGMLARMSNorm(self.q_lora_rank)
            self.q_b_proj = nn.Linear(self.q_lora_rank, self.num_heads * self.qk_head_dim, bias=False)

        if self.owns_latent:
            self.kv_a_proj_with_mqa = nn.Linear(
                config.hidden_size, self.kv_lora_rank + self.qk_rope_head_dim, bias=config.attention_bias
            )
            self.kv_a_layernorm = EGMLARMSNorm(self.kv_lora_rank)
            self.kv_b_proj = nn.Linear(self.kv_lora_rank, config.kv_width, bias=False)
        self.__dict__["latent_owner"] = self if self.owns_latent else None  # set by the model; not a child

        self.init_kv_gate(config)
        self.kv_decoding = "auto"

        self.o_proj = nn.Linear(self.num_heads * self.v_head_dim, config.hidden_size, bias=config.attention_bias)

    @property
    def up_projection(self) -> nn.Module:
        """`kv_b_proj` of the layer group."""
        return self.latent_owner.kv_b_proj

    def expand_kv(
        self, kv_features: torch.Tensor, k_rot: torch.Tensor, token_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Gates up-projected latents and splits them into the key and value states of all heads.

        Args:
            kv_features: up-projected latents, [B, T, D].
            k_rot: rotated keys, [B, 1, T, R].
            token_ids: ids of the tokens, [B, T].

        Returns:
            Keys [B, H, T, qk_nope_head_dim + R] and values [B, H, T, v_head_dim].
        """
        kv_features = self.gate_kv(kv_features, token_ids)
        head_shape = (*kv_features.shape[:2], self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        kv_heads = kv_features.view(head_shape).transpose(1, 2)
        k_nope, value_states = kv_heads.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        key_states = torch.cat((k_nope, k_rot.expand(-1, self.num_heads, -1, -1)), dim=-1)
        return key_states, value_states

    def forward(
        self,
        hidden_states: torch.Tensor,
        kv_features: torch.Tensor | None,
        k_rot: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        token_ids: torch.Tensor,
        cache: Cache | None = None,
        **kwargs: Unpack[FlashAttentionKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """
        Args:
            hidden_states: [B, S, hidden_size].
            kv_features, k_rot: what the first layer of the group returned; read by the others only.
            position_embeddings: cosines and sines, [B or 1, S, R] each.
            attention_mask: as the attention interface wants it.
            token_ids: ids of the new tokens, [B, S].
            cache: [`EGMLACache`] or [`EGMLAStaticCache`]; any other cache gets expanded keys and values.

        Returns:
            Output [B, S, hidden_size], attention weights where the interface gives them, and for the other layers of
            the group the up-projected latents [B, T, D] (None: not expanded) and the rotated keys [B, 1, T, R].
        """
        batch_size, seq_length = hidden_states.shape[:-1]

        if self.q_lora_rank is None:
            query_states = self.q_proj(hidden_states)
        else:
            query_states = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query_states = query_states.view(batch_size, seq_length, self.num_heads, self.qk_head_dim).transpose(1, 2)
        q_nope, q_rot = query_states.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)

        cos, sin = position_embeddings
        q_rot = apply_rotary(q_rot, cos, sin, self.config.rope_interleave)
        query_states = torch.cat((q_nope, q_rot), dim=-1)

        # The cache is read and written while K and V are still compressed.
        cache_holds_latents = getattr(cache, "holds_latents", False)
        if self.owns_latent:
            compressed_kv = self.kv_a_proj_with_mqa(hidden_states)
            kv_latent, k_rot = compressed_kv.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
            kv_latent = self.kv_a_layernorm(kv_latent).unsqueeze(1)
            k_rot = apply_rotary(k_rot.unsqueeze(1), cos, sin, self.config.rope_interleave)
            if cache_holds_latents:
                kv_latent, k_rot = cache.update(kv_latent, k_rot, self.group_idx, token_ids=token_ids)

        decoding = select_decoding(self, query_states, attention_mask, cache)
        if decoding != "expanded":
            attn_output = decode(self, decoding, query_states, attention_mask, cache)
            return self.o_proj(attn_output), None, None, k_rot

        if self.owns_latent:
            kv_features = project(self.kv_b_proj, kv_latent.squeeze(1))
        elif kv_features is None:
            latents = cache.latents[self.group_idx].squeeze(1)
            kv_features = project(self.up_projection, latents).to(hidden_states.device)
        if cache_holds_latents:
            token_ids = cache.token_ids.to(kv_features.device)

        key_states, value_states = self.expand_kv(kv_features, k_rot, token_ids)
        if cache is not None and not cache_holds_latents:
            key_states, value_states = cache.update(key_states, value_states, self.layer_idx)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        # On a CPU, PyTorch's fused attention wants values as wide as keys and is several times slower without.
        pads_values = (
            self.config._attn_implementation == "sdpa"
            and query_states.device.type == "cpu"
            and self.v_head_dim < self.qk_head_dim
        )
        if pads_values:
            value_states = F.pad(value_states, (0, self.qk_head_dim - self.v_head_dim))
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        if pads_values:
            attn_output = attn_output[..., : self.v_head_dim]

        attn_output = attn_output.reshape(batch_size, seq_length, -1)
        return self.o_proj(attn_output), attn_weights, kv_features, k_rot


class EGMLADecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, config: EGMLAConfig, layer_idx: int):
        super().__init__()
        self.self_attn = EGMLAAttention(config, layer_idx)
        self.mlp = EGMLAMLP(config)
        self.input_layernorm = EGMLARMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = EGMLARMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        # Positional, like `hidden_states`: what reentrant gradient checkpointing passes gradients through.
        kv_features: torch.Tensor | None = None,
        k_rot: torch.Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Returns hidden states, and what the group's other layers reuse (see [`EGMLAAttention`])."""
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _, kv_features, k_rot = self.self_attn(hidden_states, kv_features, k_rot, **kwargs)
        hidden_states = residual + hidden_states

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states, kv_features, k_rot


class EGMLAPreTrainedModel(EGMLAGatePlacement, PreTrainedModel):
    """Base of all EG-MLA models: initialisation, gates, ways to decode, vocabulary."""

    config: EGMLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["EGMLADecoderLayer"]
    _skip_keys_device_placement = ["cache"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": EGMLADecoderLayer, "attentions": EGMLAAttention}

    def __init__(self, config: EGMLAConfig, *args, **kwargs):
        config.check()  # fields may have been changed since it was made
        super().__init__(config, *args, **kwargs)

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, EGMLAGateProjection):
            init.normal_(module.weight, mean=0.0, std=module.in_features**-0.5)

    @classmethod
    def prepare_distribute_model(cls, distributed_config, device_map=None):
        """As the library's, without pipelines: later stages would have neither token ids nor a group's latents."""
        config = distributed_config
        if isinstance(config, dict):
            config = DistributedConfig.from_dict(config)
        if config is not None and config.pp_size > 1:
            raise ValueError("`pp_size` must be 1: stages behind the first would have no token ids. Use `fsdp_size`.")
        return super().prepare_distribute_model(distributed_config, device_map)

    def set_kv_decoding(self, decoding: str = "auto") -> None:
        """
        Chooses how new tokens attend to the cached history; results are the same up to rounding (docs/decoding.md).

        Args:
            decoding: `"auto"` chooses by size, as measured on CPUs, and on other devices is `"expanded"`, which makes
                keys and values of the whole history, as every prompt does; `"tiles"` makes them piece by piece, in
                bounded memory. `"grouped"` makes none: it takes the query to the latents, once for each distinct id;
                with more than 16 new tokens, an adapter on `kv_b_proj`, quantised or offloaded weights, or compiled,
                it gives way to `"tiles"`. `"fused"` is a Triton kernel for one new token, on CUDA, not timed yet; it
                gives way as `"grouped"` does, and where gate tables are placed, narrowed or wrapped. In training,
                where gradients are recorded, under autocast and with attention implementations other than `sdpa`, all
                is `"expanded"`.

        Raises:
            ValueError: there is no such way, or triton is not installed, which `"fused"` needs.
        """
        check_decoding(decoding)
        for module in self.modules():
            if isinstance(module, EGMLAAttention):
                module.kv_decoding = decoding

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As the library's; a folder that carries its code names the model of every Auto class, not its own only."""
        if self._auto_class is not None:
            self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), **AUTO_MAP}
        return super().save_pretrained(save_directory, *args, **kwargs)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """
        Resizes the token embedding and the head as the library does, and every gate table with them.

        New ids get the gate rows of [`TokenGate.resize_table`], without noise.

        Raises:
            ValueError: a special id of the configuration would fall outside the vocabulary, or gate tables were
                placed, narrowed or given adapters.
        """
        old_num_tokens = self.get_input_embeddings().weight.shape[0]
        wanted = old_num_tokens if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        self.config.check_special_ids(wanted)
        if wanted != old_num_tokens:
            self.refuse_placed_tables("resized")
            if any(not isinstance(gate.kv_gate_embed, nn.Embedding) for gate in token_gates(self)):
                raise ValueError("Gate tables with adapters on them cannot be resized: merge the adapters first.")
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        for gate in token_gates(self):
            gate.resize_table(embeddings.weight.shape[0])
        return embeddings


class EGMLAModel(EGMLAPreTrainedModel):
    """
    The decoder without a head.

    Args:
        config ([`EGMLAConfig`]): Configuration of the model.
    """

    def __init__(self, config: EGMLAConfig):
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            [EGMLADecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers)]
        )
        for layer_idx, layer in enumerate(self.layers):
            owner = self.layers[layer_idx - layer_idx % config.layer_group_size].self_attn
            layer.self_attn.__dict__["latent_owner"] = owner
        self.norm = EGMLARMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = EGMLARotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.kv_gate_pool = None

        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache", raise_if_both_names=True)
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_ids: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """
        Args:
            input_ids: ids of the new tokens, [B, S].
            attention_mask: 1 for tokens and 0 for padding, [B, T]; or a prepared mask, [B, 1, S, T].
            position_ids: positions of the new tokens, [B or 1, S]; by default they continue the cache.
            cache: what earlier calls returned; by default, with `use_cache`, a new [`EGMLACache`].
            inputs_embeds: embeddings in place of `input_ids`, [B, S, hidden_size]; then `token_ids` must say which
                tokens they stand for.
            token_ids: ids behind `inputs_embeds`, [B, S]; read only with it.
            use_cache: whether to return a cache.

        Raises:
            ValueError: neither or both of `input_ids` and `inputs_embeds`; embeddings without `token_ids`; an id
                outside the vocabulary; a cache that this model did not fill.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("Give exactly one of input_ids or inputs_embeds, the latter with token_ids beside it.")
        token_ids = find_token_ids(self.config, input_ids, inputs_embeds, token_ids)

        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        is_packed = starts_documents(cache, attention_mask, position_ids)
        if use_cache and cache is None:
            cache = EGMLACache(self.config)
        if cache is not None:
            check_cache(self.config, cache)

        if position_ids is None:
            past_seen_tokens = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)

        self.prefetch_kv_gates((layer.self_attn for layer in self.layers), token_ids, cache)
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=None if is_packed else cache,
            position_ids=position_ids,
        )

        hidden_states = inputs_embeds
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)

        for decoder_layer in self.layers[: self.config.num_hidden_layers]:
            if decoder_layer.self_attn.owns_latent:
                kv_features, k_rot = None, None  # those of the group before, which checkpointing would keep
            hidden_states, kv_features, k_rot = decoder_layer(
                hidden_states,
                kv_features,
                k_rot,
                attention_mask=causal_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                token_ids=token_ids,
                cache=cache,
                use_cache=use_cache,
                **kwargs,
            )

        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, cache=cache)


class EGMLAForCausalLM(EGMLAPreTrainedModel, EGMLAGenerationMixin):
    """
    The decoder with a language modelling head; generates on an [`EGMLACache`].

    Args:
        config ([`EGMLAConfig`]): Configuration of the model.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: EGMLAConfig):
        super().__init__(config)
        self.model = EGMLAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_function = causal_lm_loss  # `loss_type` stays "ForCausalLM", by which Trainer counts labels

        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache", raise_if_both_names=True)
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """
        Arguments as in [`EGMLAModel.forward`], and:

        Args:
            labels: ids to predict, [B, S], shifted inside; positions with -100 do not count.
            logits_to_keep: compute logits of the last so many positions only (0: of all), or of these positions.

        ```python
        >>> import modeling_egmla
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer

        >>> model = AutoModelForCausalLM.from_pretrained(folder)
        >>> tokenizer = AutoTokenizer.from_pretrained(folder)
        >>> inputs = tokenizer("The state of the union", return_tensors="pt")
        >>> tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0])
        ```
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            token_ids=token_ids,
            use_cache=use_cache,
            **kwargs,
        )

        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits = self.lm_head(hidden_states)

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class EGMLAForSequenceClassification(GenericForSequenceClassification, EGMLAPreTrainedModel):
    """The decoder with a classification head on the last token that is not padding."""

    def __init__(self, config: EGMLAConfig):
        # Not the generic __init__: it builds the decoder through AutoModel, which asks for trust again in remote code.
        EGMLAPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = EGMLAModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


class EGMLAForTokenClassification(GenericForTokenClassification, EGMLAPreTrainedModel):
    """The decoder with a classification head on every token."""

    def __init__(self, config: EGMLAConfig):
        EGMLAPreTrainedModel.__init__(self, config)  # as above
        self.num_labels = config.num_labels
        self.model = EGMLAModel(config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)  # the generic class's default
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()


__all__ = [
    "EGMLAForCausalLM",
    "EGMLAForSequenceClassification",
    "EGMLAForTokenClassification",
    "EGMLAModel",
    "EGMLAPreTrainedModel",
]
