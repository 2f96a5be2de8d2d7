"""What tests of families share."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers import GOLDEN


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Path]:
    """Copies a golden checkpoint, with its tensors and config changed."""

    def build(
        name: str,
        change: Callable[[dict[str, np.ndarray]], Any] = lambda tensors: None,
        **config: Any,
    ) -> Path:
        folder = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        raw = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return build
