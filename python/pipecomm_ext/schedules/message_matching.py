"""`match_messages`: proves, without running the program of a plan, that its messages match.

The program computes exactly the compute rows. Each result that another rank needs is sent once, after its
slot, and received once, before its consumer. The k-th send of a pair of ranks on a channel is its k-th
receive: transports match by order, so anything else would silently swap data.
"""

from __future__ import annotations

from collections import defaultdict

from .actions import ACT, GRAD, SEND, Group
from .flow import flow_of
from .plan import Plan
from .plan_error import slot_error

GroupCode = tuple[list[int], list[int]]  # the results of a group (see `Flow`), and those that it receives


def match_messages(plan: Plan, max_group_ops: int) -> list[list[GroupCode | None]]:
    """Per rank, the program with None for each compute slot. Raises PlanError."""
    return _MessageMatcher(plan, max_group_ops).code


class _MessageMatcher:
    def __init__(self, plan: Plan, max_group_ops: int):
        self._plan, self._flow, self._max_group_ops = plan, flow_of(plan), max_group_ops
        self._is_there = bytearray(self._flow.num_results)  # computed on its own rank
        self._is_sent = bytearray(self._flow.num_results)
        self._is_received = bytearray(self._flow.num_results)
        # (src, dst, channel: 0 ACT, 1 GRAD) -> results in order
        self._sends: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        self._receives: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
        self.code = [self._read_row(rank, row) for rank, row in enumerate(plan.program)]
        for pair in sorted(self._sends.keys() | self._receives.keys()):
            if self._sends[pair] != self._receives[pair]:
                raise self._mismatch(*pair)

    def _read_row(self, rank: int, row) -> list[GroupCode | None]:
        compute, inputs, outputs = self._plan.compute[rank], self._flow.inputs[rank], self._flow.outputs[rank]
        is_there, is_sent, is_received = self._is_there, self._is_sent, self._is_received
        receiver_of_stage, num_micros = self._flow.receiver_of_stage, self._flow.num_micros
        sends, receives = self._ends_of(rank)
        code: list[GroupCode | None] = []
        num_computed = 0
        for position, item in enumerate(row):
            if type(item) is not Group:
                if num_computed == len(compute) or item != compute[num_computed]:
                    raise self._wrong_compute(rank, position, num_computed)
                for result in inputs[num_computed]:
                    if not is_received[result] and receiver_of_stage[result // num_micros] >= 0:
                        raise self._missing(rank, position, item, result, "is not received before")
                for result in outputs[num_computed]:
                    is_there[result] = 1
                num_computed += 1
                code.append(None)
                continue
            if len(item.ops) > self._max_group_ops:
                problem = f"a group of {len(item.ops)} operations; the limit is {self._max_group_ops}"
                raise self._error(rank, position, problem)
            results, received = [], []
            for op in item.ops:
                kind, what, stage, micro, peer = op
                end = (sends if kind == SEND else receives).get((what, stage, peer))
                if end is None or micro >= num_micros:
                    raise self._error(rank, position, f"{op} is not a transfer of this plan")
                order, first_result = end
                result = first_result + micro
                is_done = is_sent if kind == SEND else is_received
                if is_done[result]:
                    doing = "sent" if kind == SEND else "received"
                    raise self._error(rank, position, f"{op} is {doing} a second time")
                is_done[result] = 1
                if kind != SEND:
                    received.append(result)
                elif not is_there[result]:
                    raise self._missing(rank, position, op, result, "is not computed before")
                order.append(result)
                results.append(result)
            code.append((results, received))
        if num_computed < len(compute):
            raise self._wrong_compute(rank, len(row), num_computed)
        return code

    def _ends_of(self, rank: int) -> tuple[dict, dict]:
        """The sends and receives of `rank`: (what, stage, peer) -> (order list, result of micro-batch 0)."""
        owner, flow = self._plan.owner, self._flow
        sends, receives = {}, {}
        for what_stage, receiver in enumerate(flow.receiver_of_stage):
            channel, stage = divmod(what_stage, flow.num_stages)
            what, first_result = (ACT, GRAD)[channel], what_stage * flow.num_micros
            if receiver >= 0 and owner[stage] == rank:
                sends[what, stage, receiver] = self._sends[rank, receiver, channel], first_result
            elif receiver == rank:
                order = self._receives[owner[stage], rank, channel]
                receives[what, stage, owner[stage]] = order, first_result
        return sends, receives

    def _error(self, rank: int, position: int, problem: str, waits_for: str | None = None):
        return slot_error(self._plan.name, self._plan.program, rank, position, problem, waits_for)

    def _missing(self, rank: int, position: int, action, result: int, problem: str):
        described = self._flow.describe(result)
        return self._error(rank, position, f"{action} waits for {described}, which {problem}", described)

    def _wrong_compute(self, rank: int, position: int, num_computed: int):
        compute = self._plan.compute[rank]
        expected = compute[num_computed] if num_computed < len(compute) else "nothing more"
        return self._error(rank, position, f"the compute row of this rank has {expected} here")

    def _mismatch(self, src: int, dst: int, channel: int):
        sends, receives = self._sends[src, dst, channel], self._receives[src, dst, channel]
        num_equal = next(
            (k for k, pair in enumerate(zip(sends, receives, strict=False)) if pair[0] != pair[1]),
            min(len(sends), len(receives)),
        )
        has_receive = num_equal < len(receives)
        result = receives[num_equal] if has_receive else sends[num_equal]
        rank, peer = (dst, src) if has_receive else (src, dst)
        position = next(
            position for position, group in enumerate(self.code[rank]) if group and result in group[0]
        )

        def name(order):
            return self._flow.describe(order[num_equal]) if num_equal < len(order) else "nothing"

        return self._error(
            rank,
            position,
            f"messages from rank {src} to rank {dst} on channel {channel} do not match: number {num_equal} "
            f"is sent as {name(sends)}, received as {name(receives)}",
            f"rank {peer} to {'send' if has_receive else 'receive'} {self._flow.describe(result)}",
        )
