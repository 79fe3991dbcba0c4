"""New folders, and files, that appear whole or not at all."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def new_folder(target: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """
    Gives a temporary folder beside `target` to write into, which takes the name `target` when the block ends.

    If the block raises, or the process is interrupted, the temporary folder is removed and `target` is as it was. A
    process that is killed leaves the temporary folder, `.NAME.partial-*`, and still nothing under the final name.

    Args:
        target: folder to make.
        overwrite: replace a `target` that exists, at once and only when the new folder is complete.

    Raises:
        FileExistsError: `target` exists and `overwrite` is false, or it is no folder of a model, or that of a run.
    """
    target = Path(target).absolute()
    refuse_existing(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(target, "partial")
    partial.mkdir()
    try:
        yield partial
        refuse_existing(target, overwrite)
        publish(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(target: Path, overwrite: bool) -> None:
    """Raises a `FileExistsError` if writing to `target` would touch what is there."""
    refuse_place(target)
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists already: choose another name, or replace it with --overwrite.")
    if any(target.glob("checkpoint-*")) or (target / "log.jsonl").exists():
        raise FileExistsError(f"{target} holds a training run, which --overwrite does not replace: remove it.")
    if not (target / "config.json").is_file():
        raise FileExistsError(
            f"{target} has no config.json, so it is no model that --overwrite would replace: remove it."
        )


def refuse_place(target: Path) -> None:
    """Raises a `FileExistsError` if a folder cannot take the name `target` in one step."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise FileExistsError(f"{target} exists and is not a folder: choose another name.")
    if os.path.ismount(target):
        raise FileExistsError(f"{target} is a mount point, which cannot be replaced: name a folder in it.")
    here = Path.cwd()  # with all links resolved
    if target.exists() and (target.resolve() == here or target.resolve() in here.parents):
        raise FileExistsError(f"{target} is the folder you stand in, which cannot be replaced: go elsewhere first.")


def _beside(target: Path, what: str) -> Path:
    """A hidden name of its own in the folder of `target`."""
    return target.with_name(f".{target.name}.{what}-{uuid4().hex[:8]}")


def leftovers(target: str | Path) -> list[Path]:
    """Temporary folders that killed processes left beside `target`."""
    target = Path(target).absolute()
    return sorted(path for path in target.parent.glob(f".{target.name}.partial-*") if path.is_dir())


def publish(partial: Path, target: Path) -> None:
    """Gives `partial`, which is beside it, the name `target`, and removes the folder that had it."""
    _flush(partial)
    if not target.exists() or not any(target.iterdir()):
        os.rename(partial, target)  # also replaces an empty folder
    elif _exchange(partial, target):
        shutil.rmtree(partial, ignore_errors=True)  # the old folder now
    else:
        old = _beside(target, "old")
        os.rename(target, old)
        try:
            os.rename(partial, target)
        except BaseException:
            os.rename(old, target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    _sync(target.parent)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two paths in one step where the system can (Linux), so that there is no moment without a `target`."""
    at_cwd, rename_exchange = -100, 2
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return libc.renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), rename_exchange) == 0
    except (OSError, AttributeError, TypeError):
        return False


def _flush(folder: Path) -> None:
    """Brings the folder's content to the disk, so that its final name never stands for content that is lost."""
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (PermissionError, IsADirectoryError):
        return  # folders cannot be opened on Windows
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def write_whole(path: str | Path, text: str) -> None:
    """Writes a text file that has its old content or the new one, whenever the process dies."""
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _beside(path, "partial")
    try:
        with open(partial, "x", encoding="utf-8") as file:
            file.write(text)
        _sync(partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)
