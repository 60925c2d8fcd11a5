"""The rules of the house, read off the source: which way imports point, what stays optional, how files are cut.

Imports point only downwards, and never sideways between two parts of one layer:

    trainers
    collectors   remote
    objectives   engines   weight_sync   data.replay_buffer   modules
    data.group_filters   data.window_advantages
    packing   pure functions and protocols: objectives.functional, engines.base, engines.vllm_http, weight_sync.base,
              data.*, kernels
    data.schema   adapters   engines.vllm_description
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "torchrl_asyncgrpo"

# Longest prefix wins; a module belongs to the part whose prefix it has.
LAYERS = [
    {"trainers"},
    {"collectors", "remote"},
    {"objectives", "engines", "weight_sync", "data.replay_buffer", "modules"},
    {"data.group_filters", "data.window_advantages"},
    {"packing", "objectives.functional", "engines.base", "engines.vllm_http", "weight_sync.base", "data", "kernels"},
    {"data.schema", "adapters", "engines.vllm_description"},
]
# Beyond the layers: a collector turns prompts into rollouts and knows nothing of what becomes of them.
FORBIDDEN = {"collectors": {"trainers", "objectives", "packing", "weight_sync"}}
# One file each, imported where it is needed and never by `import torchrl_asyncgrpo`; vLLM, whose two ends of a weight
# transfer run in different processes, in files of one name.
OPTIONAL = {"vllm", "ray", "peft", "bitsandbytes", "flash_attn"}
SEVERAL_FILES = {"vllm": "weight_sync/vllm_"}
NOT_A_ROOM = {"common", "utils", "util", "helpers", "helper", "misc"}
MAX_LINES = 400


def module_name(path: Path, package: Path) -> str:
    """Dotted name inside the package: ``packing/trie.py`` is ``packing.trie``, ``packing/__init__.py`` ``packing``."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(package: Path) -> dict[str, Path]:
    return {module_name(path, package): path for path in sorted(package.rglob("*.py"))}


def part_of(module: str) -> tuple[int, str]:
    """Depth and name of the part that a module belongs to."""
    found = [
        (len(part), depth, part)
        for depth, parts in enumerate(LAYERS)
        for part in parts
        if module == part or module.startswith(part + ".")
    ]
    if not found:
        raise ValueError(f"{PACKAGE}.{module} belongs to no layer; add its part to LAYERS")
    if module == "data":
        return -1, module  # it re-exports parts of several layers: import the module itself
    _, depth, part = max(found)
    # Leaves of the data package are parts of their own.
    return (depth, module) if part == "data" else (depth, part)


def imported_names(path: Path, module: str, is_package: bool) -> list[tuple[str, int]]:
    """Absolute dotted names that a file imports, anywhere in it, with their lines."""
    here = [PACKAGE, *(part for part in module.split(".") if part)]
    here = here if is_package else here[:-1]
    names = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(here[: len(here) + 1 - node.level]) if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            names += [(f"{base}.{alias.name}", node.lineno) for alias in node.names]
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                names.append((str(first.value), node.lineno))
    return names


def import_violations(package: Path) -> list[str]:
    """Every import that breaks a rule, as ``file:line: why``."""
    modules = sources(package)
    violations, optional_users = [], {}
    for module, path in modules.items():
        where = path.relative_to(package)
        is_package = path.name == "__init__.py"
        for name, line in imported_names(path, module, is_package):
            top, _, rest = name.partition(".")
            if top in OPTIONAL:
                optional_users.setdefault(top, set()).add(str(where))
            if top != PACKAGE or not module:
                continue
            target = rest
            while target and target not in modules:  # a name defined in a module, not a module itself
                target = target.rpartition(".")[0]
            if not target:
                violations.append(f"{where}:{line}: imports the top of the package, which imports every part")
                continue
            (depth, part), (target_depth, target_part) = part_of(module), part_of(target)
            root, target_root = module.split(".")[0], target.split(".")[0]
            if target_root in FORBIDDEN.get(root, ()):
                violations.append(f"{where}:{line}: {root} must know nothing of {target_root}, but imports {target}")
            elif part == target_part or (is_package and target_root == root):
                continue
            elif target_depth <= depth:
                violations.append(f"{where}:{line}: imports {target}, which is not below {part}")
    for name, users in optional_users.items():
        shared = SEVERAL_FILES.get(name)
        if len(users) > 1 and not (shared and all(user.startswith(shared) for user in users)):
            violations.append(f"{', '.join(sorted(users))}: {name} belongs in one file")
    return violations


def house_violations(package: Path, tests: Path) -> list[str]:
    """File names, file lengths, and tests that mirror no module."""
    modules = sources(package)
    violations = []
    for path in modules.values():
        where = path.relative_to(package)
        if path.stem in NOT_A_ROOM or set(where.parent.parts) & NOT_A_ROOM:
            violations.append(f"{where}: name the file after what is in it")
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            violations.append(f"{where}: {lines} lines, at most {MAX_LINES}")
    for path in sorted(tests.rglob("test_*.py")):
        where = path.relative_to(tests)
        mirrored = ".".join([*where.parent.parts, path.stem.removeprefix("test_")])
        # test_grpo_gradient.py is a part of the tests of grpo.py
        if where.parent.parts and not any(f"{mirrored}_".startswith(f"{module}_") for module in modules if module):
            violations.append(f"test {where}: there is no {mirrored.replace('.', '/')} in the package")
    return violations


def test_imports_point_downwards():
    assert import_violations(ROOT / PACKAGE) == []


def test_files_are_named_cut_and_tested_by_the_rules():
    assert house_violations(ROOT / PACKAGE, ROOT / "test") == []


def test_every_public_name_is_there_without_the_optional_packages():
    """A child process in which they cannot be imported sees the whole public interface."""
    program = f"""
import sys
for name in {sorted(OPTIONAL)!r}:
    sys.modules[name] = None
import {PACKAGE}
missing = [name for name in getattr({PACKAGE}, "__all__", []) if not hasattr({PACKAGE}, name)]
assert not missing, missing
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def write(package: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(package).parents:
            (package / parent / "__init__.py").touch()
    return package


GOOD = {
    "data/schema.py": "import torch",
    "data/advantages.py": f"from {PACKAGE}.data import schema",
    "packing/trie.py": f"from {PACKAGE}.data.schema import TreeBatch",
    "packing/packer.py": "from .trie import build\nfrom ..data import schema",
    "engines/base.py": "",
    "engines/vllm.py": f"def start():\n    import vllm\n    from {PACKAGE}.engines.base import Engine",
    "weight_sync/base.py": "",
    "weight_sync/local.py": f"from {PACKAGE}.engines.base import LocalEngine",
    "objectives/functional.py": "",
    "objectives/grpo.py": f"from {PACKAGE}.objectives.functional import clip\nimport {PACKAGE}.data.schema",
    "collectors/llm.py": f"from {PACKAGE}.engines.base import Engine",
    "trainers/trainer.py": f"from {PACKAGE}.collectors.llm import C\nfrom {PACKAGE}.packing.packer import P",
    "packing/__init__.py": "from .packer import TreePacker",
    "__init__.py": f"from {PACKAGE}.packing import TreePacker",
}


def test_checker_accepts_a_good_package(tmp_path):
    package = write(tmp_path / PACKAGE, GOOD)
    assert import_violations(package) == []
    (tmp_path / "test/packing").mkdir(parents=True)
    (tmp_path / "test/packing/test_trie.py").touch()
    (tmp_path / "test/packing/test_trie_branches.py").touch()
    (tmp_path / "test/test_whole.py").touch()
    assert house_violations(package, tmp_path / "test") == []


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("packing/trie.py", f"from {PACKAGE}.objectives.grpo import GRPOLoss", "trie.py:1: .*objectives.grpo"),
        ("packing/trie.py", "def f():\n    from ..trainers import trainer", "trie.py:2: .*trainers.trainer"),
        ("packing/trie.py", f"import {PACKAGE}", "trie.py:1: imports the top"),
        ("packing/trie.py", f"from {PACKAGE} import TreePacker", "trie.py:1: imports the top"),
        ("data/schema.py", f"from {PACKAGE}.data.advantages import a", "schema.py:1: .*data.advantages"),
        ("data/advantages.py", f"from {PACKAGE}.engines.base import Engine", "advantages.py:1: .*engines.base"),
        ("objectives/grpo.py", f"from {PACKAGE}.engines.vllm import E", "grpo.py:1: .*engines.vllm"),
        ("objectives/functional.py", f"from {PACKAGE}.objectives.grpo import x", "functional.py:1: .*objectives.grpo"),
        ("objectives/functional.py", f"from {PACKAGE}.packing import TreePacker", "functional.py:1: .*packing"),
        ("collectors/llm.py", f"from {PACKAGE}.weight_sync.base import W", "llm.py:1: collectors .*weight_sync"),
        ("collectors/llm.py", f"from {PACKAGE}.packing.trie import t", "llm.py:1: collectors .*packing"),
        ("collectors/llm.py", f"from {PACKAGE}.objectives import functional", "llm.py:1: collectors .*objectives"),
        ("collectors/llm.py", f"from {PACKAGE}.trainers.trainer import T", "llm.py:1: collectors .*trainers"),
        ("weight_sync/local.py", "import vllm", "engines/vllm.py, weight_sync/local.py: vllm"),
        (
            "weight_sync/local.py",
            "importlib.import_module('vllm.config')",
            "engines/vllm.py, weight_sync/local.py: vllm",
        ),
    ],
)
def test_checker_finds_a_bad_import(tmp_path, file, text, reason):
    package = write(tmp_path / PACKAGE, GOOD | {file: text})
    (violation,) = import_violations(package)
    assert re.search(reason, violation), violation


def test_checker_finds_a_part_that_no_layer_names(tmp_path):
    package = write(tmp_path / PACKAGE, GOOD | {"novelty/thing.py": f"from {PACKAGE}.data import schema"})
    with pytest.raises(ValueError, match=r"novelty\.thing belongs to no layer"):
        import_violations(package)


@pytest.mark.parametrize(
    ("file", "reason"),
    [("packing/utils.py", "packing/utils.py: name"), ("common/trie.py", "common/trie.py: name")],
)
def test_checker_finds_a_bad_name(tmp_path, file, reason):
    package = write(tmp_path / PACKAGE, {file: ""})
    assert any(violation.startswith(reason) for violation in house_violations(package, tmp_path / "test"))


def test_checker_finds_a_long_file_and_an_orphan_test(tmp_path):
    package = write(tmp_path / PACKAGE, {"packing/trie.py": "\n" * (MAX_LINES + 1)})
    (tmp_path / "test/packing").mkdir(parents=True)
    (tmp_path / "test/packing/test_tree.py").touch()
    assert house_violations(package, tmp_path / "test") == [
        "packing/trie.py: 401 lines, at most 400",
        "test packing/test_tree.py: there is no packing/tree in the package",
    ]
