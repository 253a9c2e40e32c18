"""The shape of the code base: who may import whom, and the traps of a repository root that is itself a package."""

from __future__ import annotations

import ast
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("core", "drafters", "inference", "distill", "training", "cli")
MOST_LINES = 350
# Libraries that training code imports or that Trainer looks for, whether installed here or not.
LIBRARIES = {
    "accelerate",
    "bitsandbytes",
    "comet_ml",
    "datasets",
    "deepspeed",
    "mlflow",
    "peft",
    "tensorboard",
    "torch",
} | {
    "trackio",
    "transformers",
    "trl",
    "wandb",
}


def package_files() -> list[Path]:
    """Return every Python file of the import package."""
    files = [file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py"))]
    return files + [file for file in (ROOT / "__init__.py", ROOT / "cli.py") if file.exists()]


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def is_entry_script(file: Path) -> bool:
    """Entry scripts are run by path, so they have no parent package and import absolutely."""
    return file.parent == ROOT / "training" and file.name.startswith("train_")


PACKAGE_FILES = package_files()
LAYER_FILES = [file for file in PACKAGE_FILES if file != ROOT / "__init__.py"]
each_file = pytest.mark.parametrize("file", PACKAGE_FILES, ids=name_of)
each_layer_file = pytest.mark.parametrize("file", LAYER_FILES, ids=name_of)


def own_imports(file: Path) -> list[tuple[str, bool, int]]:
    """Return `(path inside headstart, relative, line)` for each import of our own code, wherever in the file it stands.

    `from ..core.tree import DraftTree` in drafters/medusa.py gives `("core.tree", True, line)`; a name taken from
    the root package itself gives that name: `from .. import attach` gives `("attach", True, line)`.
    """
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "headstart":
                    found.append((alias.name.partition(".")[2], False, node.lineno))
        elif isinstance(node, ast.ImportFrom) and node.level:
            package = file.relative_to(ROOT).parent.parts
            above = package[: len(package) - (node.level - 1)]
            path = ".".join((*above, *([node.module] if node.module else [])))
            found += [(path or alias.name, True, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "headstart":
            path = node.module.partition(".")[2]
            found += [(path or alias.name, False, node.lineno) for alias in node.names]
    return found


@each_layer_file
def test_file_imports_only_from_its_own_layer_and_those_before_it(file: Path) -> None:
    layer = file.relative_to(ROOT).parts[0].removesuffix(".py")
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    for path, relative, line in own_imports(file):
        if path == "__version__" or (not relative and is_entry_script(file)):
            continue
        assert path.split(".")[0] in allowed, (
            f"{name_of(file)}:{line} imports {path}; files of {layer} may import from {', '.join(allowed)} only"
        )


@each_file
def test_imports_inside_the_package_are_relative(file: Path) -> None:
    if is_entry_script(file):
        pytest.skip("run by path")
    absolute = [f"{name_of(file)}:{line} {path}" for path, relative, line in own_imports(file) if not relative]
    assert not absolute, "inside the package write relative imports"


@each_file
def test_file_stays_short_enough_to_read(file: Path) -> None:
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES, (
        f"{name_of(file)} has {lines} lines, the most is {MOST_LINES}; split it where the story has a joint"
    )


@each_file
def test_public_module_has_a_docstring(file: Path) -> None:
    if file.name.startswith("_") and file.name != "__init__.py":
        pytest.skip("private")
    assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), f"{name_of(file)} does not say what it holds"


@pytest.mark.parametrize("folder", ["training", "scripts"])
def test_no_script_folder_shadows_a_library(folder: str) -> None:
    # Running training/train_medusa.py puts training/ first on sys.path; a datasets.py in it would be everybody's.
    entries = (ROOT / folder).iterdir() if (ROOT / folder).exists() else ()
    stems = {entry.stem for entry in entries if entry.is_dir() or entry.suffix == ".py"}
    for stem in stems - {"__init__", "__pycache__"}:
        if not stem.isidentifier():
            continue
        assert stem not in sys.stdlib_module_names | LIBRARIES, f"{folder}/{stem} bears the name of a library"
        spec = importlib.util.find_spec(stem)
        places = [spec.origin, *(spec.submodule_search_locations or [])] if spec else []
        outside = [place for place in places if place and not Path(place).is_relative_to(ROOT / folder)]
        assert not outside, f"{folder}/{stem} bears the name of the library at {outside[0]}"


def test_no_module_of_ours_is_loaded_under_two_names() -> None:
    package = [str(file) for file in PACKAGE_FILES]
    loaded = [getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if name != "__main__"]
    twice = [file for file, count in Counter(loaded).items() if file in package and count > 1]
    assert not twice, "a second copy has its own classes and registries; import through `headstart` or relatively"


def test_checkout_folder_is_not_imported_as_a_package() -> None:
    if ROOT.name == "headstart":
        pytest.skip("the checkout bears the package's own name")
    module = sys.modules.get(ROOT.name)
    assert module is None or Path(str(getattr(module, "__file__", ""))).parent != ROOT, (
        "pytest imported the root as a package"
    )


def test_type_checkers_find_the_package_through_the_symlink() -> None:
    link = ROOT / ".typing" / "headstart"
    assert link.is_symlink() and link.resolve() == ROOT, "make it again: ln -s .. .typing/headstart"


def pyproject() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_version_is_the_same_in_pyproject_and_in_the_package() -> None:
    assert f'__version__ = "{pyproject()["project"]["version"]}"' in (ROOT / "__init__.py").read_text(encoding="utf-8")


def test_every_package_is_listed_in_pyproject() -> None:
    listed = pyproject()["tool"]["setuptools"]["packages"]
    folders = {file.parent.relative_to(ROOT) for file in PACKAGE_FILES} - {Path()}
    missing = {".".join(("headstart", *folder.parts)) for folder in folders} - set(listed)
    assert not missing, "list them under [tool.setuptools] packages, or the wheel lacks them"


def test_wheel_holds_every_file_of_the_package_and_no_other(tmp_path: Path) -> None:
    # Built from a copy, because setuptools leaves build folders beside the sources.
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "outputs", "runs")
    shutil.copytree(ROOT, source, ignore=unwanted, symlinks=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run([*command, "-w", str(wheels), str(source)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr

    (wheel,) = wheels.glob("headstart-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name.removeprefix("headstart/") for name in archive.namelist() if name.startswith("headstart/")}
    data = {name_of(file) for file in (ROOT / "distill" / "data").glob("*") if file.is_file()}
    assert inside == {name_of(file) for file in PACKAGE_FILES} | data
