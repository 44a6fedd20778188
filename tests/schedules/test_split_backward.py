"""Backward in two halves: the same gradients, each in its half, and no repeated work where promised."""

from __future__ import annotations

import contextlib
import copy
import math
import threading

import pytest
import torch
from pipelines import StoringLinear
from torch import nn
from torch.autograd.graph import get_gradient_edge

from pipecomm_ext.runtime.backward import split_backward
from pipecomm_ext.schedules import WeightGradStore, run_backward


@pytest.fixture(autouse=True)
def the_store_stays_as_it_was():
    yield
    assert not WeightGradStore.enabled and WeightGradStore.cache == [] and WeightGradStore.funcs_queue.empty()


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 3, 3, padding=1), nn.GroupNorm(3, 3)
        self.scale, self.shift = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(3, 1))

    def forward(self, x):
        weighted = self.scale.softmax(0) * self.scale.exp()  # below one join, with a diamond
        return self.norm(self.conv(x[:, None] * weighted)).sum(1) + self.shift.mean()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = x[None]
        return self.attention(x, x, x, need_weights=False)[0][0]


MODULES = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)),
    "convolution": Convolution,
    "attention": Attention,
    "no weights": lambda: nn.Tanh(),
    "identity": nn.Identity,
    "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
}


def gradients_of(module, x):
    return [x.grad, *(parameter.grad for parameter in module.parameters())]


def whole_and_split(module, output_gradient=True):
    """The module and its copy after a whole backward and after I, with the inputs and the rest for W."""
    torch.manual_seed(2)
    whole, split = module, copy.deepcopy(module)
    x, y = (torch.randn(4, 8, generator=torch.Generator().manual_seed(5)).requires_grad_() for _ in range(2))
    output = whole(x)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    work = split_backward([get_gradient_edge(split(y))], [gradient], [y])
    return whole, x, split, y, work


def assert_equal_gradients(split, y, whole, x):
    for got, expected in zip(gradients_of(split, y), gradients_of(whole, x), strict=True):
        assert (got is None) == (expected is None) and (got is None or got.equal(expected))


@pytest.mark.parametrize("name", MODULES)
def test_the_halves_are_the_whole_bit_by_bit(name):
    torch.manual_seed(1)
    whole, x, split, y, work = whole_and_split(MODULES[name]())
    assert y.grad.equal(x.grad)
    assert all(parameter.grad is None for parameter in split.parameters())
    for part in work:
        part()
    assert_equal_gradients(split, y, whole, x)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_no_node_computes_anything_twice():
    """Matrix products: one for the input and one for the weight of each layer, each once."""
    module = MODULES["mlp"]()
    x = torch.randn(4, 8, requires_grad=True)
    counts = []
    output = module(x)
    edge, gradient = get_gradient_edge(output), torch.ones_like(output)
    work = []
    for half in (lambda: work.extend(split_backward([edge], [gradient], [x])), lambda: [w() for w in work]):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            half()
        counts.append(sum(event.name == "aten::mm" for event in profile.events()))
    assert counts == [2, 2]


def test_gradients_add_up_and_hooks_of_weights_fire_in_w():
    module = nn.Linear(8, 8)
    order = []
    module.weight.register_post_accumulate_grad_hook(lambda _: order.append("weight"))
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        work = split_backward([module(x).sum()], [torch.ones(())], [x])
        order.append("I")
        for part in work:
            part()
    assert order == ["I", "weight", "I", "weight"]
    expected = torch.full((8,), 8.0)
    assert module.bias.grad.equal(expected)


def test_without_inputs_everything_is_for_w():
    module = nn.Linear(8, 8)
    work = split_backward([module(torch.ones(4, 8)).sum()], [torch.ones(())], [])
    assert module.bias.grad is None
    for part in work:
        part()
    assert module.bias.grad.equal(torch.full((8,), 4.0))
    assert split_backward([], [], []) == []
    run_backward([], [])


def test_outputs_that_no_input_leads_to():
    """One of them twice, with different gradients."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    x = torch.ones(3, requires_grad=True)
    roots = [x * weights[0], output := (weights[1] * 2).exp(), output]
    work = split_backward(roots, [torch.ones(3), torch.ones(3), torch.full((3,), 5.0)], [x])
    assert x.grad.equal(torch.ones(3)) and weights[1].grad is None
    for part in work:
        part()
    assert weights[0].grad.equal(torch.ones(3))
    torch.testing.assert_close(weights[1].grad, torch.full((3,), 6 * 2 * math.exp(2)))


class Hooked(nn.Module):
    """Hooks on tensors change gradients: before weights, before an output, and with a Tanh in between."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        x.register_hook(lambda gradient: gradient * 2)
        x = torch.tanh(x)
        x.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        x = self.second(x)
        x.register_hook(lambda gradient: gradient + 1)
        return x


def test_hooks_that_change_gradients_change_them_once():
    whole, x, split, y, work = whole_and_split(Hooked())
    assert len(work) == 2
    for part in work:
        part()
    assert_equal_gradients(split, y, whole, x)


class Written(nn.Module):
    """A hook writes into the gradient before the second layer; `.grad` there is kept in `between`."""

    def __init__(self, size, write):
        super().__init__()
        self.first, self.second, self.write = nn.Linear(8, size), nn.Linear(size, 8), write

    def forward(self, x):
        self.between = self.first(x)
        if self.write is not None:
            self.between.register_hook(self.write)
        self.between.retain_grad()
        return self.second(self.between)


WRITES = {
    "an element of many": (3, lambda gradient: gradient[0, 0].fill_(5)),
    "all of one": (1, lambda g: g.add_(1)),
}


@pytest.mark.parametrize("writes", WRITES)
def test_hooks_that_write_into_a_gradient_spoil_none_of_others(writes):
    """W uses zeros that many joins share, some of which are writable."""
    size, write = WRITES[writes]

    def difference(module):
        layer = copy.deepcopy(module)
        gradients = []
        for is_split in (False, True):
            x = torch.ones(1, 8, requires_grad=True)
            outputs = [layer(x)]
            if is_split:
                for part in split_backward(outputs, [torch.ones(1, 8)], [x]):
                    part()
            else:
                run_backward(outputs, [torch.ones(1, 8)])
            gradients.append(layer.between.grad)
        return gradients[1] - gradients[0]

    with contextlib.suppress(RuntimeError):  # torch refuses what would write into several elements
        difference(Written(size, lambda gradient: write(gradient) and None))
    assert not difference(Written(size, None)).any()


def test_shared_weights_are_counted_once():
    """They are below two nodes: I is the whole backward."""
    layer = nn.Linear(8, 8)
    whole, x, split, y, work = whole_and_split(nn.Sequential(layer, nn.Tanh(), layer))
    assert work == []
    assert_equal_gradients(split, y, whole, x)


class Storing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) for _ in range(2))

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(StoringLinear.apply(x, weight))
        return x


def test_layers_that_use_the_store():
    torch.manual_seed(1)
    whole, x, split, y, work = whole_and_split(Storing())
    assert y.grad.equal(x.grad) and len(work) == 2
    assert all(weight.grad is None for weight in split.weights)
    for part in work:
        part()
    assert_equal_gradients(split, y, whole, x)


def test_the_store_is_restored_after_an_exception():
    x = torch.ones(8, requires_grad=True)

    def fail(_):
        assert WeightGradStore.enabled
        raise KeyError("broken layer")

    x.register_hook(fail)
    with pytest.raises(KeyError, match="broken layer"):
        split_backward(
            [StoringLinear.apply(x[None], torch.eye(8, requires_grad=True)).sum()], [torch.ones(())], [x]
        )


def test_the_store_by_hand():
    done = []
    WeightGradStore.put(lambda: done.append("a"))
    WeightGradStore.put(lambda: done.append("b"))
    WeightGradStore.flush()
    WeightGradStore.put(lambda: done.append("c"))
    WeightGradStore.flush()
    assert done == []
    WeightGradStore.pop()
    assert done == ["a", "b"]
    WeightGradStore.enabled = True
    WeightGradStore.put(lambda: done.append("d"))
    WeightGradStore.clear()
    assert not WeightGradStore.enabled and WeightGradStore.cache == []
    with pytest.raises(IndexError, match="call flush"):
        WeightGradStore.pop()


def test_two_threads_do_not_mix_their_closures():
    begun, results = threading.Barrier(2), {}

    def record(name):
        begun.wait()
        for _ in range(200):
            with WeightGradStore.recording() as closures:
                WeightGradStore.put(name)
                WeightGradStore.put(name)
            results.setdefault(name, []).append(list(closures))

    threads = [threading.Thread(target=record, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {name: [[name, name]] * 200 for name in "ab"}
