"""Runs the cells that a folder lacks, in worker processes."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from itertools import groupby
from pathlib import Path

import torch
import transformers

from ..configuration.presets import PRESETS
from ..configuration_egmla import EGMLAConfig
from ..version import __version__
from .cells import RETAINED, BrokenCellError, Cell, Results, is_settled, read_json, write_json
from .floor import measure_rates
from .systems import Shape, estimated_bytes
from .worker import Job


SHAPE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "kv_gate_dim",
    "kv_gate_norm",
    "layer_group_size",
    "tie_word_embeddings",
    "attention_bias",
    "hidden_act",
)
MEMORY_SHARE = 0.9  # of what is available that a cell may take


def describe(config: EGMLAConfig, layers: int, device: str, threads: int) -> dict:
    """The environment that results carry: machine without its name, versions, shape, date."""
    machine = {
        "cpu": _cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
    }
    if device != "cpu":
        machine["device"] = torch.cuda.get_device_name(device)
    preset = next((name for name, fields in PRESETS.items() if fields.items() <= config.to_dict().items()), None)
    return {
        **machine,
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "egmla": __version__,
        "preset": preset,
        "layers": layers,
        "of_layers": config.num_hidden_layers,
        "shape": {field: getattr(config, field) for field in SHAPE_FIELDS},
        "date": date.today().isoformat(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def available_bytes(device: str) -> int:
    """Memory that may be taken now."""
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    for line in meminfo.read_text(encoding="utf-8").splitlines() if meminfo.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def open_results(
    folder: Path, environment: dict, dtypes: list[str], device: str, say: Callable[[str], None]
) -> Results:
    """
    The results in a folder, to be continued; the machine's rates are measured when it is new.

    Raises:
        ValueError: the folder holds results of another machine, shape or version.
    """
    results = Results(folder)
    known = None
    if results.machine_file.exists():
        known = read_json(results.machine_file, "environment", "rates")
        for field in {*environment, *known["environment"]} - {"date"}:
            there, here = known["environment"].get(field), environment.get(field)
            if there != here:
                raise ValueError(
                    f"{folder} holds results with {field} {there}, and here it is {here}: name another folder with "
                    "--output, or remove that one."
                )
    measured = set(known["rates"]["operations"]) if known is not None else set()
    if not set(dtypes) <= measured:
        say("Measuring bandwidth and matrix products of this machine")
        rates = measure_rates(device, sorted(measured | set(dtypes)))
        write_json(results.machine_file, {"environment": environment, "rates": rates.to_dict()})
    return results


def run_missing(
    results: Results, environment: dict, wanted: list[tuple[Cell, list[str]]], job: Job, say: Callable[[str], None]
) -> None:
    """
    Measures what the folder lacks of the cells and systems wanted.

    Args:
        results, environment: where results go, and what they carry.
        wanted: cells with their systems.
        job: what workers are told, but for their cells.
        say: is called with lines that tell what happens.

    Raises:
        ValueError: workers died; what they had finished is kept.
    """
    shape = Shape.of(EGMLAConfig.from_dict(job.config), job.layers)
    room = MEMORY_SHARE * available_bytes(job.device)
    missing = []
    for cell, names in wanted:
        try:
            there = results.read(cell)
        except BrokenCellError as error:
            say(f"Measuring again, since it cannot be used: {error}")
            results.path(cell).unlink()
            there = {}
        names = [name for name in names if not (name in there and is_settled(there[name], job.seconds))]
        sets = _fitting(shape, cell, names, room, results, environment, say)
        missing += [(cell, together) for together in sets]

    def key(entry: tuple[Cell, list[str]]) -> tuple:
        cell, _ = entry
        return cell.dtype, cell.allocator, cell.phase == "memory"

    failures = []
    for _, entries in groupby(missing, key):
        entries = list(entries)
        while entries:
            done, error = _run_worker(entries, job, say)
            if error:
                failures.append(f"{entries[done][0]}: {error}" if done < len(entries) else error)
            entries = entries[done + 1 :] if error else []
    if failures:
        raise ValueError(f"{len(failures)} cells were not measured, run again to retry. {' '.join(failures)}")


def _fitting(
    shape: Shape,
    cell: Cell,
    names: list[str],
    room: float,
    results: Results,
    environment: dict,
    say: Callable[[str], None],
) -> list[list[str]]:
    """The systems in as few sets as fit into memory; those that never fit are noted as skipped."""
    sets: list[tuple[list[str], float]] = []
    for name in names:
        size = estimated_bytes(shape, name, cell)
        if size > room:
            reason = f"needs about {size / 2**30:.0f} GiB of {room / 2**30:.0f}"
            say(f"{cell}: {name} skipped, {reason}")
            results.add(cell, environment, {name: {"skipped": reason, "needs": size}})
            continue
        alone = cell.phase == "memory"  # each system in a process of its own, one after the other
        fits = next((i for i, (_, taken) in enumerate(sets) if alone or taken + size <= room), None)
        if fits is None:
            sets.append(([name], size))
        else:
            sets[fits] = ([*sets[fits][0], name], sets[fits][1] + size)
    return [together for together, _ in sets]


def _run_worker(entries: list[tuple[Cell, list[str]]], job: Job, say: Callable[[str], None]) -> tuple[int, str]:
    """Runs one process on cells of one dtype and allocator; returns how many it finished, and its error."""
    variables = {name: value for name, value in os.environ.items() if name not in RETAINED}
    if job.threads:
        variables["OMP_NUM_THREADS"] = str(job.threads)
    if entries[0][0].allocator == "retained":
        variables.update(RETAINED)
    done = 0
    with tempfile.TemporaryDirectory() as folder:
        task, errors = Path(folder, "job.json"), Path(folder, "errors")
        content = {**asdict(job), "cells": [(asdict(cell), names) for cell, names in entries]}
        task.write_text(json.dumps(content), encoding="utf-8")
        command = [sys.executable, "-m", "modeling_egmla.benchmark.worker", str(task)]
        with errors.open("w", encoding="utf-8") as stream:
            worker = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=stream, text=True)
            with worker:
                try:
                    say(f"{entries[0][0]}: {', '.join(entries[0][1])}")
                    for line in worker.stdout:
                        if line.startswith('{"done"'):
                            done += 1
                            if done < len(entries):
                                say(f"{entries[done][0]}: {', '.join(entries[done][1])}")
                except BaseException:
                    worker.kill()
                    raise
        if worker.returncode == 0:
            return done, ""
        if worker.returncode < 0:
            return done, f"killed by signal {-worker.returncode} (out of memory?)."
        lines = errors.read_text(encoding="utf-8").strip().splitlines()
        return done, lines[-1] if lines else f"exit code {worker.returncode}."
