"""The Executor's mailbox: outputs and gradients between ranks or within one, whose specs are learned.

Shapes. At the start of a step, the rank of a chain's first stage sends all ranks of the chain the kind of
each micro-batch (a number that stands for: training or not, shapes and dtypes of its inputs). The first time
that a kind crosses a border, the specs precede the tensors; from then on both ends know them. So sizes may
differ between micro-batches and between steps, at the price of one small message per rank and step. Each
chain has a channel for these messages: those of two ranks about a chain have one order, independent of the
data and of the other chains.

Only differentiable tensors have a gradient message. A gradient that autograd did not produce travels as
zeros: the other end waits for it.

A pipeline rank may stand for several ranks, a stage of a topology. The first of them then does what is
described here, and informs the others. See `relayed.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from ..communicator import Work
from ..core.user_code import stacklevel_of_user
from ..schedules.actions import ACT, GRAD, SEND, Compute, Group, Item, Transfer
from ..schedules.plan import Plan
from .border import FullSpecs, OutputSpecs, gradient_specs, specs_of
from .border_channels import Arrival, BorderChannels, Incoming, Outgoing
from .mailbox import Key, Mailbox
from .values import PLAIN, Call, rebuilt

if TYPE_CHECKING:
    from ..relay.link import Link
    from .relayed import RelayedBorders


class _Header:
    """The kinds of a chain's micro-batches in this step. The rank of the first stage knows them; each rank of
    the chain passes them on to its `children`. `mates` are the other ranks of the first stage."""

    def __init__(self, plan: Plan, chain_idx: int, ranks_of: Sequence[Sequence[int]], me: int):
        self.chain_idx = chain_idx
        chain = plan.chains[chain_idx]
        owners = [plan.owner[stage] for stage in chain]
        parent_of: dict[int, int] = {}
        for owner in dict.fromkeys(owners):
            leader, *mates = ranks_of[owner]
            if owner != owners[0]:
                parent_of[leader] = ranks_of[owners[owners.index(owner) - 1]][0]
            parent_of |= dict.fromkeys(mates, leader)
        first, *self.mates = ranks_of[owners[0]]
        self.first_stage = chain[0]
        self.is_mine = me == first
        self.parent = parent_of.get(me)
        self.children = [rank for rank, parent in parent_of.items() if parent == me]
        self.kinds: list[int] | None = None
        self.pending: tuple[torch.Tensor, Work] | None = None


class _Route(NamedTuple):
    """A transfer of the program, with what is needed to carry it out. `speakers` (other than me) announce
    specs to `listeners`. With a `link` a relay moves the tensors, not messages to or from one peer."""

    key: Key
    peer: int
    channel: int
    speakers: Sequence[int]
    listeners: Sequence[int]
    link: Link | None


class PreparedGroup(NamedTuple):
    """`ahead` are receives of the next group, to be posted now if their specs are known."""

    sends: tuple[_Route, ...]
    receives: tuple[_Route, ...]
    ahead: tuple[_Route, ...]


class ExecutorMailbox(Mailbox):
    """Outputs and gradients of the stages of one rank.

    Args:
        plan: ranks in it are pipeline ranks; `ranks_of` gives the communicator's ranks of each.
        rank: my pipeline rank.
        relayed: the borders where a pipeline rank is several ranks; None if there are none.
        dynamic_shapes: specs travel with every output, for shapes that do not follow from the inputs'.
        check_border: called with (stage, specs) of every output; may raise.

    The methods put_* pass on what a stage made, `post` runs a group of the program, take_* wait for what a
    stage needs. A neighbour on the same rank gets the tensor itself, detached.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        channels: BorderChannels,
        ranks_of: Sequence[Sequence[int]],
        relayed: RelayedBorders | None = None,
        *,
        dynamic_shapes: bool = False,
        check_border: Callable[[int, FullSpecs], None] | None = None,
    ):
        super().__init__(plan, rank)
        self._channels, self._ranks_of = channels, ranks_of
        self._me = channels.data.rank
        self._waits_on_device = channels.waits_on_device
        self._relayed = relayed
        self._dynamic_shapes, self._check_border = dynamic_shapes, check_border
        self._headers = [
            _Header(plan, chain_idx, ranks_of, self._me) for chain_idx in range(len(plan.chains))
        ]
        self._header_of = {
            stage: header for header, chain in zip(self._headers, plan.chains, strict=True) for stage in chain
        }
        self._known_specs: dict[tuple[int, int], OutputSpecs] = {}  # (producing stage, kind)
        self._compared: set[tuple[int, int]] = set()  # gradients that all ranks of a stage have
        self._joint_kinds: dict[tuple[int, ...], int] = {}  # of the ranks that share a first stage

    def forget_step(self) -> None:
        super().forget_step()
        self._structures: dict[tuple[int, int], str] = {}  # of outputs that are no plain tuples
        self._awaited_gradients: dict[tuple[int, int], FullSpecs] = {}
        self._owed_gradients: dict[tuple[int, int], FullSpecs] = {}  # over a relay

    def prepare(self, program: Sequence[Item]) -> list[Compute | PreparedGroup]:
        """The program with its groups looked up once for all steps."""
        prepared: list[Compute | PreparedGroup] = []
        following: tuple[_Route, ...] = ()
        for item in reversed(program):
            if type(item) is not Group:
                prepared.append(item)
                continue
            sends = tuple(self._route(op) for op in item.ops if op.kind == SEND)
            receives = tuple(self._route(op) for op in item.ops if op.kind != SEND)
            prepared.append(PreparedGroup(sends, receives, () if self._waits_on_device else following))
            following = receives
        return prepared[::-1]

    def connect(self, program: Iterable[Compute | PreparedGroup]) -> None:
        """Begins to connect to the peers of all messages between two ranks, so that no first one has to."""
        lanes: set[tuple[Literal["send", "recv"], int, int]] = set()
        for item in program:
            if isinstance(item, PreparedGroup):
                lanes |= {("send", each.peer, each.channel) for each in item.sends if each.link is None}
                lanes |= {("recv", each.peer, each.channel) for each in item.receives if each.link is None}
        for direction, peer, channel in sorted(lanes):
            self._channels.data.connect([peer], channels=[channel], direction=direction)

    def _route(self, op: Transfer) -> _Route:
        key, peer = (op.what, op.stage, op.micro), self._ranks_of[op.peer][0]
        is_send = op.kind == SEND
        if self._relayed is not None:
            ends = (self.rank, op.peer) if is_send else (op.peer, self.rank)
            link = self._relayed.link((op.what, *ends))
            if link is not None:
                speakers = self._relayed.sources_but_me(link)
                listeners = self._relayed.members_but_me(link) if is_send else ()
                return _Route(key, peer, op.channel, speakers, listeners, link)
        return _Route(key, peer, op.channel, () if is_send else (peer,), (peer,) if is_send else (), None)

    @property
    def _relays(self) -> RelayedBorders:
        """The borders of routes with a link."""
        assert self._relayed is not None
        return self._relayed

    # ---------------------------------------------------------------- step

    def begin_step(self, kinds_of: dict[int, list[int]], is_training: bool) -> None:
        """`kinds_of` has the kinds of the micro-batches of the chains that start here, by first stage."""
        self.forget_step()
        self.is_training = is_training
        for header in self._headers:
            header.kinds = header.pending = None
            if header.is_mine:
                header.kinds = self._agreed(kinds_of[header.first_stage], header)
                self._pass_on(
                    header, torch.tensor([is_training, *header.kinds], dtype=torch.int64, device="cpu")
                )
            elif header.parent is not None:
                if (mine := kinds_of.get(header.first_stage)) is not None:
                    words = torch.tensor(mine, dtype=torch.int64, device="cpu")
                    self.works.append(self._channels.send_words(words, header.parent, header.chain_idx))
                num_words = 1 + self.plan.micros_per_chain
                header.pending = self._channels.begin_words(num_words, header.parent, header.chain_idx)
                self.works.append(header.pending[1])

    def _agreed(self, mine: list[int], header: _Header) -> list[int]:
        """The kinds of whole micro-batches; the ranks of the first stage may hold different pieces."""
        if not header.mates:
            return mine
        theirs = [self._channels.receive_words(len(mine), mate, header.chain_idx) for mate in header.mates]
        pieces = zip(mine, *theirs, strict=True)
        return [self._joint_kinds.setdefault(kinds, len(self._joint_kinds)) for kinds in pieces]

    def _pass_on(self, header: _Header, words: torch.Tensor) -> None:
        self.works += [self._channels.send_words(words, child, header.chain_idx) for child in header.children]

    def _kind(self, stage: int, micro: int) -> int:
        header = self._header_of[stage]
        if header.kinds is None:
            assert header.pending is not None
            words, work = header.pending
            work.wait()
            self._pass_on(header, words)
            is_training, *header.kinds = words.tolist()
            if bool(is_training) != self.is_training:
                modes = {True: "training", False: "forward only (grad mode is off)"}
                raise ValueError(
                    f"this rank's step is {modes[self.is_training]}, that of the rank with stage "
                    f"{header.first_stage} is {modes[not self.is_training]}; run the same on all ranks"
                )
        return header.kinds[micro]

    # ---------------------------------------------------------------- putting and taking

    def put_output(
        self, stage: int, micro: int, outputs: Sequence[torch.Tensor], structure: str = PLAIN
    ) -> None:
        """Passes the outputs of F to the next stage of the chain."""
        specs = specs_of(outputs, structure)
        if self._check_border is not None:
            self._check_border(stage, specs.tensors)
        tensors = [output.detach() for output in outputs]
        if self.plan.owner[self.plan.stage_after(stage)] == self.rank:
            self.receipts[ACT, stage, micro] = Arrival(tensors, self._noted(stage, micro, specs))
            return
        self.outbox[ACT, stage, micro] = tensors, specs
        self.note_sent(stage, micro, outputs)

    def put_gradient(self, stage: int, micro: int, inputs: tuple[torch.Tensor, ...]) -> None:
        """Passes the gradients that B or I left in the inputs of a stage to the stage before it. It removes
        them from the inputs, which the graph may hold until W."""
        gradients = []
        for tensor in inputs:
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            gradients.append(gradient if gradient.layout == torch.strided else gradient.to_dense())
            tensor.grad = None
        if self.plan.owner[self.plan.stage_before(stage)] == self.rank:
            self.receipts[GRAD, stage, micro] = Arrival(gradients)
        else:
            self.outbox[GRAD, stage, micro] = gradients, self._owed_gradients.pop((stage, micro), ())

    def take_inputs(self, stage: int, micro: int) -> Call:
        tensors = super().take_inputs(stage, micro)
        structure = self._structures.pop((self.plan.stage_before(stage), micro), PLAIN)
        # The stage may switch requires_grad; a gradient is sent for what had it when it was sent.
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        return Call.of(rebuilt(tensors, structure), differentiable)

    def _noted(self, stage: int, micro: int, specs: OutputSpecs) -> FullSpecs:
        """The specs of the tensors; their structure is kept until they are taken."""
        if specs.structure != PLAIN:
            self._structures[stage, micro] = specs.structure
        return specs.tensors

    # ---------------------------------------------------------------- messages

    def post(self, group: PreparedGroup) -> None:
        """Starts the sends and receives of a group.

        Where messages wait on the device they are one batch, as in the plan. Else a consumer waits only for
        its own message, and the receives of the next group are posted already: what is produced early then
        arrives during a compute.
        """
        sends = self._sends_of(group)  # announces specs, which a peer may need before it sends
        if sends and not self._waits_on_device:
            self.works += self._channels.post(sends, [])[0]
        batch: list[tuple[_Route, Incoming]] = []
        for route in group.receives:
            if self.is_wanted(route.key[0]) and route.key not in self.receipts:
                specs = self._specs_if_known(route)
                is_deferred = self._dynamic_shapes and route.link is None and not self._waits_on_device
                if specs is None and is_deferred:
                    batch.append((route, Incoming(partial(self._learned, route), route.peer, route.channel)))
                else:
                    self._receive(route, self._learned(route) if specs is None else specs, batch)
        for route in group.ahead:
            if not self.is_wanted(route.key[0]):
                continue
            specs = self._specs_if_known(route)
            if specs is None:
                break
            self._receive(route, specs, batch)
        if self._waits_on_device:
            works, receipts = self._channels.post(sends, [incoming for _, incoming in batch])
            self.works += works
            self.receipts.update(zip((route.key for route, _ in batch), receipts, strict=True))
            return
        for route, incoming in batch:
            self.receipts[route.key] = self._channels.receive(incoming)

    def _sends_of(self, group: PreparedGroup) -> list[Outgoing]:
        """The messages of the group's sends; starts those of relays."""
        outgoing = []
        for route in group.sends:
            what, stage, micro = route.key
            if not self.is_wanted(what):
                continue
            tensors, specs = self.outbox.pop(route.key)
            if what == ACT:
                specs = self._announce(route, specs).tensors
                if self.is_training:
                    self._awaited_gradients[stage, micro] = gradient_specs(specs)
            if route.link is None:
                outgoing.append(Outgoing(tensors, route.peer, route.channel))
                continue
            if what == GRAD and (stage, micro) not in self._compared:
                self._compared.add((stage, micro))
                self._compare(route.link, stage, micro, tensors)
            self.works += self._relays.send(route.link, tensors, specs)
        return outgoing

    def _compare(self, link: Link, stage: int, micro: int, gradients: Sequence[torch.Tensor]) -> None:
        """Warns if the ranks of a stage have different gradients, of which only the first rank's is sent."""
        leader = self._relays.leader_to_compare(link)
        if leader is None or not gradients:
            return
        chain_idx = self._header_of[stage].chain_idx
        norms = torch.tensor(
            [gradient.norm().item() for gradient in gradients], dtype=torch.float64, device="cpu"
        )
        if leader != self._me:
            self.works.append(self._channels.send_words(norms.view(torch.int64), leader, chain_idx))
            return
        for mate in self._relays.sources_but_me(link):
            words = self._channels.receive_words(len(norms), mate, chain_idx)
            theirs = torch.tensor(words, dtype=torch.int64, device="cpu").view(torch.float64)
            if not torch.allclose(norms, theirs, rtol=1e-2, atol=0, equal_nan=True):
                warnings.warn(
                    f"stage {stage}, micro-batch {micro}: the gradients of its inputs differ between its "
                    f"ranks (norms {norms.tolist()} and {theirs.tolist()}), and that of the first rank is "
                    'sent; if they are parts of a sum, give the Executor grad_reduce="sum"',
                    stacklevel=stacklevel_of_user(),
                )

    def _receive(self, route: _Route, specs: FullSpecs, batch: list[tuple[_Route, Incoming]]) -> None:
        """Adds a message to the batch of receives; starts a relay."""
        if route.link is None:
            batch.append((route, Incoming(specs, route.peer, route.channel)))
            return
        tensors, work = self._relays.receive(route.link, specs)
        self.receipts[route.key] = Arrival(tensors, specs, work)
        what, stage, micro = route.key
        if what == ACT and self.is_training:
            self._owed_gradients[self.plan.stage_after(stage), micro] = gradient_specs(specs)

    # ---------------------------------------------------------------- specs

    def _announce(self, route: _Route, specs: OutputSpecs) -> OutputSpecs:
        """Sends the specs of an output to a receiver that does not know them. Returns those of the whole
        tensors."""
        _, stage, micro = route.key
        kind = self._kind(stage, micro)
        known = self._known_specs.get((stage, kind))
        if self._dynamic_shapes or known is None:
            for peer in route.listeners:
                self.works += self._channels.send_header(specs, peer, self._header_of[stage].chain_idx)
            known = self._known_specs[stage, kind] = self._announced(route, {self._me: specs})
            return known
        held = known if route.link is None else self._relays.held(self._me, route.link, known)
        if held != specs:
            raise ValueError(
                f"stage {stage} made {specs} of micro-batch {micro}, but {held} of "
                "another one whose inputs have the same shapes and dtypes; if shapes depend on data, make "
                "the Executor with dynamic_shapes=True; if the stage has been changed, make a new Executor"
            )
        return known

    def _announced(self, route: _Route, specs_by_rank: dict[int, OutputSpecs]) -> OutputSpecs:
        """The specs of the whole tensors, from the speakers' announcements and those already in
        `specs_by_rank`."""
        _, stage, _ = route.key
        for speaker in route.speakers:
            chain_idx = self._header_of[stage].chain_idx
            specs_by_rank[speaker] = self._channels.receive_output_header(speaker, chain_idx)
        if route.link is not None:
            return self._relays.whole(route.link, stage, specs_by_rank)
        (specs,) = specs_by_rank.values()
        return specs

    def _learned(self, route: _Route) -> FullSpecs:
        """The specs of a message to receive; waits for their announcement if they are not known."""
        _, stage, micro = route.key
        kind = self._kind(stage, micro)
        specs = self._known_specs.get((stage, kind))
        if self._dynamic_shapes or specs is None:
            specs = self._known_specs[stage, kind] = self._announced(route, {})
        return self._noted(stage, micro, specs)

    def _specs_if_known(self, route: _Route) -> FullSpecs | None:
        what, stage, micro = route.key
        if what == GRAD:  # known since the forward on this rank
            return self._awaited_gradients.pop((self.plan.stage_before(stage), micro), None)
        kinds = self._header_of[stage].kinds
        if kinds is None or self._dynamic_shapes:
            return None
        specs = self._known_specs.get((stage, kinds[micro]))
        return None if specs is None else self._noted(stage, micro, specs)
