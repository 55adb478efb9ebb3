"""What several roles take part in: transfers between two, and collectives across programs.

The k-th issues of a channel's members are one meeting. It begins when the last of them has issued it and the meeting
before it has ended, and takes as long as the slowest of them says.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from titan.compiler.cost.machine import Machine
from titan.compiler.cost.shared_cores import Loads
from titan.compiler.cost.strands import COMPUTE, MOVE, WAIT, Event
from titan.compiler.plan.program import Plan

if TYPE_CHECKING:
    from titan.compiler.cost.walker import Walker

UNKNOWN = -1  # the end of a meeting that not all members have issued


class Meeting:
    """Times in ns: `start` is the latest issue so far, `end` UNKNOWN until nobody is `missing`."""

    __slots__ = ("channel", "cost", "end", "missing", "start")

    def __init__(self, channel: Channel, missing: int, start: int, cost: int) -> None:
        self.channel, self.missing, self.start, self.cost = channel, missing, start, cost
        self.end = UNKNOWN


class Channel:
    """A channel of two, or a group across programs. `roles`: the pipeline coordinate of each member; `free`: when its
    last meeting has ended."""

    __slots__ = ("coming", "free", "network", "others", "roles", "waiting")

    def __init__(self, network: Network, roles: tuple[int, ...]) -> None:
        self.network, self.roles, self.free = network, roles, 0
        self.coming = tuple(deque[Meeting]() for _ in roles)  # issued by others, not yet by this member
        self.others = tuple(self.coming[:n] + self.coming[n + 1 :] for n in range(len(roles)))
        self.waiting: list[Walker] = []

    def issue(self, member: int, time: int, cost: int) -> Meeting:
        """The member comes to its next meeting at `time`."""
        coming = self.coming[member]
        if not coming:
            meeting = Meeting(self, len(self.roles) - 1, time, cost)
            for other in self.others[member]:
                other.append(meeting)
            if self.network.loads is not None:
                self.network.held.setdefault(self, []).append(meeting)
            return meeting
        meeting = coming.popleft()
        if time > meeting.start:
            meeting.start = time
        if cost > meeting.cost:
            meeting.cost = cost
        meeting.missing -= 1
        if not meeting.missing:
            start = meeting.start if meeting.start > self.free else self.free
            self.free = meeting.end = start + meeting.cost
            for walker in self.waiting:
                self.network.woken[walker] = None
            self.waiting.clear()
        return meeting


class Network:
    """All channels by key, the roles that one of them has woken, and what loads cores where ranks share them."""

    def __init__(self, plan: Plan, machine: Machine) -> None:
        self.plan = plan
        self.slowdown = 1.0 if machine.cores else machine.figures["overlap_slowdown"]
        self.loads = Loads(machine.cores) if machine.cores else None
        self.share, self.polling = 0.0, 0
        if self.loads is not None:
            nodes = max(min(machine.nodes, plan.mesh.world_size // machine.devices_per_node), 1)
            self.share = plan.mesh.world_size / len(plan.roles) / nodes  # ranks of a role on a node
            figures = machine.figures
            self.polling = round(1e9 * figures["polling_seconds"])
            self.weights = {COMPUTE: 1.0, MOVE: figures["communication_load"], WAIT: figures["polling_load"]}
        self.channels: dict[tuple[object, ...], Channel] = {}
        self.woken: dict[Walker, None] = {}
        self.held: dict[Channel, list[Meeting]] = {}  # where cores are shared
        self.crossing: dict[str, tuple[int, ...]] = {}

    def member(self, role: int, event: Event) -> tuple[Channel, int]:
        """The channel in which a role takes part by an event, and its number there."""
        if event.kind == "meet":
            members = self.members(event.group)
            return self._channel((event.group, event.stream), members), members.index(role)
        sends = event.kind == "send"
        if event.group == "pipeline":
            ends = (role, role + event.peer) if sends else (role + event.peer, role)
            return self._channel((event.group, event.stream, *ends), ends), int(not sends)
        offset = event.peer if sends else -event.peer  # both are ranks of this role
        return self._channel((event.group, event.stream, role, offset), (role, role)), int(not sends)

    def _channel(self, key: tuple[object, ...], roles: tuple[int, ...]) -> Channel:
        found = self.channels.get(key)
        if found is None:
            found = self.channels[key] = Channel(self, roles)
        return found

    def members(self, group: str) -> tuple[int, ...]:
        """Pipeline coordinates that a group's members have, when it holds ranks of several programs; else nothing."""
        if group not in self.crossing:
            declared = self.plan.group_table.get(group)
            axes = self.plan.mesh.resolve(declared.axes if declared else group)
            chosen = (declared.pipeline if declared else ()) or tuple(r.pipeline for r in self.plan.roles)
            self.crossing[group] = chosen if "pipeline" in axes and len(chosen) > 1 else ()
        return self.crossing[group]

    def crosses(self, group: str) -> bool:
        return bool(self.members(group))

    def load(self, start: int, work: tuple[tuple[int, int, str], ...]) -> None:
        """What the ranks of one role do from `start` on."""
        assert self.loads is not None
        for begin, stop, kind in work:
            until = min(stop, begin + self.polling) if kind == WAIT else stop
            self.loads.add(start + begin, start + until, self.share * self.weights[kind])

    def load_meetings(self) -> None:
        """Transfers and collectives across roles: every member takes part."""
        for channel, meetings in self.held.items():
            for meeting in meetings:
                for _ in channel.roles if meeting.end != UNKNOWN else ():
                    self.load(meeting.end, ((-meeting.cost, 0, MOVE),))

    def take_woken(self) -> list[Walker]:
        found, self.woken = list(self.woken), {}
        return found
