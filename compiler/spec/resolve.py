"""A parsed file to a `Spec`: imports, names, overrides, units, ranges; every error of the file at once, in order."""

from __future__ import annotations

from pathlib import Path

from titan.compiler.spec.bind import Binder
from titan.compiler.spec.evaluate import Evaluator
from titan.compiler.spec.kinds import Part
from titan.compiler.spec.objective import read_objective
from titan.compiler.spec.origin import Origin
from titan.compiler.spec.parallel import CHOICES, read_parallel
from titan.compiler.spec.report import Refusal, Report, similar
from titan.compiler.spec.schema import Cluster, Model, Spec, Train
from titan.compiler.spec.scope import SLOTS, Loader, Scope
from titan.compiler.spec.values import Broken, Record, Value
from titan.compiler.spec.wishes import Parallel
from titan.grammar.diagnostics import Note, Span
from titan.grammar.syntax import Section, SyntaxTree


def load_spec(path: str | Path) -> Spec:
    """Read, parse and resolve a file. Raises TitanError with everything that is wrong with it."""
    from titan.grammar.parser import parse
    from titan.grammar.sources import read_source

    return resolve(parse(read_source(str(path)), str(path)))


def resolve(tree: SyntaxTree, folder: Path | None = None) -> Spec:
    """The spec of a tree; imports are looked for in `folder` (the file's own) and in the shipped library."""
    from titan.grammar.sources import library_path

    report = Report()
    folder = folder if folder is not None else Path(tree.path).parent
    library = library_path()
    loader = Loader(folder, library, report)
    scope = loader.open(tree, chain=((str(Path(tree.path).resolve()), tree.path),))
    spec = _Resolution(report, scope, library).spec(tree.path)
    return spec


class _Resolution:
    """One resolution: the report and the binder that its steps share."""

    def __init__(self, report: Report, scope: Scope, library: Path) -> None:
        self.report, self.scope, self.library = report, scope, library
        self.binder = Binder(report, homes=_homes())
        self.evaluator = Evaluator(report)

    def spec(self, path: str) -> Spec:
        slots = {name: self._slot(name) for name in SLOTS}
        self._check_names()
        parallel = read_parallel(slots["parallel"], self.report, self.binder.origins, self.binder.homes)
        model = self.binder.bind(Model, slots["model"], "model")
        cluster = self.binder.bind(Cluster, slots["cluster"], "cluster")
        train = self.binder.bind(Train, slots["train"], "train", self._batch(slots["train"], cluster, parallel))
        objective = read_objective(self.scope.objective, cluster, train, self.report, self.binder.origins)
        self._warn_precision(slots["train"], cluster)
        self.report.raise_errors()
        assert model is not None and cluster is not None and train is not None
        return Spec(model, cluster, train, parallel, objective, path, self.report.warnings(), self._origins())

    def _slot(self, name: str) -> Value | None:
        """The value of `model`, `cluster`, `train` or `parallel`; the first three must be there."""
        if name in self.scope.definitions:
            try:
                return self.evaluator.definition(self.scope, name)
            except Refusal as refusal:
                self.report.add(refusal.diagnostic)
                return Broken(self.scope.definitions[name].span)
        if name != "parallel":
            others = [d for d in self.scope.definitions if d not in SLOTS]
            near = similar(name, others)
            notes = (Note("it is defined here", self._name_span(near[0])),) if near else ()
            written = {"train": "train { ... }"}.get(name, f"{name} = ...")
            message = f"`{name}` is missing"
            if near:
                message += f"; did you mean `{near[0]}`?"
            self.report.error("T212", message, _start(self.scope.path), (written,), notes)
        return None

    def _check_names(self) -> None:
        """Definitions that nothing uses: sections are errors, values are evaluated all the same and warned about."""
        for name, statement in self.scope.definitions.items():
            if name in self.scope.used or name in SLOTS:
                continue
            span = self._name_span(name)
            if isinstance(statement, Section):
                near = similar(name, SLOTS)
                note = (Note(f"sections are {', '.join(SLOTS)}"),)
                self.report.error("T211", f"`{name}` is no section", span, near, note)
                continue
            try:
                self.evaluator.definition(self.scope, name)
            except Refusal as refusal:
                self.report.add(refusal.diagnostic)
            self.report.warn("T228", f"`{name}` is defined but never used", span)

    def _name_span(self, name: str) -> Span:
        statement = self.scope.definitions[name]
        return statement.name.span if isinstance(statement, Section) else statement.key.span

    def _batch(self, train: Value | None, cluster: Cluster | None, parallel: Parallel) -> dict[str, int]:
        """Without a global batch, a pinned micro-batch and data degree make one, with a warning."""
        if not isinstance(train, Record) or "global_batch" in train.fields or cluster is None:
            return {}
        data, micro_batch = _data_degree(parallel, cluster.world_size), parallel.micro_batch.value
        if data is None or micro_batch is None:
            return {}
        batch = data * micro_batch
        message = (
            f"no global_batch is given: micro_batch {micro_batch} x data {data} makes a global batch of {batch}"
            " sequences, which changes when data does"
        )
        self.report.warn("T230", message, parallel.micro_batch.span)
        return {"global_batch": batch}

    def _warn_precision(self, train: Value | None, cluster: Cluster | None) -> None:
        if not isinstance(train, Record) or "precision" in train.fields or cluster is None:
            return
        peak = cluster.device.peak
        if "bf16" in peak:
            gain = f", {peak['bf16'] / peak['fp32']:.0f} times as fast" if "fp32" in peak else ""
            message = f"no precision is given, so this trains in float32; {cluster.device.name} has bf16 units{gain}"
            self.report.warn("T227", message, train.span)

    def _origins(self) -> dict[str, Origin]:
        origins = self.binder.origins
        spans = origins.values | {k: s for k, s in origins.keys.items() if k not in origins.values}
        root = str(self.library)
        return {p: Origin("library" if s.path.startswith(root) else "user", s) for p, s in spans.items()}


def _data_degree(parallel: Parallel, world: int) -> int | None:
    """The data degree where pins decide it."""
    if parallel.data.fixed:
        return int(parallel.data.value)
    others = (parallel.pipeline, parallel.context, parallel.tensor)
    if not all(wish.fixed for wish in others):
        return None
    product = parallel.pipeline.value * parallel.context.value * parallel.tensor.value
    return None if world % product else int(world // product)


def _homes() -> dict[str, str]:
    """key -> section.key, to answer a key in the wrong section."""
    parts: dict[str, type[Part]] = {"train": Train, "cluster": Cluster, "model": Model}
    homes = {key: f"{section}.{key}" for section, part in parts.items() for key in part.model_fields if key != "name"}
    return homes | {key: f"parallel.{key}" for key in CHOICES if key != "schedule"}


def _start(path: str) -> Span:
    return Span(path, 1, 1, 1, 2)
