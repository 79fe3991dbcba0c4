"""
What `generate()` asks of a model beside its forward pass: the cache that holds latents and ids in place of the stock
one, and prompts that are checked, and fit the cache they come with, before the first step.
"""

import torch
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.generation import GenerationMixin
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import is_flash_attention_requested

from .cache_egmla import EGMLACache, EGMLAStaticCache
from .inputs_egmla import check_ids_in_vocabulary


class EGMLAGenerationMixin(GenerationMixin):
    """The library's generation on an [`EGMLACache`] or [`EGMLAStaticCache`]."""

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache", raise_if_both_names=True)
    def prepare_inputs_for_generation(self, input_ids, inputs_embeds=None, token_ids=None, **kwargs):
        # `generate` takes embeddings only where it finds the name `inputs_embeds` in this signature.
        model_inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        # Embeddings stand for the prompt only, and so do the ids beside them.
        if token_ids is not None and model_inputs.get("inputs_embeds") is not None:
            model_inputs["token_ids"] = token_ids[:, -model_inputs["inputs_embeds"].shape[1] :]
        return model_inputs

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        given = model_kwargs.get("cache")
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = model_kwargs.get("cache")
        sequences = batch_size * max(generation_config.num_beams, generation_config.num_return_sequences)
        if given is not None:
            # A stock dynamic cache makes its layers at the first update, and cannot say its room before.
            room = given.get_max_length() if getattr(given, "layers", None) else -1
            if room != -1 and room < max_cache_length:
                raise ValueError(
                    f"The cache has room for {room} tokens, but prompt and new tokens need {max_cache_length}: make "
                    "it larger, or lower `max_new_tokens`."
                )
        elif type(cache) is DynamicCache:
            model_kwargs["cache"] = EGMLACache(self.config, offloading=cache.offloading)
        elif type(cache) is StaticCache:
            cache = EGMLAStaticCache(self.config, cache.get_max_length(), offloading=cache.offloading)
            if generation_config.prefill_chunk_size is not None and not hasattr(self, "hf_device_map"):
                # Chunks are prefilled by compiled code, which must find the room there.
                cache.early_initialization(sequences, 1, self.config.qk_head_dim, self.dtype, self.device)
            model_kwargs["cache"] = cache
        is_static = getattr(cache, "layers", None) and cache.get_max_length() != -1
        if is_static and model_kwargs.get("attention_mask") is None and is_flash_attention_requested(self.config):
            # Flash attention tells empty slots by the mask, which the library keeps beside caches of its own only.
            mask_size = (sequences, generation_config._mask_length)
            model_kwargs["attention_mask"] = torch.ones(mask_size, dtype=torch.long, device=self.device)

    def _prefill(self, input_ids, generation_config, model_kwargs, is_first_iteration=True):
        if generation_config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
            raise ValueError("`prefill_chunk_size` cuts `input_ids`, not `inputs_embeds`: leave it out, or pass ids.")
        self._check_prompt(input_ids, generation_config, model_kwargs)
        return super()._prefill(input_ids, generation_config, model_kwargs, is_first_iteration)

    def _assisted_decoding(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        cache = kwargs.get("cache")
        if self._check_prompt(input_ids, generation_config, kwargs):
            # The library's first step reads the whole prompt again, and would append it to what is cached.
            cache.crop(-int(cache.get_seq_length()))
        elif cache is not None and cache.get_seq_length() and kwargs.get("attention_mask") is not None:
            # Only the new tokens: the library would cut the mask to them, as if they were the whole text.
            raise ValueError(
                f"The attention mask covers {kwargs['attention_mask'].shape[1]} tokens, but `input_ids` has only the "
                f"last {input_ids.shape[1]}: with padding, assisted decoding and prompt lookup need the whole text."
            )
        return super()._assisted_decoding(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)

    def _check_prompt(self, input_ids, generation_config, model_kwargs) -> bool:
        """
        Refuses a prompt with ids outside the vocabulary, or one that does not continue the cache it comes with.

        Returns:
            Whether the prompt begins with what is cached.
        """
        inputs_embeds = model_kwargs.get("inputs_embeds")
        if inputs_embeds is None:
            prompt_ids = input_ids
        else:
            prompt_ids = model_kwargs.get("token_ids")
        if prompt_ids is None:
            return False
        check_ids_in_vocabulary(prompt_ids, self.config.vocab_size)

        cache = model_kwargs.get("cache")
        past_length = int(cache.get_seq_length()) if cache is not None else 0
        if past_length == 0:
            return False
        attention_mask = model_kwargs.get("attention_mask")
        mask_length = (
            attention_mask.shape[1] if attention_mask is not None else getattr(generation_config, "_mask_length", -1)
        )
        if mask_length != prompt_ids.shape[1]:
            if inputs_embeds is not None:  # of which the library would drop what it takes for cached
                raise ValueError(
                    f"Beside a cache that holds {past_length} tokens, `inputs_embeds` and `token_ids` must begin with "
                    f"these, and the attention mask must be as long, but they have {prompt_ids.shape[1]} tokens and "
                    f"the mask {mask_length}."
                )
            return False  # Only the new tokens were passed, with a mask over all of them.
        if prompt_ids.shape[1] <= past_length:
            raise ValueError(
                f"The prompt has {prompt_ids.shape[1]} tokens, but the cache already holds {past_length}. Pass the "
                "whole text, with at least one token that is not cached; or new tokens and an attention mask that "
                "covers the cached ones too; or crop the cache."
            )
        if getattr(cache, "holds_latents", False):
            cached_ids = cache.token_ids[:, :past_length].to(prompt_ids.device)
            prefix = prompt_ids[:, :past_length]
            if cached_ids.shape[0] != prefix.shape[0]:
                raise ValueError(
                    f"The cache holds a batch of {cached_ids.shape[0]} sequences, but {prefix.shape[0]} are generated "
                    "(rows times beams or returned sequences): repeat it first, with `cache.batch_repeat_interleave`."
                )
            differs = ((cached_ids != prefix) & (cached_ids >= 0)).any(0)
            if differs.any() and generation_config.is_assistant:
                # Another tokenizer than the model's read its drafts, and they came back cut into other tokens.
                cache.crop(int(differs.int().argmax()) - past_length)
            elif differs.any():
                raise ValueError(
                    "The prompt does not begin with the tokens that the cache holds (`cache.token_ids`). Pass the "
                    "whole text, or only new tokens with an attention mask that covers the cached ones too."
                )
        return True

    def init_continuous_batching(self, *args, **kwargs):
        """Not supported: the library's paged cache stores keys and values of one width."""
        raise NotImplementedError(
            "Continuous batching (`generate_batch`, `transformers serve --continuous-batching`) keeps keys and values "
            "of one width in pages, which EG-MLA's latents are not. Use `generate()` with left-padded batches."
        )
