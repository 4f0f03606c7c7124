"""Hygiene of the repository as a whole: packaging, documentation and text that must not be in it.

Invariants: what is tested here would otherwise fail only on somebody else's machine or mislead a reader.
Nothing here needs a model, git or the network.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400
# Folders that tools make (see .gitignore), beside hidden ones.
MADE_BY_TOOLS = {"build", "dist", "__pycache__"}
CODE_SUFFIXES = {".py", ".cu", ".cuh", ".cpp", ".h", ".sh", ""}
# Import names that differ from the name of the distribution.
DISTRIBUTION_OF = {
    "cuda": "cuda-python",
    "tensorrt_rtx": "tensorrt-rtx",
    "pytriton": "nvidia-pytriton",
    "triton_python_backend_utils": "nvidia-pytriton",
}

FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~$}])/(?:work|home/(?!x\b)|root|farm|Users|opt/(?:wheels|pypi))\b/?",
    "a package registry's host": (
        r"pypi[.]\w+|pythonhosted[.]org|pytorch[.]org/whl|npmjs[.]\w+|debian[.]org|crates[.]io"
    ),
    "unfinished work": r"\b(?:TOD[O]|FIXM[E]|XX[X])\b|NotImplemente[d]Error",
    "how it was developed": r"\bshared/(?:design|reference|data|prototypes)|\bissue [0-9]+\b",
}


def files() -> Iterator[Path]:
    """Every file of the repository, relative to its root."""
    pending = [ROOT]
    while pending:
        for path in pending.pop().iterdir():
            is_hidden = path.name.startswith(".") and path.name != ".ci"
            if path.is_symlink() or path.name in MADE_BY_TOOLS or path.suffix == ".egg-info":
                continue
            if path.is_file():
                yield path.relative_to(ROOT)
            elif not is_hidden:
                pending.append(path)


def texts(*suffixes: str) -> list[tuple[Path, str]]:
    """Path and content of all files with one of ``suffixes`` ("" for none), in a fixed order."""
    chosen = sorted(path for path in files() if path.suffix in suffixes)
    return [(path, (ROOT / path).read_text(encoding="utf-8")) for path in chosen]


def has_code(path: Path) -> bool:
    """True if a Python file holds more than a docstring."""
    return any(
        not isinstance(node, ast.Expr)
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    )


def code_files() -> set[str]:
    """Paths of the modules and scripts that docs/structure.md has to name."""
    return {
        path.as_posix()
        for path in files()
        if len(path.parts) > 1
        and path.parts[0] not in ("tests", "docs")  # tests mirror the folders
        and path.suffix in CODE_SUFFIXES
        and (path.name != "__init__.py" or has_code(path))
    }


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def folder_of(package: str, package_dir: dict[str, str]) -> Path:
    """Folder of a dotted ``package`` under setuptools' ``package_dir`` mapping."""
    prefix = max((name for name in package_dir if f"{package}.".startswith(f"{name}.")), key=len)
    return Path(package_dir[prefix], *package[len(prefix) + 1 :].split(".")).relative_to(".")


@pytest.mark.parametrize("what", sorted(FORBIDDEN))
def test_no_forbidden_text(what: str) -> None:
    """Guards against text that is wrong or meaningless outside the machine it was written on."""
    pattern = re.compile(FORBIDDEN[what])
    suffixes = (".py", ".md", ".toml", ".txt", ".yaml", ".json", ".jsonl", *CODE_SUFFIXES)
    found = [
        f"{path}:{number}: {match.group()}"
        for path, text in texts(*suffixes)
        for number, line in enumerate(text.splitlines(), start=1)
        for match in pattern.finditer(line)
    ]
    assert not found, f"{what}: {found}"


def test_every_module_has_a_docstring() -> None:
    """Guards against modules whose objective and invariants nobody wrote down."""
    missing = [
        str(path) for path, text in texts(".py") if text and not ast.get_docstring(ast.parse(text))
    ]
    assert not missing, f"modules without a docstring: {missing}"


def test_files_stay_short() -> None:
    """Guards against files that grow into doing two jobs."""
    long = [
        f"{path}: {text.count(chr(10))} lines"
        for path, text in texts(".py", ".md", *CODE_SUFFIXES)
        if text.count("\n") > MAX_LINES
    ]
    assert not long, f"split files over {MAX_LINES} lines: {long}"


def test_structure_page_names_every_module_and_nothing_else() -> None:
    """Guards against a module map that sends readers to files that moved, or hides new ones."""
    page = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([^`]+)`", page, flags=re.MULTILINE)
    assert len(listed) == len(set(listed)), "docs/structure.md lists a module twice"
    assert set(listed) == code_files()


def test_links_in_pages_lead_somewhere() -> None:
    """Guards against links to renamed files and headings-only folders."""
    dead = [
        f"{path}: {target}"
        for path, text in texts(".md")
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text)
        if not (ROOT / path.parent / target).exists()
    ]
    assert not dead, f"dead links: {dead}"


def test_package_mapping_covers_every_folder(project: dict[str, Any]) -> None:
    """Guards against a folder that works in an editable install and is missing from the wheel."""
    setuptools = project["tool"]["setuptools"]
    package_dir = setuptools["package-dir"]
    mapped = {folder_of(package, package_dir).as_posix() for package in setuptools["packages"]}
    real = {
        path.parent.as_posix()
        for path in files()
        if path.suffix == ".py"
        and path.parts[0] in set(package_dir.values())
        # "1" is a version of a Triton model: its files are data that the server loads
        and path.parent.name != "1"
    } | {
        path.parent.as_posix()
        for path in files()
        if path.name == "__init__.py" and path.parts[0] not in ("benchmarks", "tests")
    }
    assert mapped == real
    for folder in sorted(mapped):
        assert (ROOT / folder / "__init__.py").exists(), f"{folder} needs an __init__.py"
    for folder in package_dir.values():
        assert (ROOT / folder / "py.typed").exists(), f"{folder} needs a py.typed"


def test_every_data_file_is_in_the_wheel(project: dict[str, Any]) -> None:
    """Guards against prompts, kernels and weights that an installed package cannot find."""
    setuptools = project["tool"]["setuptools"]
    globs = [
        (folder_of(package, setuptools["package-dir"]) / pattern).as_posix()
        for package, patterns in setuptools["package-data"].items()
        for pattern in patterns
    ]
    left_out = [
        path.as_posix()
        for path in files()
        if path.parts[0] in set(setuptools["package-dir"].values())
        and path.suffix != ".py"
        and not any(fnmatch.fnmatch(path.as_posix(), pattern) for pattern in globs)
    ]
    assert not left_out, f"name these in [tool.setuptools.package-data]: {left_out}"


def test_console_scripts_can_be_imported(project: dict[str, Any]) -> None:
    """Guards against commands that pip installs and that die with ImportError."""
    for command, target in project["project"]["scripts"].items():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), command


def imported_modules(folder: str) -> set[str]:
    """Dotted names that the modules below ``folder`` import, wherever the import stands."""
    names: set[str] = set()
    for path, text in texts(".py"):
        if path.parts[0] != folder:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module)
    return names


def test_imports_and_declared_dependencies_agree(project: dict[str, Any]) -> None:
    """Guards against imports that work only where the test environment happens to have the package."""

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in requirements}

    required = names(project["project"]["dependencies"])
    optional = names(
        [item for extra in project["project"]["optional-dependencies"].values() for item in extra]
    )
    folders = sorted(set(project["tool"]["setuptools"]["package-dir"].values()))
    tops = {name.partition(".")[0] for folder in folders for name in imported_modules(folder)}
    third_party = tops - set(sys.stdlib_module_names) - {"trtllm_av"}
    imported = {DISTRIBUTION_OF.get(name, name) for name in third_party}
    assert imported <= required | optional, "declare these in pyproject.toml"
    assert required <= imported, "nothing imports these: drop them from pyproject.toml"


def test_plugins_do_not_know_the_runtime() -> None:
    """Guards against operators that cannot be used without models, requests and servers."""
    upward = {
        name for name in imported_modules("plugins") if name.startswith("trtllm_av.runtime")
    } - {"trtllm_av.runtime.errors"}
    assert not upward, f"plugins/ imports {sorted(upward)}"
