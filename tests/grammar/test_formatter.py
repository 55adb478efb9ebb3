"""The formatter: same tree, every comment, twice is once, and the layout of the examples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from titan.grammar.formatter import format_source
from titan.grammar.parser import parse
from titan.grammar.sources import library_path, read_source

from tests.grammar.generated import bare, sources
from tests.grammar.test_parser import SPEC

ROOT = Path(__file__).parents[2]
SHIPPED = sorted([*library_path().rglob("*.titan"), *(ROOT / "examples").glob("*.titan")])


def comments(source: str) -> list[str]:
    without_strings = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', source)
    return [found.rstrip() for found in re.findall(r"#[^\r\n]*", without_strings)]


def check_same(source: str) -> str:
    formatted = format_source(source, "x")
    assert bare(parse(formatted, "x").statements) == bare(parse(source, "x").statements)
    assert comments(formatted) == comments(source)
    assert format_source(formatted, "x") == formatted
    assert "\n\n\n" not in formatted and not re.search(r"[ \t]\n|\r|\{\n\n|\n\n *\}", formatted)
    return formatted


@settings(max_examples=120, deadline=None)
@given(sources())
def test_drawn_sources(drawn: tuple[str, Any]) -> None:
    check_same(drawn[0])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_files(path: Path) -> None:
    check_same(read_source(path))


def test_the_example_of_the_language_is_well_laid_out() -> None:
    assert check_same(SPEC) == SPEC


def test_layout() -> None:
    untidy = """

#head
import   models.llama
model=llama.llama3_70b   # the model


cluster=  nvidia.dgx_h100 with{nodes=128,}#the cluster
train{

  # how much
   sequence=8Ki  # long
   global_batch   =   4Mi   tokens # wide

   layers = 3*dense{ffn=18432}
      +58 * moe {
   top_k = 8,
        }
   sizes in [ 1,2 ,
     3,   # three
   ]

}
minimize step_time
  subject  to memory<=92 % of device
"""
    assert (
        check_same(untidy)
        == """\
#head
import models.llama
model = llama.llama3_70b  # the model

cluster = nvidia.dgx_h100 with { nodes = 128 }  #the cluster
train {
    # how much
    sequence     = 8Ki         # long
    global_batch = 4Mi tokens  # wide

    layers = 3 * dense { ffn = 18432 }
        + 58 * moe {
            top_k = 8
        }
    sizes  in [1, 2,
        3,  # three
    ]
}
minimize step_time
    subject to memory <= 92 % of device
"""
    )


def test_long_files_take_linear_time() -> None:
    check_same("a {\n" + "x = 1  # c\n" * 3000 + "}\n")
