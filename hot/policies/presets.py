"""Where policies are found: presets by name, anything else by path."""

from __future__ import annotations

from pathlib import Path

from hot.errors import did_you_mean


def preset_folder() -> Path:
    """The presets: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    configs = package / "configs"
    return (configs if configs.is_dir() else package.parent / "configs") / "policies"


def preset_names() -> list[str]:
    """The names of the presets, sorted."""
    return sorted(path.stem for path in preset_folder().glob("*.yaml"))


def find_policy(name: str, folder: Path) -> Path | None:
    """The file of a preset, or the existing path relative to `folder`; None if there is neither."""
    if name in preset_names():
        return preset_folder() / f"{name}.yaml"
    path = folder / Path(name).expanduser()
    return path if path.exists() else None


def not_found(name: str, folder: Path) -> str:
    """The message for a name that `find_policy` did not find."""
    beside = (folder / name).parent
    files = [str(Path(name).parent / path.name) for path in beside.glob("*.y*ml")] if beside.is_dir() else []
    known = preset_names()
    return f"no preset and no file {name!r}{did_you_mean(name, known + files)}; presets: {', '.join(known)}"
