"""The house stays as DESIGN describes it: one-way imports, right symlinks, files of a readable size, cheap imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "pallas_kernels": {"pallas_kernels"},
    "sharding": {"sharding"},
    "models": {"models", "pallas_kernels", "sharding"},
    "paxserve": {"paxserve", "models", "pallas_kernels", "sharding"},
}
"""What each code folder may import of the project."""

FILES = {folder: sorted(file for file in (ROOT / folder).rglob("*.py")) for folder in MAY_IMPORT}
LINKS = ("models", "sharding", "pallas_kernels")

MAX_LINES = 800
MAX_ENGINE_LINES = 400
ENGINE_FILES = ("buckets", "engine", "llm", "pack", "pages", "programs", "request", "runner", "scheduler", "step")


def imported(file: Path) -> set[str]:
    """Every module that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import, write paxserve.…"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def folder_of(module: str) -> str:
    """The code folder that a module of the project lives in."""
    part = module.split(".")[1] if "." in module else ""
    return part if part in LINKS else "paxserve"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_run_one_way(folder):
    assert FILES[folder]
    for file in FILES[folder]:
        for module in imported(file):
            top = module.partition(".")[0]
            assert top not in LINKS, f"{file} imports {module}: write paxserve.{module}"
            if top == "paxserve":
                assert folder_of(module) in MAY_IMPORT[folder], f"{file} imports {module}, which is above it"


def test_the_scheduler_knows_no_device():
    """What the simulator and lockstep hosts share imports no JAX, directly or through others."""
    code = "import paxserve.scheduler, paxserve.pages, sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_help_does_not_wait_for_jax():
    code = "import paxserve.cli, sys; paxserve.cli.build_parser(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_import_starts_no_backend():
    """A process may still call jax.distributed.initialize or choose platforms after importing us."""
    code = "import paxserve, sys; paxserve.LLM; from jax._src import xla_bridge; sys.exit(bool(xla_bridge._backends))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("name", LINKS)
def test_symlinks_are_relative(name):
    link = ROOT / "paxserve" / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert (link / "__init__.py").exists()


def test_files_can_be_read_in_one_sitting():
    tests = sorted((ROOT / "tests").rglob("*.py"))
    for file in [*tests, *(file for files in FILES.values() for file in files)]:
        lines = file.read_text(encoding="utf-8").count("\n")
        engine = file.parent == ROOT / "paxserve" and file.stem in ENGINE_FILES
        assert lines <= (MAX_ENGINE_LINES if engine else MAX_LINES), f"{file} has {lines} lines"
