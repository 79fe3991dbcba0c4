"""lm-evaluation-harness scores our models as it should, and our tasks are what they say."""

import copy
import hashlib
import json
import math
import random

import numpy
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


pytest.importorskip("lm_eval")

from modeling_egmla.evaluation import (
    evaluate,
    local_tasks,
    local_tasks_folder,
    run_paper_suite,
    scores,
    text_perplexity,
)
from modeling_egmla.evaluation.harness import load_tasks
from modeling_egmla.evaluation.perplexity import TextPerplexity
from modeling_egmla.evaluation.report import mean_name, paper_table, plot_results, task_table
from modeling_egmla.evaluation.suite import identify, paper_results, perplexity_entry
from modeling_egmla.training.data import is_validation


ROWS = {
    path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for path in local_tasks_folder().glob("*.jsonl")
}


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([row["text"] for row in ROWS["sotu_perplexity"]], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>")


@pytest.fixture
def model(make_model, tokenizer):
    return make_model(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, pad_token_id=None)


def test_context_is_the_models(make_model, tokenizer):
    """The harness cuts inputs to the context that our config states, not to its default of 2,048."""
    from lm_eval.models.huggingface import HFLM

    for context in (96, 4096):
        model = make_model(vocab_size=len(tokenizer), max_position_embeddings=context)
        assert HFLM(pretrained=model, tokenizer=tokenizer).max_length == context


def test_log_likelihoods_do_not_depend_on_the_batch(model, tokenizer):
    """
    Rows of different lengths score the same alone and in batches, and as the model itself scores them: the harness
    pads on the right, with id 0 and without a mask.
    """
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    pairs = [(row["context"], " " + choice) for row in ROWS["sotu_continuation"][:4] for choice in row["choices"]]
    pairs += [("Fellow citizens", " of the Senate"), ("The", " Union")]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i, metadata=("t", i, 1))
        for i, pair in enumerate(pairs)
    ]
    by_batch = [
        [value for value, _ in HFLM(pretrained=model, tokenizer=tokenizer, batch_size=size).loglikelihood(requests)]
        for size in (1, 3, 8)
    ]
    expected = []
    for context, continuation in pairs:
        context_ids, ids = tokenizer(context).input_ids, tokenizer(context + continuation).input_ids
        with torch.no_grad():
            log_probabilities = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = range(len(context_ids), len(ids))
        expected.append(sum(log_probabilities[place - 1, ids[place]].item() for place in places))
    for values in by_batch:
        assert values == pytest.approx(expected, abs=2e-3)


def test_rolling_log_likelihoods_do_not_depend_on_the_batch(model, tokenizer):
    """Perplexity of texts longer than the context, which the harness scores in windows, is the same for any batch."""
    values = []
    for batch_size in (1, 5):
        results = evaluate(model, tokenizer, ["sotu_perplexity"], limit=3, batch_size=batch_size)
        values.append({score.metric: score.value for score in scores(results)})
    assert len(tokenizer(ROWS["sotu_perplexity"][0]["text"]).input_ids) > model.config.max_position_embeddings
    assert set(values[0]) == {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_suite_without_network(model, tokenizer):
    """The suite scores its own tasks on rows of the package; the harness gives as many as are asked for."""
    results = scores(evaluate(model, tokenizer, ["sotu"], limit=5, batch_size=4))
    assert {(score.task, score.metric) for score in results} >= {
        ("sotu_continuation", "acc"),
        ("sotu_continuation", "acc_norm"),
        ("sotu_perplexity", "bits_per_byte"),
    }
    assert {score.rows for score in results} == {5}
    accuracy = next(score for score in results if score.metric == "acc")
    assert 0 <= accuracy.value <= 1 and accuracy.stderr > 0


def test_random_numbers_are_the_harnesss(monkeypatch):
    """Tasks that shuffle as they load do so as under the harness's own command, and the caller's numbers go on."""
    drawn = []

    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    def seed(python, others):
        random.seed(python)
        numpy.random.seed(others)
        torch.manual_seed(others)

    class Manager:
        def match_tasks(self, names):
            return names

        def load(self, names):
            drawn.append(draw())
            return {"tasks": {}}

    monkeypatch.setattr("modeling_egmla.evaluation.harness._task_manager", lambda include_defaults: Manager())
    seed(5, 5)
    expected = draw()
    seed(5, 5)
    load_tasks(["a"])
    assert draw() == expected
    load_tasks(["a"])
    seed(0, 1234)
    assert drawn == 2 * [draw()]


@pytest.mark.slow  # reads all task files of the harness
def test_unknown_task(model, tokenizer):
    """A misspelt task is answered with where to find the names."""
    with pytest.raises(ValueError, match="no task 'sotu_continuatoin'"):
        evaluate(model, tokenizer, ["sotu_continuatoin"])


def test_tasks_have_rows():
    """Every task of ours has its rows beside it."""
    assert set(local_tasks()) == {"sotu", *ROWS}
    assert {name: len(rows) for name, rows in ROWS.items()} == {"sotu_continuation": 200, "sotu_perplexity": 24}


def test_continuation_rows():
    """Four different continuations of equal length, the true one anywhere among them, and as much context for each."""
    rows = ROWS["sotu_continuation"]
    for row in rows:
        assert len(row["context"].split()) == 60
        assert [len(choice.split()) for choice in row["choices"]] == [12] * 4
        assert len(set(row["choices"])) == 4
    answers = [row["answer"] for row in rows]
    assert all(40 <= answers.count(answer) <= 60 for answer in range(4))


def test_rows_are_of_held_out_documents():
    """The recipe of the embedded model holds out all documents that rows are from: a score is no memory."""
    yaml = pytest.importorskip("yaml")
    folder = local_tasks_folder()
    documents = json.loads((folder / "documents.json").read_text())
    assert {row["document"] for rows in ROWS.values() for row in rows} == set(documents)
    recipe = yaml.safe_load((folder.parent / "recipes" / "egmla-sotu.yaml").read_text())
    share = recipe["data"]["validation_share"]
    for sha256 in documents.values():
        assert int(sha256[:16], 16) / 2**64 < share


def test_rows_can_be_made_again(tmp_path, monkeypatch):
    """The generator gives the same rows each time, and its rule for documents is the training's."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("make_rows", local_tasks_folder() / "make_rows.py")
    make_rows = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make_rows)

    speeches = tmp_path / "speeches"
    speeches.mkdir()
    for number in range(10):
        words = (hashlib.sha256(f"{number} {i}".encode()).hexdigest()[:6] for i in range(3100))
        (speeches / f"{number}.txt").write_text(" ".join(words))
    written = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        monkeypatch.setattr(make_rows, "FOLDER", folder)
        make_rows.make_rows(speeches)
        written.append({path.name: path.read_text() for path in folder.iterdir()})
    assert written[0] == written[1]

    documents = json.loads(written[0]["documents.json"])
    texts = {path.stem: path.read_text() for path in speeches.iterdir()}
    share = max(make_rows.position(texts[name]) for name in documents) + 1e-9
    assert {name for name, text in texts.items() if is_validation(text, share)} == set(documents)
    for line in written[0]["sotu_continuation.jsonl"].splitlines():
        row = json.loads(line)
        assert f"{row['context']} {row['choices'][row['answer']]}" in texts[row["document"]]


@pytest.mark.slow  # starts a process that imports the harness
def test_command_line_of_the_harness_gives_the_same(make_model, tokenizer, tmp_path):
    """What we report of a Llama is what the command line of `lm_eval` itself reports of it, to the last digit."""
    import subprocess
    import sys

    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=128, bos_token_id=0, eos_token_id=0, **shape
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--include_path", str(local_tasks_folder())]
    command += ["--model_args", f"pretrained={tmp_path / 'llama'},dtype=float32", "--device", "cpu"]
    command += ["--tasks", "sotu_continuation,sotu_perplexity", "--limit", "12", "--batch_size", "4"]
    done = subprocess.run([*command, "--output_path", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "out").rglob("results*.json")
    theirs = json.loads(path.read_text())
    ours = evaluate(model, tokenizer, ["sotu_continuation", "sotu_perplexity"], limit=12, batch_size=4)
    for task in ("sotu_continuation", "sotu_perplexity"):
        expected = {
            name: value for name, value in theirs["results"][task].items() if not name.startswith(("bits", "alias"))
        }
        assert {name: ours["results"][task][name] for name in expected} == expected
        assert ours["versions"][task] == theirs["versions"][task]
        assert ours["n-samples"][task] == theirs["n-samples"][task]


TEXTS = [row["text"] for row in ROWS["sotu_perplexity"][:3]] + ["Peace, at last.", "Fellow citizens \u2013 of 1862"]


@pytest.mark.parametrize(("context", "stride"), [(7, 1), (16, 5), (64, 64), (96, 48)])
def test_strided_perplexity(make_model, tokenizer, context, stride):
    """Each token is predicted once, from the window that ends nearest behind it: as a loop over single tokens says."""
    model = make_model(vocab_size=len(tokenizer), max_position_embeddings=96, bos_token_id=0, eos_token_id=0).double()
    texts = [TEXTS[0][:150], TEXTS[3], TEXTS[4]]
    nats, tokens = 0.0, 0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text).input_ids]
        for target in range(1, len(ids)):
            # Windows end at context, context + stride, ... and at the end of the text.
            end = context if target <= context else context + -(-(target - context) // stride) * stride
            start = max(0, min(end, len(ids) - 1) - context)
            with torch.no_grad():
                logits = model(torch.tensor([ids[start:target]])).logits[0, -1]
            nats -= logits.log_softmax(-1)[ids[target]].item()
            tokens += 1
    for batch_size in (1, 4):
        result = text_perplexity(model, tokenizer, texts, context, stride, batch_size)
        assert result.nats == pytest.approx(nats, rel=1e-6)
        assert result.tokens == tokens and result.documents == 3
        assert result.words == sum(len(text.split()) for text in texts)
        assert result.bytes == sum(len(text.encode()) for text in texts) > sum(map(len, texts))
        assert result.token_perplexity == pytest.approx(math.exp(nats / tokens), rel=1e-6)
        assert result.bits_per_byte == pytest.approx(math.log2(result.byte_perplexity))


def test_perplexity_without_overlap_is_the_harness(model, tokenizer):
    """Windows that do not overlap give the harness's word and byte perplexities."""
    results = {s.metric: s.value for s in scores(evaluate(model, tokenizer, ["sotu_perplexity"], batch_size=4))}
    texts = [row["text"] for row in ROWS["sotu_perplexity"]]
    ours = text_perplexity(model, tokenizer, texts, stride=model.config.max_position_embeddings)
    assert ours.word_perplexity == pytest.approx(results["word_perplexity"], rel=1e-5)
    assert ours.byte_perplexity == pytest.approx(results["byte_perplexity"], rel=1e-5)
    assert ours.bits_per_byte == pytest.approx(results["bits_per_byte"], rel=1e-5)


def test_perplexity_is_that_of_the_model_in_use(model, tokenizer):
    """Dropout is off while a text is scored, and on again where it was."""
    expected = text_perplexity(model, tokenizer, TEXTS).nats
    trained = copy.deepcopy(model).train()
    for layer in trained.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert text_perplexity(trained, tokenizer, TEXTS).nats == expected and trained.training


@pytest.mark.parametrize("change", ["rope_theta", "kv_gate_norm_eps", "hidden_act", "tables"])
def test_results_know_their_model(model, tokenizer, change):
    """What decides logits beside the weights tells results apart; where the model was loaded from does not."""
    other = copy.deepcopy(model)
    other.config._name_or_path = "elsewhere"
    assert identify(other, tokenizer, None) == identify(model, tokenizer, None)
    if change == "tables":
        other.precompute_kv_gates("int8")
    elif change == "rope_theta":
        other.config.rope_parameters["rope_theta"] *= 2
    else:
        setattr(other.config, change, {"kv_gate_norm_eps": 0.5, "hidden_act": "gelu"}[change])
    assert identify(other, tokenizer, None) != identify(model, tokenizer, None)


def test_text_without_words_has_no_perplexity_of_words():
    """A script without spaces has words whose perplexity no float holds, white space has none: no crash at the end."""
    counts = {"tokens": 100, "bytes": 300, "documents": 1, "context": 8, "stride": 8}
    for words in (0, 1):
        result = TextPerplexity(nats=900.0, words=words, **counts)
        assert result.word_perplexity is None and result.token_perplexity == pytest.approx(math.exp(9))
        assert json.dumps(perplexity_entry(result), allow_nan=False)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [({"context": 257}, "257"), ({"context": 8, "stride": 9}, "stride"), ({"texts": []}, "text")],
)
def test_perplexity_refuses_what_it_cannot_do(model, tokenizer, arguments, named):
    """A context beyond the model's, a stride that skips tokens, and no text are refused by name."""
    with pytest.raises(ValueError, match=named):
        text_perplexity(model, tokenizer, **{"texts": TEXTS, **arguments})


# Rows of the real columns of the datasets behind the paper's tasks, made up.
MC1 = {"choices": ["Peace.", "War.", "Taxes."], "labels": [1, 0, 0]}
MC2 = {"choices": ["Peace.", "Treaties.", "War."], "labels": [1, 1, 0]}
PROBLEMS = str([{"question": "Who reads?", "answer": "B", "options": ["I", "You", "They", "We"]} for _ in range(2)])
REAL_COLUMNS = {
    "baber/piqa": {"goal": "Keep the peace", "sol1": "Sign a treaty.", "sol2": "Declare war.", "label": 0},
    "allenai/ai2_arc": {
        "id": "1",
        "question": "What is law?",
        "choices": {"text": ["A rule", "A river", "A tax"], "label": ["A", "B", "C"]},
        "answerKey": "A",
    },
    "Rowan/hellaswag": {
        "ind": 1,
        "activity_label": "Reading",
        "ctx_a": "A clerk reads a message.",
        "ctx_b": "he",
        "ctx": "A clerk reads a message. he",
        "endings": ["sits down.", "flies.", "[step] melts.", "sings."],
        "label": "0",
    },
    "allenai/winogrande": {
        "sentence": "The law binds the state since _ is just.",
        "option1": "the law",
        "option2": "the state",
        "answer": "1",
    },
    "lighteval/siqa": {
        "context": "The House met.",
        "question": "Why?",
        "answerA": "To vote",
        "answerB": "To sleep",
        "answerC": "To sing",
        "label": "1",
    },
    "cais/mmlu": {
        "question": "What is a treaty?",
        "subject": "x",
        "choices": ["A pact", "A tax", "A ship", "A road"],
        "answer": 0,
    },
    "allenai/openbookqa": {
        "id": "1",
        "question_stem": "Ships sail on",
        "choices": {"text": ["water", "land", "air", "fire"], "label": ["A", "B", "C", "D"]},
        "answerKey": "A",
    },
    "aps/super_glue": {"question": "is law a rule", "passage": "Law is a rule.", "idx": 0, "label": 1},
    "EleutherAI/race": {"article": "You read this.", "problems": PROBLEMS},
    "truthfulqa/truthful_qa": {"question": "What is best?", "mc1_targets": MC1, "mc2_targets": MC2},
    "EleutherAI/lambada_openai": {"text": "The state of the union is strong"},
    "EleutherAI/wikitext_document_level": {
        "page": " = Peace = \n \n The treaty , signed in 1 @,@ 862 , ended the war . \n"
    },
}
ROWS_OF_EACH = 3


def fake_load_dataset(path, name=None, split=None, streaming=False, **kwargs):
    """What `datasets.load_dataset` gives, with rows made up here; other datasets cannot be reached."""
    from datasets import Dataset, DatasetDict

    if path == "OptimalScale/ClimbMix":
        texts = [f"Document {number}: the people ask for peace and trade." for number in range(600)]
        return Dataset.from_dict({"text": texts, "cluster_id": [1] * 600}).to_iterable_dataset(3)
    if path not in REAL_COLUMNS:
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub")
    sizes = {"train": ROWS_OF_EACH, "validation": ROWS_OF_EACH, "test": ROWS_OF_EACH, "dev": 5}
    rows = {split: [REAL_COLUMNS[path] | {"row": row} for row in range(size)] for split, size in sizes.items()}
    return DatasetDict({split: Dataset.from_list(listed) for split, listed in rows.items()})


@pytest.fixture
def real_columns(monkeypatch):
    """Replaces `datasets.load_dataset` by made-up rows of the real columns; gives the datasets to make unreachable."""
    import datasets

    import modeling_egmla.training.data

    unreachable = set()

    def load(path, *arguments, **kwargs):
        if path in unreachable:
            raise ConnectionError(f"Couldn't reach '{path}' on the Hub")
        return fake_load_dataset(path, *arguments, **kwargs)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(modeling_egmla.training.data, "load_dataset", load)
    return unreachable


TWELVE = {
    "piqa": ("acc", "acc_norm"),
    "arc_challenge": ("acc", "acc_norm"),
    "arc_easy": ("acc", "acc_norm"),
    "hellaswag": ("acc", "acc_norm"),
    "winogrande": ("acc",),
    "social_iqa": ("acc",),
    "mmlu": ("acc",),
    "openbookqa": ("acc", "acc_norm"),
    "boolq": ("acc",),
    "race": ("acc",),
    "truthfulqa_mc2": ("acc",),
    "lambada_openai": ("acc", "perplexity"),
}


@pytest.mark.slow  # reads all task files of the harness
def test_the_papers_suite(model, tokenizer, real_columns, tmp_path):
    """
    The twelve tasks are built from the harness's own files and scored, MMLU with five examples and counting once in
    the mean; what cannot be had is named, left out, and tried again; what is there is kept, but for this model only.
    """
    path = tmp_path / "paper.json"
    real_columns |= {"Rowan/hellaswag", "OptimalScale/ClimbMix"}
    messages = []
    results = run_paper_suite(model, tokenizer, path, batch_size=4, report=messages.append)
    assert set(results["tasks"]) == set(TWELVE) - {"hellaswag"}
    assert set(results["unavailable"]) == {"hellaswag", "climbmix"}
    assert any("hellaswag is LEFT OUT" in message and "Rowan/hellaswag" in message for message in messages)
    assert results["summary"]["tasks_in_mean"] == 11 and results["summary"]["mean_perplexity"] is None
    assert "NOT of 12 (without hellaswag)" in mean_name(results)
    assert json.loads(path.read_text()) == results

    # Continued: only what is missing runs.
    real_columns.clear()
    messages.clear()
    earlier = results["tasks"]
    results = run_paper_suite(model, tokenizer, path, batch_size=4, report=messages.append)
    assert messages == ["hellaswag ...", "climbmix ..."]
    assert {name: results["tasks"][name] for name in earlier} == earlier and not results["unavailable"]
    for name, metrics in TWELVE.items():
        task = results["tasks"][name]
        assert tuple(sorted(task["metrics"])) == metrics
        assert task["num_fewshot"] == (5 if name == "mmlu" else 0)
        assert task["rows"] == ROWS_OF_EACH * (57 if name == "mmlu" else 1)
        assert task["version"] is not None
    summary = results["summary"]
    accuracies = {name: results["tasks"][name]["metrics"]["acc"]["value"] for name in TWELVE}
    assert summary["mean_acc"] == pytest.approx(sum(accuracies.values()) / 12)
    normalised = [results["tasks"][name]["metrics"].get("acc_norm", {"value": accuracies[name]}) for name in TWELVE]
    assert summary["mean_acc_norm_or_acc"] == pytest.approx(sum(each["value"] for each in normalised) / 12)
    parts = (
        results["perplexity"]["climbmix"]["token_perplexity"],
        results["perplexity"]["wikitext"]["token_perplexity"],
        results["tasks"]["lambada_openai"]["metrics"]["perplexity"]["value"],
    )
    assert summary["mean_perplexity"] == pytest.approx(sum(parts) / 3)
    assert mean_name(results) == "mean of 12"

    climbmix = results["perplexity"]["climbmix"]
    texts = [row["text"] for row in fake_load_dataset("OptimalScale/ClimbMix") if is_validation(row["text"], 0.01)]
    assert climbmix["documents"] == len(texts) > 1
    assert climbmix["tokens"] == sum(len(ids) for ids in tokenizer(texts).input_ids)

    # A model with other weights, or other rows, is not mixed in.
    with pytest.raises(ValueError, match="limit"):
        run_paper_suite(model, tokenizer, path, limit=1)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    with pytest.raises(ValueError, match="weights_sha256"):
        run_paper_suite(model, tokenizer, path)
    assert json.loads(path.read_text()) == results

    columns, rows = paper_table(results, "mine")
    assert len(columns) == len(rows[0]) and rows[0][0] == "mine (here)"
    assert rows[1][:3] == ["mla-base-kv256", "43.84", "15.45"]
    columns, rows = task_table(results)
    assert [row[0] for row in rows] == [*TWELVE, "mean of 12"]
    plot_results(results, "mine", tmp_path / "paper.png")
    assert (tmp_path / "paper.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow  # reads all task files of the harness
def test_the_harness_runs_the_papers_group(real_columns):
    """`lm_eval --tasks paper` builds the same tasks from the group file: 11 and MMLU's 57, with their examples."""
    tasks = load_tasks(["paper"])["tasks"]
    assert len(tasks) == 11 + 57
    for name, task in tasks.items():
        assert task.get_config("num_fewshot") == (5 if name.startswith("mmlu_") else 0)


def test_the_papers_figures():
    """The paper's models are named as presets, and its mean perplexity is the mean of its three."""
    from modeling_egmla.configuration.presets import PRESETS

    models = paper_results()["models"]
    assert set(models) < set(PRESETS)
    for figures in models.values():
        if "climbmix" in figures:
            mean = (figures["climbmix"] + figures["wikitext"] + figures["lambada"]) / 3
            assert mean == pytest.approx(figures["mean_perplexity"], abs=0.01)


def test_number_of_examples_reaches_the_harness():
    """`num_fewshot` overrides a task's own number."""
    for shots in (None, 2):
        (task,) = load_tasks(["sotu_continuation"], shots)["tasks"].values()
        assert task.get_config("num_fewshot") == (shots or 0)


def test_examples_that_a_task_does_not_take_are_refused(monkeypatch):
    """The harness would leave a task that is defined with 0 examples at that, with a line of its log."""
    from lm_eval.api.task import ConfigurableTask

    get_config = ConfigurableTask.get_config
    monkeypatch.setattr(
        ConfigurableTask, "get_config", lambda self, key: 0 if key == "num_fewshot" else get_config(self, key)
    )
    with pytest.raises(ValueError, match="--num-fewshot 2: the task sotu_continuation is defined without"):
        load_tasks(["sotu_continuation"], 2)
    load_tasks(["sotu_continuation"], 0)


def test_damaged_weights_have_no_perplexity(make_model, tokenizer):
    """A model that gives NaN is an error, not a score."""
    model = make_model(vocab_size=len(tokenizer))
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        text_perplexity(model, tokenizer, ["some text"])
