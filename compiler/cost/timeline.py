"""The simulated time of a step, role by role."""

from __future__ import annotations

from titan.compiler.cost.shared_cores import Clock
from titan.compiler.plan.frozen import dataclass


@dataclass(frozen=True, slots=True)
class RoleTime:
    """Nanoseconds of one role. `bubble` is the flush bubble (all roles start and end the step together); `span_bubble`
    counts only between the role's first and last segment."""

    pipeline: int
    busy: int
    exposed: int
    bubble: int
    span_bubble: int
    end: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated step."""

    step: int
    roles: tuple[RoleTime, ...]

    @property
    def seconds(self) -> float:
        return self.step / 1e9

    @property
    def bubble_fraction(self) -> float:
        """Flush bubble over all roles as a share of the step."""
        return self._share(sum(r.bubble for r in self.roles))

    @property
    def span_bubble_fraction(self) -> float:
        return self._share(sum(r.span_bubble for r in self.roles))

    @property
    def exposed_comm_fraction(self) -> float:
        return self._share(sum(r.exposed for r in self.roles))

    @property
    def busy_fraction(self) -> float:
        return self._share(sum(r.busy for r in self.roles))

    def _share(self, total: int) -> float:
        return total / (self.step * len(self.roles)) if self.step else 0.0


def stretched(timeline: Timeline, clock: Clock) -> Timeline:
    """In real time; within a role all kinds of time are stretched alike."""
    step = clock(timeline.step)

    def role(r: RoleTime) -> RoleTime:
        busy, exposed, bubble, span = (
            round(t * step / max(timeline.step, 1)) for t in (r.busy, r.exposed, r.bubble, r.span_bubble)
        )
        return RoleTime(r.pipeline, busy, exposed, bubble, span, clock(r.end))

    return Timeline(step, tuple(map(role, timeline.roles)))


def added(few: Timeline, more: Timeline, outside: int) -> Timeline:
    """What the further step adds to every figure."""
    step = more.step - few.step + outside
    roles = []
    for a, b in zip(few.roles, more.roles, strict=True):
        busy, exposed = b.busy - a.busy, b.exposed - a.exposed
        span = b.span_bubble - a.span_bubble
        roles.append(RoleTime(b.pipeline, busy, exposed, step - busy - exposed, span, b.end - a.end))
    return Timeline(step, tuple(roles))
