"""
Cross-entropy of next tokens, a few tokens at a time.

The library's loss makes all logits float32 and keeps as many logarithms for the backward pass: beside bfloat16 logits,
four times their memory. Here nothing but the logits themselves is kept, and what is computed from them stays small
enough for a processor's cache.

Shapes: B batch, S length, N tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from transformers.loss.loss_utils import ForCausalLMLoss


IGNORED = -100  # label of what is not to be predicted
CPU_CHUNK = 1 << 20  # logits at a time, by measurement (docs/log.md)
DEVICE_CHUNK = 1 << 26  # on accelerators, so that calls are few; not measured


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
        ValueError: labels and logits are of other numbers of tokens; a label is neither an id nor `ignore_index`.
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
        ValueError: there are more or fewer targets than logits; a target is neither an id nor `ignore_index`.
    """
    if len(logits) != len(targets):
        raise ValueError(
            f"There are logits of {len(logits)} tokens, but `labels` of {len(targets)}: give one label for each "
            "position whose logits are computed (`logits_to_keep` leaves positions out)."
        )
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"`labels` must be whole numbers, but are {targets.dtype}.")
    targets = targets.long()
    counts = targets != ignore_index
    if type(targets) is torch.Tensor and targets.device.type == "cpu":  # elsewhere it would wait
        wrong = targets[counts & ((targets < 0) | (targets >= logits.shape[1]))]
        if len(wrong):
            raise ValueError(
                f"`labels` holds {int(wrong[0])}, but must hold ids from 0 to {logits.shape[1] - 1}, or "
                f"{ignore_index} where nothing is to be predicted."
            )
    return _TokenLosses.apply(logits, targets.masked_fill(~counts, 0), counts)[0]


class _TokenLosses(torch.autograd.Function):
    """
    `token_losses` of valid targets; `counts` says which are not zero. What the softmax is normalised by is kept as two
    numbers, the largest logit and the logarithm of the sum above it: their sum has fewer digits than either.
    """

    @staticmethod
    def forward(
        logits_NV: torch.Tensor, targets_N: torch.Tensor, counts_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        peaks_N1 = torch.empty((len(logits_NV), 1), dtype=dtype, device=logits_NV.device)
        log_sums_N1, losses_N1 = torch.empty_like(peaks_N1), torch.empty_like(peaks_N1)
        for tokens in chunks(logits_NV):
            logits = logits_NV[tokens].to(dtype)
            peaks_N1[tokens] = logits.amax(-1, keepdim=True)
            below_peak = peaks_N1[tokens] - logits.gather(1, targets_N[tokens, None])
            log_sums_N1[tokens] = (logits - peaks_N1[tokens]).exp_().sum(-1, keepdim=True).log_()
            losses_N1[tokens] = below_peak + log_sums_N1[tokens]
        return losses_N1.squeeze(1).masked_fill(~counts_N, 0.0), peaks_N1, log_sums_N1

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        _, peaks_N1, log_sums_N1 = outputs
        ctx.mark_non_differentiable(peaks_N1, log_sums_N1)
        ctx.save_for_backward(*inputs, peaks_N1, log_sums_N1)

    @staticmethod
    def backward(ctx, upstream_N: torch.Tensor, *of_what_is_kept) -> tuple[torch.Tensor, None, None]:
        logits_NV, targets_N, counts_N, peaks_N1, log_sums_N1 = ctx.saved_tensors
        upstream_N1 = upstream_N.masked_fill(~counts_N, 0.0)[:, None]
        if torch.is_grad_enabled():  # somebody wants second derivatives
            probabilities_NV = logits_NV.to(peaks_N1.dtype).softmax(-1)
            gradient_NV = (probabilities_NV - F.one_hot(targets_N, logits_NV.shape[1])) * upstream_N1
            return gradient_NV.to(logits_NV.dtype), None, None
        gradient_NV = torch.empty_like(logits_NV)
        for tokens in chunks(logits_NV):
            gradient = logits_NV[tokens].to(peaks_N1.dtype) - peaks_N1[tokens]
            gradient.sub_(log_sums_N1[tokens]).exp_().mul_(upstream_N1[tokens])
            gradient.scatter_add_(1, targets_N[tokens, None], -upstream_N1[tokens])
            gradient_NV[tokens] = gradient
        return gradient_NV, None, None


def chunks(logits_NV: torch.Tensor) -> list[slice]:
    """Slices of as many tokens as make the chunk of their device, at least one."""
    tokens, vocabulary = logits_NV.shape
    size = max(1, (CPU_CHUNK if logits_NV.device.type == "cpu" else DEVICE_CHUNK) // vocabulary)
    return [slice(start, start + size) for start in range(0, tokens, size)]
