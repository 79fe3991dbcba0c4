"""
The start of an EG-MLA model from an MLA model.

A gate of one changes nothing: every row of a layer's table has 1 in its first channel, the projection reads that
channel alone, and what else the projection holds meets zeros. With `kv_gate_norm="none"` the model is then the MLA
model. The LayerNorm is not neutral, since it divides by the norm of the whole up-projected vector M c (M the
up-projection, c the latent) and subtracts its mean. It becomes neutral if |M c| is the same for all tokens and M c has
no mean. Latents leave their RMSNorm with one norm (before its weight w, which is taken into M here), so the first
means that M is an isometry up to a factor: M^T M = (D / C) I.

What may be chosen, and undone exactly elsewhere:

* a basis for the keys of each head, k -> A k, q -> A^-T q, and for its values, v -> B v, o_proj -> o_proj B^-1. Then
  M^T M = sum over heads of K^T S K + V^T R V with S = A^T A and R = B^T B any positive definite matrices: the S and R
  nearest to an isometry are found by projected gradients (the problem is convex);
* a rotation of each such basis, which leaves S and R alone: chosen so that the channels of M sum to zero;
* a constant gate for each channel, undone in the norm's weight: no more than a diagonal A and B, so it stays at one.

A rotation of the latent changes M^T M by a rotation, so it cannot help.

Shapes: H heads, C `kv_lora_rank`, d channels of a head's keys or values, D = H (`qk_nope_head_dim` + `v_head_dim`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from .calibration import observe
from .weights import Weights, expected_tensors, with_config


STEPS = 60  # projected gradient steps; random projections of the usual shapes settle within 50
FLOOR = 0.05  # smallest eigenvalue of S and R against the mean, so that no channel is stretched beyond use


@dataclass(frozen=True)
class Basis:
    """
    A change of basis of one layer's keys and values, float64.

    Attributes:
        keys: A of every head, [H, d_nope, d_nope].
        values: B of every head, [H, d_v, d_v].
        spread_before, spread_after: largest over smallest singular value of the up-projection of normalised latents;
            1 is an isometry, and infinity means that it loses directions.
    """

    keys: torch.Tensor
    values: torch.Tensor
    spread_before: float
    spread_after: float


def near_isometry(kv_b: torch.Tensor, latent_weight: torch.Tensor, num_heads: int, nope: int) -> Basis:
    """
    Finds bases in which an up-projection of normalised latents is nearly an isometry with channels that sum to zero.

    Args:
        kv_b: weight of `kv_b_proj`, [H (nope + v), C].
        latent_weight: weight of `kv_a_layernorm`, [C].
        num_heads: H.
        nope: key channels of a head.
    """
    up = kv_b.double() * latent_weight.double()
    width, rank = up.shape
    halves = up.unflatten(0, (num_heads, -1)).split([nope, width // num_heads - nope], dim=1)
    whitened = [_whiten(half) for half in halves]
    maps, rows = [w for w, _ in whitened], [r for _, r in whitened]

    start = rank / sum(r.square().sum().item() for r in rows)
    forms = [start * torch.eye(r.shape[1], dtype=torch.float64).repeat(num_heads, 1, 1) for r in rows]
    forms = _nearest_to_identity(rows, forms, FLOOR * start)

    roots = [_root(form) for form in forms]
    blocks = [root @ r for root, r in zip(roots, rows)]
    scale = (width / sum(b.square().sum() for b in blocks)).sqrt()
    mirrors = _sum_to_zero([scale * b for b in blocks])
    bases = [scale * mirror @ root @ m for mirror, root, m in zip(mirrors, roots, maps)]
    after = torch.cat([base @ half for base, half in zip(bases, halves)], dim=1).flatten(0, 1)
    return Basis(*bases, spread_before=_spread(up), spread_after=_spread(after))


class Bases:
    """
    The [`Basis`] of every layer of an MLA model, found when it is asked for; layers of one group share it.

    Args:
        weights: of the model.
        keep: remember all of them; otherwise the last one only, which does where tensors are read layer by layer.

    Attributes:
        spreads: `spread_before` and `spread_after` of every layer group whose basis was asked for.
    """

    def __init__(self, weights: Weights, keep: bool = False):
        self.weights = weights
        self.spreads: dict[int, tuple[float, float]] = {}
        self._of_group = lru_cache(maxsize=None if keep else 1)(self._find)

    def __call__(self, layer: int) -> Basis:
        return self._of_group(layer // self.weights.config.layer_group_size)

    def _find(self, group: int) -> Basis:
        config = self.weights.config
        prefix = f"model.layers.{group * config.layer_group_size}.self_attn"
        basis = near_isometry(
            self.weights.read(f"{prefix}.kv_b_proj.weight"),
            self.weights.read(f"{prefix}.kv_a_layernorm.weight"),
            config.num_attention_heads,
            config.qk_nope_head_dim,
        )
        self.spreads[group] = (basis.spread_before, basis.spread_after)
        return basis


@dataclass(frozen=True)
class GateStart:
    """
    The gates that a model starts with.

    Attributes:
        kind: `"multiply"` or `"add"`; `"none"` for plain MLA.
        dim: `kv_gate_dim`.
        norm: `kv_gate_norm`.
    """

    kind: str = "none"
    dim: int = 256
    norm: str = "layer_norm"


def with_gate(
    weights: Weights,
    gate: GateStart,
    *,
    bases: Bases | None = None,
    fitted: Mapping[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> Weights:
    """
    An MLA model with a neutral gate in every layer.

    Args:
        weights: of a model with `kv_gate="none"`.
        gate: `"multiply"` (gates of one) or `"add"` (gates of zero). The norm `"none"` leaves the model as it is,
            `"layer_norm"` does so as far as the bases allow.
        bases: of keys and values, chosen for a LayerNorm; without, they stay as they are.
        fitted: LayerNorm weight and bias of every layer, [D] each, in the place of ones and zeros.
    """
    mla = weights.config
    config = with_config(mla, kv_gate=gate.kind, kv_gate_dim=gate.dim, kv_gate_norm=gate.norm)
    shapes = expected_tensors(config)

    def read(name: str) -> torch.Tensor:
        layer = layer_of(name)
        if ".kv_gate_" not in name:
            tensor = weights.read(name)
            return tensor if bases is None or layer is None else _in_basis(name, tensor, bases(layer), mla)
        if name.endswith("kv_gate_embed.weight"):
            tensor = torch.zeros(shapes[name])
            if gate.kind == "multiply":
                tensor[:, 0] = 1
        elif name.endswith("kv_gate_proj.weight"):
            # The random part meets zeros at first, and lets the tables learn.
            generator = torch.Generator().manual_seed(layer)
            tensor = torch.randn(shapes[name], generator=generator).mul_(gate.dim**-0.5)
            if gate.kind == "multiply":
                tensor[:, 0] = 1
        elif fitted is not None:
            tensor = fitted[layer][name.endswith("bias")]
        else:
            tensor = torch.full(shapes[name], 0.0 if name.endswith("bias") else 1.0)
        return tensor.to(dtype(name))

    def dtype(name: str) -> torch.dtype:
        return weights.dtype(stands_for(name))

    return Weights(config, read, dtype)


def stands_for(name: str) -> str:
    """Name of the tensor whose dtype a tensor takes: its own or, of a gate, that of the layer's output projection."""
    return f"{name.partition('.kv_gate_')[0]}.o_proj.weight" if ".kv_gate_" in name else name


@torch.no_grad()
def fit_norms(model, gated: Weights, windows: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """
    Fits the LayerNorm of every layer so that it gives back what goes in, channel by channel and by least squares.

    Args:
        model: the MLA model, in evaluation mode; latents are taken from it.
        gated: the same model with gates, in whose bases the LayerNorms work.
        windows: ids of calibration text, [N, S].

    Returns:
        Layer to weight and bias, [D] each, float64.
    """
    config = gated.config
    sums: dict[int, list[torch.Tensor]] = {}

    def collect(group: int, up: torch.Tensor, latent: torch.Tensor) -> None:
        features = latent.flatten(0, -2).double() @ up.T
        normed = torch.nn.functional.layer_norm(features, features.shape[-1:], eps=config.kv_gate_norm_eps)
        terms = (torch.ones_like(normed), normed, features, normed.square(), normed * features)
        new = [term.sum(0) for term in terms]
        sums[group] = [old + more for old, more in zip(sums[group], new)] if group in sums else new

    observers = {}
    for group in range(config.num_layer_groups):
        layer = group * config.layer_group_size
        up = gated.read(f"model.layers.{layer}.self_attn.kv_b_proj.weight").double()
        norm = model.model.layers[layer].self_attn.kv_a_layernorm
        observers[norm] = lambda _, latent, group=group, up=up: collect(group, up, latent)
    observe(model, windows, observers)

    fitted = {}
    for layer in range(config.num_hidden_layers):
        count, x, y, xx, xy = sums[layer // config.layer_group_size]
        variance = (xx / count - (x / count) ** 2).clamp_min(1e-12)
        weight = (xy / count - x * y / count**2) / variance
        fitted[layer] = (weight, (y - weight * x) / count)
    return fitted


def layer_of(name: str) -> int | None:
    number = name.removeprefix("model.layers.").partition(".")[0]
    return int(number) if number.isdigit() else None


def _in_basis(name: str, tensor: torch.Tensor, basis: Basis, config) -> torch.Tensor:
    """A layer's tensor in another basis; head by head, so that only one head is held in float64."""
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    if name.endswith(".kv_b_proj.weight"):
        view = tensor.clone().unflatten(0, (heads, -1))
        for head, rows in enumerate(view):
            rows[:nope] = (basis.keys[head] @ rows[:nope].double()).to(tensor.dtype)
            rows[nope:] = (basis.values[head] @ rows[nope:].double()).to(tensor.dtype)
        return view.flatten(0, 1)
    if name.endswith((".q_proj.weight", ".q_b_proj.weight")):
        view = tensor.clone().unflatten(0, (heads, -1))
        for head, rows in enumerate(view):
            rows[:nope] = torch.linalg.solve(basis.keys[head].T, rows[:nope].double()).to(tensor.dtype)
        return view.flatten(0, 1)
    if name.endswith(".o_proj.weight"):
        view = tensor.clone().unflatten(1, (heads, -1))
        for head in range(heads):
            columns = view[:, head]
            columns.copy_(torch.linalg.solve(basis.values[head], columns.double(), left=False))
        return view.flatten(1, 2)
    return tensor


def _whiten(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    For blocks [H, d, C], maps [H, d, d] that make their rows nearly orthonormal, and the rows [H, d, C] that they
    give. Directions that a block hardly has are stretched no more than tenfold.
    """
    values, vectors = torch.linalg.eigh(blocks @ blocks.mT)
    lengths = (values.clamp_min(0) + 1e-2 * values.mean(1, keepdim=True)).clamp_min(1e-300).sqrt()
    maps = vectors.mT / lengths[..., None]
    return maps, maps @ blocks


def _gram(rows: list[torch.Tensor], forms: list[torch.Tensor]) -> torch.Tensor:
    """Sum over all blocks of rows^T form rows, [C, C]."""
    return sum(r.flatten(0, 1).T @ (form @ r).flatten(0, 1) for r, form in zip(rows, forms))


def _nearest_to_identity(rows: list[torch.Tensor], forms: list[torch.Tensor], floor: float) -> list[torch.Tensor]:
    """
    Minimises |sum rows^T form rows - I| over symmetric forms with eigenvalues of at least `floor`, by accelerated
    projected gradients with restarts (Beck and Teboulle 2009; O'Donoghue and Candes 2015).
    """
    identity = torch.eye(rows[0].shape[2], dtype=torch.float64)
    ones = [torch.eye(form.shape[1], dtype=torch.float64).expand_as(form) for form in forms]
    rate = 1 / torch.linalg.eigvalsh(_gram(rows, ones))[-1]
    ahead, momentum = forms, 1.0
    for _ in range(STEPS):
        residual = _gram(rows, ahead) - identity
        if residual.norm() < 1e-9 * identity.shape[0] ** 0.5:
            return ahead
        new = [_clip(form - rate * (r @ residual @ r.mT), floor) for form, r in zip(ahead, rows)]
        if sum(((a - n) * (n - f)).sum() for a, n, f in zip(ahead, new, forms)) > 0:
            momentum = 1.0
        faster = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = [n + (momentum - 1) / faster * (n - f) for n, f in zip(new, forms)]
        forms, momentum = new, faster
    return forms


def _clip(forms: torch.Tensor, floor: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(forms)
    return (vectors * values.clamp_min(floor)[:, None]) @ vectors.mT


def _root(forms: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(forms)
    return (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT


def _sum_to_zero(blocks: list[torch.Tensor]) -> list[torch.Tensor]:
    """
    Reflections [H, d, d] of each block's channels after which the channels of all blocks [H, d, C] sum to zero, if
    that can be: 1^T U M = x^T M for x = U^T 1, any vector of length sqrt(d). Such x with sum x^T M = 0 are found by
    going to and fro between that plane and those spheres.
    """
    up = torch.cat([block.flatten(0, 1) for block in blocks])
    basis = torch.linalg.qr(up).Q
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(up.shape[0], generator=generator, dtype=torch.float64)
    sizes = [block.shape[0] * block.shape[1] for block in blocks]

    def on_spheres(x: torch.Tensor) -> torch.Tensor:
        parts = [part.view(block.shape[:2]) for part, block in zip(x.split(sizes), blocks)]
        lengths = [part.norm(dim=1, keepdim=True).clamp_min(1e-300) for part in parts]
        return torch.cat([(p * p.shape[1] ** 0.5 / n).flatten() for p, n in zip(parts, lengths)])

    for _ in range(200):
        x = on_spheres(x - basis @ (basis.T @ x))
        if (basis.T @ x).norm() < 1e-12 * x.norm():
            break

    mirrors = []
    for part, block in zip(x.split(sizes), blocks):
        across = part.view(block.shape[:2]) - 1  # the reflection across it takes x to 1
        length = across.square().sum(1).clamp_min(1e-300)[:, None, None]
        identity = torch.eye(block.shape[1], dtype=torch.float64)
        mirrors.append(identity - 2 * across[:, :, None] * across[:, None, :] / length)
    return mirrors


def _spread(up: torch.Tensor) -> float:
    """Largest over smallest singular value of [D, C]."""
    values = torch.linalg.svdvals(up)
    smallest = values[-1] if up.shape[0] >= up.shape[1] else values.new_zeros(())
    return float("inf") if smallest <= 1e-12 * values[0] else (values[0] / smallest).item()
