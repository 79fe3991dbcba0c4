"""Whether what was loaded is the model that was saved: weights that fit the configuration, and give numbers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel

from .mapped_egmla import FILE_DTYPES, read_header


NOT_FINITE = "The forward pass gives values that are not finite: the weights are damaged, or overflow in their dtype."


def misfits(info: Mapping[str, Any], may_leave_out: bool = False) -> str | None:
    """
    What `from_pretrained(..., output_loading_info=True, ignore_mismatched_sizes=True)` could not bring together, in
    words; None if nothing.

    Args:
        may_leave_out: tensors that the model does not have are no matter, as in a checkpoint of another library.
    """
    kinds = {"missing_keys": "missing", "mismatched_keys": "of another shape than config.json says"}
    if not may_leave_out:
        kinds["unexpected_keys"] = "of no use to a model of this config.json"
    for kind, what in kinds.items():
        names = sorted(name if isinstance(name, str) else name[0] for name in info[kind])
        if names:
            return f"{len(names)} weights do not load, first {names[0]}, which is {what}"
    return None


def not_floating(folder: Path) -> list[str]:
    """Tensors in the safetensors files of a model's folder that hold no floating numbers: fractions would be gone."""
    floating = {name for name, dtype in FILE_DTYPES.items() if dtype.is_floating_point}
    return [name for name, dtype in _stored(folder) if dtype not in floating]


def stored_dtypes(folder: Path) -> set[str]:
    """What the tensors in a folder's safetensors files are stored in, such as `"bfloat16"`."""
    return {str(FILE_DTYPES.get(dtype, dtype)).removeprefix("torch.") for _, dtype in _stored(folder)}


def in_dtype(state_dict: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights in another precision; those that are tied are still one tensor, which is then saved once."""
    made = {}
    return {name: made.setdefault(weight.data_ptr(), weight.to(dtype)) for name, weight in state_dict.items()}


def _stored(folder: Path) -> list[tuple[str, str]]:
    """Names of a folder's tensors and their types, in safetensors' words."""
    return [
        (name, tensor["dtype"])
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in read_header(str(path))[0].items()
        if name != "__metadata__"
    ]


class RefuseNotFinite(LogitsProcessor):
    """Raises a `ValueError` in the place of text that is drawn from NaN."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.isnan().any():  # ids that must not come are at minus infinity
            raise ValueError(NOT_FINITE)
        return scores


@torch.no_grad()
def check_finite(model: PreTrainedModel) -> None:
    """Raises a `ValueError` if a forward pass of a few tokens gives values that are not finite."""
    ids = torch.arange(4, device=model.device)[None]
    if not model(input_ids=ids, use_cache=False).logits.isfinite().all():
        raise ValueError(NOT_FINITE)
