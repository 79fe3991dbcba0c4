"""Text that conversions are fitted and measured on, and what a model's modules say about it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from .checkpoint import ConversionError
from .vocabulary import leading_ids, load_tokenizer


WINDOW = 256  # tokens in a piece of calibration text
HELD_OUT = 4  # one in so many pieces, the last ones


def read_windows(calibration: str | Path | torch.Tensor, tokens: int, source: Path, config) -> torch.Tensor:
    """
    Calibration ids, [N, S].

    Args:
        calibration: text file, or the ids.
        tokens: tokens of the file to use.
        source: folder with the tokenizer.
        config: of the model that will read them.

    Raises:
        ConversionError: the text cannot be read, is too short, or does not fit the model.
    """
    length = min(WINDOW, config.max_position_embeddings)
    if isinstance(calibration, torch.Tensor):
        windows = calibration
    else:
        try:
            text = Path(calibration).read_text(encoding="utf-8-sig")  # a byte-order mark is no text
        except (OSError, UnicodeDecodeError) as error:
            raise ConversionError(f"Calibration text {calibration} cannot be read as UTF-8 ({error}).") from error
        try:
            tokenizer = load_tokenizer(source)
        except (OSError, ValueError) as error:
            raise ConversionError(f"The tokenizer in {source} does not load ({error}).") from error
        if tokenizer is None:
            raise ConversionError(f"Calibration text needs a tokenizer, and {source} has none: put it there.")
        # Some eight bytes a token at most, so that a large file is not tokenised in vain.
        ids = tokenizer(text[: 8 * tokens], add_special_tokens=False, verbose=False)["input_ids"][:tokens]
        leading = leading_ids(tokenizer)  # attention leans on it, in every text
        room = length - len(leading)
        starts = range(0, len(ids) - room + 1, room)
        windows = torch.tensor([leading + ids[start : start + room] for start in starts]).view(-1, length)
    if windows.dim() != 2 or windows.shape[0] < 2:
        raise ConversionError(f"Calibration needs at least two windows of {length} tokens: give more text.")
    if (outside := windows[(windows < 0) | (windows >= config.vocab_size)]).numel():
        raise ConversionError(
            f"The tokenizer gives id {outside[0].item()}, outside the model's vocabulary of {config.vocab_size}: it "
            "does not belong to the model."
        )
    return windows


def split_windows(windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows to fit on, and those to measure on."""
    held_out = max(len(windows) // HELD_OUT, 1)
    return windows[:-held_out], windows[-held_out:]


@torch.no_grad()
def observe(
    model, windows: torch.Tensor, observers: Mapping[nn.Module, Callable[[torch.Tensor, torch.Tensor], None]]
) -> None:
    """
    Reads the windows [N, S] one by one, and shows observers the input and the output of their modules.

    Args:
        model: causal language model in evaluation mode.
        observers: of each module that takes and gives one tensor.
    """

    def hook(observer: Callable) -> Callable:
        return lambda module, inputs, output: observer(inputs[0], output)

    handles = [module.register_forward_hook(hook(observer)) for module, observer in observers.items()]
    try:
        for window in windows:
            model.model(window[None], use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
