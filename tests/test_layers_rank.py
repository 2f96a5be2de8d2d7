"""The house of DESIGN section 2: a module imports lower ranks, or its own package."""

import ast
import configparser
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "npmoe").rglob("*.py"))
RANKS = {
    **dict.fromkeys(
        ("__version__", "dtypes", "errors"), -1
    ),  # rank 0 too, and below the others there
    **dict.fromkeys(("config", "sampling"), 0),
    **dict.fromkeys(("runtime", "formats", "tokenizer"), 1),
    **dict.fromkeys(("ops", "checkpoint"), 2),
    **dict.fromkeys(("batch", "kv"), 3),
    **{"models": 4, "engine": 5, "llm": 6, "bench": 6},
    "eval": 6.5,  # rank 7 for what is below it, and below the command line there
    **{"cli": 7, "server": 7, "__main__": 8},
}
every_module = pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of modules (or of names in them) that a piece of code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


@every_module
def test_imports_go_down(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts == ("npmoe", "__init__"):
        return
    home, tree = parts[1], ast.parse(path.read_text())
    for name in imports(tree):
        top, _, rest = name.partition(".")
        if top in ("cupy", "cupyx", "numba"):
            assert parts[1:] == ("runtime", "device"), f"{name}: ask runtime/device.py"
        if top == "npmoe":
            other = rest.split(".")[0]
            assert other == home or RANKS[other] < RANKS[home], f"{home} imports {name}"


@every_module
def test_own_imports_stand_at_the_top(path: Path) -> None:
    if path.stem == "__main__":
        return  # imports the command line where it can catch Ctrl-C; nothing imports this
    tree = ast.parse(path.read_text())
    inner = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    late = [n for node in inner for n in imports(node) if n.startswith("npmoe")]
    assert not late, f"{late}: imported in a function, a class or a condition"


def test_the_package_itself_imports_nothing_of_ours() -> None:
    tree = ast.parse((ROOT / "npmoe" / "__init__.py").read_text())
    assert not [name for name in imports(tree) if name.startswith("npmoe")]


def test_every_package_is_in_setup_cfg() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in SOURCES if p.stem == "__init__"}
    assert found <= listed
