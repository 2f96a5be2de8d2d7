"""What the wheel and the sdist hold, and that an unpacked wheel finds its kernels and weights."""

import configparser
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import npmoe

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".*", "__pycache__", "build", "dist", "*.egg-info")


def data_files() -> dict[str, Path]:
    """Name in the wheel -> file in the checkout, of everything that is not Python code."""
    found = {f"npmoe/{name}": ROOT / "npmoe" / name for name in ("py.typed", "__init__.pyi")}
    for folder, pattern in (("cuda_src", "*.cu*"), ("weights/storyteller", "*")):
        for path in (ROOT / folder).glob(pattern):
            found[f"npmoe/{folder}/{path.name}"] = path
    return found


def modules() -> set[str]:
    """Python files of the package, by their names in the wheel."""
    return {str(p.relative_to(ROOT)) for p in (ROOT / "npmoe").rglob("*.py")}


def run_python(code: str, *arguments: Path, cwd: Path, path: Path | None = None) -> str:
    """Standard output of `python -c code` in a folder, with `path` first on the import path."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of a copy of this checkout."""
    pytest.importorskip("setuptools", "70.1", reason="setuptools of the test extra is missing")
    folder = tmp_path_factory.mktemp("packaging")
    copy, out = folder / "copy", folder / "out"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_OUT))
    out.mkdir()
    for kind in ("wheel", "sdist"):
        run_python(
            f"import sys; from setuptools import build_meta as b; b.build_{kind}(sys.argv[1])",
            out,
            cwd=copy,
        )
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("npmoe-*-py3-none-any.whl")
    return path


def test_the_wheel_holds_the_package_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n and not n.endswith("/")}
    assert names == modules() | set(data_files())


def test_the_sdist_holds_all_that_a_wheel_and_the_tests_need(built: Path) -> None:
    (path,) = built.glob("npmoe-*.tar.gz")
    with tarfile.open(path) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    wanted = modules() | {str(p.relative_to(ROOT)) for p in data_files().values()}
    wanted |= {str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("*.py")}
    wanted |= {"README.md", "LICENSE", "setup.cfg", "pyproject.toml", "weights/train.py"}
    assert wanted <= names


def test_an_unpacked_wheel_finds_kernels_and_weights(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "from npmoe.llm import shipped_model\n"
        "from npmoe.runtime.resources import folder\n"
        "print(folder('cuda_src')); print(shipped_model())"
    )
    kernels, weights = run_python(code, cwd=tmp_path, path=tmp_path / "site").split()
    assert Path(kernels) == tmp_path / "site/npmoe/cuda_src"
    assert (Path(kernels) / "common.cuh").is_file()
    assert Path(weights) == tmp_path / "site/npmoe/weights/storyteller"
    assert (Path(weights) / "model.safetensors").is_file()


def test_a_run_leaves_nothing_beside_the_installed_files(wheel: Path, tmp_path: Path) -> None:
    """pip removes only what it installed, and a folder left over would hide an -e install."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import os, sys; sys.dont_write_bytecode = True\n"
        "os.environ['XDG_CACHE_HOME'] = sys.argv[1]; os.environ.pop('NUMBA_CACHE_DIR', None)\n"
        "import numpy as np; from npmoe.ops.norm import rms_norm\n"
        "rms_norm(np.ones((1, 4), np.float32), np.ones(4, np.float32), 1e-6)"
    )
    before = set((tmp_path / "site").rglob("*"))
    run_python(code, tmp_path / "cache", cwd=tmp_path, path=tmp_path / "site")
    assert set((tmp_path / "site").rglob("*")) == before
    assert list((tmp_path / "cache/npmoe").rglob("*.nbi"))


def test_importing_npmoe_loads_no_array_library(tmp_path: Path) -> None:
    code = "import sys, npmoe; print(*{m.partition('.')[0] for m in sys.modules})"
    loaded = set(run_python(code, cwd=tmp_path, path=ROOT).split())
    assert not loaded & {"numpy", "numba", "cupy", "tokenizers", "jinja2", "torch"}


def test_every_public_name_has_a_type() -> None:
    typed = (ROOT / "npmoe/__init__.pyi").read_text()
    assert all(f" as {name}\n" in typed for name in npmoe.__all__ if name != "__version__")
    assert all(hasattr(npmoe, name) for name in npmoe.__all__)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    (command,) = [line for line in lines if "-m pytest" in line]
    assert command.startswith("python3 -m venv ")
    assert f"\n{command} || exit\n" in (ROOT / ".ci/run").read_text()


def test_version_is_said_once_in_each_place() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["metadata"]["version"] == npmoe.__version__
    assert f"## {npmoe.__version__}" in (ROOT / "CHANGELOG.md").read_text()
