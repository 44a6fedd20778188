"""`ComputeRun`: runs the compute rows of a plan in dependency order, with unlimited communication."""

from __future__ import annotations

from collections import deque

from .compute_plan import ComputePlan
from .costs import Costs, Number
from .flow import flow_of
from .plan_error import Blocked, deadlock_error


class ComputeRun:
    """starts, ends    per rank, the times of its slots
    order           (rank, position) of all slots, in an order that respects all dependencies
    needed_at       per result, the start of the slot that uses it (None: no slot does)

    A message arrives `costs.latency` after its producer has ended. Raises PlanError for a data deadlock.
    """

    def __init__(self, plan: ComputePlan, costs: Costs):
        flow = flow_of(plan)
        self.starts: list[list] = [[] for _ in range(plan.P)]
        self.ends: list[list] = [[] for _ in range(plan.P)]
        self.order: list[tuple[int, int]] = []
        self.needed_at: list = [None] * flow.num_results
        there_at: list = [None] * flow.num_results
        waiting: dict[int, int] = {}  # missing result -> the rank that waits for it
        clock: list[Number] = [0] * plan.P
        durations = [costs.durations(row) for row in plan.compute]
        num_micros, num_stages, receiver_of_stage = flow.num_micros, flow.num_stages, flow.receiver_of_stage
        ready = deque(range(plan.P))
        while ready:
            rank = ready.popleft()
            row, inputs, outputs = plan.compute[rank], flow.inputs[rank], flow.outputs[rank]
            starts, ends = self.starts[rank], self.ends[rank]
            for position in range(len(starts), len(row)):
                start = clock[rank]
                for result in inputs[position]:
                    arrival = there_at[result]
                    if arrival is None:
                        waiting[result] = rank
                        break
                    if arrival > start:
                        start = arrival
                else:
                    end = clock[rank] = start + durations[rank][position]
                    starts.append(start)
                    ends.append(end)
                    self.order.append((rank, position))
                    for result in inputs[position]:
                        self.needed_at[result] = start
                    for result in outputs[position]:
                        what_stage = result // num_micros
                        is_message = receiver_of_stage[what_stage] >= 0
                        there_at[result] = end + costs.latency(what_stage % num_stages) if is_message else end
                        if result in waiting:
                            ready.append(waiting.pop(result))
                    continue
                break
        if len(self.order) < sum(map(len, plan.compute)):
            raise deadlock_error(plan.name, plan.compute, self._blocked(plan, there_at), "compute rows")

    def _blocked(self, plan: ComputePlan, there_at) -> dict[int, Blocked]:
        blocked, flow = {}, flow_of(plan)
        for rank, row in enumerate(plan.compute):
            position = len(self.starts[rank])
            if position < len(row):
                missing = next(result for result in flow.inputs[rank][position] if there_at[result] is None)
                source = plan.owner[flow.named(missing)[1]]
                blocked[rank] = Blocked(rank, position, row[position], flow.describe(missing), source)
        return blocked
