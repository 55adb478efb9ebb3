"""The one synchronous execution against a search of all interleavings, on random small programs, sound and damaged."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from titan.compiler.plan.instruction import Instruction
from titan.compiler.plan.mesh import Group, Mesh
from titan.compiler.plan.program import Block, BlockCall, Plan, Role
from titan.compiler.verify.progress import progress

from tests.compiler.plan.small_plans import two_stages

Program = list[Instruction]


def random_programs(chance: random.Random, stages: int, exchanges: int) -> list[Program]:
    """Matched sends, receives and collectives; each is waited for somewhere later; then, mostly, something is moved."""
    programs: list[Program] = [[] for _ in range(stages)]
    due: list[list[Instruction]] = [[] for _ in range(stages)]
    for number in range(exchanges):
        if chance.random() < 0.3:
            for stage in range(stages):
                issue = Instruction(
                    "all_reduce", (f"a{number}?",), ("b.x",), (), "", "all", chance.choice(("one", "one", "two")), ()
                )
                programs[stage].append(issue)
                due[stage].append(Instruction("wait", (f"a{number}",), (f"a{number}?",)))
        else:
            sender = chance.randrange(stages)
            receiver = chance.choice([s for s in range(stages) if s != sender])
            stream, offset = chance.choice(("act", "grad")), receiver - sender
            sent = Instruction("send", (f"t.v{number}?",), ("b.x",), (), "", "pipeline", stream, (("peer", offset),))
            got = Instruction("recv", (f"v{number}?",), (), (), "", "pipeline", stream, (("peer", -offset),))
            programs[sender].append(sent)
            programs[receiver].append(got)
            due[sender].append(Instruction("wait", (), (f"t.v{number}?",)))
            due[receiver].append(Instruction("wait", (f"v{number}",), (f"v{number}?",)))
        for stage in range(stages):
            while due[stage] and chance.random() < 0.6:
                programs[stage].append(due[stage].pop(chance.randrange(len(due[stage]))))
    for stage in range(stages):
        programs[stage] += due[stage]
    for _ in range(chance.choice((0, 1, 3, 5))):
        damage(chance, chance.choice(programs))
    return programs


def damage(chance: random.Random, program: Program) -> None:
    """Moves an issue later, a wait anywhere behind its issue, or drops an issue with its wait."""
    if not program:
        return
    at = chance.randrange(len(program))
    moved = program.pop(at)
    if moved.opcode == "wait":
        issued = next(n for n, i in enumerate(program) if i.writes == moved.reads)
        program.insert(chance.randint(issued + 1, len(program)), moved)
        return
    waited = next(n for n, i in enumerate(program) if i.opcode == "wait" and i.reads == moved.writes)
    if chance.random() < 0.1:
        program.pop(waited)
    else:
        program.insert(chance.randint(0, waited), moved)


def plan_of(programs: list[Program]) -> Plan:
    roles = tuple(
        Role(stage, ((),), (), (Block("all", (), tuple(program)),), (("train", (BlockCall("all"),)), ("evaluate", ())))
        for stage, program in enumerate(programs)
    )
    mesh = Mesh((("pipeline", len(programs)), ("data", 1)))
    return replace(two_stages(), mesh=mesh, groups=(Group("all", "pipeline*data"),), roles=roles)


class Search:
    """All interleavings: a state is how far every program is. An exchange has happened when all its members have issued
    it and everything before it on each member's stream or channel has happened."""

    def __init__(self, programs: list[Program]) -> None:
        self.programs = programs
        self.queues: list[dict[tuple[str, int], list[tuple[str, int]]]] = []
        self.members: dict[tuple[str, int], set[int]] = defaultdict(set)
        self.exchange: list[dict[str, tuple[str, int]]] = []
        for stage, program in enumerate(programs):
            counts: dict[str, int] = defaultdict(int)
            named: dict[str, tuple[str, int]] = {}
            for i in program:
                if i.opcode == "wait":
                    continue
                name = self.channel(stage, i)
                named[i.writes[0]] = (name, counts[name])
                counts[name] += 1
                both = {int(e) for e in name.split()[0].split(">")} if ">" in name else set(range(len(programs)))
                self.members[named[i.writes[0]]] |= both
            self.exchange.append(named)

    @staticmethod
    def channel(stage: int, i: Instruction) -> str:
        if i.opcode == "all_reduce":
            return "all"
        peer = stage + int(i.attribute("peer"))
        ends = (stage, peer) if i.opcode == "send" else (peer, stage)
        return f"{ends[0]}>{ends[1]} {i.stream}"

    def happened(self, state: tuple[int, ...]) -> set[tuple[str, int]]:
        lines: list[list[list[tuple[str, int]]]] = []
        for stage, count in enumerate(state):
            line: dict[str, list[tuple[str, int]]] = defaultdict(list)
            for i in self.programs[stage][:count]:
                if i.opcode != "wait":
                    key = i.stream if i.opcode == "all_reduce" else self.channel(stage, i)
                    line[key].append(self.exchange[stage][i.writes[0]])
            lines.append(list(line.values()))
        done: set[tuple[str, int]] = set()
        while True:
            heads: dict[tuple[str, int], set[int]] = defaultdict(set)
            for stage, queues in enumerate(lines):
                for queue in queues:
                    head = next((e for e in queue if e not in done), None)
                    if head is not None:
                        heads[head].add(stage)
            new = {e for e, stages in heads.items() if stages == self.members[e]}
            if not new:
                return done
            done |= new

    def deadlocks(self) -> bool:
        """Whether any interleaving gets stuck before all programs have ended."""
        start = (0,) * len(self.programs)
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            done = self.happened(state)
            following = []
            for stage, count in enumerate(state):
                if count == len(self.programs[stage]):
                    continue
                i = self.programs[stage][count]
                if i.opcode != "wait" or self.exchange[stage][i.reads[0]] in done:
                    following.append((*state[:stage], count + 1, *state[stage + 1 :]))
            if not following and any(c < len(p) for c, p in zip(state, self.programs, strict=True)):
                return True
            for new in following:
                if new not in seen:
                    seen.add(new)
                    todo.append(new)
        return False


@pytest.mark.parametrize("stages", [2, 3])
def test_one_execution_decides_for_all_interleavings(stages: int) -> None:
    chance = random.Random(stages)
    stuck = 0
    for _ in range(500):
        programs = random_programs(chance, stages, chance.randint(2, 7 if stages == 2 else 4))
        expected = Search(programs).deadlocks()
        found = progress(plan_of(programs))
        assert bool(found) == expected, programs
        stuck += expected
    assert 30 < stuck < 470  # both verdicts are common
