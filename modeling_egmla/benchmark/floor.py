"""
How fast a step could be: the bytes and operations that it cannot do without, over the machine's measured rates.

    floor = sum over parts of max(bytes / bandwidth, operations / rate)

The parts of a step are its weights and its history. They take turns in every layer, each waiting for the other's
result, and nothing is read ahead.

Each system is held to its own way of computing: MLA of the library expands the history, EG-MLA takes the query to the
latents once for each distinct id (docs/decoding.md), and on accelerators expands it too. What is counted is read or
written once; sums, norms, softmax, copies and calls are free. So no system reaches its floor, and the ratio of two
floors is what the ratio of two systems could become, not what it must.

Shapes: B batch, T tokens, H heads, C latent, R rotary width, D = H * (d_nope + d_v), K = H * (d_nope + d_rope),
V = H * d_v, U distinct ids of a sequence, W those of the batch.
"""

import time
from dataclasses import asdict, dataclass

import torch

from .. import plan
from .cells import Cell
from .systems import FUSED, Shape


@dataclass(frozen=True)
class Rates:
    """
    What a machine reaches with all its threads, the best of several tries.

    Attributes:
        bandwidth: bytes a second, reading memory that no cache holds.
        operations: multiplications and additions a second in products of large matrices, by dtype.
    """

    bandwidth: float
    operations: dict[str, float]

    def to_dict(self) -> dict:
        return asdict(self)


def measure_rates(device: str, dtypes: list[str], side: int | None = None, megabytes: int | None = None) -> Rates:
    """
    Measures the rates of a device with square matrices of `side`, and by summing `megabytes` of numbers; by default
    2,048 and 512 on a CPU. An accelerator gets more, often enough to wake up, so that calling it does not count.
    """
    on_cpu = torch.device(device).type == "cpu"
    side, megabytes = side or (2048 if on_cpu else 8192), megabytes or (512 if on_cpu else 4096)
    tries, calls = (5, 1) if on_cpu else (20, 10)

    def best(call) -> float:
        seconds = []
        for _ in range(tries):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            synchronize(device)
            seconds.append((time.perf_counter() - start) / calls)
        return min(seconds)

    memory = torch.ones(megabytes << 18, device=device)
    bandwidth = memory.nbytes / best(memory.sum)
    operations = {}
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
        out = torch.empty_like(a)
        operations[dtype] = 2 * side**3 / best(lambda a=a, b=b, out=out: torch.mm(a, b, out=out))
    return Rates(bandwidth, operations)


def synchronize(device: str) -> None:
    """Waits until an accelerator has done what it was given."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize()


@dataclass(frozen=True)
class Work:
    """Bytes to move and operations to do at least, at the same time."""

    bytes: float
    operations: float

    def seconds(self, rates: Rates, dtype: str) -> float:
        return max(self.bytes / rates.bandwidth, self.operations / rates.operations[dtype])


def least_work(
    shape: Shape, name: str, cell: Cell, token_ids: torch.Tensor, expands: bool = False
) -> tuple[Work, Work]:
    """
    Work of a step (prefill: of the prompt) of one system, with its weights and with its history: cache and gates.

    Args:
        shape, name, cell: what is measured.
        token_ids: of the cached tokens, or of the prompt, [B, T].
        expands: whether steps of our models expand the history, with the gate of each token, as on accelerators.
    """
    config, size = shape.egmla_config(name), plan.BYTES[cell.dtype]
    B, T, L, H = cell.batch, cell.prompt, config.num_hidden_layers, config.num_attention_heads
    C, R, D, K = config.kv_lora_rank, config.qk_rope_head_dim, config.kv_width, H * config.qk_head_dim
    V, is_gated = H * config.v_head_dim, name.startswith("egmla")
    each_U = [len(row.unique()) for row in token_ids] if is_gated else []
    W = len(token_ids.unique()) if is_gated else 0

    if name in ("mha", "gqa"):
        heads = shape.gqa_heads if name == "gqa" else H
        parameters = plan.multi_head_parameters(config, heads)
        cached, scored = 2 * heads * config.v_head_dim, 2 * V
    else:
        parameters = plan.count_parameters(config).activated
        cached, scored = (K + V, K + V) if name == "egmla-stock" else (C + R, K + V)
    embeddings = config.vocab_size * config.hidden_size
    norms = (2 * L + 1) * config.hidden_size
    if name not in ("mha", "gqa"):
        norms += config.num_layer_groups * C + L * (2 * D * is_gated + (config.q_lora_rank or 0))
    body = parameters - norms - embeddings * (1 if config.tie_word_embeddings else 2)
    gate_macs, gate_bytes = 0, 0
    if is_gated:
        projection, is_projected = L * config.kv_gate_dim * D, not name.startswith("egmla-a")
        body -= projection  # once for each distinct id, not for each token
        gate_macs = W * projection * is_projected
        gate_bytes = size * L * W * (config.kv_gate_dim if is_projected else D)
        parameters -= projection * (not is_projected)

    groups = L if name in ("mha", "gqa", "mla", "egmla-stock") else config.num_layer_groups
    if cell.phase == "prefill":
        attention = L * B * T * (T + 1) // 2 * scored
        weights = Work(size * parameters, 2 * (B * T * body + B * embeddings))
        return weights, Work(size * B * T * groups * cached + gate_bytes, 2 * (attention + gate_macs))

    weights = Work(size * parameters, 2 * B * (body + embeddings))
    moved, macs = size * B * T * cached * groups, 0
    if name == "mla" or (expands and name not in ("mha", "gqa", "egmla-stock", FUSED)):
        macs = B * T * (groups * C * D + L * scored)  # expands keys and values, writes them and reads them
        moved += size * 2 * L * B * T * (K + V)
        if is_gated:
            gate_macs = B * T * projection * is_projected
            gate_bytes = size * L * B * T * (config.kv_gate_dim if is_projected else D)
    elif name == FUSED:
        macs = L * B * T * (C * D + scored)
    elif name in ("mha", "gqa", "egmla-stock"):
        macs = L * B * T * scored
        if name == "egmla-stock":
            gate_macs, gate_bytes = L * B * config.kv_gate_dim * D, size * L * B * config.kv_gate_dim
    else:
        macs = L * B * T * H * (2 * C + R) + L * sum(each_U) * D * C
    return weights, Work(moved + gate_bytes, 2 * (macs + gate_macs))
