"""The pinned environment is whole and minimal, `make` sets it up safely, and the profile does what it promises."""

import ast
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from workflow_scripts.doctor import read_pins

ROOT = Path(__file__).parents[1]
PINS_FILE = ROOT / "envs/requirements.txt"
PINS = read_pins(PINS_FILE)
# Run, not imported: s3fs is what fsspec loads for `s3://`, and the server of its tests is moto's with these three.
S3_SERVER = {"moto", "flask", "flask-cors", "py-partiql-parser"}
TOOLS = {"snakemake", "pytest", "pytest-xdist", "ruff", "snakefmt", "s3fs", *S3_SERVER}
EXTRA_FILE = ROOT / "envs/coreml.txt"
EXTRA = read_pins(EXTRA_FILE)  # of the Core ML reference; may be installed or not
DISTRIBUTIONS = {"coreai": "coreai-core", "yaml": "pyyaml"}


def imported_distributions():
    """Third-party distributions that our code and tests import, by canonical name."""
    names = set()
    for path in [*ROOT.glob("workflow_scripts/**/*.py"), *ROOT.glob("tests/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    own = {"workflow_scripts", "tests", *(path.stem for path in ROOT.glob("tests/**/*.py"))}
    third = names - own - sys.stdlib_module_names
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in third} - EXTRA.keys()


def requirements_of(names):
    """The distributions that these need, and theirs, on this host."""
    seen, queue = set(), [(name, ()) for name in names]
    while queue:
        name, extras = queue.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for text in importlib.metadata.requires(name) or []:
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in ("", *extras)):
                queue.append((canonicalize_name(need.name), tuple(sorted(need.extras))))
    return {name for name, _ in seen}


def test_requirements_hold_pins_and_comments_only():
    for line in PINS_FILE.read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"(#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.]+)?", line), line
    names = [canonicalize_name(name) for name in PINS]
    assert len(names) == len(set(names))
    assert PINS["torch"] == "2.13.0"
    assert not [name for name in names if re.search("nvidia|cuda|triton", name)]


def test_the_extra_holds_pins_of_its_own_and_no_other():
    for line in EXTRA_FILE.read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"(#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.]+)?", line), line
    assert not EXTRA.keys() & PINS.keys()


def test_the_extra_is_whole_and_moves_no_pin():
    if "coremltools" not in {name for name in EXTRA if _installed(name)}:
        pytest.skip("coremltools is not installed: make test-coreml")
    assert {name: _installed(name) for name in EXTRA} == EXTRA
    needed = requirements_of({"coremltools"}) - {canonicalize_name(name) for name in PINS}
    assert needed == EXTRA.keys()


def _installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def test_this_environment_is_the_pinned_one():
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in PINS}
    assert installed == PINS


def test_pins_are_whole():
    """No package is left to the day of the install, but for what a CUDA wheel of torch adds."""
    needed = requirements_of(TOOLS | imported_distributions())
    pinned = {canonicalize_name(name) for name in PINS}
    assert {name for name in needed - pinned if not re.search("nvidia|cuda|triton", name)} == set()


def test_pins_are_minimal():
    """Every pin serves something that we import or run."""
    needed = requirements_of(TOOLS | imported_distributions())
    assert {canonicalize_name(name) for name in PINS} - needed == set()


@pytest.mark.parametrize(("file", "pins"), [("pipeline.yaml", PINS), ("coreml.yaml", PINS | EXTRA)])
def test_conda_file_has_the_same_pins(file, pins):
    conda = yaml.safe_load((ROOT / "envs" / file).read_text(encoding="utf-8"))
    *packages, pip = conda["dependencies"]
    assert pip["pip"] == [f"{name}=={version}" for name, version in pins.items()]
    assert "python=3.11" in packages
    assert "pip" in packages


def test_tools_pinned_here_are_those_the_modules_check():
    """The exporter's private names are checked against fixed versions; both must move together."""
    private = ROOT / "workflow_scripts/coreai/private.py"
    for name in ("coreai-core", "coreai-torch"):
        assert PINS[name] in private.read_text(encoding="utf-8"), name


def make(folder, *arguments, **environment):
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture
def checkout(tmp_path):
    """A checkout in a folder with a space, whose pins ask for nothing."""
    folder = tmp_path / "a checkout"
    (folder / "envs").mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "envs/requirements.txt").write_text("# nothing\n")
    return folder


def test_make_environment_is_redone_after_a_kill_and_kept_otherwise(checkout):
    env = checkout / ".venv"
    state = env / "pins.state"
    python = f"PYTHON={sys.executable}"
    env.mkdir()
    half = env / "half-installed"
    half.touch()

    state.write_text(f"installing {os.getpid()}\n")  # one that still runs
    refused = make(checkout, "environment", python)
    assert refused.returncode != 0
    assert str(os.getpid()) in refused.stderr
    assert half.exists()

    gone = subprocess.Popen(["true"])
    gone.wait()
    state.write_text(f"installing {gone.pid}\n")  # one that was killed
    assert make(checkout, "environment", python).returncode == 0
    assert not half.exists()
    assert (env / "bin/python").exists()
    first = state.read_text()
    assert re.fullmatch("[0-9a-f]{64}\n", first)

    again = make(checkout, "environment", python)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    (checkout / "envs/requirements.txt").write_text("# other pins\n")
    kept = env / "kept"
    kept.touch()
    assert make(checkout, "environment", python).returncode == 0
    assert kept.exists()
    assert state.read_text() != first

    (checkout / "envs/requirements.txt").write_text("no-such-package-of-any-index ==\n")
    failed = make(checkout, "environment", python)
    assert failed.returncode != 0
    assert state.read_text().startswith("installing")


def test_make_says_what_to_install(checkout, tmp_path):
    old = tmp_path / "oldpython"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    message = make(checkout, "environment", f"PYTHON={old}").stderr
    assert "is not Python 3.11 to 3.14" in message
    assert "apt install python3" in message
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "make").symlink_to(shutil.which("make"))
    bare = make(checkout, "environment", f"PYTHON={sys.executable}", PATH=str(tools), CXX="")
    assert bare.returncode != 0
    assert "no C++ compiler" in bare.stderr
    assert "apt install g++" in bare.stderr


SNAKEFILE = """
rule release:
    input: "results/b.json"
rule a:
    input: "big.bin", "code.py"
    output: "results/a.json"
    shell: "cksum {input} > {output}.part; sleep $(cat pause); mv {output}.part {output}"
rule b:
    input: "results/a.json"
    output: "results/b.json"
    shell: "cp {input} {output}"
"""


@pytest.fixture
def workflow(tmp_path):
    (tmp_path / "profiles/default").mkdir(parents=True)
    shutil.copy(ROOT / "profiles/default/config.yaml", tmp_path / "profiles/default")
    (tmp_path / "Snakefile").write_text(SNAKEFILE)
    (tmp_path / "big.bin").write_bytes(bytes(4_000_000))  # the size of the embedded checkpoint
    (tmp_path / "code.py").write_text("x = 1\n")
    (tmp_path / "pause").write_text("60")
    return tmp_path


def snakemake(folder, *arguments):
    command = [sys.executable, "-m", "snakemake", "release", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_profile_needs_no_flags_survives_a_kill_and_ignores_touches(workflow):
    killed = snakemake(workflow)
    deadline = time.monotonic() + 60
    while not (workflow / "results/a.json.part").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()

    (workflow / "pause").write_text("0")
    plain = snakemake(workflow)  # no --cores, no --unlock, no --rerun-incomplete
    output, _ = plain.communicate(timeout=60)
    assert plain.returncode == 0, output
    megabytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1_000_000
    assert re.search(rf"Provided resources: .*mem_mb.*\b{megabytes}\b", output)
    assert (workflow / "results/b.json").is_file()

    (workflow / "big.bin").touch()
    (workflow / "code.py").touch()
    touched, _ = snakemake(workflow, "--dry-run").communicate(timeout=60)
    assert "Nothing to be done" in touched

    (workflow / "code.py").write_text("x = 2\n")
    edited, _ = snakemake(workflow, "--dry-run").communicate(timeout=60)
    assert "Nothing to be done" not in edited


def test_git_keeps_bytes_and_leaves_results_out(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("no git on this host")
    for name in (".gitattributes", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    git("init", "-q")
    texts = git("check-attr", "eol", "--", "chat_template.jinja", "config.json", "Snakefile", ".ci/run")
    assert texts.count("eol: lf") == 4
    assert "binary: set" in git("check-attr", "binary", "--", "resources/gemma-4-tiny/model.safetensors")
    ignored = ["results/x", ".venv/x", ".snakemake/x", "a/__pycache__/x"]
    assert git("check-ignore", *ignored).split() == ignored
