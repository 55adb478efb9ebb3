"""Codes T6xx: launching and training."""

from __future__ import annotations

from titan.grammar.diagnostics import Code

ROWS: tuple[Code, ...] = (
    Code(
        "T600",
        "internal error",
        "Whatever the input, the program ends with a result or with a diagnostic.",
        "An error in Titan itself.",
        "error T600: internal error: KeyError: 'x' (report: /tmp/titan-report-....txt)",
        "Send the report file, which holds the command and where the error arose; TITAN_DEBUG=1 shows it at once.",
    ),
    Code(
        "T601",
        "command line not understood",
        "A command takes the arguments and options that `titan COMMAND --help` lists.",
        "A misspelt command or option, or a value of the wrong kind.",
        "titan chek my.titan",
        "See `titan --help` and `titan COMMAND --help`; each shows an example.",
    ),
    Code(
        "T602",
        "plan file cannot be read",
        "The plan file must exist and be readable.",
        "A misspelt path, or a file of another user.",
        "titan verify missing.plan",
        "Check the path, or make the plan with `titan plan SPEC -o FILE`.",
    ),
    Code(
        "T603",
        "output cannot be written",
        "What a command writes goes to a place that exists and that this user may write.",
        "A missing folder, a folder in the file's place, no permission, a full disk.",
        "titan plan my.titan -o missing/my.plan",
        "Make the folder or choose another place.",
    ),
    Code(
        "T604",
        "PyTorch is missing",
        "Training, data preparation and `verify --execute` need PyTorch; check, plan and verify do not.",
        "Only the compiler was installed.",
        "titan run my.titan",
        "pip install 'titan-compiler[run]'",
    ),
    Code(
        "T605",
        "the spec is needed",
        "Some questions can only be answered by compiling again, for which a plan file is not enough.",
        "A plan file was given.",
        "titan verify my.plan --execute",
        "Give the spec.",
    ),
    Code(
        "T606",
        "rank or order not in the plan",
        "Ranks count from 0 to world size - 1; orders are `train` and `evaluate`.",
        "The plan is for fewer ranks.",
        "titan inspect my.plan --rank 4 (of a plan for 4 ranks)",
        "Give a rank of the plan; `titan inspect PLAN` shows how many there are.",
    ),
    Code(
        "T610",
        "program breaks the rules of registers",
        "A register is written once, read while it lives and freed once; buffers are declared; operands are complete.",
        "The plan file was edited, or the compiler made a wrong plan.",
        "rank 3, instruction 17 `free <- x.l0:0`: x.l0:0 is read after it was freed",
        "Compile the plan again; `titan verify PLAN` names every such place without running anything.",
    ),
    Code(
        "T611",
        "ranks disagree on a communication",
        "All members of a group issue the same operations in the same order with equal shape, dtype and reduction; "
        "every send meets a receive of the same shape and dtype.",
        "The plan file was edited, or ranks run different plans.",
        "operation 4 of stream tensor.gather among ranks [0, 1] is `all_gather [2, 8] float32 dim=1` on rank 0 but "
        "`all_reduce [2, 8] float32 op=sum` on rank 1",
        "Run `titan verify PLAN`; ranks compare the plan's hash before the first step.",
    ),
    Code(
        "T612",
        "deadlock",
        "With sends and collectives that wait for their peers, the programs of all ranks must run to their end.",
        "Two ranks wait for each other, directly or through others; the cycle is printed.",
        "rank 0: `wait t.x:0?` waits for rank 1; rank 1: `wait t.d.x:0?` waits for rank 0",
        "Compile the plan again; `titan verify PLAN` decides progress for every rank without running anything.",
    ),
    Code(
        "T613",
        "copies of a tensor differ",
        "Ranks that hold the same piece of a parameter, gradient or state hold the same bits.",
        "A gradient sum is missing or doubled on some ranks, or a parameter was changed from outside.",
        "layers.0.attn.q.weight: the copies on ranks 0 and 2 differ by up to 1.2e-05",
        "Run `titan verify PLAN --execute` to find the first gradient that is wrong.",
    ),
    Code(
        "T614",
        "run aborted",
        "When one rank ends, all others stop at their next wait.",
        "Another rank failed or was killed; its own message says why.",
        "rank 2 stopped at instruction 41 `wait x.l3:0 <- x.l3:0?`: the run was aborted",
        "Read the first failing rank's message; start again with `--resume DIR`.",
    ),
)
