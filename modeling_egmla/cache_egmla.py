"""
Caches of EG-MLA models: latents and rotated keys for each layer group, token ids once.

For every token and layer group a cache holds the latent after its RMSNorm and the rotated key that all heads share, as
two single-head tensors; for every token, once for all layers, its id, from which the gates are looked up. Up-projected
keys and values and gates are never kept.

Shapes: B batch, T cached length, C `kv_lora_rank`, R `qk_rope_head_dim`.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from .configuration_egmla import EGMLAConfig


BLOCK_SIZE = 256  # tokens by which a dynamic cache grows


def whole_blocks(length: int) -> int:
    """`length` tokens, rounded up to whole blocks."""
    return -(-length // BLOCK_SIZE) * BLOCK_SIZE


def is_frozen(tensor: torch.Tensor) -> bool:
    """Whether the tensor was made under inference_mode and cannot be written to here, outside of it."""
    return not torch.compiler.is_compiling() and tensor.is_inference() and not torch.is_inference_mode_enabled()


@dataclass(frozen=True)
class CacheMemory:
    """
    Bytes that a cache holds.

    Attributes:
        latents: filled latents and rotated keys; B x T x `config.cache_elements_per_token` x bytes an element.
        token_ids: filled ids; B x T x 4.
        slack: allocated ahead and not filled yet.
        workspace: derived from the others for fast decoding, and rebuilt when lost.
    """

    latents: int
    token_ids: int
    slack: int
    workspace: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.latents + self.token_ids + self.slack + self.workspace


class GrowingTensor:
    """
    A tensor that grows along one axis by whole blocks, so that appending one token does not copy the history.

    Args:
        filled: first content. It is never written to, since it may be somebody else's.
        dim: axis that grows, counted from the end (negative).
        made_from: what its content was derived from, for those who derive it.
    """

    def __init__(self, filled: torch.Tensor, dim: int, made_from: Any = None):
        self.buffer = filled
        self.dim = dim
        self.made_from = made_from
        self.length = filled.shape[dim]
        self.owns_buffer = False

    @property
    def filled(self) -> torch.Tensor:
        """View of what has been written."""
        return self.buffer.narrow(self.dim, 0, self.length)

    def check(self, new: torch.Tensor) -> None:
        """Raises a `ValueError` if `new` cannot be appended; to nothing, anything can."""
        expected = list(self.buffer.shape)
        expected[self.dim] = new.shape[self.dim]
        if self.length and list(new.shape) != expected:
            raise ValueError(
                f"The cache holds a tensor of shape {tuple(self.filled.shape)}, to which {tuple(new.shape)} cannot be "
                "appended: the batch size or the model changed. Use a new cache, or reorder this one first."
            )

    def append(self, new: torch.Tensor) -> torch.Tensor:
        """Writes `new` behind what is filled, and returns the view of all of it."""
        self.check(new)
        length = self.length + new.shape[self.dim]
        if torch.is_grad_enabled() or (self.length and new.dtype != self.buffer.dtype):
            # What autograd may save must not change; another dtype promotes, as concatenation does.
            self.buffer = torch.cat([self.filled, new], dim=self.dim) if self.length else new.clone()
            self.owns_buffer = False
        else:
            if not self.owns_buffer or is_frozen(self.buffer) or length > self.buffer.shape[self.dim]:
                self._grow(length, like=new)
            self.buffer.narrow(self.dim, self.length, new.shape[self.dim]).copy_(new)
        self.length = length
        return self.filled

    def _grow(self, length: int, like: torch.Tensor) -> None:
        shape = list(like.shape)
        shape[self.dim] = whole_blocks(length)
        grown = like.new_empty(shape)
        if self.length:
            grown.narrow(self.dim, 0, self.length).copy_(self.filled)
        self.buffer, self.owns_buffer = grown, True

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `tokens_to_remove` tokens, and gives whole blocks back."""
        self.length = max(self.length - tokens_to_remove, 0)
        if self.buffer.shape[self.dim] > whole_blocks(self.length):
            self.buffer = self.buffer.narrow(self.dim, 0, whole_blocks(self.length)).clone()

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "GrowingTensor":
        """The same with what is filled changed, the length kept."""
        new = copy.copy(self)
        new.buffer, new.owns_buffer = change(self.filled), False
        return new

    def move(self, device: torch.device | str, non_blocking: bool = True) -> None:
        """Moves the buffer, with its room, to `device`."""
        self.buffer = self.buffer.to(device, non_blocking=non_blocking)


class _MovesTogether:
    """
    What a layer adds so that every operation moves the `token_ids` [B, T] together with latents and rotated keys, and
    keeps what was derived from the three true.

    Derived state is workspace of fast decoding, neither copied nor pickled, and rebuilt when lost: `statistics`, for
    each of the group's layers the mean and inverse deviation of every token's gated features [B, 2, T], which move
    along; and `token_groups`, for each sequence its positions sorted by id, dropped by all but appending.
    """

    token_ids: torch.Tensor | None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.forget_derived()

    def forget_derived(self) -> None:
        self.statistics: dict[int, GrowingTensor] = {}
        self.token_groups: list = []

    @property
    def derived_bytes(self) -> int:
        statistics = sum(stream.buffer.nbytes for stream in self.statistics.values())
        return statistics + sum(groups.nbytes for groups in self.token_groups)

    def __getstate__(self):
        return {**self.__dict__, "statistics": {}, "token_groups": []}

    def _change_token_ids(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.token_ids is not None:
            self.token_ids = change(self.token_ids)

    def _change_rows(self, change: Callable[[torch.Tensor], torch.Tensor], statistics: dict) -> None:
        self._change_token_ids(change)
        self.token_groups = []
        self.statistics = {layer: stream.changed(change) for layer, stream in statistics.items()}

    # What follows takes `statistics` before the library assigns new keys, which forgets them.

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        statistics = self.statistics
        super().reorder_cache(beam_idx)
        self._change_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)), statistics)

    def batch_repeat_interleave(self, repeats: int) -> None:
        statistics = self.statistics
        super().batch_repeat_interleave(repeats)
        self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0), statistics)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        statistics = self.statistics
        super().batch_select_indices(indices)
        self._change_rows(lambda tensor: tensor[indices], statistics)

    def _crop_derived(self) -> None:
        self.token_groups = []
        if not self.statistics:
            return  # and of a static cache elsewhere than on a CPU, whose length is not on the host
        length = int(self.get_seq_length())
        if length == 0:
            self.statistics = {}  # what comes next may have another number of rows
        for stream in self.statistics.values():
            stream.length = min(stream.length, length)


class EGMLALayer(_MovesTogether, DynamicLayer):
    """
    Cache of one layer group that grows with the sequence. `keys` are the latents [B, 1, T, C], `values` the rotated
    keys [B, 1, T, R], the places where the library's own MLA keeps them.

    Args:
        holds_token_ids (`bool`): Whether this layer, the first of its cache, also holds the ids that all layers use.
    """

    def __init__(self, holds_token_ids: bool = False):
        self.streams: dict[str, GrowingTensor] = {}
        self.holds_token_ids = holds_token_ids
        super().__init__()

    # Operations of the base class read and assign these attributes; through them they reach the growing buffers.
    def _stream(name: str, dim: int) -> property:
        def get(self) -> torch.Tensor | None:
            return self.streams[name].filled if name in self.streams else None

        def put(self, tensor: torch.Tensor | None) -> None:
            self.forget_derived()
            self.streams.pop(name, None)
            if tensor is not None:
                self.streams[name] = GrowingTensor(tensor, dim)

        return property(get, put)

    keys, values, token_ids = _stream("keys", -2), _stream("values", -2), _stream("token_ids", -1)
    del _stream

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device = key_states.device
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        if self.holds_token_ids:
            self.token_ids = torch.empty((key_states.shape[0], 0), dtype=torch.int32, device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, token_ids: torch.Tensor, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Appends latents [B, 1, S, C], rotated keys [B, 1, S, R] and, in the first layer, ids [B, S].

        Returns all latents and all rotated keys, [B, 1, T, C] and [B, 1, T, R].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        new = {"keys": key_states, "values": value_states}
        if self.holds_token_ids:
            new["token_ids"] = token_ids.to(self.token_ids.device, torch.int32)
        for name, tensor in new.items():
            self.streams[name].check(tensor)  # all, before any is longer than the others
        for name, tensor in new.items():
            self.streams[name].append(tensor)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.streams["keys"].length if self.is_initialized else 0

    def reset(self) -> None:
        super().reset()
        self.token_ids = None

    def offload(self) -> None:
        self.forget_derived()
        for name, stream in self.streams.items():
            stream.move("cpu", non_blocking=name != "token_ids")  # which the host reads at once, in the same layer

    def prefetch(self) -> None:
        self.forget_derived()
        for stream in self.streams.values():
            stream.move(self.device)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last tokens; `tokens_to_remove` is negative, as everywhere in the library."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop` takes the number of tokens to remove as a negative number, but {tokens_to_remove} was given: "
                f"pass {-tokens_to_remove} to remove that many."
            )
        for stream in self.streams.values():
            stream.crop(-tokens_to_remove)
        self._crop_derived()

    @property
    def allocated_bytes(self) -> int:
        return sum(stream.buffer.nbytes for stream in self.streams.values())


class _StaticBatch(StaticLayer):
    """Adds to the library's static layer the two operations on the batch that only its dynamic layer has."""

    def _change_batch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.is_initialized:
            self.keys, self.values = change(self.keys), change(self.values)
            self.batch_size = self.keys.shape[0]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_batch(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change_batch(lambda tensor: tensor[indices])


class EGMLAStaticLayer(_MovesTogether, _StaticBatch):
    """
    Cache of one layer group with room for `max_cache_len` tokens, for compilation. Streams as in [`EGMLALayer`], with
    T the whole room; slots that are not filled hold zeros and are masked.
    """

    def __init__(self, max_cache_len: int, holds_token_ids: bool = False):
        super().__init__(max_cache_len=max_cache_len)
        self.holds_token_ids = holds_token_ids
        self.token_ids = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if self.holds_token_ids:
            self.token_ids = torch.zeros((self.batch_size, self.max_cache_len), dtype=torch.int32, device=self.device)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.token_ids)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, token_ids: torch.Tensor, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As [`EGMLALayer.update`]; returns the whole room, [B, 1, max_cache_len, C] and [B, 1, max_cache_len, R]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._thaw()
        for room, new in ((self.keys, key_states), (self.values, value_states)):
            if (room.shape[0], room.shape[-1]) != (new.shape[0], new.shape[-1]):
                raise ValueError(
                    f"The cache has room of shape {tuple(room.shape)}, to which {tuple(new.shape)} cannot be written: "
                    "the batch size or the model changed. Use a new cache, or reorder this one first."
                )
        if not torch.compiler.is_compiling() and self.keys.device.type == "cpu":  # elsewhere it would wait
            length = int(self.cumulative_length) + key_states.shape[-2]
            if length > self.max_cache_len:
                raise ValueError(
                    f"The static cache has room for {self.max_cache_len} tokens, but {length} are to be in it: make "
                    "one with a larger `max_cache_len`."
                )
        if self.holds_token_ids:
            cache_position = torch.arange(token_ids.shape[1], device=self.device) + self.cumulative_length
            self.token_ids.index_copy_(1, cache_position, token_ids.to(self.device, torch.int32))
        return super().update(key_states, value_states)

    def _thaw(self) -> None:
        """Copies what was made under inference_mode and is about to be written to outside of it."""
        if is_frozen(self.cumulative_length):
            self.cumulative_length = self.cumulative_length.clone()
        if self.is_initialized and is_frozen(self.keys):
            self.keys, self.values = self.keys.clone(), self.values.clone()
            self._change_token_ids(torch.clone)

    def reset(self) -> None:
        self._thaw()
        super().reset()
        if self.token_ids is not None:
            self.token_ids.zero_()
        self.forget_derived()

    def offload(self) -> None:
        super().offload()
        self.forget_derived()
        self._change_token_ids(lambda ids: ids.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        super().prefetch()
        self.forget_derived()
        if self.is_initialized:
            self._change_token_ids(lambda ids: ids.to(self.device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        """As [`EGMLALayer.crop`]; slots of removed tokens are written over later."""
        self._thaw()
        super().crop(tokens_to_remove)
        self.cumulative_length.clamp_(min=0)
        self._crop_derived()

    @property
    def allocated_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.keys, self.values, self.token_ids) if tensor is not None)


class _LatentCache(Cache):
    """What both caches share: how they are read, rebuilt and counted."""

    # How the model tells a cache of latents from one of expanded keys and values, also across copies of this file.
    holds_latents = True

    def __init__(self, config: EGMLAConfig, layers: list, offloading: bool):
        # One layer has no other to run while it is fetched, and would be fetched while it is written to.
        super().__init__(layers=layers, offloading=offloading and len(layers) > 1)
        self.stream_widths = (config.kv_lora_rank, config.qk_rope_head_dim)

    def early_initialization(
        self, batch_size: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Makes the streams of all layers now. `num_heads` and `head_dim` are the library's, and not read."""
        streams = [torch.empty((batch_size, 1, 0, width), dtype=dtype, device=device) for width in self.stream_widths]
        for layer in self.layers:
            if not layer.is_initialized:
                layer.lazy_initialization(*streams)

    def check(self, config: EGMLAConfig) -> None:
        """
        Raises:
            ValueError: the cache was made for another model, or a forward pass was interrupted while it wrote.
        """
        if len(self.layers) != config.num_layer_groups:
            raise ValueError(
                f"The cache was made for {len(self.layers)} layer groups, but this model has "
                f"{config.num_layer_groups}: make it with `{type(self).__name__}(model.config)`."
            )
        widths = (config.kv_lora_rank, config.qk_rope_head_dim)
        if self.stream_widths != widths:
            raise ValueError(
                f"The cache was made for latents and rotated keys of widths {self.stream_widths}, but this model's "
                f"are {widths}: make it with `{type(self).__name__}(model.config)`."
            )
        # On an accelerator a static cache's lengths lie there, and reading them would wait for the device.
        lengths = [layer.get_seq_length() for layer in self.layers]
        if all(isinstance(length, int) or length.device.type == "cpu" for length in lengths):
            lengths = {int(length) for length in lengths}
            if len(lengths) > 1:
                raise ValueError(
                    f"The layers of the cache hold {sorted(lengths)} tokens: a forward pass was interrupted. Reset "
                    "the cache, or use a new one."
                )

    @property
    def token_ids(self) -> torch.Tensor | None:
        """
        Ids of the cached tokens, [B, T], int32; None before the first update. A view, valid until the cache next
        changes.
        """
        ids = self.layers[0].token_ids
        if self.offloading and ids is not None and ids.is_cuda:
            # The first layer, which holds them, may be on its way back while later layers run.
            torch.cuda.current_stream(ids.device).wait_stream(self.prefetch_stream)
        return ids

    @property
    def latents(self) -> list[torch.Tensor | None]:
        """
        Latents after their RMSNorm, one [B, 1, T, C] for each layer group. They are views, valid until the cache next
        changes.
        """
        return [layer.keys for layer in self.layers]

    @property
    def rotated_keys(self) -> list[torch.Tensor | None]:
        """
        Rotated keys that all heads share, one [B, 1, T, R] for each layer group. They are views, valid until the cache
        next changes.
        """
        return [layer.values for layer in self.layers]

    def fill(
        self,
        latents: Sequence[torch.Tensor],
        rotated_keys: Sequence[torch.Tensor],
        token_ids: torch.Tensor,
    ) -> "_LatentCache":
        """
        Appends the three streams of another cache, as `latents`, `rotated_keys` and `token_ids` give them (of a static
        cache, its filled part); an empty cache that is filled so continues as the other would.

        Raises:
            ValueError: the streams do not belong together.
        """
        if not len(latents) == len(rotated_keys) == len(self.layers):
            raise ValueError(
                f"This cache has {len(self.layers)} layer groups, but {len(latents)} latents and {len(rotated_keys)} "
                "rotated keys were given."
            )
        widths = {(latent.shape[-1], key.shape[-1]) for latent, key in zip(latents, rotated_keys)}
        if widths != {self.stream_widths}:
            raise ValueError(
                f"This cache was made for latents and rotated keys of widths {self.stream_widths}, but these have "
                f"{sorted(widths)}."
            )
        sizes = {tuple(token_ids.shape)} | {(t.shape[0], t.shape[2]) for t in (*latents, *rotated_keys)}
        if len(sizes) > 1:
            raise ValueError(f"Latents, rotated keys and token ids must cover the same tokens, but cover {sizes}.")
        for index, (latent, rotated_key) in enumerate(zip(latents, rotated_keys)):
            self.update(latent, rotated_key, index, token_ids=token_ids)
        return self

    def memory(self) -> CacheMemory:
        """Bytes held now: filled streams, filled ids, what is allocated ahead, and derived workspace."""
        filled_latents = filled_ids = allocated = workspace = 0
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            length = int(layer.get_seq_length())
            filled_latents += layer.keys[:, :, :length].nbytes + layer.values[:, :, :length].nbytes
            if layer.token_ids is not None:
                filled_ids += layer.token_ids[:, :length].nbytes
            allocated += layer.allocated_bytes
            workspace += layer.derived_bytes
        return CacheMemory(filled_latents, filled_ids, allocated - filled_latents - filled_ids, workspace)


class EGMLACache(_LatentCache):
    """
    Cache of an EG-MLA model that grows with the sequence, by blocks of 256 tokens; what `generate()` uses by default.

    Args:
        config ([`EGMLAConfig`]): Configuration of the model.
        offloading (`bool`, defaults to `False`): Keep layers on the host and fetch each ahead of use (needs CUDA).
            A cache of one layer group stays on the device.

    ```python
    >>> cache = EGMLACache(model.config)
    >>> outputs = model(input_ids, cache=cache)
    >>> cache.memory().latents  # bytes: batch x tokens x config.cache_elements_per_token x bytes an element
    ```
    """

    def __init__(self, config: EGMLAConfig, offloading: bool = False):
        layers = [EGMLALayer(holds_token_ids=index == 0) for index in range(config.num_layer_groups)]
        super().__init__(config, layers, offloading)


class EGMLAStaticCache(_LatentCache):
    """
    Cache of an EG-MLA model with room for `max_cache_len` tokens that never moves, for compiled generation
    (`generate(cache_implementation="static")` makes one).

    Args:
        config ([`EGMLAConfig`]): Configuration of the model.
        max_cache_len (`int`): Tokens that the cache has room for.
        offloading (`bool`, defaults to `False`): Keep layers on the host and fetch each ahead of use (needs CUDA).
            A cache of one layer group stays on the device.
    """

    def __init__(self, config: EGMLAConfig, max_cache_len: int, offloading: bool = False):
        if max_cache_len < 1:
            raise ValueError(f"`max_cache_len` must be at least 1, but is {max_cache_len}.")
        layers = [
            EGMLAStaticLayer(max_cache_len, holds_token_ids=index == 0) for index in range(config.num_layer_groups)
        ]
        super().__init__(config, layers, offloading)


__all__ = ["CacheMemory", "EGMLACache", "EGMLAStaticCache"]
