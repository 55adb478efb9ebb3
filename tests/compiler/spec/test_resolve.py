"""From text to `Spec`: values, overrides, origins, and the one right diagnostic for each mistake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from titan.compiler.spec.resolve import load_spec
from titan.compiler.spec.wishes import Wish
from titan.grammar.catalogue import CATALOGUE
from titan.grammar.diagnostics import TitanError
from titan.grammar.sources import library_path

from tests.clock import slowness
from tests.compiler.spec.writing import codes, errors, only, pointed_at, problems, resolved, spec_text

DESIGN_EXAMPLE = """# 70B on 1,024 H100s; everything about parallelism left to the compiler except one wish.
import models.llama
import clusters.nvidia

model   = llama.llama3_70b
cluster = nvidia.dgx_h100 with { nodes = 128 }

train {
    sequence     = 8Ki
    global_batch = 4Mi tokens
    precision    = bf16
    optimizer    = adamw { learning_rate = 3e-4, weight_decay = 0.1 }
    data         = tokens("corpus.bin")
}

parallel {
    tensor    <= 8
    pipeline   = auto
    schedule   in [one_f_one_b, zero_bubble_v, dualpipe]
    recompute  = adaptive
}

minimize step_time subject to memory <= 92% of device
"""


def test_the_example_of_the_language_resolves() -> None:
    spec = resolved(DESIGN_EXAMPLE)
    assert spec.model.parameter_count() == 70_553_706_496
    assert spec.cluster.world_size == 1024
    assert (spec.train.sequence, spec.train.global_batch, spec.train.tokens_per_step) == (8192, 512, 4 * 2**20)
    assert spec.train.optimizer.learning_rate == 3e-4 and spec.train.data == 'tokens("corpus.bin")'
    assert spec.parallel.tensor.relation == "<=" and spec.parallel.tensor.values == (8,)
    assert spec.parallel.schedule.values == ("one_f_one_b", "zero_bubble_v", "dualpipe")
    assert spec.parallel.recompute == Wish("=", ("adaptive",), spec.parallel.recompute.span)
    assert spec.objective.memory_fraction == pytest.approx(0.92)
    assert spec.warnings == ()


def test_origins_name_user_library_and_default() -> None:
    spec = resolved(spec_text("tensor = 2", model="model = llama.llama3_8b with { hidden = 8Ki }"))
    assert spec.origin("parallel.tensor").kind == "user"
    assert spec.origin("parallel.data").kind == "default" and spec.span("parallel.data") is None
    assert spec.origin("model.hidden").kind == "user"
    assert spec.origin("model.attention.heads").kind == "library"
    assert spec.origin("model.layers.0.block.ffn").kind == "library"
    assert spec.origin("train.optimizer.beta2").kind == "default"
    span = spec.span("model.attention.heads")
    assert span is not None and Path(span.path).read_text().splitlines()[span.line - 1][span.column - 1 :].startswith(
        "32"
    )


def test_overrides_nest_and_leave_the_base_alone() -> None:
    text = spec_text(
        model="base = llama.llama3_8b with { attention.heads = 64, rope.theta = 1e4 }\n"
        "model = base with { tied = true }"
    )
    spec = resolved(text)
    assert spec.model.attention is not None and spec.model.rope is not None
    assert (spec.model.attention.heads, spec.model.attention.kv_heads, spec.model.rope.theta) == (64, 8, 1e4)
    assert spec.model.tied and spec.model.name == "base"
    again = resolved(spec_text(model="model = llama.llama3_8b"))
    assert again.model.attention is not None and again.model.attention.heads == 32


def test_layers_are_sums_of_repeated_blocks() -> None:
    layers = "2 * wide + 1 * dense { ffn = 64 } + wide * 3"
    layers = f"wide = dense {{ ffn = 96 * 2 }}\nmodel = tiny.llama with {{ layers = {layers} }}"
    model = resolved(spec_text(model=layers)).model
    assert [block.ffn for block in model.blocks] == [192, 192, 64, 192, 192, 192]
    lone = resolved(spec_text(model="model = tiny.llama with { layers = dense { ffn = 8 } }")).model
    assert lone.layer_count == 1


def test_repeated_sums_repeat_the_pattern() -> None:
    layers = "a = 1 * dense { ffn = 8 } + 1 * dense { ffn = 16 }\nmodel = tiny.llama with { layers = 3 * a }"
    assert [block.ffn for block in resolved(spec_text(model=layers)).model.blocks] == [8, 16] * 3


def test_arithmetic_keeps_units() -> None:
    spec = resolved(
        spec_text(train="precision = fp32, total_tokens = 2 * 500k tokens + 1k tokens", batch="(32 + 32) / 2")
    )
    assert spec.train.total_tokens == 1_001_000 and spec.train.global_batch == 32
    assert spec.train.total_steps == -(-1_001_000 // (32 * 128))


def test_an_imported_file_beside_the_spec_may_override_the_library(tmp_path: Path) -> None:
    (tmp_path / "mine.titan").write_text(
        "import models.tiny\nsmall = tiny.llama with { hidden = 32, attention.head_dim = 8 }\n"
    )
    spec = resolved("import mine\n" + spec_text(model="model = mine.small"), tmp_path)
    assert spec.model.hidden == 32 and spec.origin("model.hidden").kind == "user"
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.titan").write_text("llama = model { vocab = 7 }\n")
    assert "T231" in codes(problems("import mine\n" + spec_text(model="model = mine.small"), tmp_path))


MISTAKES = {
    # text to put in place of what stands before the arrow: (old, new, code, text under the caret, a nearest value)
    "misspelt key": ("sequence = 128", "sequnce = 128", "T211", "sequnce", "sequence"),
    "key of another tool": ("tensor = 2", "tp = 2", "T211", "tp", "tensor"),
    "key of another section": ("precision = fp32", "precision = fp32, tensor = 2", "T211", "tensor", "parallel.tensor"),
    "misspelt section": ("parallel {", "paralel {", "T211", "paralel", "parallel"),
    "missing key": ("global_batch = 64", "", "T212", "train", "global_batch = ..."),
    "given twice": ("tensor = 2", "tensor = 2, tensor = 4", "T213", "tensor", None),
    "a block for a number": ("sequence = 128", "sequence = { a = 1 }", "T214", "{ a = 1 }", None),
    "a number for a block": ("precision = fp32", "precision = fp32, optimizer = 3", "T214", "3", None),
    "wrong unit": ("sequence = 128", "sequence = 128 GiB", "T215", "128 GiB", None),
    "zero": ("sequence = 128", "sequence = 0", "T216", "0", None),
    "negative": ("hidden = 64", "hidden = -64", "T216", "-64", None),
    "share over one": ("hidden = 64", "hidden = 64, dropout = 150%", "T216", "150%", None),
    "no choice": ("precision = fp32", "precision = bf61", "T217", "bf61", "bf16"),
    "unknown name": ("nvidia.dgx_h100", "nvidia.dgx_h10", "T210", "nvidia.dgx_h10", "nvidia.dgx_h100"),
    "unknown module": ("nvidia.dgx_h100", "nvidea.dgx_h100", "T210", "nvidea.dgx_h100", "nvidia"),
    "not imported": ("nvidia.dgx_h100", "qwen.small", "T210", "qwen.small", "import models.qwen"),
    "nothing to import": ("import models.llama", "import models.lama", "T218", "models.lama", "models.llama"),
    "wish outside parallel": ("sequence = 128", "sequence <= 128", "T223", "sequence", None),
    "order of names": ("tensor = 2", "schedule <= gpipe", "T223", "schedule", None),
    "half a layer": ("8 * dense", "2.5 * dense", "T214", "2.5", None),
    "no layers": ("8 * dense { ffn = 192 }", "[]", "T214", "[]", None),
    "attention for layers": ("8 * dense {", "8 * gqa {", "T217", "gqa", "moe"),
    "layers for attention": ("attention = gqa", "attention = dense", "T217", "dense", "mla"),
    "no kind of attention": ("attention = gqa", "attention = linear", "T217", "linear", "mla"),
    "no layer": ("8 * dense", "0 * dense", "T216", "0", None),
    "mixed units": ("sequence = 128", "sequence = 128 + 3 s", "T222", "128 + 3 s", None),
    "division by zero": ("sequence = 128", "sequence = 128 / 0", "T222", "128 / 0", None),
    "odd number of tokens": ("global_batch = 64", "global_batch = 1000 tokens", "T229", "1000 tokens", "896 tokens"),
    "degree zero": ("tensor = 2", "tensor = 0", "T241", "0", "1"),
    "fp16": ("precision = fp32", "precision = fp16", "T224", "fp16", "bf16"),
    "zero 4": ("tensor = 2", "zero = 4", "T224", "4", "3"),
    "another tool's schedule": ("tensor = 2", "schedule = zb_h1", "T217", "zb_h1", "zero_bubble_h1"),
    "misspelt schedule": ("tensor = 2", "schedule = dualpip", "T217", "dualpip", "dualpipe"),
    "another tool's recompute": ("tensor = 2", "recompute = block", "T217", "block", "none"),
    "experts": ("tensor = 2", "expert = 0", "T241", "0", "1"),
    "regions": ("tensor = 2", "region >= 2", "T224", "2", "1"),
    "all of a list of later": ("tensor = 2", "zero in [4, 5]", "T224", "[4, 5]", "0"),
    "mixture of experts": (
        "8 * dense { ffn = 192 }",
        "8 * moe { experts = 4, top_k = 5, ffn = 64 }",
        "T257",
        "5",
        "top_k <= 4",
    ),
    "a key of another block": (
        "8 * dense { ffn = 192 }",
        "8 * moe { experts = 4, top_k = 2, ffn = 64, biass = 1 }",
        "T211",
        "biass",
        "bias",
    ),
    "another optimizer": (
        "precision = fp32",
        "precision = fp32, optimizer = lion { learning_rate = 1 }",
        "T217",
        "lion",
        "adamw",
    ),
    "rope without its block": ("rope = { theta = 10000 }", "positions = rope", "T233", "rope", None),
    "a rope that is ignored": ("hidden = 64,", "hidden = 64, positions = none,", "T233", "{ theta = 10000 }", None),
    "longer than positions": ("sequence = 128", "sequence = 128Ki", "T234", "128Ki", None),
    "two lengths": ("precision = fp32", "steps = 5, total_tokens = 1M tokens", "T235", "1M tokens", None),
    "warm-up over the end": ("precision = fp32", "steps = 5, warmup_steps = 6", "T235", "6", None),
    "kv heads": ("kv_heads = 16", "kv_heads = 6", "T232", "6", "8"),
    "unknown data": ("precision = fp32", "data = shakespear", "T217", "shakespear", "shakespeare"),
    "defined by itself": ("sequence = 128", "sequence = train.sequence", "T221", "train", None),
    "too many ranks": ("nodes = 1", "nodes = 9223372036854775807", "T216", "9223372036854775807", None),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_one_error_at_its_place(mistake: str) -> None:
    old, new, code, under, near = MISTAKES[mistake]
    good = spec_text("tensor = 2")
    assert errors(good) == () and good.count(old) >= 1
    text = good.replace(old, new, 1)
    found = only(errors(text))
    assert found.code == code and code in CATALOGUE, found.message
    assert pointed_at(found, text) == under
    assert near is None or near in found.nearest


def test_all_errors_of_a_file_come_at_once_and_in_order() -> None:
    text = spec_text("tensor = 0\n    zero = 4\n    tp = 2", sequence="0", train="precision = fp16\n    oops = 1")
    text = text.replace("hidden = 64", "hidden = none")
    found = errors(text)
    lines = [d.span.line for d in found if d.span]
    assert lines == sorted(lines) and len(lines) == len(found)
    assert codes(found) == ["T214", "T216", "T224", "T211", "T241", "T224", "T211"]


def test_missing_sections_are_named_with_what_looks_like_them() -> None:
    found = errors("import models.tiny\nmodle = tiny.llama\ntrain { sequence = 8, global_batch = 1 }\n")
    assert codes(found) == ["T212", "T212"]
    assert "`modle`" in found[0].message + found[1].message
    assert codes(errors("")) == ["T212"] * 3


def test_errors_are_never_warnings_and_warnings_never_stop() -> None:
    text = "spare = 3\n" + spec_text("tensor = 2", train="")
    spec = resolved(text)
    assert sorted(codes(spec.warnings)) == ["T227", "T228"]
    assert all(d.severity == "warning" for d in spec.warnings)


def test_import_circles_show_the_chain(tmp_path: Path) -> None:
    (tmp_path / "a.titan").write_text("import b\nx = 1\n")
    (tmp_path / "b.titan").write_text("import c\n")
    (tmp_path / "c.titan").write_text("import a\n")
    found = only(errors("import a\n" + spec_text(), tmp_path))
    assert found.code == "T219"
    assert [found.message.count(f"{name}.titan") for name in "abc"] == [2, 1, 1]


def test_a_file_that_imports_itself(tmp_path: Path) -> None:
    (tmp_path / "me.titan").write_text("import me\n" + spec_text())
    with pytest.raises(TitanError) as caught:
        load_spec(tmp_path / "me.titan")
    assert codes(caught.value.diagnostics) == ["T219"]


def test_imports_do_not_follow_links_out_of_the_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    (outside / "secret.titan").write_text("key = 1\n")
    os.symlink(outside / "secret.titan", inside / "link.titan")
    os.symlink(outside, inside / "folder")
    assert codes(errors("import link\n" + spec_text(), inside)) == ["T220"]
    assert codes(errors("import folder.secret\n" + spec_text(), inside)) == ["T220"]


@pytest.mark.parametrize("name", ["..outside.secret", "/etc/passwd", '"../outside"'])
def test_imports_have_no_paths(name: str, tmp_path: Path) -> None:
    found = errors(f"import {name}\n" + spec_text(), tmp_path)
    assert found and all(d.code.startswith("T1") for d in found)


def test_the_library_does_not_import_from_the_user(tmp_path: Path) -> None:
    """A user's file cannot put itself between two files of the library."""
    for file in library_path().rglob("*.titan"):
        for line in file.read_text().splitlines():
            if line.startswith("import "):
                assert (library_path() / (line.split()[1].replace(".", "/") + ".titan")).exists()


BOMBS = {
    "layers": "".join(f"l{i} = l{i + 1} + l{i + 1}\n" for i in range(40)) + "l40 = 1 * dense { ffn = 8 }\n",
    "numbers": "".join(f"l{i} = l{i + 1} * l{i + 1}\n" for i in range(40)) + "l40 = 1000\n",
    "lists": "".join(f"l{i} = [l{i + 1}, l{i + 1}, l{i + 1}]\n" for i in range(40)) + "l40 = 1\n",
    "blocks": "".join(f"l{i} = {{ a = l{i + 1}, b = l{i + 1} }}\n" for i in range(40)) + "l40 = 1\n",
    "chain": "".join(f"l{i} = l{i + 1}\n" for i in range(5000)) + "l5000 = 1\n",
    "sum": "l0 = " + " + ".join(["1"] * 20000) + "\n",
    "repetition": "a = 1 * dense { ffn = 8 } + 1 * dense { ffn = 8 }\nl0 = 4000000 * (4000000 * a)\n",
    "million layers": "l0 = 1000000 * dense { ffn = 8 }\n",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_specs_that_would_grow_without_end_are_refused(bomb: str) -> None:
    text = BOMBS[bomb] + spec_text(model="model = tiny.llama with { layers = l0 }")
    assert set(codes(errors(text))) & {"T109", "T214", "T216", "T221", "T222", "T236"}


def test_the_batch_follows_from_micro_batch_and_data_with_a_warning() -> None:
    spec = resolved(spec_text("micro_batch = 2, tensor = 1, pipeline = 1, context = 1", batch=""))
    assert spec.train.global_batch == 16 and codes(spec.warnings) == ["T230"]
    assert only(errors(spec_text("micro_batch = 2", batch=""))).code == "T212"


def test_memory_limits_as_share_and_as_amount() -> None:
    share = resolved(spec_text() + "minimize step_time subject to memory <= 80% of device\n")
    assert share.objective.memory_fraction == pytest.approx(0.8)
    amount = resolved(spec_text() + "minimize step_time subject to memory <= 40 GiB\n")
    assert amount.objective.memory_fraction == pytest.approx(40 * 2**30 / (81559 * 2**20))
    wrong = {
        "memory <= 120% of device": "T216",
        "memory >= 2 GiB": "T223",
        "memory <= 2 s": "T215",
        "memory <= 90% of node": "T217",
        "energy <= 3": "T217",
        "cost <= 3": "T215",
        "cost <= 3 USD": "T262",
        "step_time <= 3 USD": "T215",
        "step_time <= 0 s": "T216",
        "devices <= 2.5": "T216",
        "devices <= 50% of device": "T217",
    }
    for limit, code in wrong.items():
        assert only(errors(spec_text() + f"minimize step_time subject to {limit}\n")).code == code
    assert only(errors(spec_text() + "minimize energy\n")).code == "T217"
    assert only(errors(spec_text() + "minimize cost\n")).code == "T262"
    assert only(errors(spec_text() + "maximize step_time\n")).code == "T224"


def test_wishes_hold_what_they_say() -> None:
    parallel = resolved(
        spec_text("tensor in [1, 2, 4]\n pipeline >= 2\n data <= 4\n zero = 1\n stages = [2, 6]")
    ).parallel
    assert [d for d in range(1, 9) if parallel.tensor.allows(d)] == [1, 2, 4]
    assert [d for d in range(1, 9) if parallel.pipeline.allows(d)] == [2, 3, 4, 5, 6, 7, 8]
    assert [d for d in range(1, 9) if parallel.data.allows(d)] == [1, 2, 3, 4]
    assert parallel.context.allows(7) and not parallel.context.fixed
    assert parallel.zero.value == 1 and parallel.stages.value == (2, 6)
    assert str(parallel.tensor) == "in [1, 2, 4]" and str(parallel.stages) == "= [2, 6]"


def test_later_choices_are_dropped_from_wishes_with_a_warning() -> None:
    spec = resolved(spec_text("zero <= 4\n region <= 8\n schedule in [gpipe]\n recompute in [full]"))
    assert codes(spec.warnings) == ["T225"] * 2
    assert all(warning.message.partition(": ")[2] for warning in spec.warnings)  # a reason
    assert spec.parallel.schedule.value == "gpipe" and spec.parallel.recompute.value == "full"


def test_loading_is_quick_and_pulls_in_nothing_heavy() -> None:
    program = (
        "import sys, time; start = time.process_time()\n"
        "from titan.compiler.spec.resolve import load_spec\n"
        "load_spec('examples/quickstart.titan')\n"
        "print(time.process_time() - start)\n"
        "print([m for m in ('torch', 'numpy', 'rich', 'networkx', 'lark') if m in sys.modules])"
    )
    runs = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        seconds, heavy = done.stdout.split("\n")[:2]
        assert heavy == "[]"
        runs.append(float(seconds))
    assert min(runs) < 0.3 * slowness(), runs  # 0.12 s on an idle core


def test_an_import_that_does_not_parse_is_the_only_error(tmp_path: Path) -> None:
    (tmp_path / "mine.titan").write_text("small = = 3\n")
    found = only(errors("import mine\n" + spec_text(model="model = mine.small"), tmp_path))
    assert found.code.startswith("T1") and found.span is not None and found.span.path.endswith("mine.titan")


def test_an_import_that_is_missing_is_the_only_error() -> None:
    assert codes(errors("import mine\n" + spec_text(model="model = mine.small"))) == ["T218"]


SHAPE = "model { vocab = 64, hidden = 64, rope = { theta = 1e4 }, max_positions = 512, attention ="
WINDOWS = {
    "gqa { heads = 4, window = 8 }, layers = 3 * dense { ffn = 64 }": [8, 8, 8],
    "gqa { heads = 4, window = 8 }, layers = dense { ffn = 64 } + dense { ffn = 64, window = none }": [8, None],
    "gqa { heads = 4 }, layers = 2 * (dense { ffn = 64, window = 5 } + dense { ffn = 64 })": [5, None, 5, None],
}


@pytest.mark.parametrize("written", WINDOWS)
def test_windows_of_a_model_and_of_its_layers(written: str) -> None:
    found = resolved(spec_text(model=f"{SHAPE} {written} }}"))
    assert [block.window for block in found.model.blocks] == WINDOWS[written]


@pytest.mark.parametrize(
    ("written", "code", "at"),
    [
        ("mla { heads = 4, kv_rank = 16, head_dim = 16, rope_dim = 8, value_dim = 16 }, layers = 2 * dense { ffn = 64, "
         "window = 8 }", "T224", "8"),
        ("gqa { heads = 4, window = 0 }, layers = 2 * dense { ffn = 64 }", "T216", "0"),
    ],
)  # fmt: skip
def test_windows_that_cannot_be(written: str, code: str, at: str) -> None:
    text = spec_text(model=f"{SHAPE} {written} }}")
    found = only(errors(text))
    assert found.code == code and pointed_at(found, text) == at
