"""Files and their names: definitions of a file, and imports from the spec's own folder or the shipped library."""

from __future__ import annotations

import os
from dataclasses import field
from pathlib import Path

from titan.compiler.plan.frozen import dataclass
from titan.compiler.spec.report import Refusal, Report, similar
from titan.compiler.spec.values import Value
from titan.grammar.diagnostics import Note, Span, TitanError
from titan.grammar.syntax import Entry, Import, Objective, Section, SyntaxTree

MAX_FILES = 64  # a spec is a handful of files; more is an accident

SLOTS = ("model", "cluster", "train", "parallel")  # the parts of a spec


@dataclass(slots=True)
class Scope:
    """The names of one file.

    `values` caches definitions once evaluated, `used` are those that something asked for, `failed` the names of imports
    that could not be opened: what refers to them stays silent.
    """

    path: str
    shipped: bool
    broken: bool = False  # it did not parse: which names it has is unknown
    modules: dict[str, Scope] = field(default_factory=dict)
    definitions: dict[str, Entry | Section] = field(default_factory=dict)
    objective: Objective | None = None
    values: dict[str, Value] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class Loader:
    """Opens imports, each file once, from `folder` and then from the shipped library."""

    def __init__(self, folder: Path, library: Path, report: Report) -> None:
        self.folder, self.library, self.report = folder, library, report
        self.scopes: dict[str, Scope] = {}

    def open(self, tree: SyntaxTree, shipped: bool = False, chain: tuple[tuple[str, str], ...] = ()) -> Scope:
        """The scope of a parsed file; `chain` lists (real path, shown path) of the files that led here."""
        scope = Scope(tree.path, shipped)
        spans: dict[str, Span] = {}
        for statement in tree.statements:
            name, span = _declared(statement)
            own = (
                f"import {name}" if isinstance(statement, Import) and name in SLOTS else name
            )  # a part of the spec too
            if own in spans:
                self.report.error("T213", f"`{name}` is given twice", span, notes=(Note("first here", spans[own]),))
                continue
            spans[own] = span
            try:
                self._declare(scope, name, statement, chain)
            except Refusal as refusal:
                self.report.add(refusal.diagnostic)
                scope.failed.add(name)
        return scope

    def _declare(
        self,
        scope: Scope,
        name: str,
        statement: Import | Entry | Section | Objective,
        chain: tuple[tuple[str, str], ...],
    ) -> None:
        if isinstance(statement, Import):
            scope.modules[name] = self._import(statement, scope, chain)
        elif isinstance(statement, Objective):
            scope.objective = statement
        elif len(statement.name.parts if isinstance(statement, Section) else statement.key.parts) > 1:
            raise Refusal("T211", f"`{name}` cannot be defined: a definition has a plain name", statement.span)
        else:
            scope.definitions[name] = statement

    def _import(self, statement: Import, scope: Scope, chain: tuple[tuple[str, str], ...]) -> Scope:
        path, shipped = self._find(statement, scope)
        if path in [real for real, _ in chain]:
            circle = " -> ".join([shown for _, shown in chain] + [str(path)])
            raise Refusal("T219", f"import `{statement.name.dotted}` closes a circle: {circle}", statement.name.span)
        if path not in self.scopes:
            if len(self.scopes) >= MAX_FILES:
                raise Refusal("T236", f"more than {MAX_FILES} files are imported", statement.name.span)
            self.scopes[path] = self._parse(path, shipped, chain)
        return self.scopes[path]

    def _parse(self, path: str, shipped: bool, chain: tuple[tuple[str, str], ...]) -> Scope:
        from titan.grammar.parser import parse
        from titan.grammar.sources import read_source

        try:
            tree = parse(read_source(path), path)
        except TitanError as error:
            for diagnostic in error.diagnostics:
                self.report.add(diagnostic)
            return Scope(path, shipped, broken=True)
        return self.open(tree, shipped, (*chain, (path, path)))

    def _find(self, statement: Import, scope: Scope) -> tuple[str, bool]:
        """The real path of an import and whether the library ships it."""
        name, span = statement.name.dotted, statement.name.span
        relative = Path(*statement.name.parts).with_suffix(".titan")
        roots = [(self.library, True)] if scope.shipped else [(self.folder, False), (self.library, True)]
        found = [(root / relative, shipped) for root, shipped in roots if os.path.lexists(root / relative)]
        if not found:
            known = importable([root for root, _ in roots])
            near = similar(name, known)
            raise Refusal("T218", f"nothing to import under the name `{name}`", span, near, (Note(_list(known)),))
        if len(found) > 1:
            self.report.warn("T231", f"`{name}` of the spec's folder hides the shipped file of that name", span)
        path, shipped = found[0]
        root = self.library if shipped else self.folder
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(os.path.realpath(root)):
            raise Refusal(
                "T220", f"`{name}` leads out of {'the library' if shipped else 'the folder of the spec'}", span
            )
        return str(real), shipped


def _declared(statement: Import | Entry | Section | Objective) -> tuple[str, Span]:
    if isinstance(statement, Import):
        return statement.name.parts[-1], statement.name.span
    if isinstance(statement, Objective):
        return statement.direction, statement.span
    name = statement.name if isinstance(statement, Section) else statement.key
    return name.dotted, name.span


def importable(roots: list[Path]) -> list[str]:
    """Importable names: files of the folder itself and of its folders one level down."""
    names: set[str] = set()
    for root in roots:
        for pattern in ("*.titan", "*/*.titan"):
            names.update(".".join(p.relative_to(root).with_suffix("").parts) for p in root.glob(pattern))
    return sorted(names)[:200]


def _list(known: list[str]) -> str:
    return "importable: " + ", ".join(known[:20])
