"""`egmla bench`: all systems at tiny size, resuming, broken files, tables that say what the files say."""

import json
import os
import socket
import statistics
import time
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache
from typer.testing import CliRunner

from modeling_egmla.benchmark import schedule, systems, worker
from modeling_egmla.benchmark.cells import BrokenCellError, Cell, Results, is_settled, write_json
from modeling_egmla.benchmark.floor import Rates, least_work, measure_rates
from modeling_egmla.benchmark.systems import ALL_SYSTEMS, LABELS, Shape
from modeling_egmla.benchmark.text import text, token_ids
from modeling_egmla.commands import app


SHAPE = {"num_attention_heads": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16, "qk_rope_head_dim": 6}
RATES = Rates(bandwidth=1e9, operations={"float32": 1e9, "bfloat16": 1e9})
CELL = Cell("decode", 40, 2, "float32", "default")


@pytest.fixture(scope="module")
def shape(make_config):
    return Shape.of(make_config(**SHAPE))


@pytest.fixture
def bench(monkeypatch):
    """Runs the command with rates that take no time to measure; returns what it printed, or its error."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(schedule, "measure_rates", lambda *args: RATES)

    def run(*arguments, exit_code=0):
        result = CliRunner().invoke(app, ["bench", "--device", "cpu", *(str(argument) for argument in arguments)])
        assert result.exit_code == exit_code, result.output
        return result.stderr if exit_code else result.stdout

    return run


@pytest.fixture(scope="module")
def model(make_config, tmp_path_factory):
    """A folder with the tiny shape."""
    folder = tmp_path_factory.mktemp("model")
    make_config(**SHAPE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    """A folder of results of every phase, with the options that made it and what the command printed."""
    folder = tmp_path_factory.mktemp("results")
    options = [model, "--output", folder, "--prompts", 40, "--batches", 2, "--dtypes", "float32"]
    options += ["--allocators", "default", "--threads", 1, "--steps", 5]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        patch.setattr(schedule, "measure_rates", lambda *args: RATES)
        result = CliRunner().invoke(app, ["bench", "--device", "cpu", *map(str, options)])
    assert result.exit_code == 0, result.output
    return folder, options, result.stdout


def systems_of(folder, phase: str) -> dict:
    return json.loads((folder / f"{phase}-float32-b2-t40-default.json").read_text())["systems"]


def table(output: str, title: str) -> list[list[str]]:
    """Words of the rows of the table with this title."""
    lines = output.split(title)[1].splitlines()
    first = next(i for i, line in enumerate(lines) if "──" in line) + 1
    return [line.split() for line in lines[first : next(i for i in range(first, len(lines)) if not lines[i].strip())]]


@pytest.mark.slow
def test_every_system_is_measured(measured):
    """One call gives a file for each cell, with all systems in it, tables of them, and a figure."""
    folder, _, output = measured
    for phase in ("decode", "prefill", "memory"):
        assert list(systems_of(folder, phase)) == list(ALL_SYSTEMS)
        assert not any("skipped" in result for result in systems_of(folder, phase).values())
    assert list(systems_of(folder, "groups")) == ["egmla-a-lgz1", "egmla-a-lgz2"]
    for result in systems_of(folder, "decode").values():
        assert len(result["seconds"]) == 5 and min(result["seconds"]) > 0
    for result in systems_of(folder, "memory").values():
        assert result["peak"] >= result["held"] > result["weights"] and result["transient"] >= 0
    assert "Not measured" not in output
    assert (folder / "figure.png").stat().st_size > 10_000
    assert "| batch x tokens" in (folder / "report.md").read_text()


@pytest.mark.slow
def test_caches_hold_what_their_formula_says(measured, shape):
    """The bytes of each cache are those of its kind of attention, to the byte."""
    folder, _, _ = measured
    tokens, layers, heads, size = 2 * (40 + 5 + 2), 2, 8, 4
    per_layer = {"mha": 2 * heads * 8, "gqa": 2 * 4 * 8, "egmla-stock": heads * (8 + 6 + 8)}
    for name, result in systems_of(folder, "decode").items():
        assert result["cache"]["filled"] == tokens * layers * per_layer.get(name, 16 + 6) * size
    assert systems_of(folder, "groups")["egmla-a-lgz2"]["cache"]["filled"] == tokens * (16 + 6) * size
    decode = systems_of(folder, "decode")
    assert decode["egmla-a"]["precomputed"] == layers * 97 * heads * 16 * size and decode["egmla"]["precomputed"] == 0
    assert decode["egmla"]["tables"] == layers * 97 * 12 * size and decode["mha"]["tables"] == 0


@pytest.mark.slow
def test_tables_say_what_the_files_say(measured):
    """Medians, ratios and tokens a second in the tables are those of the files; so is the Markdown."""
    folder, _, output = measured
    medians = {name: statistics.median(r["seconds"]) for name, r in systems_of(folder, "decode").items()}
    (row,) = table(output, "Milliseconds a step: decode")
    assert row[3:] == [f"{1e3 * seconds:,.1f}" for seconds in medians.values()]
    (row,) = table(output, "Ratios: decode")
    assert row[3] == f"{medians['egmla-a'] / medians['mha']:.2f}"
    (row,) = table(output, "Tokens a second, of all sequences together: decode")
    assert float(row[3].replace(",", "")) == pytest.approx(2 / medians["mha"], rel=0.01)
    markdown = (folder / "report.md").read_text()
    line = next(l for l in markdown.split("Milliseconds a step: decode")[1].splitlines() if "2 x 40" in l)
    assert line.replace("|", " ").split()[3:] == [f"{1e3 * seconds:,.1f}" for seconds in medians.values()]


@pytest.mark.slow
def test_files_name_no_machine(measured, model):
    """Results carry processor, versions and date, but neither the host's name nor a path."""
    folder, _, _ = measured
    for path in folder.glob("*.json"):
        content = path.read_text()
        assert str(model) not in content and str(folder) not in content
        assert not socket.gethostname() or socket.gethostname() not in content
    environment = json.loads((folder / "machine.json").read_text())["environment"]
    assert {"threads", "torch", "transformers", "egmla", "date", "shape", "layers"} <= set(environment)


@pytest.mark.slow
def test_resumes(measured, bench, monkeypatch):
    """A second call measures nothing, and prints the same tables; so does --report."""
    folder, options, output = measured
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*-*.json")}
    monkeypatch.setattr(schedule, "_run_worker", lambda *args: pytest.fail("a finished cell was measured again"))
    again = bench(*options)
    assert again.split("Machine")[1] == output.split("Machine")[1]
    assert bench("--output", folder, "--report").split("Machine")[1] == output.split("Machine")[1]
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*-*.json")} == before


@pytest.mark.slow
def test_measures_only_what_is_missing(measured, bench, monkeypatch):
    """With the file of one cell gone, and one system gone from another, exactly these are measured."""
    folder, options, _ = measured
    path, prefill = folder / f"{CELL.name}.json", folder / "prefill-float32-b2-t40-default.json"
    kept = path.read_text(), prefill.read_text()
    content = json.loads(kept[1])
    del content["systems"]["mla"]
    write_json(prefill, content)
    path.unlink()
    asked = []
    monkeypatch.setattr(schedule, "_run_worker", lambda entries, *rest: asked.extend(entries) or (len(entries), ""))
    try:
        bench(*options)
    finally:
        path.write_text(kept[0])
        prefill.write_text(kept[1])
    assert asked == [(CELL, list(ALL_SYSTEMS)), (Cell("prefill", 40, 2, "float32", "default"), ["mla"])]


@pytest.mark.slow
@pytest.mark.parametrize("content", ['{"cell": {"pha', '{"cell": {}}', None], ids=["cut", "incomplete", "another"])
def test_broken_cells_are_redone_loudly(measured, bench, content, monkeypatch):
    """A file that is cut off, lacks a part or is of another cell is named, and measured again; --report refuses it."""
    folder, options, _ = measured
    path = folder / f"{CELL.name}.json"
    kept = path.read_text()
    path.write_text(content or kept.replace('"prompt": 40', '"prompt": 41'))
    asked = []
    monkeypatch.setattr(schedule, "_run_worker", lambda entries, *rest: asked.extend(entries) or (len(entries), ""))
    try:
        assert path.name in bench("--output", folder, "--report", exit_code=1).replace("\n", "")
        output = bench(*options, "--phases", "decode", "--systems", "mha")
        assert "Measuring again" in output and path.name in output.replace("\n", "")
        assert asked == [(CELL, ["mha"])] and not path.exists()
    finally:
        path.write_text(kept)


@pytest.mark.slow
def test_other_machines_are_refused(measured, bench):
    """Results of another version, machine or shape are not mixed with these: the error names the difference."""
    folder, options, _ = measured
    path = folder / "machine.json"
    kept = path.read_text()
    path.write_text(kept.replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'))
    try:
        assert "torch 1.0" in bench(*options, exit_code=1)
    finally:
        path.write_text(kept)
    assert "layers 2, and here it is 1" in bench(*options, "--layers", 1, exit_code=1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--phases", "decode,speed"], "--phases knows decode, prefill, memory, groups, but was given 'decode,speed'"),
        (["--prompts", "1k"], "--prompts takes whole numbers"),
        (["--batches", "0"], "--batches takes whole numbers"),
        (["--report"], "holds no results"),
        (["mla-base-kv256"], "`kv_gate` is 'none'"),
        (["--device", "cuda:1"], "--device takes cpu or cuda"),
        (["--quick", "--dtypes", "float32"], "--quick sets --dtypes itself"),
        (["--systems", "egmla-a-fused"], "--systems egmla-a-fused is a kernel for CUDA"),
    ],
)
def test_errors(bench, tmp_path, arguments, message):
    """What cannot be measured is said in a sentence, before anything is."""
    assert message in bench("--output", tmp_path, *arguments, exit_code=1)
    assert not list(tmp_path.iterdir())


def test_one_systems_failure_is_its_own():
    """Too little memory, or a kernel that cannot be built here, costs that system alone, and is tried again."""
    job = worker.Job("", {}, {}, None, "cpu", 1, 5, 60, [])

    def fail(error):
        raise error

    calls = {"mha": lambda: None, "egmla-a-fused": lambda: fail(RuntimeError("no C compiler\nat all"))}
    calls["mla"] = lambda: fail(torch.OutOfMemoryError("too much"))
    timed = worker.take_turns(calls, job)
    assert len(timed["mha"]["seconds"]) == 5
    assert timed["egmla-a-fused"] == {"skipped": "RuntimeError: no C compiler", "needs": 0}
    assert "too much" in timed["mla"]["skipped"] and not is_settled(timed["mla"], 60)
    with pytest.raises(RuntimeError, match="a fault"):
        worker.take_turns({"mha": lambda: fail(RuntimeError("a fault"))}, job)


def test_rates_of_every_dtype_are_kept(tmp_path, monkeypatch):
    """A folder that is continued in another precision still has the rate of the first."""
    asked = []
    monkeypatch.setattr(schedule, "measure_rates", lambda device, dtypes: asked.append(dtypes) or RATES)
    monkeypatch.setattr(schedule, "write_json", lambda path, content: path.write_text(json.dumps(content)))
    machine = {"environment": {}, "rates": {"bandwidth": 1.0, "operations": {"bfloat16": 1.0}}}
    (tmp_path / "machine.json").write_text(json.dumps(machine))
    schedule.open_results(tmp_path, {}, ["float32"], "cpu", lambda line: None)
    assert asked == [["bfloat16", "float32"]]


@pytest.mark.parametrize("name", ["our-mla", "egmla", "egmla-a"])
def test_floor_of_expanding(shape, name):
    """Where our models expand the history, their floor is that of expanding it, with the gate of every token."""
    ids = token_ids(CELL.batch, CELL.prompt, shape.config.vocab_size)
    grouped, expanded = (least_work(shape, name, CELL, ids, expands=expands)[1] for expands in (False, True))
    assert expanded.bytes > grouped.bytes
    if name == "our-mla":
        assert expanded == least_work(shape, "mla", CELL, ids)[1]


def test_what_does_not_fit_is_skipped(tmp_path, shape, bench, model, monkeypatch):
    """A system that memory has no room for is noted with the reason; the others are measured, apart if need be."""
    needs = {name: systems.estimated_bytes(shape, name, CELL) for name in LABELS}
    monkeypatch.setattr(schedule, "MEMORY_SHARE", 1)
    monkeypatch.setattr(schedule, "estimated_bytes", lambda shape, name, cell: 3 if name == "mla" else 1)
    monkeypatch.setattr(schedule, "available_bytes", lambda device: 2)
    sets, results = [], Results(tmp_path)
    monkeypatch.setattr(schedule, "_run_worker", lambda entries, *rest: sets.extend(entries) or (len(entries), ""))
    job = worker.Job(str(tmp_path), {}, shape.config.to_dict(), None, "cpu", 1, 5, 60, [])
    schedule.run_missing(results, {}, [(CELL, ["mha", "gqa", "mla", "egmla"])], job, lambda line: None)
    assert [names for _, names in sets] == [["mha", "gqa"], ["egmla"]]
    assert "needs about" in results.read(CELL)["mla"]["skipped"]
    assert needs["egmla-a"] > needs["egmla"] and all(size > 0 for size in needs.values())


def test_slow_systems_are_left_out(tmp_path):
    """What would take too long is timed once more to be sure and left out, there and in larger cells."""
    job = worker.Job("", {}, {}, None, "cpu", 1, 5, 0.05, [])
    timed = worker.take_turns({"fast": lambda: None, "slow": lambda: time.sleep(0.03)}, job)
    assert len(timed["fast"]["seconds"]) == 5 and "more than 0.05 s" in timed["slow"]["skipped"]
    results = Results(tmp_path)
    results.add(CELL, {}, {"mha": timed["fast"], "mla": timed["slow"]})
    larger, other = Cell("decode", 80, 2, "float32", "default"), Cell("decode", 80, 1, "float32", "default")
    assert results.too_slow(larger, "mla", 0.05) == CELL
    for cell, name, seconds in ((larger, "mha", 0.05), (other, "mla", 0.05), (CELL, "mla", 0.05), (larger, "mla", 1)):
        assert results.too_slow(cell, name, seconds) is None


@pytest.mark.parametrize("seconds, names", [(60, ["egmla"]), (61, ["mla", "egmla"])])
def test_what_was_left_out_may_be_measured_later(tmp_path, shape, monkeypatch, seconds, names):
    """A system that was too slow is measured where it may take longer, one that was too large where it fits."""
    results, entries = Results(tmp_path), []
    skipped = {"skipped": "it took too long", "first": 9.0, "limit": 60}
    results.add(CELL, {}, {"mha": {"seconds": [1.0]}, "mla": skipped, "egmla": {"skipped": "", "needs": 2**60}})
    monkeypatch.setattr(schedule, "_run_worker", lambda missing, *rest: entries.extend(missing) or (len(missing), ""))
    job = worker.Job(str(tmp_path), {}, shape.config.to_dict(), None, "cpu", 1, 5, seconds, [])
    schedule.run_missing(results, {}, [(CELL, ["mha", "mla", "egmla"])], job, lambda line: None)
    assert entries == [(CELL, names)]


@pytest.mark.slow
def test_a_worker_that_fails_is_reported(tmp_path, shape):
    """Its error is passed on with the cell it was at."""
    job = worker.Job(str(tmp_path), {}, shape.config.to_dict(), None, "cpu", 1, 5, 60, [])
    done, error = schedule._run_worker([(replace(CELL, dtype="float5"), ["mha"])], job, lambda line: None)
    assert done == 0 and "float5" in error


def test_files_are_whole_or_not_there(tmp_path, monkeypatch):
    """A crash while a cell is written leaves the old file, and no other."""
    results = Results(tmp_path)
    results.add(CELL, {}, {"mha": {"seconds": [1.0]}})
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        results.add(CELL, {}, {"mla": {"seconds": [2.0]}})
    assert list(results.read(CELL)) == ["mha"] and len(list(tmp_path.iterdir())) == 1
    results.path(CELL).write_text('{"cell": 1, "systems": {}}')
    with pytest.raises(BrokenCellError, match="another cell"):
        results.read(CELL)


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", ALL_SYSTEMS)
def test_the_floor_is_below_what_is_done(shape, name, phase):
    """No system does fewer operations than its floor counts, and the floor is not idle: within a factor of three."""
    cell = Cell(phase, 96, 2, "float32", "default")
    model = systems.build_model(shape, name, torch.float32, "cpu")
    ids = token_ids(2, 97, shape.config.vocab_size)

    def in_place(result, a, b, **kwargs):
        return 2 * a[0] * a[1] * b[1]

    with torch.no_grad():
        if isinstance(systems.new_cache(model, name), DynamicCache) or phase == "prefill":
            model.set_attn_implementation("eager")  # the counter does not know fused attention on a CPU
        if phase == "decode":
            if name in ("our-mla", "egmla", "egmla-a"):
                model.set_kv_decoding("grouped")
            cache = systems.filled_cache(model, name, ids[:, :95])
            model(ids[:, 95:96].long(), cache=cache)  # statistics of what is filled are computed once
        with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
            if phase == "decode":
                model(ids[:, 96:97].long(), cache=cache)
            else:
                model(ids[:, :96].long(), cache=systems.new_cache(model, name), logits_to_keep=1)
    least = sum(work.operations for work in least_work(shape, name, cell, ids[:, :96]))
    assert least <= counter.get_total_flops() < 3 * least


def test_floor_of_mha_by_hand(shape):
    """MHA reads weights and cache once: the bytes are those of all tensors, the seconds those of the slower rate."""
    model = systems.build_model(shape, "mha", torch.float32, "cpu")
    ids = token_ids(2, 40, shape.config.vocab_size)
    cache = systems.filled_cache(model, "mha", ids)
    weights, history = least_work(shape, "mha", CELL, ids)
    assert weights.bytes == sum(p.nbytes for p in model.parameters())
    assert history.bytes == systems.cache_bytes(cache)["filled"]
    for work in (weights, history):
        assert work.seconds(Rates(1e3, {"float32": 1e12}), "float32") == work.bytes / 1e3
        assert work.seconds(Rates(1e12, {"float32": 1e3}), "float32") == work.operations / 1e3


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("name", ALL_SYSTEMS)
def test_weights_work_does_not_depend_on_the_history(shape, name, phase):
    """A longer history is more work of the history alone: where decoding waits for the one, the other rests."""
    ids = token_ids(2, 80, shape.config.vocab_size)
    cells = [Cell(phase, prompt, 2, "float32", "default") for prompt in (40, 80)]
    (weights, history), (same, longer) = (least_work(shape, name, cell, ids[:, : cell.prompt]) for cell in cells)
    if phase == "decode":
        assert weights == same
    assert longer.bytes > history.bytes and longer.operations > history.operations


def test_rates_are_measured():
    """Bandwidth and the rate of products are positive, for each dtype that was asked for."""
    rates = measure_rates("cpu", ["float32", "bfloat16"], side=64, megabytes=1)
    assert rates.bandwidth > 0 and set(rates.operations) == {"float32", "bfloat16"}
    assert min(rates.operations.values()) > 0


def test_ids_repeat_as_in_text():
    """Windows of 4,096 tokens have the distinct ids that the documents say; rows follow one another in the text."""
    ids = token_ids(32, 4096, 50304)
    counts = [len(row.unique()) for row in ids]
    assert (min(counts), round(statistics.mean(counts)), max(counts)) == (1056, 1282, 1495)
    assert torch.equal(ids[1, :5], text()[4096:4101]) and ids.dtype == torch.int32
    assert token_ids(40, 4096, 50304).shape == (40, 4096) and token_ids(2, 9, 97).max() < 97


def test_shared_weights(shape):
    """Variants of EG-MLA are measured on the very same weights, which are in memory once."""
    first = systems.build_model(shape, "egmla", torch.float32, "cpu")
    second = systems.build_model(shape, "egmla-a", torch.float32, "cpu", {"egmla": first})
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert a.data_ptr() == b.data_ptr()
    assert second.lm_head.weight is second.model.embed_tokens.weight
