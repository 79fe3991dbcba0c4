"""
Milliseconds of CPU time a layer of each way to decode, by new tokens and context: the table in docs/decoding.md, from
which the limits of "auto" are taken. One thread, gates precomputed, ids of real text or all different ones.

    OMP_NUM_THREADS=1 python benchmarks/ways.py --dtype bfloat16
"""

import time
from typing import Annotated

import torch
import typer

from modeling_egmla import EGMLAConfig
from modeling_egmla.benchmark.systems import Shape, build_model, filled_cache
from modeling_egmla.benchmark.text import token_ids


CASES = [(1, 1, 64), (1, 1, 128), (1, 1, 256), (1, 1, 512), (1, 1, 1024), (4, 1, 256), (1, 1, 4096)]
CASES += [(1, queries, 4096) for queries in (2, 4, 8, 16)]
LAYERS, STEPS = 2, 7


@torch.no_grad()
def main(
    preset: str = "egmla-base-kv64-emb256",
    dtype: str = "float32",
    different: Annotated[bool, typer.Option(help="No id twice in a sequence, in place of text.")] = False,
) -> None:
    """Prints a line for each batch, number of new tokens and context; MLP and projections are counted as well."""
    torch.set_num_threads(1)
    shape = Shape.of(EGMLAConfig.from_preset(preset), LAYERS)
    model = build_model(shape, "egmla-a", getattr(torch, dtype), "cpu").model  # without the head
    typer.echo("batch  new tokens  context  grouped  tiles  expanded")
    for batch, queries, context in CASES:
        length, vocabulary = context + queries * (STEPS + 2), shape.config.vocab_size
        ids = token_ids(batch, length, vocabulary)
        if different:
            ids = torch.stack([torch.randperm(vocabulary)[:length] for _ in range(batch)]).int()
        milliseconds = []
        for way in ("grouped", "tiles", "expanded"):
            model.set_kv_decoding(way)
            cache, seconds = filled_cache(model, "egmla-a", ids[:, :context]), []
            for step in range(STEPS + 2):
                new = ids[:, context + step * queries :][:, :queries].long()
                start = time.process_time()
                model(new, cache=cache, use_cache=True)
                seconds.append(time.process_time() - start)
            milliseconds.append(f"{1e3 * min(seconds[2:]) / LAYERS:8.2f}")
        typer.echo(f"{batch:5}  {queries:10}  {context:7}  {'  '.join(milliseconds)}")


if __name__ == "__main__":
    typer.run(main)
