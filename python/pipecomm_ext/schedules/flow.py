"""`flow_of`: the results that each compute slot of a plan needs and makes, as numbers; complete plans only.

A result is one number: the output of (stage, micro) is stage * K + micro, its input gradient S * K more,
where K is the number of micro-batches of a chain and S that of stages. Every result has one producer and at
most one consumer slot. The data that a stage keeps for itself (F for its B or I, I for its W) are
not results: completeness orders them in their row.
"""

from __future__ import annotations

from .actions import ACT, GRAD, Action, actions_in
from .compute_plan import ComputePlan
from .plan_error import PlanError, error_in_row, slot_error


def flow_of(plan: ComputePlan) -> Flow:
    """The data flow of the compute rows, built once per plan. Raises PlanError if they are not complete."""
    if "flow" not in plan.derived:
        plan.derived["flow"] = Flow(plan)
    return plan.derived["flow"]


class Flow:
    """inputs, outputs    per rank and position, the results that the slot needs and makes
    receiver_of_stage  rank that gets the results of what * S + stage (what 0: output, 1: gradient) as a
                       message, or -1; the index is `result // num_micros`
    """

    def __init__(self, plan: ComputePlan):
        self.num_stages, self.num_micros = plan.num_stages, plan.micros_per_chain
        self.num_results = 2 * self.num_stages * self.num_micros
        receivers = (
            plan.receiver_of(what, stage) for what in (ACT, GRAD) for stage in range(plan.num_stages)
        )
        self.receiver_of_stage = [-1 if receiver is None else receiver for receiver in receivers]
        self.inputs: list[list[tuple[int, ...]]] = []
        self.outputs: list[list[tuple[int, ...]]] = []
        position_of = {kind: [-1] * (self.num_stages * self.num_micros) for kind in "FBIW"}
        for rank in range(plan.P):
            self._read_row(plan, rank, position_of)
        for stage in range(plan.num_stages):
            _check_stage(plan, stage, position_of)

    def named(self, result: int) -> tuple[str, int, int]:
        """(ACT | GRAD, producing stage, micro-batch) of a result."""
        stage, micro = divmod(result, self.num_micros)
        return (ACT, stage, micro) if stage < self.num_stages else (GRAD, stage - self.num_stages, micro)

    def describe(self, result: int) -> str:
        what, stage, micro = self.named(result)
        return (
            f"the output of F{stage}.{micro}" if what == ACT else f"the gradient of B{stage}.{micro} (or I)"
        )

    def _read_row(self, plan: ComputePlan, rank: int, position_of: dict[str, list[int]]) -> None:
        num_stages, num_micros, owner = self.num_stages, self.num_micros, plan.owner
        num_cells = num_stages * num_micros
        prev_of, next_of = plan.prev_of, plan.next_of
        inputs, outputs = [], []
        for position, item in enumerate(plan.compute[rank]):
            needs: tuple[int, ...] = ()
            makes: tuple[int, ...] = ()
            for kind, stage, micro in actions_in(item):
                cell = stage * num_micros + micro
                is_of_rank = stage < num_stages and micro < num_micros and owner[stage] == rank
                if not is_of_rank or position_of[kind][cell] >= 0:
                    raise _misplaced(plan, rank, position, Action(kind, stage, micro), position_of)
                position_of[kind][cell] = position
                if kind == "F":
                    if (source := prev_of[stage]) is not None:
                        needs += (source * num_micros + micro,)
                    makes += (cell,)
                elif kind != "W":
                    if (source := next_of[stage]) is not None:
                        needs += (num_cells + source * num_micros + micro,)
                    makes += (num_cells + cell,)
            inputs.append(needs)
            outputs.append(makes)
        self.inputs.append(inputs)
        self.outputs.append(outputs)


def _misplaced(plan: ComputePlan, rank: int, position: int, action: Action, position_of) -> PlanError:
    _, stage, micro = action
    if stage >= plan.num_stages:
        problem = f"there is no stage {stage}; the plan has stages 0..{plan.num_stages - 1}"
    elif micro >= plan.micros_per_chain:
        problem = (
            f"there is no micro-batch {micro}; each chain has micro-batches 0..{plan.micros_per_chain - 1}"
        )
    elif plan.owner[stage] != rank:
        problem = f"stage {stage} belongs to rank {plan.owner[stage]}"
    else:
        earlier = position_of[action.kind][stage * plan.micros_per_chain + micro]
        problem = f"{action} is already at position {earlier}"
    return slot_error(plan.name, plan.compute, rank, position, problem)


def _check_stage(plan: ComputePlan, stage: int, position_of: dict[str, list[int]]) -> None:
    """Each micro-batch has its F, then B, or I and then W."""
    rank, num_micros = plan.owner[stage], plan.micros_per_chain
    row = plan.compute[rank]
    cells = slice(stage * num_micros, (stage + 1) * num_micros)
    positions = zip(*(position_of[kind][cells] for kind in "FBIW"), strict=True)
    for micro, (forward, whole, inputs, weights) in enumerate(positions):
        if 0 <= forward < whole and inputs < 0 and weights < 0:
            continue
        if 0 <= forward < inputs < weights and whole < 0:
            continue
        name = f"{stage}.{micro}"
        backward, kind = (whole, "B") if inputs < 0 else (inputs, "I")
        position = waits_for = None
        if forward < 0:
            problem = f"F{name} is missing"
        elif whole >= 0 and (inputs >= 0 or weights >= 0):
            problem, position = f"both B{name} and its parts I or W are there", whole
        elif backward < 0:
            problem = f"no backward: neither B{name} nor I{name} is there"
        elif backward <= forward:
            problem, position = f"{kind}{name} waits for F{name}, which does not end before it", backward
            waits_for = f"F{name} at position {forward}"
        elif weights < 0:
            problem, position = f"I{name} is there, but not its W{name}", inputs
        else:
            problem, position = f"W{name} waits for I{name}, which does not end before it", weights
            waits_for = f"I{name} at position {inputs}"
        place = "" if position is None else f", position {position}"
        action = Action("F", stage, micro) if position is None else row[position]
        headline = f"{plan.name}: rank {rank}{place}: {problem}"
        raise error_in_row(headline, plan.compute, rank, position, action, waits_for)
