"""Checks that several modules share, and the names that the public contract promises."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from pipecomm_ext import _C, cal_split_sizes
from pipecomm_ext.core.checked import whole_number
from pipecomm_ext.pipeline_parallel import PipelineParallelLayerLayout
from pipecomm_ext.schedules import dualpipe, gpipe


class Index:
    def __index__(self) -> int:
        return 3


@pytest.mark.parametrize("value", [3, Index(), torch.tensor(3), torch.tensor([3], dtype=torch.uint8)[0]])
def test_whole_numbers_are_taken_in_every_form(value):
    assert whole_number(value, "x") == 3


@pytest.mark.parametrize("value", [True, 3.0, "3", None, torch.tensor(True), torch.tensor(3.0), [3]])
def test_what_is_not_a_whole_number_is_refused_by_name_bools_too(value):
    kind = type(value).__name__
    with pytest.raises(TypeError, match=rf"^the length must be an int, not {kind}$"):
        whole_number(value, "the length")


@pytest.mark.parametrize(
    "call", [lambda: cal_split_sizes(5, True), lambda: PipelineParallelLayerLayout("EL", True)]
)
def test_bools_are_no_sizes(call):
    with pytest.raises(TypeError, match="must be an int, not bool"):
        call()


def test_timeouts_in_seconds():
    given = (2, 2.5, timedelta(minutes=1), math.inf)
    assert [_C.timeout_seconds(timeout) for timeout in given] == [2, 2.5, 60, None]
    for wrong in (0, -1, math.nan, 1e9, timedelta(0)):
        with pytest.raises(ValueError, match="timeout must be more than 0 and at most 10 years"):
            _C.timeout_seconds(wrong)
    for wrong in (True, "5"):
        with pytest.raises(TypeError, match="timeout must be a number of seconds, a timedelta or None"):
            _C.timeout_seconds(wrong)


# The public contract; a name is never removed. Members follow their class.
PUBLIC = {
    "pipecomm_ext": """__version__ info Communicator get_communicator Send Recv Work PipeCommError
        PipeCommTimeout PipeCommPeerLost PipeCommMismatch PipeCommAborted distributed parallel_state
        all_to_all all_to_all_many ulysses_attention zigzag_attention attention_with_cp
        split_forward_gather_backward gather_forward_split_backward
        load_balanced_split_forward_gather_backward load_balanced_gather_forward_split_backward
        packed_data_split_forward_gather_backward packed_data_gather_forward_split_backward
        split_forward_gather_backward_with_cp gather_forward_split_backward_with_cp
        packed_data_split_forward_gather_backward_with_cp packed_data_gather_forward_split_backward_with_cp
        cal_split_sizes cal_split_sizes_multi reorder_output StageRelay vtp_recv_forward vtp_recv_backward
        vtp_send_forward vtp_send_backward""",
    "pipecomm_ext.Communicator": """rank size device transport transport_reason closed connect route
        batch_p2p send recv isend irecv broadcast all_to_all exchange barrier abort close
        __enter__ __exit__""",
    "pipecomm_ext.Work": "wait is_completed synchronize",
    "pipecomm_ext.StageRelay": "send_forward recv_forward send_backward recv_backward relay",
    "pipecomm_ext.distributed": """P2POp batch_isend_irecv send recv isend irecv broadcast all_to_all_single
        all_to_all all_gather all_gather_into_tensor all_gather_single barrier""",
    "pipecomm_ext.parallel_state": """initialize_sequence_parallel get_parallel_state destroy ParallelState
        initialize_pipeline PipelineTopology get_vtp_size_list get_vtp_stage_ranks get_vtp_my_stage_idx
        is_vtp_stage_rank0 get_pipeline_model_parallel_group get_pipeline_model_parallel_next_rank
        get_pipeline_model_parallel_prev_rank get_pipeline_model_parallel_rank
        get_pipeline_model_parallel_world_size get_tensor_model_parallel_group get_tensor_model_parallel_rank
        get_tensor_model_parallel_world_size is_pipeline_first_stage is_pipeline_last_stage""",
    "pipecomm_ext.parallel_state.ParallelState": """is_ulysses_enable is_ring_enable get_ulysses_group
        get_ring_group get_ulysses_group_size get_ring_group_size get_ulysses_rank get_ring_rank""",
    "pipecomm_ext.pipeline_parallel": """P2PCommunicator PipelineConfig recv_forward_with_reqs
        recv_backward_with_reqs send_forward send_backward get_forward_backward_func
        forward_backward_no_pipelining forward_backward_pipelining_without_interleaving
        forward_backward_pipelining_with_interleaving forward_step backward_step custom_backward
        deallocate_output_tensor get_pp_rank_microbatches get_schedule_table convert_schedule_table_to_order
        get_tensor_shapes set_current_microbatch check_first_val_step clear_embedding_activation_buffer
        finish_embedding_wgrad_compute PipelineParallelLayerLayout""",
    "pipecomm_ext.schedules": """gpipe one_f_one_b interleaved_1f1b zb_h1 zb_h2 zb_v dualpipe dualpipev
        u_shaped get_plan Plan check PlanError simulate Costs Timeline draw Executor StepResult Action
        DualPipe DualPipeV WeightGradStore set_p2p_tensor_shapes set_p2p_tensor_dtype""",
    "pipecomm_ext.schedules.Plan": "program to_csv from_csv",
    "pipecomm_ext.schedules.Executor": "step",
}


@pytest.mark.parametrize("place", PUBLIC)
def test_the_public_names_are_there(place):
    path, names = place.split("."), PUBLIC[place].split()
    modules = [name for name in path if name.islower()]
    holder = importlib.import_module(".".join(modules))
    for name in path[len(modules) :]:
        holder = getattr(holder, name)
    missing = [name for name in names if not hasattr(holder, name)]
    assert not missing, f"{place} has no {missing}"


def test_a_plan_has_the_public_attributes():
    plan = gpipe(2, 2)
    for name in "name P M owner next_of prev_of replicas compute program".split():
        assert hasattr(plan, name), name


def test_a_new_python_has_the_public_modules_as_attributes_and_the_same_hashes():
    program = """
import sys, pipecomm_ext
assert "pipecomm_ext.schedules" not in sys.modules, "loaded before use"
for name in ("distributed", "integrations", "parallel_state", "pipeline_parallel", "schedules"):
    assert getattr(pipecomm_ext, name) is sys.modules[f"pipecomm_ext.{name}"]
assert not hasattr(pipecomm_ext, "no_such_module")
assert "transformers" not in sys.modules, "loaded before use"
plan = pipecomm_ext.schedules.dualpipe(4, 8)
print(hash(plan), plan.digest)
"""
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=200).stdout
    plan = dualpipe(4, 8)
    assert printed.split() == [str(hash(plan)), plan.digest]
