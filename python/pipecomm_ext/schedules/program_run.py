"""`ProgramRun`: runs the program of a plan as the ranks would, with one in-order communication stream each.

Each rank computes in order and has one first-in first-out queue of groups. A group is posted when the compute
before it has ended, and starts when the group before it is done. A message takes its latency from the moment
at which both its ends have started (a send does not buffer). A group is done with its last message. A compute
waits for the groups that bring its inputs, never for a send. Sent data live until their group is done.
"""

from __future__ import annotations

from collections import deque

from .actions import Group
from .costs import Costs, Number
from .flow import flow_of
from .lowering import MAX_GROUP_OPS
from .message_matching import GroupCode, match_messages
from .plan import Plan
from .plan_error import Blocked, deadlock_error


class PostedGroup:
    __slots__ = (
        "end",
        "has_started",
        "num_open",
        "position",
        "posted",
        "rank",
        "received",
        "results",
        "start",
    )

    def __init__(self, rank: int, position: int, code: GroupCode, posted: Number):
        self.rank = rank
        self.position = position
        self.results, self.received = code
        self.posted = self.start = self.end = posted  # the last two once it has started
        self.has_started = False
        self.num_open = len(self.results)


class ProgramRun:
    """starts, ends   per rank, the times of its compute slots
    groups          per rank, its groups in order, with `posted`, `start` and `end`
    sent_at         per result that is a message: its start and its end, None for others

    Raises PlanError if the messages do not match or the ranks wait for each other.
    """

    def __init__(self, plan: Plan, costs: Costs, max_group_ops: int = MAX_GROUP_OPS):
        self._plan, self._costs, self._flow = plan, costs, flow_of(plan)
        self._code = match_messages(plan, max_group_ops)
        self.starts: list[list] = [[] for _ in range(plan.P)]
        self.ends: list[list] = [[] for _ in range(plan.P)]
        self.groups: list[list[PostedGroup]] = [[] for _ in range(plan.P)]
        self.sent_at: list = [None] * self._flow.num_results
        self._position = [0] * plan.P
        self._waits_for = [-1] * plan.P  # the result that stops the rank
        self._clock: list[Number] = [0] * plan.P
        self._durations = [costs.durations(row) for row in plan.compute]
        self._queues: list[deque[PostedGroup]] = [deque() for _ in range(plan.P)]
        self._queue_clock: list[Number] = [0] * plan.P
        # Per result, the group of that end of its message which starts first.
        self._begun: list[PostedGroup | None] = [None] * self._flow.num_results
        self._there_at: list = [None] * self._flow.num_results
        self._ready: deque[int] = deque()  # ranks whose queue has moved on
        for rank in range(plan.P):
            self._advance(rank)
        while self._ready:
            rank = self._ready.popleft()
            self._start_groups(rank)
            if self._there_at[self._waits_for[rank]] is not None:
                self._advance(rank)
        blocked = self._blocked()
        if blocked:
            where = "program (each send waits for its receive)"
            raise deadlock_error(plan.name, plan.program, blocked, where)

    def _advance(self, rank: int) -> None:
        """Runs computes and posts groups until an input is missing."""
        flow, code, there_at = self._flow, self._code[rank], self._there_at
        inputs, outputs, durations = flow.inputs[rank], flow.outputs[rank], self._durations[rank]
        receiver_of_stage, num_micros = flow.receiver_of_stage, flow.num_micros
        starts, ends, queue = self.starts[rank], self.ends[rank], self._queues[rank]
        clock = self._clock[rank]
        for position in range(self._position[rank], len(code)):
            group = code[position]
            if group is None:
                slot_idx = len(starts)
                start = clock
                for result in inputs[slot_idx]:
                    arrival = there_at[result]
                    if arrival is None:
                        self._position[rank], self._clock[rank] = position, clock
                        self._waits_for[rank] = result
                        return
                    if arrival > start:
                        start = arrival
                clock = start + durations[slot_idx]
                starts.append(start)
                ends.append(clock)
                for result in outputs[slot_idx]:
                    if receiver_of_stage[result // num_micros] < 0:
                        there_at[result] = clock
            else:
                posted = PostedGroup(rank, position, group, clock)
                self.groups[rank].append(posted)
                queue.append(posted)
                if len(queue) == 1:
                    self._start_groups(rank)
        self._position[rank], self._clock[rank] = len(code), clock

    def _start_groups(self, rank: int) -> None:
        """Starts the groups of the rank's queue one after the other, while each is done at once."""
        queue, begun = self._queues[rank], self._begun
        num_micros, num_stages = self._flow.num_micros, self._flow.num_stages
        while queue and not queue[0].has_started:
            head = queue[0]
            head.has_started = True
            head.start = head.end = max(head.posted, self._queue_clock[rank])
            for result in head.results:
                other = begun[result]
                if other is None:
                    begun[result] = head
                    continue
                start = head.start if head.start > other.start else other.start
                end = start + self._costs.latency(result // num_micros % num_stages)
                self.sent_at[result] = (start, end)
                for posted in (head, other):
                    posted.num_open -= 1
                    if end > posted.end:
                        posted.end = end
                if other.num_open == 0:
                    self._finish(other)
            if head.num_open == 0:
                self._finish(head)

    def _finish(self, posted: PostedGroup) -> None:
        """Records that the head of its queue is done: its receives have arrived, the next group may start."""
        rank = posted.rank
        self._queues[rank].popleft()
        self._queue_clock[rank] = posted.end
        for result in posted.received:
            self._there_at[result] = posted.end
        self._ready.append(rank)

    def _blocked(self) -> dict[int, Blocked]:
        blocked = {}
        for rank, row in enumerate(self._plan.program):
            queue, position = self._queues[rank], self._position[rank]
            if position == len(row) and not queue:
                continue
            reasons, source = [], rank
            if position < len(row):
                missing = next(
                    result
                    for result in self._flow.inputs[rank][len(self.starts[rank])]
                    if self._there_at[result] is None
                )
                reasons.append(self._flow.describe(missing))
                source = self._plan.owner[self._flow.named(missing)[1]]
            if queue:
                head = queue[0]
                group = row[head.position]
                assert type(group) is Group
                op = next(
                    op
                    for op, result in zip(group.ops, head.results, strict=True)
                    if self.sent_at[result] is None
                )
                reasons.append(f"{op} at position {head.position}, which the peer has not reached")
                source = op.peer
                if position == len(row):
                    position = head.position
            blocked[rank] = Blocked(rank, position, row[position], ", behind ".join(reasons), source)
        return blocked
