"""
What data-parallel training costs a process, with gate tables whole or cut by columns: time, memory and bytes sent.

    python benchmarks/parallel.py --processes 2 --output benchmarks/results/parallel-2.json

Each engine runs in processes of its own, all on this machine, over gloo: "ddp" and "fsdp" with whole tables,
"ddp-columns" and "fsdp-columns" with cut ones. Bytes are what the loopback interface carried during a step, divided by
the processes, so nothing else may use it; processor time, unlike the step's, leaves out waiting; peak memory is the
largest resident set of any process. Ids are of real text.
"""

import json
import os
import resource
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from modeling_egmla import EGMLAConfig, EGMLAForCausalLM
from modeling_egmla.benchmark.text import token_ids
from modeling_egmla.console import console, format_bytes, plain_table
from modeling_egmla.gate_egmla import gate_table_parameters
from modeling_egmla.training import parallel


NAMES = (
    ("passes", "  forward, backward, exchange"),
    ("optimizer", "  clipping and AdamW"),
    ("processor", "processor time"),
)


def loopback_bytes() -> int:
    """Bytes that the loopback interface has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[8])
    raise OSError("This system does not show what its loopback interface carries (/proc/net/dev).")


def work(rank, processes, port, engine, config, length, steps, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    mesh = init_device_mesh("cpu", (processes,))
    torch.manual_seed(0)
    model = EGMLAForCausalLM(config).train()
    if "columns" in engine:
        parallel.shard_gate_tables(model, mesh)
    if engine.startswith("ddp"):
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        wrapped = parallel.shard_model(model, mesh)
    tables = gate_table_parameters(model)
    of_tables = set(tables)
    rest = [parameter for parameter in model.parameters() if parameter not in of_tables]
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": tables}], lr=1e-4, fused=True)

    rows = []
    all_ids = (
        token_ids(processes * (steps + 1), length, config.vocab_size).long().view(steps + 1, processes, 1, length)
    )
    for ids in all_ids[:, rank]:
        dist.barrier()
        carried, start, processor = loopback_bytes(), time.perf_counter(), time.process_time()
        wrapped(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        dist.barrier()
        passed, carried = time.perf_counter(), loopback_bytes() - carried
        parallel.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        rows.append(
            {
                "passes": passed - start,
                "optimizer": time.perf_counter() - passed,
                "processor": time.process_time() - processor,
                "bytes": carried / processes,
            }
        )
    rows = rows[1:]  # the first step makes the moments
    result = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    peak = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    held = {
        "weights": sum(_local(p).nbytes for p in model.parameters()),
        "moments": sum(_local(v).nbytes for s in optimizer.state.values() for v in s.values() if v.dim()),
    }
    if rank == 0:
        result |= {"peak_memory": peak.item(), **held, "distinct_ids": len(all_ids[-1, 0].unique())}
        (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def main(
    processes: int = 2,
    preset: str = "egmla-base-kv64-emb256",
    layers: Annotated[int | None, typer.Option(help="fewer layers than the preset's")] = None,
    length: Annotated[int, typer.Option(help="tokens of the one sequence of each process")] = 512,
    steps: int = 3,
    engines: str = "ddp,ddp-columns",
    output: Annotated[Path | None, typer.Option(help="where to write JSON")] = None,
) -> None:
    config = EGMLAConfig.from_preset(preset)
    config.num_hidden_layers = layers or config.num_hidden_layers
    results = {}
    for engine in engines.split(","):
        with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            probe.close()
            multiprocessing.spawn(work, (processes, port, engine, config, length, steps, folder), nprocs=processes)
            results[engine] = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))

    title = (
        f"{preset}, {config.num_hidden_layers} layers, float32, {processes} processes of one thread, each "
        f"1 x {length} tokens, medians of {steps} steps"
    )
    table = plain_table(title, "a process", *results)
    seconds = {name: r["passes"] + r["optimizer"] for name, r in results.items()}
    table.add_row("step", *(f"{value:.2f} s" for value in seconds.values()))
    for key, name in NAMES:
        table.add_row(name, *(f"{r[key]:.2f} s" for r in results.values()))
    table.add_row("tokens a second, all", *(f"{processes * length / value:,.0f}" for value in seconds.values()))
    for key in ("bytes", "peak_memory", "weights", "moments"):
        name = {"bytes": "sent in a step", "peak_memory": "peak memory"}.get(key, key)
        table.add_row(name, *(format_bytes(r[key]) for r in results.values()))
    console().print(table)
    if output is not None:
        report = {"title": title, "torch": torch.__version__, "cores": os.cpu_count(), "engines": results}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
