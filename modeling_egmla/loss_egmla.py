"""
Cross-entropy of next tokens, a few tokens at a time.

The library's loss makes all logits float32 and keeps as many logarithms for the backward pass, which with a wide
vocabulary is more memory than all layers keep. Here nothing but the logits themselves is kept, and what is computed
from them stays small enough for a processor's cache.

Shapes: B batch, S length, N tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from transformers.loss.loss_utils import ForCausalLMLoss


IGNORED = -100  # label of what is not to be predicted
CPU_CHUNK = 1 << 20  # logits at a time; fastest of those tried (docs/training.md)
DEVICE_CHUNK = 1 << 26  # on accelerators, where a call costs more than what it moves


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor:
    """
    The library's `ForCausalLMLoss` without its float32 copies. Compiled, it is the library's, which is fused then.

    Args:
        logits: [B, S, V].
        labels: [B, S]; the label of a position is predicted by the position before.
        num_items_in_batch: what the sum is divided by; by default the number of labels that count, here.
        shift_labels: labels that are shifted already, [B, S], in place of `labels`.

    Returns:
        The loss in nats a token.

    Raises:
        ValueError: a label is neither an id nor `ignore_index`.
    """
    if torch.compiler.is_compiling():
        return ForCausalLMLoss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    total = token_losses(logits.reshape(-1, vocab_size), targets, ignore_index).sum()
    if num_items_in_batch is None:
        return total / (targets != ignore_index).sum()
    if torch.is_tensor(num_items_in_batch):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def token_losses(logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = IGNORED) -> torch.Tensor:
    """
    Cross-entropy of each token in nats, [N], in float32 or wider, of logits [N, V]; zero where `targets` [N] are
    `ignore_index`.

    Raises:
        ValueError: a target is neither an id nor `ignore_index`.
    """
    counts = targets != ignore_index
    if targets.device.type == "cpu":  # elsewhere it would wait
        wrong = targets[counts & ((targets < 0) | (targets >= logits.shape[1]))]
        if len(wrong):
            raise ValueError(
                f"`labels` holds {int(wrong[0])}, but must hold ids from 0 to {logits.shape[1] - 1}, or "
                f"{ignore_index} where nothing is to be predicted."
            )
    return _TokenLosses.apply(logits, targets.masked_fill(~counts, 0), counts)


class _TokenLosses(torch.autograd.Function):
    """`token_losses` of valid targets; `counts` says which are not zero."""

    @staticmethod
    def forward(ctx, logits_NV: torch.Tensor, targets_N: torch.Tensor, counts_N: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        normalizers_N = torch.empty(len(logits_NV), dtype=dtype, device=logits_NV.device)
        losses_N = torch.empty_like(normalizers_N)
        for tokens in chunks(logits_NV):
            logits = logits_NV[tokens].to(dtype)
            normalizers_N[tokens] = logits.logsumexp(-1)
            losses_N[tokens] = normalizers_N[tokens] - logits.gather(1, targets_N[tokens, None]).squeeze(1)
        ctx.save_for_backward(logits_NV, targets_N, counts_N, normalizers_N)
        return losses_N.masked_fill_(~counts_N, 0.0)

    @staticmethod
    def backward(ctx, upstream_N: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, targets_N, counts_N, normalizers_N = ctx.saved_tensors
        upstream_N1 = upstream_N.masked_fill(~counts_N, 0.0)[:, None]
        if torch.is_grad_enabled():  # somebody wants second derivatives
            probabilities_NV = logits_NV.to(normalizers_N.dtype).softmax(-1)
            gradient_NV = (probabilities_NV - F.one_hot(targets_N, logits_NV.shape[1])) * upstream_N1
            return gradient_NV.to(logits_NV.dtype), None, None
        gradient_NV = torch.empty_like(logits_NV)
        for tokens in chunks(logits_NV):
            gradient = (logits_NV[tokens].to(normalizers_N.dtype) - normalizers_N[tokens, None]).exp_()
            gradient.mul_(upstream_N1[tokens]).scatter_add_(1, targets_N[tokens, None], -upstream_N1[tokens])
            gradient_NV[tokens] = gradient
        return gradient_NV, None, None


def chunks(logits_NV: torch.Tensor) -> list[slice]:
    """Slices of the tokens."""
    (tokens, vocabulary), on_cpu = logits_NV.shape, logits_NV.device.type == "cpu"
    size = max(1, (CPU_CHUNK if on_cpu else DEVICE_CHUNK) // vocabulary)
    return [slice(start, start + size) for start in range(0, tokens, size)]
