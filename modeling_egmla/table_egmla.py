"""
Gate tables that live elsewhere than the model, or in another precision: on the host, or in a safetensors file that is
memory-mapped; docs/placement.md says what to choose when.

A table that is not on the device lends its rows to a pool on the device: each distinct id is brought over once for all
layers, and stays until rows that were used later need its room. Rows that find no room are brought for one use.

Shapes: V `vocab_size`, W width of a table (`kv_gate_dim`, or D for precomputed gates), P rows of the pool.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import logging

from .mapped_egmla import MappedTensor


logger = logging.get_logger(__name__)

POOL_ROWS = 4096
ADVISED_ROWS = 64  # rows of a step that the system is asked to read ahead; for a whole prompt, asking costs more


@dataclass(frozen=True)
class Placement:
    """
    Where gate tables are, and how precise.

    Attributes:
        where: `"device"`, `"host"` or `"mmap"`.
        dtype: precision of the rows that gates are looked up in; None: the model's.
    """

    where: str = "device"
    dtype: torch.dtype | None = None

    @property
    def is_default(self) -> bool:
        return self == Placement()


_TABLES_LEFT_OUT = ContextVar("tables_left_out", default=False)


@contextmanager
def tables_left_out() -> Iterator[None]:
    """Models made inside have no gate tables yet, so that what loads and places the rest does not meet them."""
    token = _TABLES_LEFT_OUT.set(True)
    try:
        yield
    finally:
        _TABLES_LEFT_OUT.reset(token)


def are_tables_left_out() -> bool:
    return _TABLES_LEFT_OUT.get()


def new_gate_embedding(num_embeddings: int, embedding_dim: int) -> nn.Module:
    """The table of a new model, or what [`tables_left_out`] has in its place."""
    if are_tables_left_out():
        return PlacedEmbedding(num_embeddings, embedding_dim, like=torch.empty(0))
    # No padding_idx: it would freeze the gate of the padding id at zero, and that id often is eos as well.
    return nn.Embedding(num_embeddings, embedding_dim)


def narrow(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows in `dtype`, and for int8 the float32 scale of each, [..., 1]: its largest magnitude is 127."""
    if dtype != torch.int8:
        return rows.to(dtype), None
    rows = rows.float()
    scales = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8), scales


def widen(values: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What [`narrow`] was given, up to rounding, in `dtype`."""
    return values.to(dtype) if scales is None else (values * scales).to(dtype)


class PlacedTable:
    """
    A table [V, W] by token id, as it is stored, and its rows as they are lent.

    Args:
        values: on the device, on the host, or mapped.
        dtype: of the rows that are lent. Where `values` have another one, rows are narrowed when they are read.
        exact: precision of the model's own table, through which rows of a file of another precision go.
        scales: of `values` that are int8, [V, 1].
        pool: where rows are kept on the device; None for a table that is there itself.
        mapped: the file behind `values`.
        is_narrowed: the original values are gone.
    """

    def __init__(
        self,
        values: torch.Tensor,
        dtype: torch.dtype,
        scales: torch.Tensor | None = None,
        exact: torch.dtype | None = None,
        pool: "GateRowPool | None" = None,
        mapped: MappedTensor | None = None,
        is_narrowed: bool = False,
    ):
        self.values, self.scales, self.dtype, self.exact = values, scales, dtype, exact or values.dtype
        self.pool, self.mapped, self.is_narrowed = pool, mapped, is_narrowed

    @classmethod
    def empty(
        cls,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        pool: "GateRowPool | None" = None,
        **kwargs,
    ) -> "PlacedTable":
        """Room to [`~PlacedTable.write`] a table into; page-locked if it is to lend rows to a CUDA device."""
        pins = pool is not None and device.type == "cpu" and torch.cuda.is_available()
        values = torch.empty(shape, dtype=dtype, device=device, pin_memory=pins)
        scales = None
        if dtype == torch.int8:
            scales = torch.empty((shape[0], 1), dtype=torch.float32, device=device, pin_memory=pins)
        return cls(values, dtype, scales, pool=pool, **kwargs)

    def write(self, start: int, rows: torch.Tensor) -> None:
        values, scales = narrow(rows, self.dtype)
        self.values[start : start + len(rows)].copy_(values)
        if scales is not None:
            self.scales[start : start + len(rows)].copy_(scales)

    def rows(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows and scales of `token_ids` [...], which are where the table is, in `dtype`: [..., W] and [..., 1]."""
        values = F.embedding(token_ids, self.values)
        if self.scales is None:
            return (values, None) if values.dtype == self.dtype else narrow(values.to(self.exact), self.dtype)
        return values, F.embedding(token_ids, self.scales)

    def look_up(self, token_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of `token_ids` [...] in `dtype`, on their device: [..., W]."""
        if self.pool is None or torch.compiler.is_compiling():  # a pool is filled by code that cannot be compiled
            device = token_ids.device
            values, scales = self.rows(token_ids.to(self.values.device))
            return widen(values.to(device), None if scales is None else scales.to(device), dtype)
        return widen(*self.pool.look_up(self, token_ids), dtype)

    def read_ahead(self, token_ids: torch.Tensor) -> None:
        if self.mapped is not None:
            self.mapped.read_ahead(token_ids)

    def let_go(self) -> None:
        """Takes what was read of a mapped table out of this process."""
        if self.mapped is not None:
            self.mapped.let_go()

    def to(self, device: torch.device) -> None:
        self.values = self.values.to(device)
        self.scales = None if self.scales is None else self.scales.to(device)

    def __getstate__(self):
        return {**self.__dict__, "values": None} if self.mapped is not None else self.__dict__

    def __setstate__(self, state):
        self.__dict__ |= state
        if self.mapped is not None:
            self.values = self.mapped.tensor  # copies share the file, and are no copies of it

    @property
    def where(self) -> str:
        return "file" if self.mapped is not None else "device" if self.pool is None else "host"

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)


class GateRowPool:
    """
    Rows of tables that are elsewhere, on every device that looks rows up in them.

    All layers look the same ids up, so one account serves the tables of a device: an id has the same place in the
    pool of each. It is kept on the device, and a step waits for the device once, to learn which ids are missing.
    Threads that share a model take turns, and may take each other's rows out between two layers.

    Args:
        capacity: P, rows that each table may keep on the device.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.pools: dict[torch.device, _DevicePool] = {}
        self.lock = threading.Lock()

    def admit(self, token_ids: torch.Tensor, tables: list[tuple[PlacedTable, torch.device]]) -> None:
        """
        Brings over the rows of all ids that a forward pass looks up and that are not there yet.

        Args:
            token_ids: of the history and of new tokens, any shape.
            tables: in the order of layers, with the devices on which they are looked up.
        """
        devices = {device for _, device in tables}
        with self.lock:
            self.pools = {device: pool for device, pool in self.pools.items() if device in devices}
            for device in devices:
                here = [table for table, used_on in tables if used_on == device]
                pool = self.pools.get(device)
                if pool is None or list(pool.shelves) != here:  # precomputed or released, computed again, or moved
                    pool = _DevicePool(min(self.capacity, len(here[0].values)), here, device)
                    self.pools[device] = pool
                pool.admit(token_ids.to(device).flatten())

    def look_up(self, table: PlacedTable, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of `token_ids` and their scales, on the device of `token_ids`."""
        with self.lock:
            pool = self.pools.get(token_ids.device)
            if pool is None or table not in pool.shelves:
                pool = _DevicePool(0, [table], token_ids.device)  # of a layer that is called by itself
            return pool.look_up(table, token_ids)

    def statistics(self) -> dict[str, int]:
        """Sums over devices; see [`GateStatistics`]."""
        pools = self.pools.values()
        return {
            "pool": sum(shelf.nbytes for pool in pools for shelf in pool.shelves.values()),
            "pool_rows": sum(len(pool.id_of_slot) for pool in pools),
            "rows": sum(int((pool.id_of_slot >= 0).sum()) for pool in pools),
            "hits": sum(int(pool.needed) - pool.misses for pool in pools),
            "misses": sum(pool.misses for pool in pools),
            "bytes_moved": sum(pool.bytes_moved for pool in pools),
        }

    def __reduce__(self):
        return type(self), (self.capacity,)


class _DevicePool:
    """The pools of all tables that are looked up on one device."""

    @torch.inference_mode(False)
    def __init__(self, capacity: int, tables: list[PlacedTable], device: torch.device):
        self.device, self.step = device, 0
        self.slot_of_id = torch.full((len(tables[0].values),), -1, device=device)
        self.id_of_slot = torch.full((capacity,), -1, device=device)
        self.last_used = torch.zeros(len(tables[0].values), dtype=torch.long, device=device)  # by id, a step
        self.needed, self.misses, self.bytes_moved = torch.zeros((), dtype=torch.long, device=device), 0, 0
        self.has_room = False  # for all that the step looks up, which is that of the thread
        self.thread = threading.get_ident()
        self.shelves = {
            table: PlacedTable.empty((capacity, table.values.shape[1]), table.dtype, device) for table in tables
        }
        self.coming: dict[PlacedTable, list] = {table: [] for table in tables}
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.arrived = {}

    @torch.inference_mode(False)
    @torch.no_grad()
    def admit(self, token_ids: torch.Tensor) -> None:
        self.step += 1
        self.thread = threading.get_ident()
        needed = torch.zeros_like(self.slot_of_id, dtype=torch.bool)
        needed[token_ids] = True
        self.last_used.masked_fill_(needed, self.step)
        self.needed += needed.sum()
        missing = (needed & (self.slot_of_id < 0)).nonzero().squeeze(1)  # waits for the device
        self.has_room = True
        if len(missing) == 0:
            return
        self.misses += len(missing)
        slots = self._slots(len(missing))
        if len(slots) < len(missing):
            self.has_room = False
            logger.warning_once(
                f"The texts have more distinct ids than the {len(self.id_of_slot):,} gate rows a layer that the pool "
                "has room for: the others are brought over again at every step. Results are the same; "
                "`model.place_kv_gates(..., pool_rows=...)` makes it larger."
            )
        missing = missing[: len(slots)]
        on_host = missing.cpu()
        # In this order an interruption costs reads, and never leaves an id with the row of another.
        evicted = self.id_of_slot[slots]
        self.slot_of_id[evicted[evicted >= 0]] = -1
        for coming in self.coming.values():
            coming.append((on_host, slots))
        self.id_of_slot[slots] = missing
        self.slot_of_id[missing] = slots
        if len(on_host) <= ADVISED_ROWS:
            for table in self.shelves:
                table.read_ahead(on_host)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still read what is replaced
            for table in self.shelves:
                self._fill(table)

    def _slots(self, count: int) -> torch.Tensor:
        """Places for `count` rows, or as many as there are: empty ones, then those not used for longest."""
        used = torch.where(self.id_of_slot >= 0, self.last_used[self.id_of_slot.clamp(min=0)], -1)
        slots = used.argsort()[:count]
        return slots[used[slots] < self.step]

    def _fill(self, table: PlacedTable) -> None:
        """Brings over what the table is to lend."""
        for token_ids, slots in self.coming[table]:
            with torch.cuda.stream(self.stream):
                for shelf, rows in zip(self._streams(self.shelves[table]), self._bring(table, token_ids)):
                    shelf.index_copy_(0, slots, rows)
                    if self.stream is not None:
                        shelf.record_stream(self.stream)
                if self.stream is not None:
                    slots.record_stream(self.stream)
                    self.arrived[table] = self.stream.record_event()
        self.coming[table] = []

    def _bring(self, table: PlacedTable, token_ids: torch.Tensor) -> list[torch.Tensor]:
        """Rows of ids on the host, and their scales if they have any, on the device."""
        rows = [tensor for tensor in table.rows(token_ids) if tensor is not None]
        table.let_go()
        self.bytes_moved += sum(tensor.nbytes for tensor in rows)
        if self.stream is not None:
            rows = [tensor.pin_memory() for tensor in rows]
        return [tensor.to(self.device, non_blocking=True) for tensor in rows]

    @staticmethod
    def _streams(table: PlacedTable) -> list[torch.Tensor]:
        return [tensor for tensor in (table.values, table.scales) if tensor is not None]

    @torch.inference_mode(False)
    @torch.no_grad()
    def look_up(self, table: PlacedTable, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._fill(table)  # on a CPU; meanwhile the system reads what later layers need
        if table in self.arrived:
            torch.cuda.current_stream(self.device).wait_event(self.arrived[table])
        slots = self.slot_of_id[token_ids]
        is_sure = self.has_room and self.thread == threading.get_ident()
        absent = slots < 0 if self.stream is None or not is_sure else None
        if absent is None or not absent.any():
            return self.shelves[table].rows(slots)
        distinct, inverse = token_ids[absent].unique(return_inverse=True)
        out = []
        for shelf, rows in zip(self._streams(self.shelves[table]), self._bring(table, distinct.cpu())):
            looked_up = shelf.new_empty((*token_ids.shape, shelf.shape[1]))
            looked_up[~absent] = shelf[slots[~absent]]
            looked_up[absent] = rows[inverse]
            out.append(looked_up)
        return out[0], out[1] if len(out) > 1 else None


class PlacedEmbedding(nn.Module):
    """
    The projected gates' table, in place of the `nn.Embedding` that a model is trained with: not a parameter.

    Args:
        table: None where it is filled in after the rest of a checkpoint has been loaded.
        like: a tensor whose device and dtype are those of the model.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, like: torch.Tensor, table: PlacedTable | None = None):
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.table = num_embeddings, embedding_dim, table
        self.was_trainable = True  # whether the parameter that it stands for was
        # Moves and casts with the model, and says by it where rows are wanted.
        self.register_buffer("like", torch.empty(0, dtype=like.dtype, device=like.device), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """Stored values, [V, W]; of int8 rows without their scales. What depends on the table can tell it by them."""
        return self.table.values

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise ValueError(
                "Gate tables that were placed or narrowed are no parameters and cannot be trained: load the model "
                "without, or put them back with `model.place_kv_gates()`."
            )
        return self.table.look_up(token_ids, self.like.dtype)

    def original(self) -> torch.Tensor:
        """
        The table as it was before it was placed, where it is, in the model's precision or that of its file.

        Raises:
            ValueError: it was narrowed, and its values are gone.
        """
        if self.table.is_narrowed:
            raise ValueError(
                f"The gate tables were narrowed to {str(self.table.dtype).removeprefix('torch.')} and their original "
                "values given up, so they can neither be saved, nor placed otherwise, nor precomputed from: load the "
                "model again for that."
            )
        return self.table.values

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.table is not None and self.table.pool is None and self.like.device.type != "meta":
            self.table.to(self.like.device)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if self.table is not None:
            destination[prefix + "weight"] = self.original().to(self.like.dtype)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, error_msgs):
        if prefix + "weight" in state_dict:
            error_msgs.append(
                f"{prefix}weight is a placed or narrowed gate table, which cannot be written to: put tables back with "
                "`model.place_kv_gates()` first."
            )


def place_embedding(
    embedding: nn.Module,
    placement: Placement,
    pool: GateRowPool | None,
    stored: tuple[str, str] | None = None,
) -> nn.Module:
    """
    Returns the table of `embedding` as `placement` wants it: an `nn.Embedding` or [`PlacedEmbedding`].

    Args:
        stored: file and name of the table in a checkpoint; read for `"mmap"`, and where there is no table yet.

    Raises:
        ValueError: the table is not the stored one, or its original values are gone.
    """
    where = placement.where
    if placement.is_default and type(embedding) is nn.Embedding:
        return embedding
    is_placed = isinstance(embedding, PlacedEmbedding)
    was_trainable = embedding.was_trainable if is_placed else embedding.weight.requires_grad
    if is_placed:
        like, original = embedding.like, None if embedding.table is None else embedding.original()
        mapped = None if embedding.table is None else embedding.table.mapped
    else:
        like, mapped = embedding.weight.detach(), None
        original = like
    shape = (embedding.num_embeddings, embedding.embedding_dim)
    if stored is not None:
        mapped = MappedTensor(*stored)
    if mapped is not None and not mapped.tensor.is_floating_point():
        raise ValueError(
            f"{mapped.name} in {mapped.path} has whole numbers and no scales, so it is no gate table of this model: "
            "save the model with `save_pretrained(folder)`, and name the folder as `checkpoint`."
        )
    if mapped is not None and tuple(mapped.tensor.shape) != shape:
        raise ValueError(
            f"{mapped.name} in {mapped.path} has shape {tuple(mapped.tensor.shape)}, but this model's table {shape}."
        )
    if original is None:
        original = mapped.tensor
    elif mapped is not None and not _agree(original, mapped, like.dtype):
        raise ValueError(
            f"The gate table of the model is not {mapped.name} in {mapped.path}: it was changed since. Save the model "
            "with `save_pretrained(folder)`, and name the folder as `checkpoint`."
        )

    exact = min(original.dtype, like.dtype, key=lambda dtype: dtype.itemsize)
    dtype = placement.dtype or exact
    if where == "mmap":
        table = PlacedTable(mapped.tensor, dtype, exact=exact, pool=pool, mapped=mapped)
    elif placement.is_default:
        placed = nn.Embedding(*shape, device="meta")
        rows = original.to(like.device, like.dtype, copy=mapped is not None)
        placed.weight = nn.Parameter(rows, requires_grad=was_trainable)
        return placed.train(embedding.training)
    else:
        device = torch.device("cpu") if where == "host" else like.device
        is_narrowed = dtype == torch.int8 or torch.promote_types(dtype, exact) != dtype
        table = PlacedTable.empty(shape, dtype, device, pool=pool, is_narrowed=is_narrowed)
        table.write(0, original.to(exact))
    placed = PlacedEmbedding(*shape, like, table).train(embedding.training)
    placed.was_trainable = was_trainable
    return placed


def _agree(original: torch.Tensor, mapped: MappedTensor, dtype: torch.dtype) -> bool:
    """Whether a table has the values that its file has in this precision."""
    rows = mapped.tensor.split(8192)
    same = all(torch.equal(a.to("cpu", dtype), b.to(dtype)) for a, b in zip(original.split(8192), rows))
    mapped.let_go()
    return same
