"""Safetensors files: gate tables mapped and read row by row, tensors written piece by piece."""

import json
import math
import mmap
import os
import re
from collections.abc import Iterable

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file


FILE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
}


class MappedTensor:
    """
    A tensor of a safetensors file as a view of the memory-mapped file: rows are read when they are first touched.

    The file must not be written to while it is mapped; replacing it by another one of its name is harmless.

    Raises:
        ValueError: the file has no such tensor, or has it in a dtype that is not mapped.
    """

    def __init__(self, path: str, name: str):
        self.path, self.name = os.path.abspath(path), name  # the working directory may change before it is read again
        header, start = read_header(path)
        if name not in header:
            raise ValueError(f"{path} has no tensor {name}.")
        if header[name]["dtype"] not in FILE_DTYPES:
            raise ValueError(
                f"{path}: {name} is stored as {header[name]['dtype']}, which cannot be mapped: save the model in one "
                f"of {', '.join(FILE_DTYPES)}."
            )
        dtype, shape = FILE_DTYPES[header[name]["dtype"]], header[name]["shape"]
        first, last = (start + offset for offset in header[name]["data_offsets"])
        page = first - first % mmap.ALLOCATIONGRANULARITY
        if last > os.path.getsize(path):
            raise ValueError(f"{path} was cut short: write or download it again.")
        with open(path, "rb") as file:
            # Private, and written to by nobody: torch knows no read-only tensors.
            self.map = mmap.mmap(file.fileno(), last - page, access=mmap.ACCESS_COPY, offset=page)
        self.tensor = torch.frombuffer(
            self.map, dtype=dtype, count=(last - first) // dtype.itemsize, offset=first - page
        )
        self.tensor = self.tensor.view(shape)
        self.offset, self.row_bytes = first - page, self.tensor[0].nbytes
        self._advise("MADV_RANDOM")  # rows are scattered: reading ahead would read the whole file

    def _advise(self, advice: str, *where: int) -> None:
        if hasattr(mmap, advice):
            self.map.madvise(getattr(mmap, advice), *where)

    def read_ahead(self, token_ids: torch.Tensor) -> None:
        """Asks the system to read these rows from the disk while something else is computed."""
        for token_id in token_ids.tolist():
            first = self.offset + token_id * self.row_bytes
            page = first - first % mmap.PAGESIZE
            self._advise("MADV_WILLNEED", page, first + self.row_bytes - page)

    def let_go(self) -> None:
        """Takes pages that were read out of this process; the system may keep them."""
        self._advise("MADV_DONTNEED")

    def __reduce__(self):
        return type(self), (self.path, self.name)

    def __deepcopy__(self, memo):
        return self


def read_header(path: str) -> tuple[dict, int]:
    """
    Header of a safetensors file, and where its tensors begin.

    Raises:
        ValueError: it is no such file, or was cut off.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            if 8 + length > os.path.getsize(path):
                raise ValueError("it is shorter than its header says")
            return json.loads(file.read(length)), 8 + length
        except ValueError as error:
            raise ValueError(f"{path} is no safetensors file ({error}): write or download it again.") from error


def write_tensors(
    path: str | os.PathLike,
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]],
    chunks: Iterable[torch.Tensor],
) -> None:
    """
    Writes a safetensors file piece by piece, so that it may be larger than memory; it appears whole or not at all. The
    library's own writer wants all tensors of a file in memory at once.

    Args:
        tensors: dtype and shape of each tensor, by name, in the order of their `chunks`; wide elements first, if each
            is to begin at a multiple of its element's size.
        chunks: pieces of them, one after the other.
    """
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    names = {dtype: name for name, dtype in FILE_DTYPES.items()}
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise FileNotFoundError(f"There is no folder to write {path} into.")
    partial = f"{path}.{os.getpid()}.partial"  # of its own, should two processes write the same file
    try:
        with open(partial, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            for chunk in chunks:
                file.write(chunk.contiguous().flatten().view(torch.uint8).numpy().data)
                del chunk  # before the next one is made
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def find_tables(checkpoint: str, suffix: str, variant: str | None = None, **download) -> dict[int, tuple[str, str]]:
    """
    File and name of the tensor `layers.N.SUFFIX` of every layer N of a checkpoint.

    Args:
        checkpoint: folder or Hub id, with `model.safetensors` or an index of its shards.
        variant: which of its files, as in `model.VARIANT.safetensors`.
        download: which version of it: `revision`, `subfolder`, `cache_dir`, `token`, `local_files_only`.

    Raises:
        ValueError: there are no safetensors files.
    """

    def with_variant(name: str) -> str:
        stem, _, extension = name.rpartition(".")
        return name if variant is None else f"{stem}.{variant}.{extension}"

    def file_of(name: str) -> str | None:
        if not checkpoint:
            return None
        return cached_file(checkpoint, name, _raise_exceptions_for_missing_entries=False, **download)

    weights_name = with_variant(SAFE_WEIGHTS_NAME)
    if path := file_of(weights_name):
        files = dict.fromkeys(read_header(path)[0], path)
    elif path := file_of(with_variant(SAFE_WEIGHTS_INDEX_NAME)):
        with open(path) as index:
            shards = json.load(index)["weight_map"]
        files = {name: file_of(shard) for name, shard in shards.items() if name.endswith(suffix)}
    else:
        raise ValueError(
            f"{checkpoint or 'The model was not loaded from a folder, which'} has no {weights_name}, from which "
            "tables could be read: save the model with `save_pretrained(folder)`, and name the folder as `checkpoint`."
        )
    pattern = re.compile(rf"(?:^|\.)layers\.(\d+)\.{re.escape(suffix)}$")
    return {int(match[1]): (path, name) for name, path in files.items() if (match := pattern.search(name))}
