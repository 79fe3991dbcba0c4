"""lm-evaluation-harness scores our models as it should, and our tasks are what they say."""

import hashlib
import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from modeling_egmla.evaluation import evaluate, local_tasks, local_tasks_folder, scores


pytest.importorskip("lm_eval")

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

    from modeling_egmla.training.data import is_validation

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
