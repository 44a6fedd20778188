"""Reads the program of a plan and proves its messages without running it.

The program computes what the compute rows say. Each result that another rank needs is sent once, after its
slot, and received once, before its consumer. The k-th send of a pair of ranks on a channel is its k-th
receive: transports match by order, so anything else would silently swap data.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from .actions import ACT, SEND, Group
from .errors import plan_error
from .plan import Plan


class GroupCode(NamedTuple):
    """A group as numbers of results (see `Flow`)."""

    results: tuple[int, ...]
    received: tuple[int, ...]


def read_messages(plan: Plan, max_group_ops: int) -> list[list[GroupCode | None]]:
    """Per rank, the program with None for a compute slot. Raises PlanError."""
    return _MessageReader(plan, max_group_ops).code


class _MessageReader:
    def __init__(self, plan: Plan, max_group_ops: int):
        self._plan, self._flow, self._max_group_ops = plan, plan.flow, max_group_ops
        self._is_there = bytearray(self._flow.num_results)  # computed on its own rank
        self._is_sent = bytearray(self._flow.num_results)
        self._is_received = bytearray(self._flow.num_results)
        self._sends = defaultdict(list)  # (src, dst, channel: 0 ACT, 1 GRAD) -> results in order
        self._receives = defaultdict(list)
        self.code = [self._read_row(rank, row) for rank, row in enumerate(plan.program)]
        for pair in sorted(self._sends.keys() | self._receives.keys()):
            if self._sends[pair] != self._receives[pair]:
                raise self._mismatch(*pair)

    def _read_row(self, rank: int, row) -> list[GroupCode | None]:
        compute, flow = self._plan.compute[rank], self._flow
        inputs, outputs = flow.inputs[rank], flow.outputs[rank]
        receiver_of_stage, num_micros = flow.receiver_of_stage, flow.num_micros
        sends, receives = self._orders_of(rank)
        code: list[GroupCode | None] = []
        num_computed = 0
        for position, item in enumerate(row):
            if type(item) is Group:
                code.append(self._read_group(rank, position, item, sends, receives))
                continue
            if num_computed == len(compute) or item != compute[num_computed]:
                raise self._wrong_compute(rank, position, num_computed)
            for result in inputs[num_computed]:
                if not self._is_received[result] and receiver_of_stage[result // num_micros] >= 0:
                    raise self._missing(rank, position, item, result, "is not received before")
            for result in outputs[num_computed]:
                self._is_there[result] = 1
            num_computed += 1
            code.append(None)
        if num_computed < len(compute):
            raise self._wrong_compute(rank, len(row), num_computed)
        return code

    def _orders_of(self, rank: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """By what * S + stage, the order lists in which a send and a receive of `rank` count."""
        owner, num_stages = self._plan.owner, self._flow.num_stages
        sends, receives = {}, {}
        for what_stage, receiver in enumerate(self._flow.receiver_of_stage):
            channel, stage = divmod(what_stage, num_stages)
            if receiver >= 0 and owner[stage] == rank:
                sends[what_stage] = self._sends[rank, receiver, channel]
            elif receiver == rank:
                receives[what_stage] = self._receives[owner[stage], rank, channel]
        return sends, receives

    def _read_group(self, rank: int, position: int, group: Group, sends, receives) -> GroupCode:
        num_micros, num_stages, owner = self._flow.num_micros, self._flow.num_stages, self._plan.owner
        if len(group.ops) > self._max_group_ops:
            problem = f"a group of {len(group.ops)} operations; the limit is {self._max_group_ops}"
            raise self._error(rank, position, problem)
        results, received = [], []
        for op in group.ops:
            kind, what, stage, micro, peer = op
            what_stage = stage if what == ACT else stage + num_stages
            result = what_stage * num_micros + micro
            if stage >= num_stages or micro >= num_micros:
                raise self._error(rank, position, f"{op} is no transfer of this plan")
            if kind == SEND:
                if what_stage not in sends or self._flow.receiver_of_stage[what_stage] != peer:
                    raise self._error(rank, position, f"{op} is no transfer of this plan")
                if not self._is_there[result]:
                    raise self._missing(rank, position, op, result, "is not computed before")
                if self._is_sent[result]:
                    raise self._error(rank, position, f"{op} is sent a second time")
                self._is_sent[result] = 1
                sends[what_stage].append(result)
            else:
                if what_stage not in receives or owner[stage] != peer:
                    raise self._error(rank, position, f"{op} is no transfer of this plan")
                if self._is_received[result]:
                    raise self._error(rank, position, f"{op} is received a second time")
                self._is_received[result] = 1
                receives[what_stage].append(result)
                received.append(result)
            results.append(result)
        return GroupCode(tuple(results), tuple(received))

    def _error(self, rank: int, position: int, problem: str, waits_for: str | None = None):
        row = self._plan.program[rank]
        item = row[position] if position < len(row) else None
        return plan_error(
            f"{self._plan.name}: rank {rank}, position {position}: {item}: {problem}",
            self._plan.program,
            rank,
            position,
            item,
            waits_for,
        )

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
            position for position, group in enumerate(self.code[rank]) if group and result in group.results
        )
        item = self._plan.program[rank][position]

        def name(order):
            return self._flow.describe(order[num_equal]) if num_equal < len(order) else "nothing"

        return plan_error(
            f"{self._plan.name}: rank {rank}, position {position}: {item}: messages from rank {src} to rank "
            f"{dst} on channel {channel} do not match: number {num_equal} is sent as {name(sends)}, received "
            f"as {name(receives)}",
            self._plan.program,
            rank,
            position,
            item,
            f"rank {peer} to {'send' if has_receive else 'receive'} {self._flow.describe(result)}",
        )
