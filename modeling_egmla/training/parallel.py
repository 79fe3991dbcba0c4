"""
Training on several processes: gate tables cut by columns, and the model sharded by FSDP2 (docs/parallel.md).

Everything here is called by all processes of the mesh alike.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.weak import WeakIdKeyDictionary

from ..gate_egmla import token_gates
from ..modeling_egmla import EGMLADecoderLayer


class GatheredIds(NamedTuple):
    """Distinct ids of every process, joined, with their numbers by process, and where each local id is in its own."""

    ids: torch.Tensor
    counts: list[int]
    inverse: torch.Tensor


class IdExchange:
    """What all tables of a model know about the ids of a forward pass: gathered once, by the first table."""

    def __init__(self, mesh: DeviceMesh):
        self.group = mesh.get_group()
        self._gathered = WeakIdKeyDictionary()  # as long as the ids live, so that recomputed layers find them too

    def gather(self, ids: torch.Tensor, renew: bool) -> GatheredIds:
        """Gathers `ids` of any shape; with `renew` even if this tensor was gathered before, as it may be reused."""
        if renew or ids not in self._gathered:
            distinct, inverse = ids.unique(return_inverse=True)
            size = self.group.size()
            counts = ids.new_empty(size)
            dist.all_gather_single(counts, ids.new_tensor([len(distinct)]), group=self.group)
            counts = counts.tolist()
            longest = max(counts)
            padded = ids.new_empty(size * longest)
            dist.all_gather_single(padded, F.pad(distinct, (0, longest - len(distinct))), group=self.group)
            joined = torch.cat([row[:count] for row, count in zip(padded.view(size, longest), counts)])
            self._gathered[ids] = GatheredIds(joined, counts, inverse)
        return self._gathered[ids]


class ShardedEmbedding(nn.Module):
    """
    A gate table in W slices of `embedding_dim` / W columns, one on each of the W processes of `mesh`.

    A process looks its columns up for the ids of all processes and sends each of them those of its ids. Gradients take
    the way back: from all processes to the one that has the columns and their optimizer state, divided by W, as those
    that data parallelism averages. The weight is a `DTensor` of the whole table's shape.

    Args:
        embedding: the whole table; process 0's counts.
        mesh: the data-parallel processes, one-dimensional.
        exchange: shared by all tables of a model.
        is_first: whether the model's forward pass comes to this table first.
    """

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh, exchange: IdExchange, is_first: bool):
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.weight = nn.Parameter(
            distribute_tensor(embedding.weight.data, mesh, [Shard(1)]), embedding.weight.requires_grad
        )
        self.exchange = exchange
        self.is_first = is_first

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, processes={self.exchange.group.size()}"

    @torch.compiler.disable  # the sizes of what is exchanged depend on the ids
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the rows of `ids`, [..., embedding_dim]."""
        gathered = self.exchange.gather(ids, renew=self.is_first)
        columns = F.embedding(gathered.ids, self.weight.to_local())
        group = self.exchange.group
        size, count = group.size(), gathered.counts[group.rank()]
        slices = all_to_all_single_autograd(columns, [count] * size, gathered.counts, group)
        rows = slices.view(size, count, -1).transpose(0, 1).reshape(count, self.embedding_dim)
        if rows.requires_grad:
            rows.register_hook(lambda gradient: gradient / size)
        return F.embedding(gathered.inverse, rows)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        """Takes a whole table, as a checkpoint has it."""
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and not isinstance(weight, DTensor) and weight.shape == self.weight.shape:
            state_dict = {**state_dict, f"{prefix}weight": _cut(weight, self.weight)}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def shard_gate_tables(model: nn.Module, mesh: DeviceMesh | None = None) -> None:
    """
    Cuts every gate table of `model` by columns, a slice for each process (a [`ShardedEmbedding`] in its place), and
    tells `DistributedDataParallel` to leave them alone. Call it before DDP or [`shard_model`], and before making the
    optimizer, which needs the tables in a parameter group of their own.

    Args:
        model: an EG-MLA model; process 0's tables count.
        mesh: the data-parallel processes, one-dimensional; by default all.

    Raises:
        ValueError: the model has no gate tables, or they are cut already or wrapped by an adapter, or their width is
            not a multiple of the number of processes.
    """
    gates = token_gates(model)
    if not gates:
        raise ValueError('There are no gate tables to cut: `kv_gate` is "none".')
    if other := {type(gate.kv_gate_embed) for gate in gates} - {nn.Embedding}:
        raise ValueError(f"Only plain embeddings can be cut by columns, but `kv_gate_embed` is a {other.pop()}.")
    if mesh is None:
        mesh = init_device_mesh(gates[0].kv_gate_embed.weight.device.type, (dist.get_world_size(),))
    width = gates[0].kv_gate_embed.embedding_dim
    if width % mesh.size():
        raise ValueError(
            f"`kv_gate_dim` is {width}, which {mesh.size()} processes cannot share evenly: each takes as many columns "
            "of the gate tables. Take a number of processes that divides it."
        )
    exchange = IdExchange(mesh)
    for gate in gates:
        gate.kv_gate_embed = ShardedEmbedding(gate.kv_gate_embed, mesh, exchange, is_first=gate is gates[0])
    names = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


def shard_model(model: nn.Module, mesh: DeviceMesh, **options) -> nn.Module:
    """
    Shards parameters, gradients and optimizer state by FSDP2: each gate table is a unit of its own, each decoder layer
    another, and the rest one more; the up-projection that a layer group shares is one as well. Tables that
    [`shard_gate_tables`] has cut stay as they are.

    Args:
        model: an EG-MLA model; process 0's weights and buffers count, as with DDP.
        mesh: the data-parallel processes, one-dimensional.
        options: of `torch.distributed.fsdp.fully_shard`, such as `mp_policy` and `reshard_after_forward`.

    Returns:
        The same model.
    """
    tables = [gate.kv_gate_embed for gate in token_gates(model)]
    whole = [table for table in tables if not isinstance(table, ShardedEmbedding)]
    cut = {parameter for parameter in model.parameters() if isinstance(parameter, DTensor)}
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor not in cut:
            dist.broadcast(tensor.data, group=mesh.get_group(), group_src=0)
    layers = [module for module in model.modules() if isinstance(module, EGMLADecoderLayer)]
    owners = [layer.self_attn for layer in layers if layer.self_attn.owns_latent]
    shared = [owner.kv_b_proj for owner in owners if owner.config.layer_group_size > 1]
    for module in [*whole, *shared, *layers, model]:
        fully_shard(module, mesh=mesh, ignored_params=cut, **options)
    return model


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> torch.Tensor:
    """
    `torch.nn.utils.clip_grad_norm_` for parameters of which some are sharded and some are not: the norm is that of the
    whole gradient, on every process.

    Returns:
        The norm before clipping.
    """
    parameters = [p for p in parameters if p.grad is not None]
    groups = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    norms = [get_total_norm([p.grad for p in group]) for group in groups if group]
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    for group in groups:
        clip_grads_with_norm_(group, max_norm, norm)
    return norm


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """
    The weights of a model whose tables or other parameters are sharded, whole: what `save_pretrained(state_dict=...)`
    takes. Processes other than the first get an empty one.
    """
    return _whole(model.state_dict())


def full_optimizer_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """
    The state of an optimizer over sharded parameters as one process would have it, so that any number of processes can
    continue from it with [`load_optimizer_state_dict`]. Processes other than the first get an empty one.
    """
    return _whole(optimizer.state_dict())


def load_optimizer_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads what [`full_optimizer_state_dict`] gave, or one process's own `optimizer.state_dict()`."""
    optimizer.load_state_dict(cut_optimizer_state(optimizer, state_dict))


def cut_optimizer_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A whole optimizer state, with this process's part of what belongs to sharded parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {
            name: _cut(value, parameters[index]) if torch.is_tensor(value) and value.dim() else value
            for name, value in values.items()
        }
        for index, values in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _cut(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A whole tensor, the same on all processes, laid out as the parameter `like`."""
    if not isinstance(like, DTensor) or isinstance(value, DTensor):
        return value
    cut = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return DTensor.from_local(
        cut.to_local().clone(), like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


def _whole(tree: dict[str, Any]) -> dict[str, Any]:
    """Every sharded tensor whole and on the CPU; an empty dictionary on all processes but the first."""
    is_first = dist.get_rank() == 0

    def gather(value):
        if isinstance(value, dict):
            return {key: gather(child) for key, child in value.items()}
        if isinstance(value, DTensor):
            whole = value.detach().full_tensor()
            return whole.cpu() if is_first else None
        return value

    whole = gather(tree)
    return whole if is_first else {}
