"""Batches that are not split right before the model, and what the package keeps of them."""

from __future__ import annotations

import gc
import io
import os

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_transformers_integration import check_works, padding, registered, tokens
from test_transformers_models import DECODER, ENCODER, OPT, make_model

from pipecomm_ext.parallel_state import ParallelState


def split_by_a_worker(integration, batch, group):
    """As a DataLoader does in collate_fn; test ranks are daemons, in which it cannot start workers."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            piece = io.BytesIO()
            torch.save(integration.split_batch(batch, group), piece)
            os.write(writer, piece.getvalue())  # less than the capacity of a pipe
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        piece = torch.load(io.BytesIO(pipe.read()))
    os.wait()
    return piece


MODELS = {
    "roberta": ("Roberta", ENCODER | {"is_decoder": True}, {}, "counts positions by its tokens"),
    "opt": ("OPT", OPT, {"attention_mask": padding(13, "left", 4)}, "counts positions by attention_mask"),
}


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_positions_of_a_batch_that_a_loader_has_split(world, name):
    """Its workers are separate processes, so this one has not seen the batch."""
    kind, options, given, text = MODELS[name]
    integration = registered(None)
    piece = split_by_a_worker(integration, {"input_ids": tokens(13), **given}, None)
    model = make_model(kind, options, "pipecomm_ulysses")
    with pytest.raises(ValueError, match=f"{text}.* count from 0: give split_batch"):
        model(**piece)
    check_works(world, integration, world.comm)


@on_ranks(2)
def test_positions_that_are_given_do_not_depend_on_earlier_batches(world):
    """Positions from 0 are refused, and others accepted, in either order."""
    integration, comm = registered(world.comm), world.comm
    model = make_model(*MODELS["roberta"][:2], "pipecomm_ulysses")
    from_0 = {"input_ids": tokens(12), "position_ids": torch.arange(12).expand(2, 12)}
    for _ in range(2):
        with pytest.raises(ValueError, match="counts positions by its tokens"):
            model(**integration.split_batch(from_0, comm))
        model(**integration.split_batch(from_0 | {"position_ids": from_0["position_ids"] + 1}, comm))
        integration.split_batch({"input_ids": tokens(12)}, comm)


@on_ranks(2)
def test_labels_of_a_loader_in_a_group_of_one_rank(world):
    """They are shifted there, too, and a model that expects the tokens' own labels must refuse them."""
    groups = [dist.new_group([rank]) for rank in range(world.size)]
    alone = groups[world.rank]
    integration = registered(alone)
    piece = split_by_a_worker(integration, {"input_ids": tokens(13), "labels": tokens(13)}, alone)
    model = make_model("Bert", ENCODER, "pipecomm_ulysses", "ForMaskedLM")
    with pytest.raises(ValueError, match="cannot take the labels that split_batch"):
        model(**piece)


@on_ranks(2)
def test_no_tensor_of_a_batch_is_kept(world):
    integration = registered(world.comm)
    state = ParallelState(world.comm)

    def count_tensors():
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    integration.split_batch({"input_ids": tokens(14)}, state)
    before = count_tensors()
    lengths = range(15, 40)
    for length in lengths:
        integration.split_batch({"input_ids": tokens(length)}, state)
    # Tensors left by earlier tests may be freed meanwhile.
    assert count_tensors() < before + len(lengths)


@on_ranks(2)
def test_a_model_of_a_module_that_is_not_registered(world):
    """As with code that was executed from a text."""
    integration, comm = registered(world.comm), world.comm
    names = {"__name__": "nowhere"}
    exec("from transformers import LlamaForCausalLM\nclass Mine(LlamaForCausalLM): pass", names)
    config = make_model("Llama", DECODER, "pipecomm_ulysses").config
    model = names["Mine"]._from_config(config, attn_implementation="pipecomm_ulysses")
    model(**integration.split_batch({"input_ids": tokens(9)}, comm))
    check_works(world, integration, comm)
