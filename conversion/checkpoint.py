"""
Weight files, read and written one tensor at a time.

Files are memory-mapped and opened again for every tensor: pages that were read count as the process's memory for as
long as their file stays open, so that memory would otherwise grow to the size of a shard.
"""

import json
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open

from ..mapped_egmla import write_tensors


WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
STEMS = ("model.safetensors", "pytorch_model.bin")  # names of the library's weight files, of which the first counts


class ConversionError(ValueError):
    """A checkpoint cannot be converted; the message names the tensor, field or file, and the remedy."""


class TensorInfo(NamedTuple):
    """Where a tensor lies, and what it is."""

    file: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fp8Blocks:
    """
    How 8-bit floats are stored: `weight` = stored values x scale, with one float32 scale for each block.

    Source: `weight_block_size` in the configs of DeepSeek-V3; the scales lie in `*.weight_scale_inv` there, and in
    `*.scale` in the original layout.
    """

    rows: int
    columns: int
    suffix: str  # takes the place of "weight" in the scale's name
    dtype: torch.dtype = torch.bfloat16

    def scale_name(self, name: str) -> str:
        return name.removesuffix("weight") + self.suffix

    def dequantise(self, stored: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Returns the [out, in] weight of `stored` [out, in] and `scale` [out / rows, in / columns], rounded up."""
        rows, columns = stored.shape
        scale = scale.float().repeat_interleave(self.rows, 0)[:rows]
        scale = scale.repeat_interleave(self.columns, 1)[:, :columns]
        return (stored.float() * scale).to(self.dtype)


class Checkpoint:
    """
    The tensors of a folder: safetensors or .bin, in one file or in shards.

    A .bin file (also .pt, .pth) is a pickle. It is read with `weights_only=True`, which builds tensors and containers
    and runs nothing else; what needs more is refused.

    Args:
        folder: folder with the weight files.
        key: name under which a .bin file holds its tensors, e.g. `"model"`; dots lead deeper.
        fp8: how 8-bit floats are turned into wider ones; without it they are refused.

    Attributes:
        tensors (`dict[str, TensorInfo]`): every tensor by name; scales of 8-bit tensors are part of these and left
            out.
        dequantised (`list[str]`): names of the tensors that are stored in 8 bits.
        files (`tuple[str, ...]`): files that hold the tensors, or say where they are.

    Raises:
        ConversionError: no weights, a damaged or hostile file, an index that does not fit its files, or 8-bit weights
            without the scales that belong to them.
    """

    def __init__(self, folder: str | Path, key: str | None = None, fp8: Fp8Blocks | None = None):
        self.folder = Path(folder)
        self.key = key
        self.fp8 = fp8
        self.tensors: dict[str, TensorInfo] = {}
        files, index = _find_files(self.folder)
        self.files = (*files, *(f"{stem}.index.json" for stem in STEMS))
        for file in files:
            for name, tensor in self._describe(file).items():
                if name in self.tensors:
                    raise ConversionError(
                        f"Tensor {name} lies in {self.tensors[name].file} and in {file}. If the files hold one "
                        "tensor-parallel rank each, merge them into one checkpoint first."
                    )
                self.tensors[name] = TensorInfo(file, tensor.dtype, tuple(tensor.shape))
        for name, file in (index or {}).items():
            found = self.tensors.get(name)
            if found is None or found.file != file:
                where = "is in no file" if found is None else f"lies in {found.file}"
                raise ConversionError(f"The index says that tensor {name} lies in {file}, but it {where}.")
        self.dequantised = [name for name, info in self.tensors.items() if info.dtype == torch.float8_e4m3fn]
        self._set_scales_aside()

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor by name; 8-bit ones dequantised."""
        tensor = self._load(name)
        if self.fp8 is not None and tensor.dtype == torch.float8_e4m3fn:
            return self.fp8.dequantise(tensor, self._load(self.fp8.scale_name(name), self._scales))
        return tensor

    def _load(self, name: str, among: Mapping[str, TensorInfo] | None = None) -> torch.Tensor:
        file = (among or self.tensors)[name].file
        if file.endswith(".safetensors"):
            with _opened(self.folder / file) as shard:
                return shard.get_tensor(name)
        return _load_pickle(self.folder / file, self.key)[name]

    def _describe(self, file: str) -> dict[str, torch.Tensor]:
        """The tensors of one file, mapped and not read."""
        if file.endswith(".safetensors"):
            with _opened(self.folder / file) as shard:
                return {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (not a mapping)
        return _load_pickle(self.folder / file, self.key)

    def _set_scales_aside(self) -> None:
        self._scales: dict[str, TensorInfo] = {}
        for name in self.dequantised:
            if self.fp8 is None:
                raise ConversionError(
                    f"Tensor {name} is stored in 8 bits, but `quantization_config` in config.json does not say how "
                    "(`quant_method` fp8 with `weight_block_size`)."
                )
            scale_name = self.fp8.scale_name(name)
            rows, columns = self.tensors[name].shape
            expected = (math.ceil(rows / self.fp8.rows), math.ceil(columns / self.fp8.columns))
            scale = self.tensors.pop(scale_name, None)
            if scale is None:
                raise ConversionError(f"Tensor {name} is stored in 8 bits, and its scale {scale_name} is missing.")
            if scale.shape != expected:
                raise ConversionError(f"Tensor {scale_name} has shape {scale.shape}, but {name} needs {expected}.")
            self._scales[scale_name] = scale
            self.tensors[name] = self.tensors[name]._replace(dtype=self.fp8.dtype)


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    read: Callable[[str], torch.Tensor],
    max_shard_size: int | str = "5GB",
    written: Callable[[str], None] = lambda name: None,
) -> None:
    """
    Writes safetensors files, with an index if there are several, holding one tensor at a time.

    Args:
        folder: folder to write into.
        tensors: name to a meta tensor that has its shape and dtype, in the order of reading.
        read: gives a tensor by name.
        max_shard_size: bytes in a file, or e.g. `"5GB"`; a larger tensor gets a file of its own.
        written: called with every name once its tensor was written.
    """

    def checked(names: list[str]) -> Iterator[torch.Tensor]:
        for name in names:
            tensor, meta = read(name), tensors[name]
            if tensor.shape != meta.shape or tensor.dtype != meta.dtype:
                raise ConversionError(
                    f"Tensor {name} came out as {tuple(tensor.shape)}, {tensor.dtype}, instead of "
                    f"{tuple(meta.shape)}, {meta.dtype}. This is a fault of the converter."
                )
            yield tensor
            del tensor  # before the next one is read
            written(name)

    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        names = sorted(names, key=lambda name: -tensors[name].dtype.itemsize)
        write_tensors(
            folder / file, {name: (tensors[name].dtype, tuple(tensors[name].shape)) for name in names}, checked(names)
        )
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _find_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """Weight files of a folder and, if there is an index, which file it says that each tensor lies in."""
    for stem in STEMS:
        if (folder / stem).is_file():
            return [stem], None  # before an index, which the library leaves behind when it saves in one file again
        index_path = folder / f"{stem}.index.json"
        if index_path.is_file():
            try:
                index = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
                files = sorted(set(index.values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConversionError(f"{index_path} is not an index of weight files ({error!r}).") from error
            for file in files:
                if Path(file).name != file:
                    raise ConversionError(f"{index_path} points outside of its folder: {file!r}.")
                if not (folder / file).is_file():
                    raise ConversionError(f"{folder / file} is missing, which {index_path.name} lists.")
            return files, index
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.pth"):
        if files := sorted(path.name for path in folder.glob(pattern)):
            return files, None
    raise ConversionError(f"{folder} holds no weights: no .safetensors, .bin, .pt or .pth file.")


def _opened(path: Path):
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ConversionError(f"{path} is cut short or damaged: copy or download it again ({error}).") from error


def _load_pickle(path: Path, key: str | None) -> dict[str, torch.Tensor]:
    try:
        try:
            tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            # Files of PyTorch before 1.6 cannot be mapped: this one is read whole.
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConversionError(
            f"{path} holds more than tensors, and was not read any further: a pickle can run any code. Nothing was "
            "run. Ask for safetensors, or save a plain state dict with `torch.save(model.state_dict(), ...)`."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise ConversionError(f"{path} is cut short or damaged: copy or download it again ({first_line}).") from error
    for part in key.split(".") if key else ():
        if not isinstance(tensors, Mapping) or part not in tensors:
            raise ConversionError(f"{path} has no entry {key!r} (the layout's `checkpoint_key`).")
        tensors = tensors[part]
    if not isinstance(tensors, Mapping):
        raise ConversionError(f"{path} holds a {type(tensors).__name__}, not a state dict.")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ConversionError(
                f"{path} holds a {type(tensor).__name__} under {name!r}, not a tensor. If the tensors lie deeper, "
                "name the entry in the layout's `checkpoint_key`."
            )
    return dict(tensors)
