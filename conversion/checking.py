"""Does a converted model compute what its source computes? Logits on the same tokens, and loss on text."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from .checkpoint import Checkpoint, ConversionError
from .layouts import LIBRARY_LAYOUTS, Layout
from .original import original_logits


EXACT_THRESHOLD = 1e-4  # float32, only the order of sums differs
ROUNDED_THRESHOLD = 2e-2  # some tensors were rounded to 16 bits again


@dataclass(frozen=True)
class Comparison:
    """
    Logits of two models on the same tokens, both computed in float32.

    Attributes:
        relative: |a - b| / |b| over all logits, b the source's.
        largest: largest absolute difference.
        same_top: share of positions where both hold the same token for the likeliest.
        tokens: number of positions.
        threshold: largest `relative` that passes; None if the models are not meant to agree.
    """

    relative: float
    largest: float
    same_top: float
    tokens: int
    threshold: float | None

    @property
    def passed(self) -> bool:
        return math.isfinite(self.relative) and (self.threshold is None or self.relative <= self.threshold)

    def __str__(self) -> str:
        bound = "no threshold" if self.threshold is None else f"threshold {self.threshold:g}"
        return (
            f"relative difference of logits {self.relative:.2e} ({bound}), largest {self.largest:.2e}, same likeliest "
            f"token at {self.same_top:.1%} of {self.tokens} positions"
        )


def compare(logits: torch.Tensor, reference: torch.Tensor, threshold: float | None) -> Comparison:
    """Compares logits [B, S, V] with a source's."""
    if logits.shape != reference.shape:
        raise ConversionError(f"Logits have shape {tuple(logits.shape)}, the source's {tuple(reference.shape)}.")
    difference = logits.double() - reference.double()
    return Comparison(
        relative=(difference.norm() / reference.double().norm()).item(),
        largest=difference.abs().max().item(),
        same_top=(logits.argmax(-1) == reference.argmax(-1)).double().mean().item(),
        tokens=logits.shape[0] * logits.shape[1],
        threshold=threshold,
    )


def check_ids(vocab_size: int, max_length: int) -> torch.Tensor:
    """Ids of a check, [2, 64] or shorter: drawn from the whole vocabulary, the same at every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (2, min(64, max_length)), generator=generator)


@torch.no_grad()
def folder_logits(
    folder: Path, layout: Layout, checkpoint: Checkpoint, raw_config: dict[str, Any], input_ids: torch.Tensor
) -> torch.Tensor:
    """
    Logits [B, S, V] of a checkpoint, computed in float32 by the code that its layout belongs to: the library's model,
    or DeepSeek's own.

    Raises:
        ConversionError: no code is known for the layout, or the library does not find all tensors in the folder.
    """
    if layout.name == "deepseek":
        return original_logits(checkpoint.read, raw_config, input_ids)
    if layout.name not in LIBRARY_LAYOUTS:
        raise ConversionError(
            f"Nothing here runs a checkpoint in layout {layout.name}, so the conversion cannot be checked. Save "
            "`input_ids` [B, S] and the model's `logits` [B, S, V] to a safetensors file and give it as "
            "--reference-logits, or pass --no-check."
        )
    return load_library_model(folder, checkpoint)(input_ids, use_cache=False).logits


@torch.no_grad()
def load_library_model(folder: Path, checkpoint: Checkpoint):
    """
    Loads a folder through the library, in float32 and evaluation mode.

    8-bit weights come dequantised from `checkpoint`: the library's own way needs a GPU, or blocks that divide weights.

    Raises:
        ConversionError: the library cannot load the folder, or does not find all tensors in it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if checkpoint.dequantised:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        del config.quantization_config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.read(name))
        return model.eval()
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ConversionError(
            f"The library cannot load {folder} ({error!r}), so logits cannot be compared. Give --reference-logits, or "
            "pass --no-check."
        ) from error
    for kind in ("missing_keys", "mismatched_keys"):
        if info.get(kind):
            raise ConversionError(f"The library loads {folder} with {kind.replace('_', ' ')}: {sorted(info[kind])}.")
    return model.eval()


def read_reference(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Returns `input_ids` [B, S] and `logits` [B, S, V] from a safetensors file.

    Raises:
        ConversionError: the file is damaged, or one of the two is missing or of a wrong shape.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if missing := {"input_ids", "logits"} - names:
                raise ConversionError(f"{path} lacks {', '.join(sorted(missing))}.")
            input_ids, logits = file.get_tensor("input_ids").long(), file.get_tensor("logits").float()
    except (SafetensorError, OSError) as error:
        raise ConversionError(f"{path} cannot be read as safetensors ({error}).") from error
    if input_ids.dim() != 2 or logits.shape[:-1] != input_ids.shape:
        raise ConversionError(
            f"{path} must hold `input_ids` [B, S] and `logits` [B, S, V], but holds {tuple(input_ids.shape)} and "
            f"{tuple(logits.shape)}."
        )
    return input_ids, logits


@dataclass(frozen=True)
class TextScore:
    """
    A model on held-out text, beside the model that it was made from.

    Attributes:
        loss: mean cross-entropy of the next token, in nats.
        divergence: mean Kullback-Leibler divergence of its next-token distribution from the source's, in nats.
    """

    loss: float
    divergence: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def score_text(model, source_model, windows: torch.Tensor) -> TextScore:
    """Scores a model on windows of ids [N, S] against the one it was made from."""
    loss = divergence = 0.0
    for window in windows:
        log_probs = model(window[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        source = source_model(window[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        loss += F.nll_loss(log_probs, window[1:], reduction="sum").item()
        divergence += F.kl_div(log_probs, source, reduction="sum", log_target=True).item()
    count = windows.shape[0] * (windows.shape[1] - 1)
    return TextScore(loss / count, divergence / count)
