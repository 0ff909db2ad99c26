"""What a stage's code is: the package modules and data files it can reach, found from the source by `ast`.

Nothing is imported for it, so it costs milliseconds; nothing is listed by hand, so no list can go stale.
A module names a data file beside it with `data_file(__file__, "name.ext")`, always with a literal name.
"""

import ast
import importlib.metadata
import os
import platform
import shutil
import sys
from functools import cache
from pathlib import Path

from workflow_scripts.errors import UserError
from workflow_scripts.files import canonical_json, sha256_file, sha256_text

PACKAGE = Path(__file__).parent
ROOT = PACKAGE.parent
_XCODE_LINK = "/var/db/xcode_select_link"
# The Metal compiler is no part of Xcode since version 26: it is fetched, and mounted, by itself.
_METAL_TOOLCHAINS = (
    "/System/Library/AssetsV2/com_apple_MobileAsset_MetalToolchain",
    "~/Library/Developer/DVTDownloads/MetalToolchain/mounts",
    "/var/run/com.apple.security.cryptexd/mnt",
)
_DISTRIBUTIONS = {"coreai": "coreai-core", "yaml": "pyyaml"}  # import name -> distribution where they differ


def data_file(module_file: str, name: str) -> Path:
    """Path of a data file that lies beside a module; `name` must be a literal, since the closure is read from it."""
    return Path(module_file).parent / name


def stage_module(stage: str) -> Path:
    """Source file of a stage."""
    path = PACKAGE / "stages" / f"{stage}.py"
    if not path.is_file():
        raise UserError(f"there is no stage `{stage}`: {path.parent} has no {path.name}")
    return path


def stage_sources(stage: str) -> list[Path]:
    """Every package module and data file that a stage reaches, sorted by path."""
    return sorted(_reach(stage_module(stage)))


def stage_tools(stage: str) -> dict[str, str]:
    """Version of each third-party distribution that a stage's modules import."""
    names = {name for path in stage_sources(stage) if path.suffix == ".py" for name in _scan(path)[1]}
    versions = {}
    for name in sorted(names):
        distribution = _DISTRIBUTIONS.get(name, name.replace("_", "-"))
        try:
            # A local part such as +cpu names how a wheel was built, not another release of the code.
            versions[distribution] = importlib.metadata.version(distribution).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            raise UserError(
                f"stage `{stage}` needs {distribution}, which is not installed in {sys.prefix}: run `make environment`"
            ) from None
    return versions


def stage_host(stage: str) -> dict[str, str]:
    """What of the host may matter to a stage: Python's version, and the system where its GPU or Apple's tools are used.

    The machine is not in it, so that a Mac finishes a release without repeating what Linux built and judged. On which
    machine a gate ran is in its `measured.json`.
    """
    host = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    reached = {path.name for path in stage_sources(stage) if path.parent == PACKAGE / "coreai"}
    if {"gpu.py", "xcrun.py"} & reached:
        local = " without its Core AI" if "USE_LOCAL_COREAI" in os.environ else ""
        host["macos"] = (platform.mac_ver()[0] or "none") + local
    if "xcrun.py" in reached:
        host["xcrun"] = _tools_behind(shutil.which("xcrun"), os.environ.get("DEVELOPER_DIR"))
    return host


@cache
def _tools_behind(xcrun: str | None, developer: str | None) -> str:
    """Identity of the tools that an `xcrun` finds: its own file, the chosen Xcode, the Metal toolchains; else `none`.

    Files are looked at and none is run, since this is asked for while a workflow is parsed. `developer` is Xcode's
    folder by the environment; without it `xcode-select` has left a link to it.
    """
    if xcrun is None:
        return "none"
    xcode = Path(developer or _XCODE_LINK).resolve()
    parts = [sha256_file(Path(xcrun)), str(xcode)]
    version = xcode.parent / "version.plist"
    parts += [sha256_file(version)] if version.is_file() else []
    parts += [path.name for folder in _METAL_TOOLCHAINS for path in _entries(folder)]
    return sha256_text(canonical_json(parts))[:16]


def _entries(folder: str) -> list[Path]:
    return sorted(Path(os.path.expanduser(folder)).glob("*"))  # noqa: PTH111 (Path.home raises without a home)


def stage_code(stage: str) -> dict[str, str]:
    """Source file (path from the project's root) -> hex sha256, for every file that a stage reaches."""
    return {path.relative_to(ROOT).as_posix(): sha256_file(path) for path in stage_sources(stage)}


def _reach(start: Path) -> set[Path]:
    """Files reachable from one module over imports and data files."""
    seen: set[Path] = set()
    queue = [start]
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        if path.suffix == ".py":
            queue += _scan(path)[0]
    return seen


@cache
def _scan(path: Path) -> tuple[list[Path], list[str]]:
    """Direct package files and third-party top-level names of one module."""
    local: list[Path] = []
    foreign: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for node in ast.walk(tree):
        for name in _imported_names(node, path):
            files = _package_files(name)
            top = name.partition(".")[0]
            if files:
                local += files
            elif top not in sys.stdlib_module_names and top != PACKAGE.name:
                foreign.add(top)
        local += _data_files(node, path)
    return local, sorted(foreign)


def _imported_names(node: ast.AST, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    if node.level:
        raise UserError(
            f"{path}: line {node.lineno} uses a relative import; write it from `{PACKAGE.name}` on"
        )
    module = node.module or ""
    if module.partition(".")[0] != PACKAGE.name:
        return [module]
    return [module, *(f"{module}.{alias.name}" for alias in node.names)]  # a name may be a submodule


def _package_files(name: str) -> list[Path]:
    """A package module's file with the `__init__.py` files on the way to it; empty for anything else."""
    parts = name.split(".")
    if parts[0] != PACKAGE.name:
        return []
    base = PACKAGE.parent.joinpath(*parts)
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not file.is_file():
        return []
    inits = [PACKAGE.parent.joinpath(*parts[:depth]) / "__init__.py" for depth in range(1, len(parts))]
    return [*inits, file]


def _data_files(node: ast.AST, path: Path) -> list[Path]:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "data_file"):
        return []
    name = node.args[1] if len(node.args) == 2 else None
    if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
        raise UserError(f"{path}: line {node.lineno}: data_file(__file__, ...) needs a literal file name")
    file = path.parent / name.value
    if not file.is_file():
        raise UserError(f"{path}: line {node.lineno} names {name.value}, which is not beside it")
    return [file]
