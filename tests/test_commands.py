"""The `egmla` command: every subcommand on a tiny model, errors in a sentence, and the output that users see."""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.main import get_command
from typer.testing import CliRunner

from modeling_egmla import EGMLACache, EGMLAConfig
from modeling_egmla.commands import app, common
from modeling_egmla.commands.generate import cache_table
from modeling_egmla.commands.train import find_recipe
from modeling_egmla.configuration.presets import PRESETS
from modeling_egmla.console import format_bytes


BASE = "egmla-base-kv64-emb256"


@pytest.fixture(scope="module")
def folder(make_model, tmp_path_factory):
    """A random model of bytes, saved with its tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<|endoftext|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("model")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    make_model(vocab_size=len(vocabulary), bos_token_id=None, pad_token_id=None).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def egmla(monkeypatch):
    """Runs the command in a terminal of 80 columns; checks its exit code and returns what it printed, and errors."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*arguments, exit_code=0, stdin=None):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
        assert result.exit_code == exit_code, result.output
        return result.stderr if exit_code else result.stdout

    return run


def numbers(output: str, label: str) -> list[str]:
    """What stands behind `label` in a table's line."""
    line = next(line for line in output.splitlines() if line.strip().startswith(label))
    return line.strip().removeprefix(label).split()


@pytest.mark.parametrize("command", [[], *([name] for name in get_command(app).commands)], ids=str)
def test_help(egmla, command):
    """Every command explains itself, without loading a model."""
    output = egmla(*command, "--help")
    assert "Usage: egmla" in output or "Usage: root" in output
    assert all(len(line) <= 80 for line in output.splitlines())


def test_generate(egmla, folder):
    """The text begins with the prompt; the table counts the cached tokens, as a dynamic and as a static cache."""
    dynamic = egmla("generate", "My fellow", "--model", folder, "-n", 7, "--greedy")
    assert dynamic.startswith("My fellow")
    assert "7 tokens; the first after" in dynamic
    assert "Cache of 15 tokens, float32" in dynamic  # the last new token has not been fed
    config = EGMLAConfig.from_pretrained(folder)
    assert numbers(dynamic, "latents and rotary keys")[0] == f"{15 * config.cache_elements_per_token * 4:,}"
    assert numbers(dynamic, "token ids")[0] == str(15 * 4)
    assert numbers(dynamic, "MHA")[0] == f"{15 * 2 * 3 * (8 + 10) * 4:,}"
    assert "allocated ahead" in dynamic

    static = egmla("generate", "My fellow", "--model", folder, "-n", 7, "--temperature", 0, "--cache", "static")
    assert static.splitlines()[0] == dynamic.splitlines()[0]
    assert numbers(static, "latents and rotary keys") == numbers(dynamic, "latents and rotary keys")


@pytest.mark.parametrize("gates", ["projected", "precomputed"])
@pytest.mark.parametrize("placement", ["device", "host", "mmap"])
def test_generate_with_placed_gates(egmla, folder, tmp_path, placement, gates):
    """Gate tables go where they are told, the text stays the same, and the table shows bytes and where they are."""
    arguments = ["generate", "My fellow", "--model", folder, "-n", 7, "--greedy"]
    placed = [*arguments, "--gates", gates, "--placement", placement]
    if placement != "device":
        placed += ["--pool-rows", 5]
    if (placement, gates) == ("mmap", "precomputed"):
        placed += ["--gates-file", tmp_path / "gates"]
    row = 2 * 4 * (54 if gates == "precomputed" else 12)  # two layers, float32
    source = 2 * 4 * 12 if gates == "precomputed" else 0
    where = {"device": "on the device", "host": "on the host", "mmap": "in a file"}[placement]
    for _ in range(2):  # the second time the file is there
        output = egmla(*placed)
        assert output.splitlines()[0] == egmla(*arguments).splitlines()[0]
        assert numbers(output, where)[0] == f"{257 * (row + source):,}"
        assert all(len(line.rstrip()) <= 80 for line in output.splitlines())
    if placement != "device":
        assert numbers(output, "rows on the device, 5 of 5")[0] == f"{5 * row:,}"
        assert "brought there" in output
    if placement == "host":
        narrow = egmla(*placed, "--tables-dtype", "int8")
        assert numbers(narrow, "on the host")[0] == f"{257 * (row // 4 + 2 * 4 + source):,}"


def test_generate_samples_by_seed(egmla, folder):
    """The same seed draws the same text, another seed another; the prompt can come from standard input."""
    first, again, other = (
        egmla("generate", "-", "-m", folder, "-n", 12, "--seed", seed, stdin="Citizens").split("\n\n")[0]
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_cache_table_is_measured(make_model):
    """What the table says of the model is read from the live cache, not computed."""
    import torch
    from rich.console import Console

    model = make_model()
    cache = EGMLACache(model.config)
    model(torch.randint(97, (2, 9)), cache=cache)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(cache_table(model.config, cache))
    memory = cache.memory()
    output = console.export_text()
    assert numbers(output, "EG-MLA, measured")[0] == f"{memory.latents + memory.token_ids:,}"
    assert numbers(output, "allocated ahead, empty")[0] == f"{memory.slack:,}"


def test_plan(egmla):
    """The table fits 80 columns and shows the paper's break-even."""
    output = egmla("plan")
    assert all(len(line.rstrip()) <= 80 for line in output.splitlines())
    assert numbers(output, "Elements/token") == ["1,536", "1,536", "3,840", "6,144", "1,536", "18,432"]
    assert numbers(output, "Break-even") == ["never", "66,831", "35,593", "never", "9,149"]
    assert "67,072" in output


def test_plan_of_every_kind(egmla, folder):
    """Layer groups, plain MLA, folders, placements and dtypes have plans that fit 80 columns."""
    for arguments in (
        ["egmla-large-kv256-emb512-lgz2", "--placement", "host", "--tables-dtype", "int8", "--batch", 32],
        ["mla-xlarge-kv512", "--dtype", "float32"],
        [BASE, "--gates", "precomputed", "--placement", "mmap", "--cache-dtype", "float16", "--context", 131072],
        [folder, "-b", 3, "-c", 100],
    ):
        output = egmla("plan", *arguments)
        assert all(len(line.rstrip()) <= 80 for line in output.splitlines())
        assert "On the device" in output


def test_plan_as_json(egmla):
    """JSON has all numbers, in bytes, and nothing around it."""
    planned = json.loads(egmla("plan", BASE, "--batch", 2, "--context", 10, "--json"))
    assert planned["model"]["cache"] == 2 * 10 * 1536 * 2
    assert planned["tables_break_even_tokens"] == 67_072
    assert [column["name"] for column in planned["alternatives"]] == ["MLA-64", "MLA-256", "GQA-4", "MQA", "MHA"]
    placed = json.loads(
        egmla("plan", BASE, "--placement", "host", "--pool-rows", 10, "--tables-dtype", "int8", "--json")
    )
    row = 12 * (256 + 4)
    assert (placed["pool_rows"], placed["model"]["gate_rows"], placed["model"]["host"]) == (10, 10 * row, 50_304 * row)


def test_plan_list(egmla):
    """All presets are listed by the names that other commands take."""
    output = egmla("plan", "--list")
    assert all(name in output for name in PRESETS)


def test_plan_plot(egmla, tmp_path):
    """A figure is written, into a folder that need not exist."""
    pytest.importorskip("matplotlib")
    egmla("plan", BASE, "--placement", "mmap", "--plot", tmp_path / "new" / "plan.png")
    assert (tmp_path / "new" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_eval(egmla, folder, tmp_path):
    """Scores of a task of ours, printed and as the harness's JSON."""
    pytest.importorskip("lm_eval")
    output = egmla(
        "eval", folder, "--tasks", "sotu_continuation", "--limit", 3, "--output", tmp_path / "new" / "x.json"
    )
    value = float(numbers(output, "sotu_continuation")[1])
    results = json.loads((tmp_path / "new" / "x.json").read_text())["results"]
    assert value == pytest.approx(results["sotu_continuation"]["acc,none"], abs=1e-4)


def test_demo(egmla, folder, tmp_path):
    """All steps in one go."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("matplotlib")
    output = egmla("demo", "--model", folder, "--folder", tmp_path / "out")
    assert "EG-MLA, measured" in output
    assert "66,831" in output
    assert "sotu_continuation" in output
    assert (tmp_path / "out" / "plan.png").is_file()


def test_demo_without_extras(egmla, folder, tmp_path, monkeypatch):
    """Steps whose extra is absent are skipped with one line that names it."""
    find_spec = importlib.util.find_spec
    absent = {"matplotlib", "lm_eval"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in absent else find_spec(name))
    output = egmla("demo", "--model", folder, "--folder", tmp_path / "out")
    assert "pip install 'egmla[plot]'" in output
    assert "pip install 'egmla[eval]'" in output
    assert not (tmp_path / "out").exists()
    assert "pip install 'egmla[plot]'" in egmla("plan", "--plot", tmp_path / "x.png", exit_code=1)
    assert "pip install 'egmla[eval]'" in egmla("eval", folder, exit_code=1)


@pytest.mark.slow
def test_publishing_needs_no_extra(tmp_path):
    """Everything but what an extra is for is imported where no extra is installed."""
    absent = ("accelerate", "datasets", "hf_xet", "lm_eval", "matplotlib", "peft", "triton", "trl")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
        "import modeling_egmla.commands, modeling_egmla.plan, modeling_egmla.benchmark.report\n"
        "import modeling_egmla.evaluation.suite\n"
        "from modeling_egmla.conversion import cards, converter, export, hub, verify\n"
        "print(modeling_egmla.EGMLAForCausalLM.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "EGMLAForCausalLM\n", done.stderr


def test_eval_of_texts(egmla, folder, tmp_path):
    """Text files are counted to the unit and scored; the JSON says the same."""
    (tmp_path / "a.txt").write_text("Peace and trade \u2013 in that order.", encoding="utf-8")
    (tmp_path / "b.txt").write_text("War. " * 100, encoding="utf-8")
    (tmp_path / "b.txt").write_text("\ufeff" + (tmp_path / "b.txt").read_text(), encoding="utf-8")  # no text
    files = ["--text", tmp_path / "a.txt", "--text", tmp_path / "b.txt"]
    output = egmla("eval", folder, *files, "--stride", 32, "--output", tmp_path / "new" / "out.json")
    assert "Context 256 tokens, stride 32" in output
    results = json.loads((tmp_path / "new" / "out.json").read_text())
    first, second = results[str(tmp_path / "a.txt")], results[str(tmp_path / "b.txt")]
    assert (first["tokens"], first["bytes"], first["words"]) == (34, 34, 7)  # a token is a byte here
    assert (second["tokens"], second["bytes"], second["words"]) == (500, 500, 100)
    assert f"{first['bits_per_byte']:.4f}" in output
    assert "goes with --text" in egmla("eval", folder, "--stride", 3, exit_code=1)
    assert "Give one of" in egmla("eval", folder, "--suite", "paper", "--tasks", "piqa", exit_code=1)
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    assert "c.txt is not UTF-8" in egmla("eval", folder, "--text", tmp_path / "c.txt", exit_code=1).replace("\n", "")


def test_suite_leaves_table_and_plot(egmla, folder, tmp_path, monkeypatch):
    """The paper's suite shows what was left out in words, and leaves a table and a picture beside its results."""
    pytest.importorskip("lm_eval")
    import modeling_egmla.evaluation.suite as suite

    def run_task(model, tokenizer, name, *arguments):
        if name == "mmlu":
            raise suite.UnavailableError("no network")
        metrics = {"acc": {"value": 0.25, "stderr": 0.1}, "perplexity": {"value": 30.0, "stderr": 1.0}}
        return {"metrics": metrics, "rows": 4, "num_fewshot": 0, "version": 1.0, "dataset": ["x"]}

    def unavailable(*arguments):
        raise suite.UnavailableError("no network either")

    monkeypatch.setattr(suite, "_run_task", run_task)
    monkeypatch.setattr(suite, "_run_wikitext", unavailable)
    monkeypatch.setattr(suite, "_run_climbmix", unavailable)
    output = egmla("eval", folder, "--suite", "paper", "--output", tmp_path / "r.json")
    assert "LEFT OUT: mmlu: no network" in output and "NOT of 12" in output
    assert numbers(output, "egmla-large-kv256-emb512-lgz6") == ["47.80", "13.52"], "names are not cut"
    table = (tmp_path / "r.md").read_text()
    assert "| mean of 11, NOT of 12 (without mmlu) | 25.00 |" in table and "| mla-base-kv256 | 43.84 |" in table
    assert json.loads((tmp_path / "r.json").read_text())["summary"]["mean_acc"] == 0.25
    assert (tmp_path / "r.png").is_file() == (importlib.util.find_spec("matplotlib") is not None)


def test_plot_of_two_runs(egmla, tmp_path):
    """`egmla plot A B` prints the differences and draws them; a folder without a log is named."""
    pytest.importorskip("matplotlib")
    for name, loss in (("a", 3.5), ("b", 3.25)):
        (tmp_path / name).mkdir()
        line = {"step": 100, "eval_loss": loss}
        (tmp_path / name / "log.jsonl").write_text(json.dumps(line) + "\n")
    output = egmla("plot", tmp_path / "a", tmp_path / "b", "--output", tmp_path / "both.png")
    assert numbers(output, "100") == ["3.5000", "3.2500", "+0.2500"]
    assert (tmp_path / "both.png").is_file()
    assert "has no log.jsonl" in egmla("plot", tmp_path, exit_code=1).replace("\n", " ")


def test_recipes_are_found_by_name(tmp_path):
    """`egmla train NAME` takes a recipe of the package; a file of that name comes first; others are listed."""
    assert find_recipe(BASE).name == f"{BASE}.yaml"
    (tmp_path / "mine.yaml").write_text("model: {}")
    assert find_recipe(str(tmp_path / "mine.yaml")) == tmp_path / "mine.yaml"
    with pytest.raises(ValueError, match="lora-shakespeare"):
        find_recipe("egmla-base")
    with pytest.raises(ValueError, match="egmla distill"):
        find_recipe("distill-smollm2")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--model", "nobody/nothing"], "There is no model nobody/nothing"),
        (["generate", "x", "--model", BASE], f"{BASE} is a preset without weights"),
        (["generate", "", "--model", "FOLDER"], "at least one word"),
        (["generate", "x", "--model", "FOLDER", "-n", "1000"], "lower --max-new-tokens"),
        (["generate", "x", "--model", "FOLDER", "--device", "nowhere"], "--device nowhere"),
        (["generate", "x", "--model", "FOLDER", "--pool-rows", "9"], "--placement host or mmap"),
        (["generate", "x", "--model", "FOLDER", "--gates-file", "x"], "--gates precomputed --placement mmap"),
        (["generate", "x", "-m", "FOLDER", "--gates", "precomputed", "--placement", "mmap"], "--gates-file"),
        (["plan", BASE, "--pool-rows", "9"], "--placement host or mmap"),
        (["plan", "nothing"], "egmla plan --list"),
        (["plan", "mla-base-kv256", "--gates", "precomputed"], "without gate tables"),
        (["plan", "--plot", "FOLDER/plan.xyz"], "xyz"),
        (["eval", "nobody/nothing"], "There is no model nobody/nothing"),
        (["eval", "--tasks", " , "], "--tasks names no task"),
        (["eval", "--suite", "paper", "--output", "FOLDER/results.md"], ".json"),
        (["generate", "\udcff\udcfe", "--model", "FOLDER"], "not UTF-8"),
        (["generate", "x", "--model", "FOLDER", "--device", "meta"], "--device meta"),
        (["push", "FOLDER", "a/b/c", "--dry-run"], "a/b/c"),
    ],
    ids=str,
)
def test_errors_are_sentences(egmla, folder, arguments, said):
    """What a user can do something about is said in one line, without a traceback, and ends with exit code 1."""
    output = egmla(*(argument.replace("FOLDER", folder) for argument in arguments), exit_code=1)
    assert output.startswith("Error: ")
    assert said in output
    assert output.count("\n") == 1


def test_other_models_are_refused(egmla, tmp_path):
    """A model of another family is named as such."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "type llama" in egmla("plan", tmp_path, exit_code=1)
    assert "type llama" in egmla("generate", "x", "-m", tmp_path, "--placement", "host", exit_code=1)


def test_debug_shows_where_errors_are_from(monkeypatch):
    """With EGMLA_DEBUG=1 the error itself comes through."""
    monkeypatch.setenv(common.DEBUG, "1")
    result = CliRunner().invoke(app, ["plan", "mla-base-kv256", "--gates", "precomputed"])
    assert isinstance(result.exception, ValueError)


def test_remote_code_is_not_run_unasked(egmla, folder, tmp_path):
    """A model whose code we do not have is refused until the user trusts it."""
    config = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "configuration.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration.py").write_text("raise SystemExit('this code was run')")
    assert "--trust-remote-code" in egmla("plan", tmp_path, exit_code=1)


@pytest.mark.parametrize(("size", "said"), [(0, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (1_234_567, "1.18 MiB")])
def test_sizes_in_words(size, said):
    """Sizes are shown with three digits."""
    assert format_bytes(size) == said


@pytest.mark.slow  # starts two processes
def test_as_a_process(folder, tmp_path):
    """The command works as users start it, from any folder: text on standard output, errors and 1 on failure."""
    egmla = [sys.executable, "-c", "from modeling_egmla.commands import main; main()"]
    planned = subprocess.run([*egmla, "plan", "--json"], cwd=tmp_path, capture_output=True, text=True)
    assert planned.returncode == 0
    assert json.loads(planned.stdout)["preset"] == BASE
    failed = subprocess.run([*egmla, "plan", "--placement", "host", "mla-base-kv256"], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("Error: ") and "Traceback" not in failed.stderr


def damaged(folder, tmp_path, change):
    """A copy of the model's folder with its weights changed."""
    shutil.copytree(folder, tmp_path / "damaged")
    weights = load_file(tmp_path / "damaged" / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "damaged" / "model.safetensors", {"format": "pt"})
    return tmp_path / "damaged"


COMMANDS = [("generate", "x", "-m"), ("eval", "--tasks", "sotu_continuation", "--limit", "1"), ("export",)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("model.norm.weight"), "model.norm.weight, which is missing"),
        (lambda w: w.update({"model.other.weight": torch.ones(2)}), "model.other.weight, which is of no use"),
        (lambda w: w.update({"model.norm.weight": torch.ones(5)}), "model.norm.weight, which is of another shape"),
        (lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int32)}), "holds whole numbers"),
        (lambda w: w["model.norm.weight"].fill_(torch.nan), "not finite"),
    ],
    ids=["missing", "unexpected", "shape", "integers", "nan"],
)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_weights_that_do_not_fit_are_refused(egmla, folder, tmp_path, command, change, said):
    """No command goes on with weights that are drawn anew, left out, rounded or no numbers."""
    broken = damaged(folder, tmp_path, change)
    arguments = [*command, broken, *([tmp_path / "out"] if command[0] == "export" else [])]
    output = " ".join(egmla(*arguments, exit_code=1).split())
    assert said in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors.index.json", b"no json"),
        ("tokenizer.json", b"{}"),
        ("config.json", {"kv_lora_rank": "16"}),
        ("config.json", {"rope_parameters": 5}),
        ("config.json", {"dtype": "foo"}),
        ("config.json", {"vocab_size": 5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", COMMANDS[:2], ids=lambda command: command[0])
def test_damaged_folders_are_errors_in_a_sentence(egmla, folder, tmp_path, command, file, content):
    """Each names the folder or the field."""
    shutil.copytree(folder, tmp_path / "damaged")
    path = tmp_path / "damaged" / file
    if isinstance(content, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    else:
        path.write_bytes(content)
    if "index" in file:
        (tmp_path / "damaged" / "model.safetensors").rename(tmp_path / "damaged" / "model-1.safetensors")
    output = egmla(*command, tmp_path / "damaged", exit_code=1)
    assert output.startswith("Error: ") and output.count("\n") == 1
    assert "damaged" in output or "kv_lora_rank" in output or "rope_parameters" in output or "vocab" in output


def test_temperature_reaches_the_draw(egmla, folder):
    """Near zero, drawing is greedy; high up, it is not."""
    arguments = ["generate", "My fellow", "-m", folder, "-n", 12, "--seed", 3]
    greedy = egmla(*arguments, "--greedy").splitlines()[0]
    assert egmla(*arguments, "--temperature", 1e-4).splitlines()[0] == greedy
    assert egmla(*arguments, "--temperature", 5, "--top-p", 1).splitlines()[0] != greedy
