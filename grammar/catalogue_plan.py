"""Codes T4xx: plan files."""

from __future__ import annotations

from titan.grammar.diagnostics import Code

ROWS: tuple[Code, ...] = (
    Code(
        "T401",
        "not a plan",
        "A plan file is gzip of a text whose first line is `titan plan VERSION sha256 DIGEST`.",
        "Another file was given: a spec, a checkpoint, an unpacked plan text.",
        "titan verify corpus.txt",
        "Give the file that `titan plan SPEC -o FILE` wrote.",
    ),
    Code(
        "T402",
        "plan of another version",
        "This program reads plans of one version of the text.",
        "The plan was written by a newer or older program.",
        "titan plan 7 sha256 ...",
        "Make the plan again from its spec: `titan plan SPEC -o FILE`.",
    ),
    Code(
        "T403",
        "malformed plan text",
        "Every line of a plan is of a known kind, names what is declared, and holds numbers below 2^62.",
        "The text was written or edited by hand, or by a program with an error.",
        "   3  all_gathr  y:i? <- x:i @tensor",
        "Make the plan again from its spec; the line stands in the message.",
    ),
    Code(
        "T404",
        "damaged plan file",
        "A plan file must be whole.",
        "The copy was interrupted, or the disk was full.",
        "a file that ends in the middle",
        "Copy the file again, or make the plan again from its spec.",
    ),
    Code(
        "T405",
        "plan changed after it was written",
        "The hash in the first line is that of the text; ranks compare it before the first step.",
        "The text was unpacked, edited and packed again.",
        "titan plan 1 sha256 0000...",
        "Change the spec and make the plan again; a plan is not edited.",
    ),
    Code(
        "T406",
        "plan file too large",
        "No plan's text is larger than 256 MiB.",
        "A small compressed file that expands without end: not a plan, or an attack.",
        "a file of 1 MB that expands to 1 GB",
        "Give the file that `titan plan` wrote.",
    ),
    Code(
        "T410",
        "pipeline table that cannot be read",
        "A row per rank; each cell an action such as 0F3, 1B2, 0I1, 0W1; every micro-batch once through every stage.",
        "A row lost or a cell edited; a stage on two ranks; ranks that wait for each other.",
        "0F0,0F0,0B0                 # the same forward twice",
        "Export the table again, or correct the cell shown.",
    ),
    Code(
        "T411",
        "order that a pipeline table cannot hold",
        "In the table of actions each stage is on one rank.",
        "A bidirectional schedule, which holds every stage on two ranks.",
        "schedule = dualpipe",
        "Export a schedule of one copy, such as dualpipe_v.",
    ),
)
