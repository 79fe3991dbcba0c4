"""Named configurations of EG-MLA models, recipes, evaluation tasks, and the small trained model."""

from pathlib import Path


EMBEDDED_MODEL = "egmla-sotu"


def preset_path(name: str = EMBEDDED_MODEL) -> str:
    """
    Folder of the preset `name`, for `from_pretrained`; by default the small trained model that comes with the package.
    Most presets are a `config.json` alone: build those with `EGMLAConfig.from_preset(name)`.

    Raises:
        ValueError: there is no such preset.
    """
    folder = Path(__file__).parent / name
    if not (folder / "config.json").is_file():
        raise ValueError(f"There is no preset {name!r}; `egmla plan --list` shows those there are.")
    return str(folder)


def find_model(name: str) -> str:
    """The folder of the preset `name`, if there is one and no folder here has the name; else `name` as it is."""
    if Path(name).is_dir():
        return name
    try:
        return preset_path(name)
    except ValueError:
        return name
