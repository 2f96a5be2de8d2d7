"""Finds the package's data folders in a checkout, an editable install or a wheel."""

from importlib.resources import files
from pathlib import Path


def folder(name: str) -> Path:
    """The folder `cuda_src` or `weights` that belongs to this npmoe.

    A checkout (also when installed with `pip install -e`) keeps them beside setup.cfg; a wheel
    carries them inside the package.
    """
    root = Path(__file__).resolve().parents[2]
    if (root / "setup.cfg").is_file() and (root / name).is_dir():
        return root / name
    return Path(str(files("npmoe"))) / name
