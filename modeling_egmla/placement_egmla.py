"""
Where a model's gate tables are and how precise: the methods of [`EGMLAPreTrainedModel`] for that.

docs/placement.md says what to choose when; tables and their pool are in `table_egmla.py`, files in `mapped_egmla.py`.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from .gate_egmla import TokenGate, token_gates
from .mapped_egmla import find_tables, write_tensors
from .table_egmla import (
    POOL_ROWS,
    GateRowPool,
    PlacedEmbedding,
    PlacedTable,
    Placement,
    are_tables_left_out,
    narrow,
    tables_left_out,
)


PLACEMENTS = ("device", "host", "mmap")
ROW_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}


def find_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A precision of rows by its name; None for None."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in ROW_DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(ROW_DTYPES)}, but is {dtype!r}.")
    return ROW_DTYPES[name]


@dataclass(frozen=True)
class GateStatistics:
    """
    What [`~EGMLAPreTrainedModel.kv_gate_statistics`] says; sizes in bytes, over all layers.

    Attributes:
        device: tables on the device.
        host: tables on the host.
        file: tables in files that are mapped.
        pool: rows on the device, whether they are taken or not; `pool_rows` of them a layer, `rows` of them taken.
        hits: distinct ids of a forward pass, summed over all of them, whose rows were there.
        misses: those whose rows were not.
        bytes_moved: what was brought to the device. Compiled steps read tables directly and are not counted.
    """

    device: int = 0
    host: int = 0
    file: int = 0
    pool: int = 0
    pool_rows: int = 0
    rows: int = 0
    hits: int = 0
    misses: int = 0
    bytes_moved: int = 0


class EGMLAGatePlacement:
    """Gates of a whole model: precomputed, placed, narrowed, counted."""

    _loaded_from: dict | None = None  # arguments of `find_tables`

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if are_tables_left_out():
            self._keys_to_ignore_on_load_unexpected = [r"\.kv_gate_embed\.weight$"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, kv_gates: dict | None = None, **kwargs):
        """
        As the library's, with a say in where gate tables go.

        Args:
            kv_gates: arguments of [`~EGMLAPreTrainedModel.place_kv_gates`], e.g. `{"placement": "host"}`. Tables are
                then read from the checkpoint's files straight to their place: neither `device_map` nor what it moves
                to a device sees them.
        """
        if not isinstance(kv_gates, dict | None):
            raise ValueError(f'`kv_gates` must be a dict, such as {{"placement": "host"}}, but is {kv_gates!r}.')
        with nullcontext() if kv_gates is None else tables_left_out():
            loaded = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # What was just loaded is on this machine, so neither the network nor a token is needed to read it again.
        model._loaded_from = {"checkpoint": model.name_or_path, "local_files_only": True}
        if model.name_or_path == str(pretrained_model_name_or_path):  # and not an adapter's, whose base was loaded
            names = ("revision", "variant", "subfolder", "cache_dir")
            model._loaded_from |= {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        if kv_gates is not None:
            model.place_kv_gates(**kv_gates)
        return loaded

    def _gates_to_place(self) -> list[TokenGate]:
        if gates := token_gates(self):
            return gates
        raise ValueError("This model has no gates (`kv_gate='none'`), so there are no tables to place or save.")

    def precompute_kv_gates(self, dtype: str | torch.dtype | None = None) -> None:
        """
        Computes the gates of all ids, so that they are looked up and not projected (EG-MLA-A in the paper).

        Beside the tables they are made from, these take `vocab_size` x `config.kv_width` elements a layer in the
        weights' precision, or as [`~EGMLAPreTrainedModel.place_kv_gates`] says. They are derived state: not saved with
        the model, not used in training or where gradients are wanted, computed again at the next use after their
        parameters changed, moved or were resized (in a model that is compiled as a whole: at the next call that is
        not). Layers whose gate modules are wrapped by an adapter, quantised or offloaded go on projecting.

        Args:
            dtype: as in `place_kv_gates`.

        Raises:
            ValueError: the tables were narrowed before, or are memory-mapped, where a file is wanted; `dtype` cannot
                be.
        """
        row_dtype = find_dtype(dtype)
        for gate in token_gates(self):
            gate.precompute_kv_gates(row_dtype)

    def release_kv_gates(self) -> None:
        """Frees what [`~EGMLAPreTrainedModel.precompute_kv_gates`] computed."""
        for gate in token_gates(self):
            gate.release_kv_gates()

    def place_kv_gates(
        self,
        placement: str = "device",
        dtype: str | torch.dtype | None = None,
        pool_rows: int = POOL_ROWS,
        checkpoint: str | None = None,
        gates_file: str | None = None,
    ) -> None:
        """
        Chooses where gate tables are and how precise, for inference (docs/placement.md says what to choose when).

        Tables that are not on the device lend their rows to a pool there, each distinct id once for as long as there
        is room. Placed or narrowed tables are no parameters: training with them is refused, and so is saving a model
        whose original values were given up. Without arguments, tables go back to the device.

        Args:
            placement: `"device"`; `"host"`, page-locked where CUDA is; `"mmap"`, left in the checkpoint's safetensors
                files, which must stay as they are.
            dtype: of the rows that gates are looked up in, `"bfloat16"`, `"float16"` or `"int8"` (each row with one
                float32 scale); by default that of the model. After `precompute_kv_gates()` these are the precomputed
                ones, and the tables behind them keep their values.
            pool_rows: rows a layer that stay on the device. Enough for the distinct ids of all sequences at once, or
                the rest is brought over again at every step.
            checkpoint: folder or Hub id to read tables from, at its main revision; by default what was loaded.
            gates_file: file that [`~EGMLAPreTrainedModel.save_kv_gates`] wrote; its precomputed gates are used, as
                after `precompute_kv_gates()`. Only with `"mmap"`.

        Raises:
            ValueError: the model has no gates; an argument that cannot be; a file whose tables are not the model's;
                original values that were given up.
        """
        gates = self._gates_to_place()
        if placement not in PLACEMENTS:
            raise ValueError(f"`placement` must be one of {', '.join(PLACEMENTS)}, but is {placement!r}.")
        if not isinstance(pool_rows, int) or pool_rows < 1:
            raise ValueError(f"`pool_rows` must be a whole number of at least 1, but is {pool_rows!r}.")
        if gates_file is not None and placement != "mmap":
            raise ValueError(f"`gates_file` is memory-mapped: it goes with placement 'mmap', not {placement!r}.")
        stored = {}
        if placement == "mmap" or any(gate.lacks_table for gate in gates):
            source = {"checkpoint": self.name_or_path if checkpoint is None else checkpoint}
            if checkpoint is None and self._loaded_from is not None:
                source = self._loaded_from
            stored = find_tables(suffix="self_attn.kv_gate_embed.weight", **source)
            missing = [gate.layer_idx for gate in gates if gate.layer_idx not in stored]
            if missing:
                raise ValueError(
                    f"{source['checkpoint']} has no tensor layers.{missing[0]}.self_attn.kv_gate_embed.weight: it is "
                    "no checkpoint of this model."
                )
        pool = None if placement == "device" else GateRowPool(pool_rows)
        chosen = Placement(placement, find_dtype(dtype))
        planned = [gate.plan_placement(chosen, pool, stored.get(gate.layer_idx), gates_file) for gate in gates]
        for put in planned:
            put()
        self.base_model.kv_gate_pool = pool

    def save_kv_gates(self, path: str, dtype: str | torch.dtype | None = None) -> None:
        """
        Writes the gates of all ids to a safetensors file, from which [`~EGMLAPreTrainedModel.place_kv_gates`] maps
        them; a piece at a time, in no more memory than that.

        Args:
            path: file to write. It appears whole or not at all.
            dtype: as in `place_kv_gates`; `vocab_size` x `config.kv_width` elements a layer.

        Raises:
            ValueError: the model has no gates, its original tables were given up, its gate projections are no plain
                ones, or `dtype` cannot be.
        """
        gates = self._gates_to_place()
        for gate in gates:
            gate.check_projects_plainly()
        row_dtype = find_dtype(dtype) or gates[0].kv_gate_proj.weight.dtype
        tables, shape = {}, (self.config.vocab_size, self.config.kv_width)
        for gate in gates:
            name = f"layers.{gate.layer_idx}.kv_gates"
            tables[name] = (row_dtype, shape)
            if row_dtype == torch.int8:
                tables[f"{name}.scales"] = (torch.float32, (shape[0], 1))

        def chunks() -> Iterator[torch.Tensor]:
            for gate in gates:
                scales = []
                for rows in gate.gate_chunks():
                    values, scale = narrow(rows, row_dtype)
                    scales.append(scale)
                    yield values.cpu()
                if row_dtype == torch.int8:
                    yield torch.cat(scales).cpu()

        write_tensors(path, tables, chunks())

    def kv_gate_statistics(self) -> GateStatistics:
        """Where the tables are that gates are looked up in, and what was brought to the device since."""
        sizes = dict.fromkeys(("device", "host", "file"), 0)
        for gate in token_gates(self):
            for table in gate.tables():
                sizes[table.where if isinstance(table, PlacedTable) else "device"] += table.nbytes
        pool = self.base_model.kv_gate_pool
        return GateStatistics(**sizes, **(pool.statistics() if pool is not None else {}))

    def prefetch_kv_gates(self, gates: Iterable[TokenGate], token_ids: torch.Tensor, cache) -> None:
        """
        Brings the rows to the device that `gates` look up in a forward pass of the decoder: of new tokens and, where
        the cache holds latents, of the history.
        """
        pool = self.kv_gate_pool
        if pool is None or torch.compiler.is_compiling():
            return
        tables = [table for gate in gates if (table := gate.pooled_table()) is not None]
        if getattr(cache, "holds_latents", False) and cache.token_ids is not None:
            token_ids = torch.cat((cache.token_ids.to(token_ids.device).flatten(), token_ids.flatten()))
        pool.admit(token_ids, tables)

    def refuse_placed_tables(self, change: str) -> None:
        """Raises a `ValueError` if tables are elsewhere or narrowed, and so cannot be `change`d."""
        if any(isinstance(gate.kv_gate_embed, PlacedEmbedding) for gate in token_gates(self)):
            raise ValueError(
                f"Gate tables that were placed or narrowed cannot be {change}: put them back with "
                "`model.place_kv_gates()` first."
            )

    def save_pretrained(self, save_directory, *args, **kwargs):
        """
        As the library's. Gate tables are saved with the values that they had before they were placed.

        Raises:
            ValueError: these were given up, or are mapped from the folder that would be written to.
        """
        tables = [table for gate in token_gates(self) for table in gate.tables() if isinstance(table, PlacedTable)]
        for path in {table.mapped.path for table in tables if table.mapped is not None}:
            if os.path.dirname(os.path.realpath(path)) == os.path.realpath(save_directory):
                raise ValueError(f"Gate tables are mapped from {path}, so {save_directory} cannot be written over.")
        for gate in token_gates(self):
            if isinstance(gate.kv_gate_embed, PlacedEmbedding) and "state_dict" not in kwargs:
                gate.kv_gate_embed.original()  # raises before anything is written
        return super().save_pretrained(save_directory, *args, **kwargs)


__all__ = ["EGMLAGatePlacement", "GateStatistics"]
