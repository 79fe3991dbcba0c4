"""
Every fenced Python or shell block of the README, and every Python block of docs/cache.md, runs as a reader would run
it. Of `egmla` commands in all documents and in recipes, names and options are checked.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from minihub import TOKEN, MiniHub
from typer.main import get_command

from modeling_egmla.commands import app


ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(name: str, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall((ROOT / name).read_text(encoding="utf-8")) if found == language]


def run(command: list[str], folder: Path, **variables: str) -> None:
    environment = os.environ | {"COLUMNS": "100"} | variables
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


PUBLISH = next(block for block in blocks("README.md", "python") if "push_to_hub" in block)
PYTHON = [block for block in blocks("README.md", "python") if "push_to_hub" not in block]
SHELL = [line for block in blocks("README.md", "bash") for line in block.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_of_the_readme_run(code, tmp_path):
    """A reader can paste a Python block of the README into a fresh process."""
    run([sys.executable, "-c", code], tmp_path)


@pytest.mark.slow
def test_the_publishing_block_of_the_readme_runs(tmp_path):
    """The block that publishes leaves a private repository with weights, code and tokenizer on the Hub."""
    with MiniHub(tmp_path / "server") as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "cache")}
        run([sys.executable, "-c", PUBLISH], tmp_path, HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1", **settings)
        (repo,) = hub.repos.values()
        assert repo.private
        assert {"model.safetensors", "modeling_egmla.py", "config.json", "tokenizer.json"} <= set(repo.files)


@pytest.mark.slow
@pytest.mark.parametrize("line", SHELL)
def test_shell_blocks_of_the_readme_run(line, tmp_path):
    """A reader can paste a shell line of the README, with the package installed."""
    name, *arguments = shlex.split(line)
    run([str(Path(sys.executable).parent / name), *arguments], tmp_path)


@pytest.mark.slow
def test_the_blocks_of_the_cache_document_run(tmp_path):
    """The examples of docs/cache.md run in one process, in order."""
    run([sys.executable, "-c", "\n".join(blocks("docs/cache.md", "python"))], tmp_path)


def test_links_of_the_documents_lead_somewhere():
    """Every relative link and picture in the README and in docs/ is there."""
    pages = {page: page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
    links = [(page, link) for page, text in pages.items() for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)]
    assert links
    assert not [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()]


def commands_of_the_documents() -> list[tuple[str, list[str]]]:
    """What follows `egmla` in code blocks of documents and in indented comments of recipes, with the file's name."""
    found = []
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("configuration/recipes/*.yaml")):
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        if page.suffix == ".yaml":
            code = re.findall(r"^#   .*", text, re.MULTILINE)
        else:
            code = re.findall(r"^```\w*\n.*?^```|^    [^\n]*", text, re.MULTILINE | re.DOTALL)
        lines = re.findall(r"(?<!\S)egmla (.*)", "\n".join(code))
        found += [(page.name, shlex.split(line, comments=True)) for line in lines]
    return found


def test_commands_of_the_documents_exist():
    """Every `egmla` command that a document or a recipe shows is one, and takes every option that it is shown with."""
    commands = get_command(app).commands
    options = {
        name: {"--help"}.union(*(parameter.opts + parameter.secondary_opts for parameter in command.params))
        for name, command in commands.items()
    }
    found = commands_of_the_documents()
    assert {"README.md", "hub.md", "egmla-sotu.yaml"} <= {page for page, _ in found}
    for page, (name, *arguments) in found:
        assert name in options, f"{page} shows `egmla {name}`, which is no command"
        shown = {argument.split("=")[0] for argument in arguments if argument.startswith("-")}
        assert shown <= options[name], f"{page} shows `egmla {name}` with {sorted(shown - options[name])}"
