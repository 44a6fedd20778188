"""The parts of the schedules that need no ranks: counts, orders, losses, steps, deferred gradients."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipecomm_ext.pipeline_parallel import (
    PipelineConfig,
    backward_step,
    check_first_val_step,
    clear_embedding_activation_buffer,
    convert_schedule_table_to_order,
    custom_backward,
    deallocate_output_tensor,
    finish_embedding_wgrad_compute,
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    forward_step,
    get_forward_backward_func,
    get_pp_rank_microbatches,
    get_schedule_table,
    get_tensor_shapes,
    set_current_microbatch,
)
from pipecomm_ext.pipeline_parallel.loss_scaling import auxiliary_loss_scales, scaled_loss
from pipecomm_ext.schedules import interleaved_1f1b, one_f_one_b

# ---- counts and orders ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "rank", "num_micro", "vp_size", "group", "warmup", "remaining"),
    [
        (4, 0, 8, None, None, 3, 5),
        (4, 3, 8, None, None, 0, 8),
        (4, 0, 2, None, None, 2, 0),
        (4, 0, 8, 2, 4, 10, 6),
        (4, 3, 8, 2, 4, 4, 12),
        (2, 0, 5, 2, 3, 5, 5),
        (2, 1, 5, 2, 3, 3, 7),
        (4, 0, 4, 2, 4, 8, 0),
        (8, 0, 8, 4, 8, 32, 0),
        (1, 0, 8, None, None, 0, 8),
    ],
)
def test_warmup_counts(num_ranks, rank, num_micro, vp_size, group, warmup, remaining):
    p2p = SimpleNamespace(
        total_stages=num_ranks, current_stage=rank, virtual_pipeline_model_parallel_size=vp_size
    )
    total = num_micro * (vp_size or 1)
    arguments, keywords = (num_micro, vp_size or 1, group), {"p2p_communicator": p2p}
    counts = get_pp_rank_microbatches(*arguments, **keywords)
    assert counts == (total, warmup == total, warmup, remaining)
    evaluation = get_pp_rank_microbatches(*arguments, forward_only=True, **keywords)
    assert evaluation == (total, True, total, 0)
    plan = one_f_one_b(num_ranks, num_micro)
    if vp_size is not None:
        plan = interleaved_1f1b(num_ranks, num_micro, vp_size, group)
    assert [action.kind for action in plan.compute[rank]].index("B") == min(total, warmup + 1)


def test_combined_moe_overlap_adds_a_warmup_forward():
    p2p = SimpleNamespace(total_stages=4, current_stage=3, virtual_pipeline_model_parallel_size=2)
    assert get_pp_rank_microbatches(8, 2, 4, False, True, p2p) == (16, False, 5, 11)
    assert get_pp_rank_microbatches(8, 1, None) == (8, False, 0, 8)


def test_the_schedule_table_and_its_order():
    table = get_schedule_table(5, 2, 3)
    assert [micro for micro, _ in table] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [chunk for _, chunk in table] == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    order = convert_schedule_table_to_order(5, 2, table)
    assert order == [1, 1, 1, 2, 2, 2, -2, 1, -2, 1, -2, 2, -1, 2, -1, -1, -2, -2, -1, -1]
    assert get_schedule_table(2, 2, 4) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert get_schedule_table(0, 2, 4) == []


def test_orders_are_those_of_the_plans():
    for num_ranks, num_micro, num_chunks, group in [(2, 5, 2, 3), (4, 8, 3, 4), (3, 3, 2, 3)]:
        plan = interleaved_1f1b(num_ranks, num_micro, num_chunks, group)
        for rank in range(num_ranks):
            p2p = SimpleNamespace(
                total_stages=num_ranks, current_stage=rank, virtual_pipeline_model_parallel_size=num_chunks
            )
            warmup = get_pp_rank_microbatches(num_micro, num_chunks, group, p2p_communicator=p2p)[2]
            order = convert_schedule_table_to_order(
                warmup, num_chunks, get_schedule_table(num_micro, num_chunks, group)
            )
            assert order == [
                (1 if kind == "F" else -1) * (stage // num_ranks + 1) for kind, stage, _ in plan.compute[rank]
            ]


def test_tensor_shapes():
    tp, cp = SimpleNamespace(size=lambda: 2), SimpleNamespace(size=lambda: 4)

    def shapes(config, **changes):
        arguments = {"seq_length": 64, "micro_batch_size": 3, "decoder_seq_length": None}
        return get_tensor_shapes(config=config, **{**arguments, "tp_group": tp, "cp_group": cp, **changes})

    split = PipelineConfig(hidden_size=8, sequence_parallel=True)
    assert shapes(PipelineConfig(hidden_size=8)) == [(16, 3, 8)]
    assert shapes(split) == [(8, 3, 8)]
    assert shapes(split, decoder_seq_length=32) == [(4, 3, 8)]
    assert shapes(split, tp_group=None, cp_group=None) == [(64, 3, 8)]
    for name in ("variable_seq_lengths", "mtp_standalone"):
        assert shapes(SimpleNamespace(**{name: True})) == [()]
    with pytest.raises(ValueError, match="hidden_size must be set"):
        shapes(PipelineConfig())


def test_which_schedule():
    assert get_forward_backward_func(1, None) is forward_backward_no_pipelining
    assert get_forward_backward_func(1, 2) is forward_backward_no_pipelining
    assert get_forward_backward_func(2, None) is forward_backward_pipelining_without_interleaving
    assert get_forward_backward_func(pp_size=2, vp_size=1) is forward_backward_pipelining_with_interleaving
    assert get_forward_backward_func() is forward_backward_no_pipelining
    several = type("MultiModuleProcessGroupCollection", (), {})()
    with pytest.raises(ValueError, match="pipelines of several modules are not supported"):
        get_forward_backward_func(2, None, several)


def test_the_first_validation_step():
    assert [check_first_val_step(first, True, cond) for first in (True, False) for cond in (True, False)] == [
        True, False, False, False,
    ]  # fmt: skip
    assert check_first_val_step(None, True, True) and check_first_val_step(False, False, True)


# ---- losses -----------------------------------------------------------------------------------------------


def test_how_losses_are_scaled():
    def scale(values, is_per_token=False):
        return scaled_loss(values, num_microbatches=4, cp_size=2, is_per_token=is_per_token)

    loss = torch.tensor(12.0)
    scaled, num_tokens, data = scale((loss, "data"))
    assert (scaled.item(), int(num_tokens), data) == (6.0, 0, "data")
    assert scale((loss, "data"), is_per_token=True)[0] == 6
    for tokens, expected in [(3, 1.0), (torch.tensor(3), 1.0), (torch.tensor(0), 3.0)]:
        assert scale((loss, tokens, "data"))[0] == expected
        per_token = scale((loss, tokens, "data"), is_per_token=True)
        assert per_token[0] == 12 and per_token[1] is tokens
    assert loss == 12
    for wrong, message in [((loss,), "not 1 values"), (loss, "not Tensor")]:
        with pytest.raises(ValueError, match=message):
            scale(wrong)


def test_auxiliary_loss_scales():
    config = PipelineConfig(
        num_moe_experts=8,
        mtp_num_layers=1,
        experimental_attention_variant="dsa",
        grad_scale_func=lambda loss: loss * 3,
    )

    def scales(**settings) -> dict[str, float]:
        vars(config).update(settings)
        return {
            kind: scale.item()
            for kind, scale in auxiliary_loss_scales(config, num_microbatches=2, cp_size=4).items()
        }

    assert scales() == {"moe": 6.0, "mtp": 1.5, "attention": 6.0}
    assert scales(calculate_per_token_loss=True) == {"moe": 3.0, "mtp": 3.0, "attention": 3.0}
    assert scales(moe_grad_scale_func=lambda: 5, mtp_grad_scale_func=lambda: torch.tensor([7.0])) == {
        "moe": 5, "mtp": 7, "attention": 3,
    }  # fmt: skip
    assert scales(moe_grad_scale_func=None, mtp_grad_scale_func=None, grad_scale_func=None)["moe"] == 1
    assert auxiliary_loss_scales(PipelineConfig(), num_microbatches=2, cp_size=4) == {}
    with pytest.raises(ValueError, match="mtp_grad_scale_func must give one element, not 2"):
        scales(mtp_grad_scale_func=lambda: torch.ones(2))


class Scaler:
    """A class like Megatron's, which stores the scale that is set."""

    def __init__(self):
        self.scales = []

    def set_loss_scale(self, scale):
        self.scales.append(scale.item())


MEGATRONS_SCALERS = {
    "num_moe_experts": ("moe.moe_utils", "MoEAuxLossAutoScaler"),
    "mtp_num_layers": ("multi_token_prediction", "MTPLossAutoScaler"),
    "experimental_attention_variant": ("experimental_attention_variant.dsa", "DSAIndexerLossAutoScaler"),
}


def test_megatrons_scalers_are_told_the_scale_of_auxiliary_losses(monkeypatch):
    scalers = {feature: Scaler() for feature in MEGATRONS_SCALERS}
    for feature, (module, name) in MEGATRONS_SCALERS.items():
        full_name = f"megatron.core.transformer.{module}"
        monkeypatch.setitem(sys.modules, full_name, SimpleNamespace(**{name: scalers[feature]}))
    groups = SimpleNamespace(cp=SimpleNamespace(size=lambda: 6))
    settings = {"num_moe_experts": 8, "grad_scale_func": lambda loss: loss * 4}
    no_pipelining(Model(PipelineConfig(**settings)), 3, pg_collection=groups)
    assert [scaler.scales for scaler in scalers.values()] == [[8.0] * 3, [], []]
    settings |= {"mtp_num_layers": 1, "experimental_attention_variant": "dsa"}
    no_pipelining(Model(PipelineConfig(calculate_per_token_loss=True, **settings)), 1, pg_collection=groups)
    assert [scaler.scales[-1] for scaler in scalers.values()] == [4.0] * 3


@pytest.mark.parametrize("feature", MEGATRONS_SCALERS)
def test_auxiliary_losses_that_nobody_scales_are_refused(feature):
    value = "dsa" if feature == "experimental_attention_variant" else 2
    model = Model(PipelineConfig(**{feature: value}))
    with pytest.raises(ValueError, match=f"config.{feature} needs config.set_auxiliary_loss_scale"):
        no_pipelining(model, 1)
    model.config.set_auxiliary_loss_scale = lambda kind, scale: None
    no_pipelining(model, 1)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("overlap_moe_expert_parallel_comm", True, False),
        ("delay_wgrad_compute", True, False),
        ("hybrid_context_parallel", True, False),
        ("fine_grained_activation_offloading", True, False),
        ("moe_paged_stash", True, False),
        ("cuda_graph_impl", "local", "none"),
    ],
)
def test_settings_that_change_what_training_computes_are_refused(name, bad, good):
    with pytest.raises(ValueError, match=f"these schedules do not support config.{name}"):
        no_pipelining(Model(SimpleNamespace(**{name: bad})), 1)
    no_pipelining(Model(SimpleNamespace(**{name: good})), 1)


# ---- steps ------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.config = config or PipelineConfig()
        self.calls = []

    def set_input_tensor(self, tensors):
        self.calls.append(tensors)
        self.inputs = tensors

    def set_is_first_microbatch(self):
        self.calls.append("first")


def module_of(**members) -> nn.Module:
    module = nn.Module()
    for name, member in members.items():
        setattr(module, name, nn.ModuleList(member) if isinstance(member, list) else member)
    return module


def wrapped(model: nn.Module) -> nn.Module:
    return module_of(module=module_of(module=model))


def test_a_forward_step_in_the_middle_and_at_the_end():
    model, x, scales = Model(), torch.ones(3), []
    config = PipelineConfig(num_moe_experts=2, set_auxiliary_loss_scale=lambda *args: scales.append(args))

    def func(iterator, wrapper, *flags):
        output = next(iterator) * wrapper.module.module.inputs[0]
        return output, lambda out: (out.sum(), torch.tensor(6), flags)

    def step(input_tensor, **kwargs):
        store = []
        arguments = (func, iter([5]), wrapped(model), 2, input_tensor, store, config, 1)
        output, num_tokens = forward_step(*arguments, **kwargs)
        return output, int(num_tokens), store

    output, num_tokens, store = step(x, is_last_stage=False, is_first_microbatch=True)
    assert output.tolist() == [5, 5, 5] and (num_tokens, store) == (0, [])
    assert model.calls == ["first", [x]] and scales[0][0] == "moe" and scales[0][1].item() == 0.5
    output, _, _ = step([x], is_last_stage=False)
    assert isinstance(output, list) and output[0].tolist() == [5, 5, 5]
    output, num_tokens, store = step([x], checkpoint_activations_microbatch=True)
    assert output[0].item() == 15 / 6 / 2 and (num_tokens, store) == (6, [(True,)])


def test_what_is_stored_of_a_forward_step():
    for loss_func, collects, expected in [
        (None, False, "output"),
        (lambda output, non_loss_data: (output, non_loss_data), True, ("output", True)),
    ]:
        store, func = [], lambda *_: ("output", loss_func)  # noqa: B023
        forward(func, Model(), PipelineConfig(), store=store, collect_non_loss_data=collects)
        assert store == [expected]


def test_a_model_must_take_its_input_and_its_chunk():
    with pytest.raises(ValueError, match="a Linear, has no set_input_tensor"):
        forward(lambda *_: (None, None), nn.Linear(1, 1), PipelineConfig())
    model = Model()
    model.vp_stage = 1
    with pytest.raises(ValueError, match="vp_stage is 0, but the model says 1"):
        forward(lambda *_: (torch.ones(1), None), model, PipelineConfig(), vp_stage=0)


def forward(func, model, config, input_tensor=None, store=None, **kwargs):
    """One forward step of one micro-batch without data."""
    store = [] if store is None else store
    return forward_step(func, None, model, 1, input_tensor, store, config, 1, **kwargs)


def test_autocast():
    config, seen = PipelineConfig(enable_autocast=True, autocast_dtype=torch.bfloat16, device="cpu"), []

    def func(iterator, model):
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return torch.ones(1), None

    for input_tensor in (None, torch.ones(2)):
        forward(func, Model(), config, input_tensor, is_last_stage=False)
    assert seen == [torch.bfloat16] * 2


@pytest.mark.parametrize("frees", [False, True])
def test_a_backward_step_through_several_outputs(frees):
    config = PipelineConfig(deallocate_pipeline_outputs=frees)
    x, positions = torch.ones(3, requires_grad=True), torch.arange(3)
    outputs = [x * 2, positions, x * x * 3, torch.ones(1)]
    grads = [torch.ones(3), None, torch.full((3,), 10.0), None]
    if frees:
        deallocate_output_tensor([outputs[0], outputs[2]], True)
        assert outputs[0].shape == outputs[2].shape == (1,)
    assert backward_step([x, positions, None], outputs, grads, config)[1:] == [None, None]
    assert x.grad.tolist() == [62.0] * 3


def test_a_backward_step_from_a_loss():
    config = PipelineConfig(grad_scale_func=lambda loss: loss * 8)
    x = torch.ones(3, requires_grad=True)
    assert backward_step(x, x.sum(), None, config).tolist() == [8, 8, 8]
    hidden = x * 1  # not a leaf
    assert backward_step([hidden], [hidden.sum()], [None], config)[0].tolist() == [8, 8, 8]
    frozen = torch.ones(3)
    assert backward_step(frozen, frozen.sum(), None, PipelineConfig()) is None
    assert backward_step(None, frozen.sum(), None, PipelineConfig()) is None
    with pytest.raises(ValueError, match="2 outputs and 1 gradients"):
        backward_step([x], [x, x], [None], config)


def test_outputs_without_a_gradient():
    """They are skipped, unless none has one: then the first is a loss."""
    x, config = torch.ones(2, requires_grad=True), PipelineConfig(grad_scale_func=lambda loss: loss * 8)
    for grads, expected in [([torch.ones(2), None], 2), ([None, torch.ones(2)], 10)]:
        x.grad = None
        assert backward_step([x], [x * 2, x * 10], grads, config)[0].tolist() == [expected] * 2
    x.grad = None
    assert backward_step([x], [x.sum(), x * 10], [None, None], config)[0].tolist() == [8, 8]
    for outputs in ([x * 2], [x * 2, x * 10]):
        with pytest.raises(ValueError, match="2 elements and no gradient; only a loss"):
            backward_step([x], outputs, [None] * len(outputs), config)


def test_a_backward_step_with_and_without_a_model_type():
    config = PipelineConfig(grad_scale_func=lambda loss: loss * 8)
    x, kind = torch.ones(3, requires_grad=True), "encoder_or_decoder"
    for step in (
        lambda: backward_step(x, x.sum(), None, config=config),
        lambda: backward_step(x, x.sum(), None, kind, config),
        lambda: backward_step(x, x.sum(), None, kind, config=config),
        lambda: backward_step(x, x.sum(), None, model_type=kind, config=config),
    ):
        x.grad = None
        assert step().tolist() == [8, 8, 8]
    with pytest.raises(TypeError, match="needs a config"):
        backward_step(x, x.sum(), None)


def test_freed_outputs_and_their_backward():
    x = torch.ones(4, requires_grad=True)
    outputs = {"a": x * 2, "b": [x * 3, None]}
    deallocate_output_tensor(outputs)
    assert outputs["a"].shape == (4,)
    deallocate_output_tensor(outputs, True)
    assert outputs["a"].shape == outputs["b"][0].shape == (1,)
    custom_backward(outputs["a"], torch.arange(4.0))
    assert x.grad.tolist() == [0, 2, 4, 6]
    loss = x.sum()
    custom_backward(loss, None)
    assert x.grad.tolist() == [1, 3, 5, 7]
    for error, message, call in [
        (ValueError, "a view cannot be freed", lambda: deallocate_output_tensor((x * 2).view(2, 2), True)),
        (TypeError, "must be a torch.Tensor, not int", lambda: deallocate_output_tensor(3, True)),
        (ValueError, "output has 4 elements", lambda: custom_backward(x * 2, torch.ones(4))),
        (TypeError, "output must be a torch.Tensor", lambda: custom_backward(None, None)),
        (TypeError, "grad_output must be a torch.Tensor or None", lambda: custom_backward(loss, 1.0)),
    ]:
        with pytest.raises(error, match=message):
            call()


def test_the_current_microbatch_of_layers():
    layers = [nn.Linear(1, 1) for _ in range(5)]
    model = module_of(decoder=module_of(layers=layers[:2]))
    set_current_microbatch(wrapped(model), 3)
    assert [layer.current_microbatch for layer in layers[:2]] == [3, 3]
    model.mtp = module_of(layers=[module_of(mtp_model_layer=layer) for layer in layers[2:4]])
    model.vision_model = module_of(decoder=module_of(layers=layers[4:]))
    set_current_microbatch(wrapped(model), 4)
    assert [layer.current_microbatch for layer in layers] == [4] * 5
    set_current_microbatch(nn.Linear(1, 1), 3)


# ---- deferred gradients of the embedding ------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("has_main_grad", [False, True])
def test_deferred_embedding_gradients(shared, has_main_grad):
    config, layer = PipelineConfig(defer_embedding_wgrad_compute=True), nn.Linear(4, 6, bias=False)
    weight = layer.weight
    module = module_of(
        output_layer=layer,
        share_embeddings_and_output_weights=shared,
        shared_embedding_or_output_weight=lambda: weight,
    )
    module.embedding_activation_buffer, module.grad_output_buffer = ["stale"], []
    assert clear_embedding_activation_buffer(config, [nn.Linear(1, 1), wrapped(module)], True) is module
    assert module.embedding_activation_buffer == []
    if has_main_grad:
        weight.main_grad = torch.ones(6, 4)
    activations, grads = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 6)
    module.embedding_activation_buffer += list(activations)
    module.grad_output_buffer += list(grads)
    finish_embedding_wgrad_compute(config, module, True, None)
    expected = torch.einsum("nsbo,nsbi->oi", grads, activations)
    torch.testing.assert_close(weight.main_grad - 1 if has_main_grad else weight.grad, expected)
    assert module.embedding_activation_buffer == module.grad_output_buffer == []


def test_nothing_is_deferred_elsewhere():
    on, off = PipelineConfig(defer_embedding_wgrad_compute=True), PipelineConfig()
    assert clear_embedding_activation_buffer(off, nn.Linear(1, 1), True) is None
    assert clear_embedding_activation_buffer(on, nn.Linear(1, 1), False) is None
    finish_embedding_wgrad_compute(off, None, True, None)
    finish_embedding_wgrad_compute(on, None, False, None)
    with pytest.raises(ValueError, match="an embedding_activation_buffer"):
        clear_embedding_activation_buffer(on, nn.Linear(1, 1), True)
    uneven = SimpleNamespace(embedding_activation_buffer=[1], grad_output_buffer=[])
    with pytest.raises(ValueError, match="1 activations and 0 gradients"):
        finish_embedding_wgrad_compute(on, uneven, True, None)


# ---- without pipelining -----------------------------------------------------------------------------------


def no_pipelining(model, num_microbatches, **kwargs):
    def func(iterator, model):
        x = next(iterator)
        return model.weight * x, lambda output: (output.sum(), {"x": x})

    return forward_backward_no_pipelining(
        forward_step_func=func,
        data_iterator=iter([1.0, 2.0, 3.0]),
        model=model,
        num_microbatches=num_microbatches,
        seq_length=0,
        micro_batch_size=0,
        **kwargs,
    )


def test_no_pipelining():
    calls = []
    config = PipelineConfig(
        no_sync_func=lambda: contextlib.ExitStack(),
        finalize_model_grads_func=lambda *args, **kwargs: calls.append((args, kwargs)),
    )
    model = Model(config)
    assert no_pipelining([model], 3, force_all_reduce=True) == [{"x": 1.0}, {"x": 2.0}, {"x": 3.0}]
    assert model.weight.grad.item() == 2
    [((models, num_tokens), kwargs)] = calls
    assert models == [model] and num_tokens is None and kwargs["force_all_reduce"] is True
    groups = SimpleNamespace(tp=None, cp=SimpleNamespace(size=lambda: 2))
    no_pipelining(model, 3, pg_collection=groups)
    assert model.weight.grad.item() == 6 and calls[1][1]["pg_collection"] is groups
    no_pipelining(model, 3, forward_only=True)
    assert model.weight.grad.item() == 6 and len(calls) == 2


def test_the_finalizing_hook_gets_what_its_version_of_megatron_takes():
    calls = []

    def core_0_20(model, num_tokens=None, pg_collection=None, force_all_reduce=False):
        calls.append((pg_collection, force_all_reduce))

    def core_0_15(model, num_tokens=None, pg_collection=None):
        calls.append((pg_collection,))

    def core_0_12(model, num_tokens=None):
        calls.append(())

    groups = SimpleNamespace(tp=None, cp=None)
    for hook, expected in [(core_0_20, (groups, False)), (core_0_15, (groups,)), (core_0_12, ())]:
        model = Model(PipelineConfig(finalize_model_grads_func=hook))
        no_pipelining(model, 1, pg_collection=groups)
        no_pipelining(model, 1)
        assert calls == [expected, tuple(None if value is groups else value for value in expected)]
        calls.clear()
        if hook is core_0_20:
            no_pipelining(model, 1, force_all_reduce=True)
            assert calls.pop() == (None, True)
        else:
            with pytest.raises(TypeError, match="force_all_reduce"):
                no_pipelining(model, 1, force_all_reduce=True)


def test_no_pipelining_refuses_what_it_cannot_do():
    model = Model()
    for error, message, arguments in [
        (ValueError, "adjust_tensor_shapes_fn has nothing to adjust", {"adjust_tensor_shapes_fn": print}),
        (ValueError, "M must be at least 1", {"num_microbatches": 0}),
        (ValueError, "model must be one, or a list of one, not of 2", {"model": [model, model]}),
        (ValueError, "has no config", {"model": nn.Linear(1, 1)}),
    ]:
        with pytest.raises(error, match=message):
            no_pipelining(**{"model": model, "num_microbatches": 1, **arguments})
