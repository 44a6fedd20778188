"""What crosses the borders of stages: outputs one way, gradients the other, between ranks or within one.

Shapes. The rank of a chain's first stage tells all ranks of the chain at the start of a step of which kind
each micro-batch is (a number for: training or not, shapes and dtypes of its inputs). The first time that a
border sees a kind, the specs of the tensors travel ahead of them; from then on both ends know them. So sizes
may differ between micro-batches and between steps, and nothing but one small message per rank and step is
paid for that. All this goes over channels of its own, one for each chain: what two ranks tell each other
about a chain has one order, whatever the data and the other chains do meanwhile.

Only differentiable tensors have a gradient message. A gradient that autograd did not produce travels as
zeros: the other end waits for it.

A pipeline rank may stand for several ranks, a stage of a topology: what is said of a rank here then holds for
the first of them, which tells the others. See `relayed.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ...communicator import MAX_CHANNELS, Communicator, Recv, Send, Work, device_kind, own_group
from ..actions import ACT, GRAD, SEND, Compute, Group, Item, Transfer
from ..plan import Plan

if TYPE_CHECKING:
    from ...relay.stage_relay import Link
    from .relayed import RelayedBorders

Tensors = tuple[torch.Tensor, ...]
Key = tuple[str, int, int]  # what, producing stage, micro-batch

NUM_DATA_CHANNELS = 2  # activations and gradients
MAX_SPEC_WORDS = 1024
_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
_CODE_OF = {dtype: code for code, dtype in enumerate(_DTYPES)}


class TensorSpec(NamedTuple):
    """A tensor of a border: differentiable ones have a gradient that goes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_differentiable: bool

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}" + (" with gradient" if self.is_differentiable else "")


Specs = tuple[TensorSpec, ...]


def specs_of(tensors: Tensors) -> Specs:
    return tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)


def differentiable(specs: Sequence[TensorSpec]) -> Specs:
    return tuple(spec for spec in specs if spec.is_differentiable)


def text_of(specs: Specs) -> str:
    return "(" + ", ".join(map(str, specs)) + ")"


def connect(
    group: dist.ProcessGroup | None, device: torch.device | None, has_relays: bool = False
) -> Communicator:
    """A communicator for an executor. Collective. Channels cost nothing on the host, so there are some for
    the control messages of two chains; NCCL needs a communicator for each. Relays may need all there are."""
    group = own_group(group)
    is_on_host = (device_kind(group, None) if device is None else device.type) == "cpu"
    num_channels = NUM_DATA_CHANNELS + (2 if is_on_host else 0)
    if has_relays:
        num_channels = MAX_CHANNELS
    return Communicator(group, device=device, channels=num_channels)


class Transport:
    """The communicator for data, and what carries headers and specs, which the host reads, on one channel
    for each chain: channels of it, or for CUDA tensors, and where it has too few, a communicator of its own.
    """

    def __init__(self, data: Communicator, num_chains: int):
        self.data = data
        self._owns_control = data.device.type != "cpu" or data.channels < NUM_DATA_CHANNELS + num_chains
        self.control = (
            Communicator(data.group, device="cpu", channels=num_chains, timeout=data.timeout)
            if self._owns_control
            else data
        )
        self._first_channel = 0 if self._owns_control else NUM_DATA_CHANNELS
        self.is_one_stream = data.transport == "nccl"  # else each pair and channel is an order of its own
        self.num_channels = NUM_DATA_CHANNELS + (0 if self._owns_control else num_chains)

    def send_words(self, words: torch.Tensor, peer: int, chain_idx: int) -> Work:
        return self.control.isend(words, peer, self._first_channel + chain_idx)

    def receive_words(self, num_words: int, peer: int, chain_idx: int) -> tuple[torch.Tensor, Work]:
        words = torch.empty(num_words, dtype=torch.int64)
        return words, self.control.irecv(words, peer, self._first_channel + chain_idx)

    def abort(self, reason: str) -> None:
        self.data.abort(reason)
        self.control.abort(reason)

    def close_control(self) -> None:
        if self._owns_control:
            self.control.close()


class _Header:
    """The kinds of a chain's micro-batches in this step: given by the rank of its first stage, handed from
    each rank of the chain to those that it is the first to reach. `mates` share the first stage with it."""

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


class _Arrival(NamedTuple):
    """Received tensors, and the work after which their contents are there."""

    tensors: list[torch.Tensor]
    specs: Sequence[TensorSpec]
    work: Work | None


class PreparedGroup(NamedTuple):
    """`ahead` are receives of the next group, to be posted now if their specs are known."""

    sends: tuple[_Route, ...]
    receives: tuple[_Route, ...]
    ahead: tuple[_Route, ...]


class Mailbox:
    """Outputs and gradients of the stages of one rank.

    Args:
        plan: ranks in it are pipeline ranks; `ranks_of` gives the communicator's ranks of each.
        rank: my pipeline rank.
        relayed: the borders where a pipeline rank is several ranks; None if there are none.
        dynamic_shapes: specs travel with every output, for shapes that do not follow from the inputs'.
        check_border: called with (stage, specs) of every output; may raise.

    put_* hand over what a stage made; `post` runs a group of the program; take_* wait for what a stage needs
    and give it away. A neighbour on the same rank gets the tensor itself, detached.
    """

    def __init__(
        self, plan, rank, transport, ranks_of, relayed=None, *, dynamic_shapes=False, check_border=None
    ):
        self._plan, self._rank, self._transport, self._ranks_of = plan, rank, transport, ranks_of
        self._me: int = transport.data.rank
        self._relayed: RelayedBorders | None = relayed
        self._dynamic_shapes, self._check_border = dynamic_shapes, check_border
        self._headers = [
            _Header(plan, chain_idx, ranks_of, self._me) for chain_idx in range(len(plan.chains))
        ]
        self._header_of = {
            stage: header for header, chain in zip(self._headers, plan.chains, strict=True) for stage in chain
        }
        self._known_specs: dict[tuple[int, int], Specs] = {}  # (producing stage, kind)
        self._joint_kinds: dict[tuple[int, ...], int] = {}  # of the ranks that share a first stage
        self._is_training = False
        self._forget_step()

    def _forget_step(self) -> None:
        self._outbox: dict[Key, tuple[list[torch.Tensor], Specs]] = {}
        self._arrived: dict[Key, _Arrival] = {}
        self._awaited_gradients: dict[tuple[int, int], Specs] = {}
        self._owed_gradients: dict[tuple[int, int], Specs] = {}  # over a relay
        self._works: list[Work] = []

    def prepare(self, program: Sequence[Item]) -> list[Compute | PreparedGroup]:
        """The program with its groups looked up once for all steps."""
        prepared: list[Compute | PreparedGroup] = []
        following: tuple[_Route, ...] = ()
        for item in reversed(program):
            if type(item) is Group:
                sends = tuple(self._route(op) for op in item.ops if op.kind == SEND)
                receives = tuple(self._route(op) for op in item.ops if op.kind != SEND)
                item = PreparedGroup(sends, receives, () if self._transport.is_one_stream else following)
                following = receives
            prepared.append(item)
        return prepared[::-1]

    def _route(self, op: Transfer) -> _Route:
        key, peer = (op.what, op.stage, op.micro), self._ranks_of[op.peer][0]
        is_send = op.kind == SEND
        if self._relayed is not None:
            ends = (self._rank, op.peer) if is_send else (op.peer, self._rank)
            link = self._relayed.link((op.what, *ends))
            if link is not None:
                speakers = self._relayed.sources_but_me(link)
                listeners = self._relayed.members_but_me(link) if is_send else ()
                return _Route(key, peer, op.channel, speakers, listeners, link)
        return _Route(key, peer, op.channel, () if is_send else (peer,), (peer,) if is_send else (), None)

    # ---------------------------------------------------------------- step

    def begin_step(self, kinds_of: dict[int, list[int]], is_training: bool) -> None:
        """`kinds_of` has the kinds of the micro-batches of the chains that start here, by first stage."""
        self._forget_step()
        self._is_training = is_training
        for header in self._headers:
            header.kinds = header.pending = None
            mine = kinds_of.get(header.first_stage)
            if header.is_mine:
                header.kinds = self._agreed(mine, header)
                self._pass_on(header, torch.tensor([is_training, *header.kinds], dtype=torch.int64))
            elif header.parent is not None:
                if mine is not None:
                    words = torch.tensor(mine, dtype=torch.int64)
                    self._works.append(self._transport.send_words(words, header.parent, header.chain_idx))
                num_words = 1 + self._plan.micros_per_chain
                header.pending = self._transport.receive_words(num_words, header.parent, header.chain_idx)
                self._works.append(header.pending[1])

    def _agreed(self, mine: list[int], header: _Header) -> list[int]:
        """Kinds of whole micro-batches, of which the ranks of the first stage may hold different pieces."""
        if not header.mates:
            return mine
        theirs = self._hear(header.mates, len(mine), header.chain_idx)
        pieces = zip(mine, *theirs.values(), strict=True)
        return [self._joint_kinds.setdefault(kinds, len(self._joint_kinds)) for kinds in pieces]

    def _pass_on(self, header: _Header, words: torch.Tensor) -> None:
        self._works += [
            self._transport.send_words(words, child, header.chain_idx) for child in header.children
        ]

    def _kind(self, stage: int, micro: int) -> int:
        header = self._header_of[stage]
        if header.kinds is None:
            words, work = header.pending
            work.wait()
            self._pass_on(header, words)
            is_training, *header.kinds = words.tolist()
            if bool(is_training) != self._is_training:
                modes = {True: "training", False: "forward only (grad mode is off)"}
                raise ValueError(
                    f"this rank's step is {modes[self._is_training]}, that of the rank with stage "
                    f"{header.first_stage} is {modes[not self._is_training]}; run the same on all ranks"
                )
        return header.kinds[micro]

    def finish_step(self) -> None:
        """Waits for everything that is under way."""
        for work in self._works:
            work.wait()
        self._forget_step()

    # ---------------------------------------------------------------- handing over and taking

    def put_output(self, stage: int, micro: int, outputs: Tensors) -> None:
        """The outputs of F, for the next stage of the chain."""
        following = self._plan.next_of[stage]
        specs = specs_of(outputs)
        if self._check_border is not None:
            self._check_border(stage, specs)
        data = [output.detach() for output in outputs]
        key = (ACT, stage, micro)
        if self._plan.owner[following] == self._rank:
            self._arrived[key] = _Arrival(data, specs, None)
            return
        self._outbox[key] = data, specs

    def put_gradient(self, stage: int, micro: int, inputs: Tensors) -> None:
        """The gradients that B or I left in the inputs of a stage, for the stage before it. They are taken
        away: until W the graph may go on holding the inputs."""
        gradients = []
        for tensor in inputs:
            gradients.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
            tensor.grad = None
        key = (GRAD, stage, micro)
        if self._plan.owner[self._plan.prev_of[stage]] == self._rank:
            self._arrived[key] = _Arrival(gradients, (), None)
        else:
            self._outbox[key] = gradients, self._owed_gradients.pop((stage, micro), ())

    def take_inputs(self, stage: int, micro: int) -> Tensors:
        """The outputs of the stage before, as leaves that require grad where they are differentiable."""
        arrival = self._arrived.pop((ACT, self._plan.prev_of[stage], micro))
        if arrival.work is not None:
            arrival.work.wait()
        return tuple(
            tensor.requires_grad_() if spec.is_differentiable else tensor
            for tensor, spec in zip(arrival.tensors, arrival.specs, strict=True)
        )

    def take_gradients(self, stage: int, micro: int) -> list[torch.Tensor]:
        """The gradients of those outputs of a stage that are differentiable."""
        arrival = self._arrived.pop((GRAD, self._plan.next_of[stage], micro))
        if arrival.work is not None:
            arrival.work.wait()
        return arrival.tensors

    # ---------------------------------------------------------------- messages

    def post(self, group: PreparedGroup) -> None:
        """Starts the sends and receives of a group.

        On one in-order stream they are one batch, as the plan has it. Where every pair and channel has an
        order of its own, a consumer waits for its message alone, and the receives of the next group are
        posted already: what is produced early then arrives during a compute.
        """
        is_one_stream = self._transport.is_one_stream
        sends = self._sends_of(group)  # announces: a peer may wait for that before it sends what comes here
        if not is_one_stream:
            self._start(sends)
        receives = [
            self._receive(route, self._specs_from(route))
            for route in group.receives
            if self._is_wanted(route) and route.key not in self._arrived
        ]
        if is_one_stream:
            work = self._start(sends + [op for _, ops in receives for op in ops])
            for key, ops in receives:
                self._set_work(key, work if ops else None)
            return
        for route in filter(self._is_wanted, group.ahead):
            specs = self._specs_if_known(route)
            if specs is None:
                break
            receives.append(self._receive(route, specs))
        for key, ops in receives:
            self._set_work(key, self._start(ops))

    def _set_work(self, key: Key, work: Work | None) -> None:
        if work is not None:
            self._arrived[key] = self._arrived[key]._replace(work=work)

    def _is_wanted(self, route: _Route) -> bool:
        return self._is_training or route.key[0] == ACT

    def _start(self, ops: list[Send | Recv]) -> Work | None:
        if not ops:
            return None
        self._works.append(self._transport.data.batch_p2p(ops, async_op=True))
        return self._works[-1]

    def _sends_of(self, group: PreparedGroup) -> list[Send]:
        """Those to one peer; relays are started here."""
        ops = []
        for route in filter(self._is_wanted, group.sends):
            what, stage, micro = route.key
            tensors, specs = self._outbox.pop(route.key)
            if what == ACT:
                specs = self._announce(route, specs)
                if self._is_training:
                    self._awaited_gradients[stage, micro] = differentiable(specs)
            if route.link is None:
                ops += [Send(tensor, route.peer, route.channel) for tensor in tensors]
            else:
                self._works += self._relayed.send(route.link, tensors, specs)
        return ops

    def _receive(self, route: _Route, specs: Specs) -> tuple[Key, list[Recv]]:
        if route.link is not None:
            tensors, work = self._relayed.receive(route.link, specs)
            self._arrived[route.key] = _Arrival(tensors, specs, work)
            what, stage, micro = route.key
            if what == ACT and self._is_training:
                self._owed_gradients[self._plan.next_of[stage], micro] = differentiable(specs)
            return route.key, []
        buffers = [self._transport.data.empty(spec.shape, spec.dtype) for spec in specs]
        self._arrived[route.key] = _Arrival(buffers, specs, None)
        return route.key, [Recv(buffer, route.peer, route.channel) for buffer in buffers]

    # ---------------------------------------------------------------- specs

    def _announce(self, route: _Route, specs: Specs) -> Specs:
        """Tells the receiver the specs of an output if it does not know them; those of the whole tensors."""
        _, stage, micro = route.key
        kind = self._kind(stage, micro)
        known = self._known_specs.get((stage, kind))
        if self._dynamic_shapes or known is None:
            words, chain_idx = _encode(stage, specs), self._header_of[stage].chain_idx
            self._works += [self._transport.send_words(words, peer, chain_idx) for peer in route.listeners]
            known = self._known_specs[stage, kind] = self._announced(route, {self._me: specs})
            return known
        held = known if route.link is None else self._relayed.held(route.link, known)
        if held != specs:
            raise ValueError(
                f"stage {stage} made {text_of(specs)} of micro-batch {micro}, but {text_of(held)} of "
                "another one whose inputs have the same shapes and dtypes; if shapes depend on data, make "
                "the Executor with dynamic_shapes=True; if the stage has been changed, make a new Executor"
            )
        return known

    def _announced(self, route: _Route, specs_of: dict[int, Specs]) -> Specs:
        """Of the whole tensors, from what the speakers say and `specs_of` (by rank) has already."""
        _, stage, _ = route.key
        heard = self._hear(route.speakers, MAX_SPEC_WORDS, self._header_of[stage].chain_idx)
        specs_of |= {speaker: _decode(words) for speaker, words in heard.items()}
        if route.link is not None:
            return self._relayed.whole(route.link, stage, specs_of)
        (specs,) = specs_of.values()
        return specs

    def _hear(self, speakers: Sequence[int], num_words: int, chain_idx: int) -> dict[int, list[int]]:
        """Waits for words of each speaker."""
        pending = [self._transport.receive_words(num_words, speaker, chain_idx) for speaker in speakers]
        for _, work in pending:
            work.wait()
        return {speaker: words.tolist() for speaker, (words, _) in zip(speakers, pending, strict=True)}

    def _specs_from(self, route: _Route) -> Specs:
        """The specs of a message to receive; waits for their announcement if there must be one."""
        specs = self._specs_if_known(route)
        if specs is None:
            _, stage, micro = route.key
            kind = self._kind(stage, micro)
            specs = self._known_specs.get((stage, kind))
            if self._dynamic_shapes or specs is None:
                specs = self._known_specs[stage, kind] = self._announced(route, {})
        return specs

    def _specs_if_known(self, route: _Route) -> Specs | None:
        what, stage, micro = route.key
        if what == GRAD:  # known since the forward on this rank
            return self._awaited_gradients.pop((self._plan.prev_of[stage], micro), None)
        kinds = self._header_of[stage].kinds
        if kinds is None or self._dynamic_shapes:
            return None
        return self._known_specs.get((stage, kinds[micro]))


def _encode(stage: int, specs: Specs) -> torch.Tensor:
    words = [len(specs)]
    for shape, dtype, is_differentiable in specs:
        words += [_CODE_OF[dtype], is_differentiable, len(shape), *shape]
    if len(words) > MAX_SPEC_WORDS:
        raise ValueError(
            f"stage {stage} returned {len(specs)} tensors, more than a border can describe; return fewer"
        )
    return torch.tensor(words + [0] * (MAX_SPEC_WORDS - len(words)), dtype=torch.int64)


def _decode(words: list[int]) -> Specs:
    specs, position = [], 1
    for _ in range(words[0]):
        code, is_differentiable, num_dims = words[position : position + 3]
        position += 3 + num_dims
        shape = tuple(words[position - num_dims : position])
        specs.append(TensorSpec(shape, _DTYPES[code], bool(is_differentiable)))
    return tuple(specs)
