"""
Measures cells in a process of its own, whose allocator and threads are set before it starts:

    python -m modeling_egmla.benchmark.worker JOB.json

Systems take turns step by step, so that what else the machine does meets all of them.
"""

import gc
import json
import multiprocessing
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.cache_utils import Cache

from ..configuration_egmla import EGMLAConfig
from .cells import Cell, Results
from .floor import synchronize
from .systems import FUSED, Shape, build_model, cache_bytes, filled_cache, new_cache, weight_bytes
from .text import token_ids


@dataclass
class Job:
    """
    What a worker is to do.

    Attributes:
        folder: of the results.
        environment: what they carry.
        config, layers: the shape.
        device, threads: where.
        steps: timed steps of each system, after two that are not.
        seconds: a system whose steps would take longer in one cell is left out.
        cells: cells and their systems, which are in memory together.
    """

    folder: str
    environment: dict
    config: dict
    layers: int | None
    device: str
    threads: int
    steps: int
    seconds: float
    cells: list[tuple[dict, list[str]]]


def main(path: str) -> None:
    """Runs the job in a file; says what it does on standard output, a line for each cell."""
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    torch.manual_seed(0)
    if job.threads:
        torch.set_num_threads(job.threads)
    shape = Shape.of(EGMLAConfig.from_dict(job.config), job.layers)
    results, models = Results(Path(job.folder)), {}
    for cell, names in job.cells:
        cell = Cell(**cell)
        slow = {name: smaller for name in names if (smaller := results.too_slow(cell, name, job.seconds)) is not None}
        names = [name for name in names if name not in slow]
        if cell.phase == "memory":
            for name in names:
                measure_apart(name, cell, job, shape)
            measured = {}
        else:
            for name in set(models) - set(names):
                del models[name]
            gc.collect()
            for name in names:
                if name not in models:
                    models[name] = build_model(shape, name, getattr(torch, cell.dtype), job.device, models)
            measure = measure_prefill if cell.phase == "prefill" else measure_decode
            measured = measure(models, cell, job) if names else {}
        skipped = {
            name: {"skipped": f"{other.batch} x {other.prompt} took too long", "limit": job.seconds}
            for name, other in slow.items()
        }
        results.add(cell, job.environment, {**measured, **skipped})
        print(json.dumps({"done": cell.name, "systems": names}), flush=True)


class Clock:
    """Seconds of a call, on an accelerator between two events."""

    def __init__(self, device: str):
        self.device = device

    def __call__(self, call) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        start, end = torch.Event(self.device, enable_timing=True), torch.Event(self.device, enable_timing=True)
        synchronize(self.device)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def take_turns(calls: dict, job: Job) -> dict[str, dict]:
    """
    Times each call twice and then `job.steps` times, one after the other.

    Returns for each its `first` seconds and the list `seconds`, or why it was `skipped`: it takes too long, or fails
    at once for want of memory, or since its kernel cannot be built here.
    """
    clock, first, seconds = Clock(job.device), {}, {name: [] for name in calls}
    skipped = {}
    for name, call in calls.items():
        try:
            first[name] = clock(call)
        except Exception as error:
            if not (isinstance(error, torch.OutOfMemoryError) or name == FUSED):
                raise
            skipped[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            continue
        again = clock(call) if first[name] * job.steps > job.seconds else 0.0
        if again * job.steps > job.seconds:
            skipped[name] = f"one takes {again:.1f} s, {job.steps} of them more than {job.seconds:g} s"
        elif not again:
            clock(call)
    for _ in range(job.steps):
        for name, call in calls.items():
            if name not in skipped:
                seconds[name].append(clock(call))
    return {
        name: {"skipped": skipped[name], "first": first[name], "limit": job.seconds}
        if name in skipped and name in first
        else {"skipped": skipped[name], "needs": 0}  # to be tried again
        if name in skipped
        else {"first": first[name], "seconds": seconds[name]}
        for name in calls
    }


@torch.no_grad()
def measure_decode(models: dict, cell: Cell, job: Job) -> dict[str, dict]:
    """Steps of one new token on filled caches."""
    config = next(iter(models.values())).config
    ids = token_ids(cell.batch, cell.prompt + job.steps + 2, config.vocab_size).to(job.device)
    caches = {name: filled_cache(model, name, ids[:, : cell.prompt]) for name, model in models.items()}

    def step(name: str) -> None:
        at = caches[name].get_seq_length()
        models[name](ids[:, at : at + 1].long(), cache=caches[name], use_cache=True)

    timed = take_turns({name: lambda name=name: step(name) for name in models}, job)
    run = time.time_ns()
    return {
        name: {"run": run, **timed[name], **weight_bytes(model), "cache": cache_bytes(caches[name])}
        for name, model in models.items()
    }


@torch.no_grad()
def measure_prefill(models: dict, cell: Cell, job: Job) -> dict[str, dict]:
    """Whole prompts into empty caches, with the logits of the last token, as `generate` computes them."""
    config = next(iter(models.values())).config
    ids = token_ids(cell.batch, cell.prompt, config.vocab_size).to(job.device).long()

    def prefill(name: str) -> None:
        models[name](ids, cache=new_cache(models[name], name), use_cache=True, logits_to_keep=1)

    timed = take_turns({name: lambda name=name: prefill(name) for name in models}, job)
    run = time.time_ns()
    return {name: {"run": run, **result} for name, result in timed.items()}


def measure_apart(name: str, cell: Cell, job: Job, shape: Shape) -> None:
    """Measures the memory of one system in a child process, which has nothing but the libraries when it begins."""
    child = multiprocessing.get_context("fork").Process(target=measure_memory, args=(name, cell, job, shape))
    child.start()
    child.join()
    if child.exitcode:
        raise RuntimeError(f"{name} ended with exit code {child.exitcode}.")


@torch.no_grad()
def measure_memory(name: str, cell: Cell, job: Job, shape: Shape) -> None:
    """
    Memory of two steps of a system: `held` before them, the `peak` of the process while they run, and `transient`,
    what of that is neither held before nor kept after. Code is loaded by steps on a shorter cache before.
    """
    model = build_model(shape, name, getattr(torch, cell.dtype), job.device)
    ids = token_ids(cell.batch, cell.prompt + 2, model.config.vocab_size).to(job.device)

    def decode(cache: Cache, *positions: int) -> None:
        for at in positions:
            model(ids[:, at : at + 1].long(), cache=cache, use_cache=True)

    length = min(cell.prompt, 512)
    decode(filled_cache(model, name, ids[:, :length]), length, length + 1)  # loads the code that is needed
    cache = filled_cache(model, name, ids[:, : cell.prompt])
    before = sum(cache_bytes(cache).values())
    gc.collect()
    held = reset_peak(job.device)
    decode(cache, cell.prompt, cell.prompt + 1)
    peak, kept = peak_bytes(job.device), cache_bytes(cache)
    result = {"peak": peak, "held": held, "transient": max(0, peak - held - (sum(kept.values()) - before))}
    result |= {**weight_bytes(model), "cache": kept}
    Results(Path(job.folder)).add(cell, job.environment, {name: result})


def _process_status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}.")


def peak_bytes(device: str) -> int:
    """The most that the process, or on an accelerator its tensors, took since the last `reset_peak`."""
    return _process_status("VmHWM") if device == "cpu" else torch.accelerator.max_memory_allocated()


def reset_peak(device: str) -> int:
    """Makes what is held now the peak, and returns it."""
    if device != "cpu":
        torch.accelerator.reset_peak_memory_stats()
        return torch.accelerator.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # Linux: resets the peak
    return _process_status("VmRSS")


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(sys.argv[1])
