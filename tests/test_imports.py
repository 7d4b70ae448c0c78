"""Imports of the package go downwards only, published files stand alone, and the library does not print."""

import ast
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dspark_hf"
MODELING = ROOT / "modeling"
# From the bottom up (the layout in CONTRIBUTING.md); a module imports only from layers below its own. A folder counts as one module.
LAYERS = [
    {"modeling", "grouped", "host", "loading", "narrow", "reference_pair", "transfer"},
    {"sampling", "verification_cost", "calibration", "metrics", "gating"},
    {"acceptance", "scheduling"},
    {"caches", "taps", "processors", "sequences", "outputs", "options", "checkpoints", "model_card", "quantised"},
    {"recurrent"},
    {"verification", "judging", "publishing", "convert"},
    {"committing", "drafting"},
    {"passes"},
    {"cost_curve"},
    {"planning", "profiling"},
    {"decoding"},
    {"integration"},
    {"training", "evaluation"},
    {"cli", "custom_generate"},  # the second is published with a drafter
]
MATHEMATICS = LAYERS[1] | LAYERS[2]
LAYER_OF = {name: number for number, layer in enumerate(LAYERS) for name in layer}
MAY_PRINT = {"cli", "reference_pair", "evaluation"}  # commands, and only in their `main`
STANDARD = sys.stdlib_module_names


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_of(path: Path) -> str:
    """Name in `LAYERS` of a file of the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> list[str]:
    """Dotted names that a file imports anywhere, functions and type checking included; relative ones keep their dots."""
    names = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            # `from dspark_hf import caches` imports the module dspark_hf.caches.
            names += [f"{start}.{alias.name}" for alias in node.names] if start == "dspark_hf" else [start]
    return names


def inner(path: Path) -> set[str]:
    """Modules of the package that a file imports, by their name in `LAYERS`."""
    return {name.split(".")[1] for name in imported(path) if name.startswith("dspark_hf.")}


PACKAGE_FILES = [path for path in sources(PACKAGE) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards_only(path):
    module = module_of(path)
    assert module in LAYER_OF, f"{module} is new: give it a place in LAYERS"
    if LAYER_OF[module] <= LAYER_OF["integration"]:
        assert "dspark_hf" not in imported(path), "import the module that is meant, not the package"
    for other in inner(path) - {module}:
        assert LAYER_OF[other] < LAYER_OF[module], f"{module} imports {other}"


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_are_absolute_and_of_dependencies_that_are_declared(path):
    of_transformers = {"safetensors", "huggingface_hub", "tokenizers", "tqdm"}  # it depends on them itself
    known = STANDARD | of_transformers | {"dspark_hf", "psutil", "torch", "transformers"}
    lazily = {"accelerate", "datasets", "gguf", "matplotlib"}
    names = imported(path)
    assert not [name for name in names if name.startswith(".")]
    assert {name.split(".")[0] for name in names} <= known | lazily
    at_the_top = {
        alias.name.split(".")[0] for node in parse(path).body if isinstance(node, ast.Import) for alias in node.names
    } | {node.module.split(".")[0] for node in parse(path).body if isinstance(node, ast.ImportFrom)}
    assert not at_the_top & lazily


@pytest.mark.parametrize("module", sorted(MATHEMATICS))
def test_the_mathematics_knows_only_torch(module):
    path = PACKAGE / f"{module}.py"
    outside = {name.split(".")[0] for name in imported(path)} - STANDARD
    assert outside <= {"torch", "dspark_hf"}
    assert inner(path) <= MATHEMATICS


@pytest.mark.parametrize("path", sources(MODELING), ids=lambda path: path.name)
def test_published_files_stand_alone(path):
    """transformers copies what `from .sibling import ...` names into the checkpoint, and nothing else."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            assert node.level == 1
            assert node.module is not None, "`from . import x` is not copied"
            assert "." not in node.module
            assert (MODELING / f"{node.module}.py").exists()
    outside = {name.split(".")[0] for name in imported(path) if not name.startswith(".")} - STANDARD
    assert outside <= {"torch", "transformers", "safetensors"}


def test_only_the_front_doors_import_the_integration():
    users = {module_of(path) for path in sources(PACKAGE) if "integration" in inner(path)}
    assert users <= {"__init__", "cli"}


@pytest.mark.parametrize("path", sources(PACKAGE) + sources(MODELING), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_does_not_print_or_assert(path):
    def is_print(node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"

    tree = parse(path)
    mains = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    is_command = path.is_relative_to(PACKAGE) and module_of(path) in MAY_PRINT
    allowed = {id(node) for main in mains for node in ast.walk(main)} if is_command else set()
    assert not [node.lineno for node in ast.walk(tree) if is_print(node) and id(node) not in allowed]
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
