"""
The gate of EG-MLA: a vector over all heads' keys and values that is looked up by token id, one table a layer.

A gate is projected from a narrow row (the paper's EG-MLA) or read from a table of all ids' gates (its EG-MLA-A).

Shapes: D = heads * (`qk_nope_head_dim` + `v_head_dim`), the gate's width.
"""

import os
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .configuration_egmla import EGMLAConfig
from .mapped_egmla import MappedTensor
from .table_egmla import (
    GateRowPool,
    PlacedEmbedding,
    PlacedTable,
    Placement,
    new_gate_embedding,
    place_embedding,
    widen,
)


PRECOMPUTE_CHUNK = 8192  # ids projected at a time

# Of a stored gate against one projected anew, to the largest of its row.
RELATIVE_ROUNDING = {
    torch.float64: 1e-5,
    torch.float32: 1e-5,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
    torch.int8: 0.51 / 127,
}

NEEDS_GATES_FILE = (
    "Precomputed gates can be memory-mapped only from a file: write it with `model.save_kv_gates(file)`, then "
    "`model.place_kv_gates('mmap', gates_file=file)`; or `model.release_kv_gates()` first, to map what they are "
    "projected from."
)

# Of torch's private functions, so that it may be gone one day: float32 is right everywhere, if not as fast.
CPU_MULTIPLIES_BF16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()


class EGMLAGateProjection(nn.Linear):
    """Projects rows of a gate table to the width of K/V; a class of its own for its initial scale."""


PLAIN_MODULES = (nn.Linear, EGMLAGateProjection, nn.Embedding, PlacedEmbedding, nn.LayerNorm, nn.Identity)


def is_plain(*modules: nn.Module) -> bool:
    """
    Whether reading the weights of these modules means the same as calling them: false for one that is wrapped by an
    adapter, parametrized, quantised, sharded, offloaded or hooked.
    """
    return all(
        type(module) in PLAIN_MODULES
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and all(type(p.data) is torch.Tensor and p.device.type != "meta" for p in module.parameters(recurse=False))
        for module in modules
    )


def has_fast_matmul(tensor: torch.Tensor) -> bool:
    """Whether matrix products in this precision are fast: on CPUs without instructions for it, bfloat16 is not."""
    if tensor.device.type != "cpu" or tensor.dtype not in (torch.bfloat16, torch.float16):
        return True
    return tensor.dtype == torch.bfloat16 and CPU_MULTIPLIES_BF16


def project(linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Calls `linear`, which may be a wrapped one or on another device, through float32 where that is faster."""
    if has_fast_matmul(x) or not is_plain(linear):
        return linear(x)
    bias = None if linear.bias is None else linear.bias.float()
    return F.linear(x.float(), linear.weight.float(), bias).to(x.dtype)


def token_gates(model: nn.Module) -> "list[TokenGate]":
    """Attention modules with a gate, by layer."""
    return [module for module in model.modules() if isinstance(module, TokenGate) and module.kv_gate != "none"]


def gate_table_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Weights of the gate tables, and of adapters on them."""
    return [parameter for name, parameter in model.named_parameters() if "kv_gate_embed" in name]


class Sources:
    """What something was computed from: `parameters`, as they were then."""

    def __init__(self, parameters: list[nn.Parameter]):
        # The alias keeps the storage alive, so that another one cannot appear at its address, and shares the version.
        self.states = [(weakref.ref(p), p.detach(), self._version(p)) for p in parameters]

    @staticmethod
    def _version(tensor: torch.Tensor) -> int | None:
        return None if tensor.is_inference() else tensor._version

    def is_current(self, parameters: list[nn.Parameter]) -> bool:
        """Whether `parameters` are the same ones with the same memory, not written to since."""
        return all(
            reference() is p
            and (alias.data_ptr(), alias.dtype, alias.shape) == (p.data_ptr(), p.dtype, p.shape)
            and version == self._version(p)
            for p, (reference, alias, version) in zip(parameters, self.states)
        )


class GateTable(NamedTuple):
    """Gates of all ids, [vocab_size, D], with what they were computed from; a [`PlacedTable`] if they were placed."""

    gates: torch.Tensor | PlacedTable
    sources: Sources


class TokenGate(nn.Module):
    """
    What attention knows about gates. The table `kv_gate_embed`, its projection `kv_gate_proj` and the norm of what was
    gated, `kv_gate_norm`, are modules of the attention itself.

    After [`~TokenGate.precompute_kv_gates`] gates come from a [`GateTable`]. That is derived state: neither saved nor
    copied, read only in evaluation mode where no gradient is wanted, and computed again when next used after its
    parameters were replaced, moved or written to. What writes through `parameter.data`, as merging an adapter, and
    fused optimizers leave no trace on the parameter; so `train()`, a forward pass with gradients and loading weights
    drop the table too, and so does replacing one of its modules, as putting an adapter on or taking it off does.

    `kv_gate_placement` says where tables are and how precise ([`~TokenGate.plan_placement`]).
    """

    def init_kv_gate(self, config: EGMLAConfig) -> None:
        self.kv_gate = config.kv_gate
        self.precomputes_kv_gates = False
        self.kv_gate_placement = Placement()
        self.kv_gate_pool: GateRowPool | None = None
        self.kv_gate_file: str | None = None
        self._kv_gate_table: GateTable | None = None
        if self.kv_gate != "none":
            self.kv_gate_embed = new_gate_embedding(config.vocab_size, config.kv_gate_dim)
            self.kv_gate_proj = EGMLAGateProjection(config.kv_gate_dim, config.kv_width, bias=False)
            self.kv_gate_norm = (
                nn.LayerNorm(config.kv_width, eps=config.kv_gate_norm_eps)
                if config.kv_gate_norm == "layer_norm"
                else nn.Identity()
            )

    def resize_table(self, vocab_size: int) -> None:
        """
        Gives the table `vocab_size` rows. A new id's is the mean of all rows where the gate multiplies (no row is
        neutral there), and zeros where it is added.
        """
        embedding = self.kv_gate_embed
        rows = embedding.weight.data
        if vocab_size == rows.shape[0]:
            return
        self._kv_gate_table = None
        if vocab_size > rows.shape[0]:
            new_row = rows.new_zeros(rows.shape[1])
            if self.kv_gate == "multiply":
                wide = rows.cpu() if rows.device.type == "mps" else rows  # MPS has no float64
                new_row = wide.double().mean(0).to(rows.device, rows.dtype)
            added = new_row.expand(vocab_size - rows.shape[0], -1)
            embedding.weight.data = torch.cat((rows, added))
        else:
            embedding.weight.data = rows[:vocab_size].clone()
        embedding.num_embeddings = vocab_size

    def precompute_kv_gates(self, dtype: torch.dtype | None = None) -> None:
        """Computes the gates of all ids now; see [`EGMLAPreTrainedModel.precompute_kv_gates`]."""
        if self.kv_gate == "none":
            return
        if self.kv_gate_placement.where == "mmap" and self.kv_gate_file is None:
            raise ValueError(NEEDS_GATES_FILE)
        self._original_rows()  # raises where they are gone
        self.precomputes_kv_gates = True
        if dtype is not None and dtype != self.kv_gate_placement.dtype:
            self.kv_gate_placement, self._kv_gate_table = Placement(self.kv_gate_placement.where, dtype), None
        self._current_gate_table()

    def release_kv_gates(self) -> None:
        """Frees the table; gates are projected again, from a table that was never narrowed."""
        if self.precomputes_kv_gates:
            self.kv_gate_placement = Placement(self.kv_gate_placement.where)
        self.precomputes_kv_gates = False
        self.kv_gate_file = self._kv_gate_table = None

    def plan_placement(
        self,
        placement: Placement,
        pool: GateRowPool | None,
        stored: tuple[str, str] | None = None,
        gates_file: str | None = None,
    ) -> Callable[[], None]:
        """
        Makes the tables as `placement` wants them, and returns what puts them in place, which cannot fail any more;
        see [`EGMLAPreTrainedModel.place_kv_gates`].
        """
        if not isinstance(self.kv_gate_embed, PlacedEmbedding) and not is_plain(self.kv_gate_embed):
            raise ValueError(
                f"The gate table of layer {self.layer_idx} is wrapped by an adapter, quantised, sharded or offloaded, "
                "so it cannot be placed: merge or take off what is around it first."
            )
        gates_file = None if gates_file is None else os.path.abspath(gates_file)  # it may be read again elsewhere
        precomputes = self.precomputes_kv_gates or gates_file is not None
        if precomputes and placement.where == "mmap" and gates_file is None:
            raise ValueError(NEEDS_GATES_FILE)
        # Precomputed gates are what is looked up and narrowed; the table behind them keeps its values.
        projected = Placement(placement.where, None) if precomputes else placement
        embedding = place_embedding(self.kv_gate_embed, projected, pool, stored)
        gates = None
        if gates_file is not None:
            gates = self._read_gates(gates_file, embedding, placement, pool)

        def put() -> None:
            self.kv_gate_embed = embedding
            self.kv_gate_placement, self.kv_gate_pool, self.kv_gate_file = placement, pool, gates_file
            self.precomputes_kv_gates = precomputes
            self._kv_gate_table = None if gates is None else GateTable(gates, Sources(self._gate_parameters()))

        return put

    def kv_gates(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Returns the gates of `token_ids`, [..., D]."""
        table = self._gate_table()
        if table is None:
            return project(self.kv_gate_proj, self._rows(token_ids))
        if isinstance(table, PlacedTable):
            return table.look_up(token_ids, self.kv_gate_proj.weight.dtype)
        return F.embedding(token_ids, table)

    def _rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        embed = self.kv_gate_embed
        if type(embed) is nn.Embedding and embed.weight.device not in (token_ids.device, torch.device("meta")):
            # Moved by hand, or left on the host by accelerate (`_no_placement_params`).
            return embed(token_ids.to(embed.weight.device)).to(token_ids.device)
        return embed(token_ids)

    @property
    def lacks_table(self) -> bool:
        """Whether the rest of a checkpoint was loaded, and the table is yet to be read."""
        return isinstance(self.kv_gate_embed, PlacedEmbedding) and self.kv_gate_embed.table is None

    def tables(self) -> list[torch.Tensor | PlacedTable]:
        """What there is now: the table that gates are projected from, and that of precomputed gates."""
        embed = self.kv_gate_embed
        projected = embed.table if isinstance(embed, PlacedEmbedding) else embed.weight
        return [projected] if self._kv_gate_table is None else [projected, self._kv_gate_table.gates]

    def pooled_table(self) -> tuple[PlacedTable, torch.device] | None:
        """The table whose rows are brought to the device when gates are looked up, and that device."""
        if not isinstance(getattr(self, "kv_gate_embed", None), PlacedEmbedding):
            return None
        table = self._gate_table()
        table = self.kv_gate_embed.table if table is None else table
        device = self.kv_gate_embed.like.device
        return (table, device) if table.pool is not None and device.type != "meta" else None

    def gate_tensors(self) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """
        What `kv_gates` reads: a table [vocab_size, D] and None, or rows [vocab_size, kv_gate_dim] and the weight that
        projects them; without gates, None twice. None alone where these are no plain tensors in memory, since a table
        is placed or a module wrapped.
        """
        if self.kv_gate == "none":
            return None, None
        table = self._gate_table()
        if isinstance(table, torch.Tensor):
            return table, None
        if table is not None or type(self.kv_gate_embed) is not nn.Embedding:
            return None
        is_readable = is_plain(self.kv_gate_embed, self.kv_gate_proj)
        return (self.kv_gate_embed.weight, self.kv_gate_proj.weight) if is_readable else None

    def gate_kv(self, kv_features: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Gates up-projected latents [..., D] by their tokens' ids and normalises the result over all heads."""
        if self.kv_gate == "none":
            return kv_features
        gates = self.kv_gates(token_ids)
        return self.kv_gate_norm(kv_features * gates if self.kv_gate == "multiply" else kv_features + gates)

    def _gate_table(self) -> torch.Tensor | PlacedTable | None:
        """The table of all gates, or None where they are to be projected."""
        modules = (self.kv_gate_embed, self.kv_gate_proj)
        if torch.is_grad_enabled() and any(p.requires_grad for m in modules for p in m.parameters()):
            self._kv_gate_table = None  # an optimizer may step next
            return None
        return self._current_gate_table()

    def _gate_parameters(self) -> list[torch.Tensor]:
        return [self.kv_gate_embed.weight, self.kv_gate_proj.weight]

    def _current_gate_table(self) -> torch.Tensor | PlacedTable | None:
        """Returns the table of all gates where it may be used, computing it if it is not there or no longer right."""
        if not self.precomputes_kv_gates or self.training or not is_plain(self.kv_gate_embed, self.kv_gate_proj):
            return None
        table = self._kv_gate_table
        if torch.compiler.is_compiling():  # what was computed from is checked by the calls that are not compiled
            return table.gates if table is not None else None
        if table is None or not table.sources.is_current(self._gate_parameters()):
            self._kv_gate_table = table = None  # before the new one is allocated
            if self.kv_gate_file is None:
                gates = self._compute_gates()
            else:
                gates = self._read_gates(
                    self.kv_gate_file, self.kv_gate_embed, self.kv_gate_placement, self.kv_gate_pool
                )
            self._kv_gate_table = table = GateTable(gates, Sources(self._gate_parameters()))
        return table.gates

    def _original_rows(self, embedding: nn.Module | None = None) -> torch.Tensor:
        """The projected gates' table as it was trained, wherever it is."""
        embedding = self.kv_gate_embed if embedding is None else embedding
        return embedding.original() if isinstance(embedding, PlacedEmbedding) else embedding.weight.detach()

    def gate_chunks(self) -> Iterator[torch.Tensor]:
        """Gates of all ids in order, some at a time, where the projection is."""
        for rows in self._original_rows().split(PRECOMPUTE_CHUNK):
            yield self._projected(rows)
        self._let_go(self.kv_gate_embed)

    @staticmethod
    def _let_go(embedding: nn.Module) -> None:
        if isinstance(embedding, PlacedEmbedding):
            embedding.table.let_go()

    def check_projects_plainly(self) -> None:
        """Raises a `ValueError` if the projection is not what its weights say."""
        if not is_plain(self.kv_gate_proj):
            raise ValueError(
                f"The gate projection of layer {self.layer_idx} is wrapped by an adapter, quantised, sharded or "
                "offloaded, so its gates cannot be written to a file or compared with one."
            )

    @torch.no_grad()
    def _projected(self, rows: torch.Tensor) -> torch.Tensor:
        self.check_projects_plainly()
        like = self.kv_gate_proj.weight
        with torch.autocast(like.device.type, enabled=False):
            return project(self.kv_gate_proj, rows.to(like))

    def _compute_gates(self) -> torch.Tensor | PlacedTable:
        embed, proj, placement = self.kv_gate_embed, self.kv_gate_proj, self.kv_gate_placement
        table = PlacedTable.empty(
            (embed.num_embeddings, proj.out_features),
            placement.dtype or proj.weight.dtype,
            torch.device("cpu") if placement.where == "host" else proj.weight.device,
            pool=self.kv_gate_pool,
        )
        for index, gates in enumerate(self.gate_chunks()):
            table.write(index * PRECOMPUTE_CHUNK, gates)
        return table.values if placement.is_default else table

    def _read_gates(
        self, path: str, embedding: nn.Module, placement: Placement, pool: GateRowPool | None
    ) -> PlacedTable:
        """
        The gates that [`~EGMLAPreTrainedModel.save_kv_gates`] wrote.

        Raises:
            ValueError: they are not those of this model, by a sample of 512 ids.
        """
        name = f"layers.{self.layer_idx}.kv_gates"
        mapped = MappedTensor(path, name)
        scales = MappedTensor(path, f"{name}.scales").tensor if mapped.tensor.dtype == torch.int8 else None
        dtype = placement.dtype or mapped.tensor.dtype
        if scales is not None and dtype != torch.int8:
            raise ValueError(f"The gates in {path} are int8, so `dtype` cannot be {dtype}: leave it out.")
        table = PlacedTable(mapped.tensor, dtype, scales, pool=pool, mapped=mapped)

        shape = (embedding.num_embeddings, self.kv_gate_proj.out_features)
        agrees = mapped.tensor.shape == shape
        if agrees:
            sample = torch.arange(0, shape[0], max(1, shape[0] // 512))
            rows = self._original_rows(embedding)
            expected = self._projected(rows[sample.to(rows.device)])
            tolerance = RELATIVE_ROUNDING[mapped.tensor.dtype] + RELATIVE_ROUNDING[expected.dtype]
            expected = expected.cpu().float()
            found = widen(mapped.tensor[sample], None if scales is None else scales[sample], torch.float32)
            largest = expected.abs().amax(-1, keepdim=True)
            agrees = bool(((found - expected).abs() <= tolerance * largest).all())
            table.let_go()
            self._let_go(embedding)
        if not agrees:
            raise ValueError(
                f"The gates of layer {self.layer_idx} in {path} are not those of this model: write the file again "
                "with `model.save_kv_gates(file)`."
            )
        return table

    def _load_from_state_dict(self, *args, **kwargs):
        self._kv_gate_table = None
        super()._load_from_state_dict(*args, **kwargs)

    def train(self, mode: bool = True):
        if mode:
            self._kv_gate_table = None
        return super().train(mode)

    def __setattr__(self, name, value):
        if name in ("kv_gate_embed", "kv_gate_proj"):
            self.__dict__["_kv_gate_table"] = None
        super().__setattr__(name, value)

    def __getstate__(self):
        return {**self.__dict__, "_kv_gate_table": None}
