"""The garbage collector is paused while plans are built, and restored to the program's setting."""

from __future__ import annotations

import gc

import pytest

from pipecomm_ext.schedules import gc_pause, one_f_one_b


@pytest.fixture(autouse=True)
def collector():
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    gc.unfreeze()
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_it_is_paused_and_then_as_before_whatever_happens(is_enabled):
    (gc.enable if is_enabled else gc.disable)()
    with pytest.raises(ZeroDivisionError), gc_pause.gc_paused():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled() == is_enabled


def test_a_small_plan_does_not_count_what_the_program_has_frozen(monkeypatch):
    """Counting walks over all frozen objects: tens of milliseconds per plan once torch is frozen."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: pytest.fail("counted"))
    one_f_one_b(4, 8)


@pytest.mark.parametrize("has_frozen", [False, True])
@pytest.mark.parametrize("num_of_python", [0, 375])
def test_many_new_objects_are_old_afterwards_unless_the_program_has_frozen_some(
    monkeypatch, has_frozen, num_of_python
):
    """Python 3.12 begins with some frozen objects of its own."""
    count = gc.get_freeze_count
    gc.collect()
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: num_of_python + count())
    if has_frozen:
        gc.freeze()
    with gc_pause.gc_paused():
        objects = [[] for _ in range(2 * gc_pause.MANY_OBJECTS)]
    gc.disable()
    num_young = len(gc.get_objects(generation=0)) + len(gc.get_objects(generation=1))
    # All are still frozen, or none; other threads of the process may have freed some meanwhile.
    assert (count() > 0) == has_frozen
    assert (num_young < len(objects) // 2) != has_frozen
