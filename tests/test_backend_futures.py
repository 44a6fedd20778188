"""Futures of the backend "pipecomm": their callbacks may do what those of gloo's futures may."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_backend import both, gloo_group, group_of

from pipecomm_ext import _C
from pipecomm_ext.backend.work import BackendWork
from pipecomm_ext.communicator import continuation

LIMIT_S = 60.0


@both(2)
def test_callbacks_wait_for_other_futures(world):
    """Some futures are completed by the thread that waits, others by one of the library's."""
    group = group_of(2)
    for length in (4, 50_000):
        for idx in range(10):
            first, second, third = (torch.ones(length) for _ in range(3))

            def nested(done, second=second, third=third):
                future = dist.all_reduce(second, group=group, async_op=True).get_future()
                return future.then(
                    lambda done: dist.all_reduce(third, group=group, async_op=True).get_future().wait()[0]
                ).wait()

            if world.rank == idx % 2:
                time.sleep(0.003)  # so that the other rank's future ends in the background
            future = dist.all_reduce(first, group=group, async_op=True).get_future().then(nested)
            assert future.wait() is third and first[0] == second[0] == third[0] == 2


@both(2)
def test_callbacks_of_several_futures_wait_for_each_other(world):
    group, have_both_begun = group_of(2), threading.Barrier(2)
    tensors = [torch.ones(50_000) for _ in range(2)]
    if world.rank == 1:
        dist.barrier()  # a callback that is added to a future that has ended runs at once
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    if world.rank == 1:
        for work in works:
            work.wait()
        return
    futures = [
        work.get_future().then(lambda done: have_both_begun.wait(LIMIT_S) >= 0 and done.value()[0])
        for work in works
    ]
    dist.barrier()
    for future, tensor in zip(futures, tensors, strict=True):
        assert future.wait() is tensor


@both(2)
def test_a_future_has_ended_with_its_work(world):
    group = group_of(2)
    for _ in range(20):
        work = dist.all_reduce(torch.ones(50_000), group=group, async_op=True)
        future = work.get_future()
        work.wait()
        assert future.done()
        future = (work := dist.all_reduce(torch.ones(50_000), group=group, async_op=True)).get_future()
        while not work.is_completed():
            time.sleep(0.0001)
        assert future.done()


@both(2)
def test_errors_of_futures_and_of_their_callbacks(world):
    group = group_of(2)
    future = dist.all_reduce(torch.ones(5), group=group, async_op=True).get_future()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        future.then(lambda done: 1 // 0).wait()
    wrong = dist.all_reduce(torch.ones(3 + world.rank), group=group, async_op=True).get_future()
    dist.barrier()
    with pytest.raises(RuntimeError, match="called all_reduce with SUM"):
        wrong.wait()
    dist.barrier(group)


@both(2)
def test_tensors_of_futures_that_have_ended_are_not_kept(world):
    group, refs = group_of(2), []
    for _ in range(2):
        tensor = torch.ones(1000)
        refs.append(weakref.ref(tensor))
        if world.rank == 1:
            time.sleep(0.02)  # so that rank 0's thread rests for its sake
        dist.all_reduce(tensor, group=group, async_op=True).get_future().wait()
        del tensor
    until = time.monotonic() + LIMIT_S
    while any(ref() is not None for ref in refs) and time.monotonic() < until:
        time.sleep(0.01)
        gc.collect()
    assert [ref() for ref in refs] == [None, None]


class Interrupted(BaseException):
    pass


def test_an_interrupted_step_is_an_error_of_later_waits():
    class Done:
        number = 0

        def wait(self, timeout=None) -> None: ...
        def is_completed(self) -> bool:
            return True

    def steps():
        yield Done()
        raise Interrupted

    handle = continuation.Continuation(steps())
    for _ in range(2):
        with pytest.raises(Interrupted):
            handle.wait()
    assert handle.is_completed()


@pytest.mark.parametrize("is_failed_before", [False, True])
def test_a_future_ends_though_no_thread_can_use_its_device(is_failed_before):
    """As after an error of CUDA, which each later call raises."""

    class Failed:
        is_failed = False

        def wait(self, timeout=None) -> None: ...
        def is_completed(self) -> bool:
            if self.is_failed:
                raise RuntimeError("CUDA error")
            return False

    class Output:
        device, is_cuda = torch.device("cuda", 1), False

    def set_device(device) -> None:
        if is_failed_before or threading.current_thread().name == "pipecomm future":
            raise RuntimeError("CUDA error")

    handle = Failed()
    with mock.patch("torch.cuda.set_device", set_device), mock.patch.object(_C, "relax_captures"):
        work = BackendWork(handle, [Output()], None, 0, "all_reduce")
        future, handle.is_failed = work.get_future(), True
        until = time.monotonic() + LIMIT_S
        while not future.done() and time.monotonic() < until:
            time.sleep(0.01)
    with pytest.raises(RuntimeError, match="CUDA error"):
        assert future.done() and future.wait()


def trained_by_power_sgd(group) -> list[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(60, 40), torch.nn.Linear(40, 40))
    model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(5, 60, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return [parameter.detach().clone() for parameter in model.parameters()]


@both(2)
def test_power_sgd_equals_gloo(world):
    """Its hook waits within callbacks."""
    ours, theirs = trained_by_power_sgd(group_of(2)), trained_by_power_sgd(gloo_group(2))
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected)
