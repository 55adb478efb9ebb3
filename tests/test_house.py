"""The house: who may import whom, complete tables, sizes, and documents that say what is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from titan.compiler.cost.prices import Prices
from titan.compiler.lower import lower
from titan.compiler.passes.registry import GRAPH_PASSES
from titan.compiler.plan.opcodes import OPCODES
from titan.compiler.plan.operators import OPERATORS
from titan.compiler.plan.program import Plan
from titan.compiler.plan.text import instruction_text, parse_plan, print_plan
from titan.compiler.schedules.registry import SCHEDULES
from titan.grammar.catalogue import CATALOGUE, FAMILIES
from titan.runtime.handlers.table import HANDLERS

from tests.equivalence.configurations import Configuration, spec_of, strategy_of

ROOT = Path(__file__).parents[1]
ROOMS = ("grammar", "compiler", "runtime")
LONGEST_FILE, LONGEST_FUNCTION = 400, 80
CODE = re.compile(r"\bT\d{3}\b")


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def sources(*rooms: str) -> list[Path]:
    return sorted(file for room in rooms for file in (ROOT / room).rglob("*.py"))


def imported(file: Path) -> Iterator[str]:
    """Dotted names that a file imports, inside functions too, but not for type checking only."""
    skipped = {
        id(node)
        for branch in ast.walk(tree(file))
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree(file)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            yield str(node.module)


def third_party(file: Path) -> set[str]:
    return {name.split(".")[0] for name in imported(file)} - set(sys.stdlib_module_names) - {"titan"}


def under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


# --- imports point left


def test_grammar_imports_only_lark_and_the_standard_library() -> None:
    for file in sources("grammar"):
        assert third_party(file) <= {"lark"}, file
        assert all(under(name, "titan.grammar") for name in imported(file) if under(name, "titan")), file


def test_the_plan_imports_only_the_standard_library() -> None:
    for file in sources("compiler/plan"):
        assert third_party(file) == set(), file
        assert all(under(name, "titan.compiler.plan") for name in imported(file) if under(name, "titan")), file


def test_the_compiler_never_imports_torch_or_the_runtime() -> None:
    for file in sources("compiler"):
        allowed = {"click", "networkx", "numpy", "pydantic", "pydantic_core", "rich"}
        optional = {"scipy"} if file == ROOT / "compiler/schedules/exact.py" else set()  # an extra, imported when asked
        assert third_party(file) <= allowed | optional, file
        assert not any(under(name, "titan.runtime") for name in imported(file)), file


def test_the_compiler_makes_its_data_classes_quickly() -> None:
    """With those of the standard library starting takes a quarter longer."""
    quick = ROOT / "compiler/plan/frozen.py"
    for file in sources("compiler"):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ImportFrom) and node.module == "dataclasses" and file != quick:
                assert all(alias.name != "dataclass" for alias in node.names), f"{file}: import it from {quick}"


def test_the_runtime_imports_nothing_of_the_compiler_but_the_plan() -> None:
    for file in sources("runtime"):
        assert third_party(file) <= {"torch", "numpy", "rich", "safetensors", "tokenizers"}, file
        names = [name for name in imported(file) if under(name, "titan.compiler")]
        assert all(under(name, "titan.compiler.plan") for name in names), file


@pytest.mark.parametrize(
    ("package", "home"),
    [("lark", "grammar"), ("pydantic", "compiler/spec"), ("networkx", "compiler/graph"), ("torch", "runtime")],
)
def test_third_party_packages_have_one_home(package: str, home: str) -> None:
    users = [file for file in sources(*ROOMS) if package in third_party(file)]
    assert all(file.is_relative_to(ROOT / home) for file in users), users


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (("grammar",), ("pydantic", "click", "rich", "numpy", "networkx", "torch", "titan.compiler", "titan.runtime")),
        (
            ("compiler/plan",),
            ("lark", "pydantic", "click", "rich", "numpy", "networkx", "torch", "titan.grammar", "titan.runtime"),
        ),
        (("compiler",), ("torch", "transformers", "titan.runtime")),
        (("runtime",), ("pydantic", "lark", "titan.compiler.spec", "titan.compiler.passes", "titan.compiler.cost")),
    ],
    ids=["grammar", "plan", "compiler", "runtime"],
)
def test_what_importing_everything_of_a_layer_does_not_load(modules: tuple[str, ...], absent: tuple[str, ...]) -> None:
    names = [
        "titan." + ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sources(*modules)
        if file.parent.name != "corpora"
    ]
    script = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
print(*sorted(n for n in sys.modules if any(n == a or n.startswith(a + ".") for a in {absent!r})))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd="/")
    assert (found.returncode, found.stdout.split()) == (0, []), found.stderr


# --- packaging


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_package_list_is_complete() -> None:
    folders = {file.parent for file in sources(*ROOMS) if file.parent.name != "corpora"}
    assert all((folder / "__init__.py").exists() for folder in folders)
    written = project()["tool"]["setuptools"]["packages"]  # type: ignore[index]
    assert sorted(written) == sorted("titan." + ".".join(f.relative_to(ROOT).parts) for f in folders)


def test_package_files_are_empty() -> None:
    for file in sources(*ROOMS):
        assert file.name != "__init__.py" or file.read_text() == "", file


def test_every_dependency_is_pinned_to_a_version_in_its_range() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    table = project()["project"]
    extras = [line for lines in table["optional-dependencies"].values() for line in lines]  # type: ignore[index]
    for line in (*table["dependencies"], *extras):  # type: ignore[index]
        wanted = Requirement(line)
        if wanted.name != "titan-compiler":
            assert pins[canonicalize_name(wanted.name)] in wanted.specifier, line


# --- complete tables


@cache
def all_opcodes_plan() -> tuple[Plan, ...]:
    """Small plans that use every opcode between them."""
    cells = (
        Configuration(data=2, tensor=2, sequence_parallel=True, zero=1, recompute="full"),
        Configuration(pipeline=2, schedule="zero_bubble_h1", tied=True),
        Configuration(context=2, context_form="heads"),
        Configuration(context=2, context_form="ring"),
        Configuration(data=2, zero=2),
        Configuration(recompute="adaptive"),
        Configuration(offload="both"),
        Configuration(tensor=2, sequence_parallel=True, family="kv_one"),
    )
    return tuple(lower(spec_of(c), strategy_of(c)) for c in cells)


def test_every_opcode_has_a_handler_and_no_other_has() -> None:
    assert set(HANDLERS) == set(OPCODES)


@pytest.mark.parametrize("opcode", OPCODES)
def test_every_opcode_is_printed_priced_and_shown_in_a_golden_file(opcode: str) -> None:
    for plan in all_opcodes_plan():
        for role in plan.roles:
            found = [i for block in role.blocks for i in block.instructions if i.opcode == opcode]
            if found:
                assert instruction_text(found[0]).startswith(opcode)
                assert Prices(plan).price(role, found[0]) >= 0
                assert re.search(rf"^ *\d+  {opcode} ", golden_text(), re.MULTILINE), f"no golden file shows {opcode}"
                return
    pytest.fail(f"no small plan has {opcode}")


@cache
def golden_text() -> str:
    return "\n".join(file.read_text() for file in sorted((ROOT / "tests/golden/passes").rglob("*.expect")))


def test_plans_with_every_opcode_are_read_back() -> None:
    for plan in all_opcodes_plan():
        assert parse_plan(print_plan(plan)) == plan


def test_every_operator_has_its_file() -> None:
    assert {file.stem for file in (ROOT / "runtime/operators").glob("[a-z]*.py")} == {
        name for name, row in OPERATORS.items() if not row.plan_only
    }


def test_passes_are_called_like_their_files() -> None:
    for step in GRAPH_PASSES:
        assert step.__module__ == f"titan.compiler.passes.{step.__name__}"
        assert (step.__doc__ or "").strip()


def used_codes() -> dict[str, str]:
    """Codes of diagnostics in the source -> a file that has it; the catalogue's own rows do not count."""
    files = [file for file in sources(*ROOMS) if not file.name.startswith("catalogue_")]
    return {code: str(file.relative_to(ROOT)) for file in files for code in CODE.findall(file.read_text())}


def test_every_code_in_the_source_is_in_the_catalogue() -> None:
    assert {code: file for code, file in used_codes().items() if code not in CATALOGUE} == {}


def test_every_code_of_the_catalogue_is_used() -> None:
    assert sorted(set(CATALOGUE) - set(used_codes())) == []


def test_every_code_of_the_catalogue_has_a_case() -> None:
    """A test or a golden file names it."""
    files = [f for f in (ROOT / "tests").rglob("*") if f.suffix in (".py", ".expect") and f != Path(__file__)]
    named = set(re.findall(r"\bT\d{3}\b", "\n".join(f.read_text() for f in files)))
    assert sorted(set(CATALOGUE) - named) == []


def test_codes_belong_to_their_family() -> None:
    assert len(CATALOGUE) == sum(map(len, FAMILIES.values()))
    assert all(row.code.startswith(family) for family, rows in FAMILIES.items() for row in rows)


# --- sizes and habits


def test_no_file_is_longer_than_a_reader_can_bear() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in sources(*ROOMS, "tests")}
    assert {str(f.relative_to(ROOT)): n for f, n in lengths.items() if n > LONGEST_FILE} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    found = {}
    for file in sources(*ROOMS, "tests"):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    found[f"{file.relative_to(ROOT)}:{node.name}"] = length
    assert found == {}


def test_nothing_is_left_for_later_or_named_without_meaning() -> None:
    marks = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    for file in sources(*ROOMS, "tests"):
        assert not marks.search(file.read_text()), file
        assert file.stem not in ("utils", "util", "helpers", "common", "misc"), file


def test_every_module_says_what_it_is() -> None:
    for file in sources(*ROOMS, "tests/benchmarks", "tests/equivalence"):
        assert file.name == "__init__.py" or ast.get_docstring(tree(file)), file


# --- documents


def commands(document: str) -> list[str]:
    """Lines of the shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line and not line.startswith("#")]


def test_the_readme_sets_up_with_two_commands_and_the_checks_run_the_second() -> None:
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Set up") :].split("\n## ")[0]
    setup = [line for line in section.splitlines() if line.startswith("python3 -m venv")]
    assert len(setup) == 2
    assert "titan run examples/quickstart.titan" in setup[0] and "pytest" in setup[1]
    assert all("-c constraints.txt" in line for line in setup)
    assert setup[1] in (ROOT / ".ci/run").read_text().splitlines()


def test_commands_in_the_documents_exist() -> None:
    from titan.compiler.cli import COMMANDS

    for document in ("README.md", "CONTRIBUTING.md"):
        for line in commands(document):
            for command in re.findall(r"\btitan ([a-z]+)", line):
                assert command in COMMANDS, f"{document}: {line}"
            for module in re.findall(r"-m (tests\.[\w.]+)", line):
                path = ROOT / module.replace(".", "/")
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{document}: {line}"


def test_every_command_is_in_the_readme() -> None:
    from titan.compiler.cli import COMMANDS

    text = (ROOT / "README.md").read_text()
    assert [name for name in COMMANDS if f"titan {name}" not in text] == []


def test_files_named_in_the_documents_exist() -> None:
    for document in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / document).read_text()
        for path in re.findall(r"`((?:grammar|compiler|runtime|tests|examples|\.ci)/[\w./]*)`", text):
            if "NAME" not in path:
                assert (ROOT / path).exists(), f"{document}: {path}"


MEMBERS = {
    "pass": [step.__name__ for step in GRAPH_PASSES],
    "schedule": list(SCHEDULES),
    "operator": [name for name, row in OPERATORS.items() if not row.plan_only],
    "opcode": list(OPCODES),
    "rule": list(CATALOGUE),
}


@pytest.mark.parametrize("kind", MEMBERS)
def test_the_steps_of_adding_something_are_those_that_were_gone(kind: str) -> None:
    """Each `## Add a ...` list: numbered steps, each naming files; with NAME filled in they exist for every member."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.search(rf"^## Add an? {kind}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section, f"no list for {kind}"
    steps = re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |\Z)", section[1], re.DOTALL | re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1)) and len(steps) >= 3
    for _, step in steps:
        paths = re.findall(r"`([\w./]+/[\w./]*)`", step)
        assert paths, step
        for path in paths:
            for member in MEMBERS[kind] if "NAME" in path else [""]:
                assert (ROOT / path.replace("NAME", member)).exists(), f"{path} for {member}"
