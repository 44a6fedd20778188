"""What a user of Megatron-core writes around it: models from a config, a forward step, a training step.

Also the few lines that let it run on CPU ranks. None of this knows pipecomm_ext.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import Timers, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

VOCAB, SEQ_LENGTH, MICRO_BATCH_SIZE, NUM_MICROBATCHES = 64, 32, 2, 8
FLAGS_OF_A_STREAM = ["wait_stream", "wait_event", "record_event", "record", "synchronize", "wait"]


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Maps Megatron's calls of torch.cuda to the CPU."""

    def without_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def on_cpu(*args, device=None, **kwargs):
            return function(*args, device="cpu" if device == "cuda" else device, **kwargs)

        return on_cpu

    stream = SimpleNamespace(**{name: lambda *args, **kwargs: None for name in FLAGS_OF_A_STREAM})
    tracker = SimpleNamespace(
        fork=lambda *name: contextlib.nullcontext(), get_states=dict, set_states=lambda states: None
    )
    type_of = torch.Tensor.type

    def cuda_type(self, *args, **kwargs):
        result = type_of(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.") if isinstance(result, str) else result

    with contextlib.ExitStack() as patches:
        for name in ("zeros", "ones", "empty", "full", "tensor", "arange"):
            patches.enter_context(mock.patch.object(torch, name, without_cuda(getattr(torch, name))))
        for name, value in {
            "current_device": lambda: torch.device("cpu"),
            "current_stream": lambda *device: stream,
            "Stream": lambda *args, **kwargs: stream,
            "Event": lambda *args, **kwargs: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "synchronize": lambda *device: None,
        }.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, value))
        patches.enter_context(mock.patch.object(torch.Tensor, "cuda", lambda self, *args, **kwargs: self))
        patches.enter_context(mock.patch.object(torch.Tensor, "type", cuda_type))
        for name, value in {
            "_CUDA_RNG_STATE_TRACKER": tracker,
            "_CUDA_RNG_STATE_TRACKER_INITIALIZED": True,
            "_get_cuda_rng_state": lambda *args, **kwargs: None,
            "_set_cuda_rng_state": lambda *args, **kwargs: None,
        }.items():
            patches.enter_context(mock.patch.object(tensor_parallel.random, name, value))
        yield


@dataclass(frozen=True)
class Setup:
    """A job. `config`, `ddp` and `optimizer` are fields of Megatron's config classes."""

    pp: int = 2
    vp: int | None = None
    tp: int = 1
    config: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    trains: Callable[[str], bool] = lambda name: True  # whether the parameter of this name is
    ties_embeddings: bool = False
    counts_tokens: bool = False  # the loss function returns a sum and the number of tokens
    has_uneven_lengths: bool = False
    has_timers: bool = False
    starts_from_embeddings: bool = False  # leaves, of which the job wants the gradients


@contextlib.contextmanager
def model_parallel(setup: Setup) -> Iterator[None]:
    """Megatron's parallel_state on the ranks of the default group."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=setup.tp,
        pipeline_model_parallel_size=setup.pp,
        virtual_pipeline_model_parallel_size=setup.vp,
        expert_model_parallel_size=setup.config.get("expert_model_parallel_size", 1),
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


class Trainer:
    """One copy of the model and its training step. Copies of a setup start from equal weights."""

    def __init__(self, setup: Setup, **changed_config: Any):
        self.setup = setup
        self.config = TransformerConfig(
            **{
                "num_layers": 4,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "tensor_model_parallel_size": setup.tp,
                "pipeline_model_parallel_size": setup.pp,
                "virtual_pipeline_model_parallel_size": setup.vp,
                "pipeline_dtype": torch.float32,
                "use_cpu_initialization": True,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "deallocate_pipeline_outputs": True,
                "gradient_accumulation_fusion": False,
                "variable_seq_lengths": setup.has_uneven_lengths,
                "moe_token_dispatcher_type": "alltoall",
                "masked_softmax_fusion": False,
                "bias_dropout_fusion": False,
                "bias_activation_fusion": False,
                **setup.config,
                **changed_config,
            }
        )
        if setup.has_timers:
            self.config.timers = Timers(log_level=2, log_option="minmax")
        torch.manual_seed(5 + parallel_state.get_pipeline_model_parallel_rank())
        self.chunks = [self._chunk(None if setup.vp is None else idx) for idx in range(setup.vp or 1)]
        if self.chunks[0].ddp_config.overlap_grad_reduce:
            no_syncs = [chunk.no_sync for chunk in self.chunks]
            starts = [chunk.start_grad_sync for chunk in self.chunks]
            is_one = len(self.chunks) == 1
            self.config.no_sync_func = no_syncs[0] if is_one else no_syncs
            self.config.grad_sync_func = starts[0] if is_one else starts
        self.config.finalize_model_grads_func = finalize_model_grads
        self.leaves: list[torch.Tensor] = []
        self.optimizer = None
        if setup.optimizer:
            options = {"optimizer": "adam", "lr": 1e-2, "params_dtype": self.config.params_dtype}
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(**{**options, **setup.optimizer}), self.chunks
            )
            self.config.grad_scale_func = self.optimizer.scale_loss

    def _chunk(self, vp_stage: int | None) -> DistributedDataParallel:
        is_end = {"ignore_virtual": False, "vp_stage": vp_stage}
        model = GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_layer_local_spec(self.config.num_moe_experts),
            vocab_size=VOCAB,
            max_sequence_length=SEQ_LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**is_end),
            post_process=parallel_state.is_pipeline_last_stage(**is_end),
            share_embeddings_and_output_weights=self.setup.ties_embeddings,
            mtp_block_spec=self._mtp_spec(),
            vp_stage=vp_stage,
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.setup.trains(name))
        if self.config.bf16 or self.config.fp16:
            model = Float16Module(self.config, model)
        return DistributedDataParallel(
            config=self.config,
            ddp_config=DistributedDataParallelConfig(**self.setup.ddp),
            module=model,
            disable_bucketing=bool(vp_stage),
        )

    def _mtp_spec(self) -> Any:
        spec = get_gpt_layer_local_spec()
        is_used = self.config.mtp_num_layers and parallel_state.is_pipeline_last_stage()
        return get_gpt_mtp_block_spec(self.config, spec, use_transformer_engine=False) if is_used else None

    def _micro_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        for idx in itertools.count():
            generator = torch.Generator().manual_seed(100 * parallel_state.get_data_parallel_rank() + idx)
            length = SEQ_LENGTH - (3 * idx % 11 if self.setup.has_uneven_lengths else 0)
            tokens = torch.randint(0, VOCAB, (MICRO_BATCH_SIZE, length + 1), generator=generator)
            yield {
                "input_ids": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": (torch.rand(MICRO_BATCH_SIZE, length, generator=generator) > 0.2).float(),
                "position_ids": torch.arange(length).expand(MICRO_BATCH_SIZE, length),
            }

    def _loss(self, loss_mask: torch.Tensor, output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return output.detach().clone()
        loss, num_tokens = torch.sum(output.float() * loss_mask), loss_mask.sum().to(torch.int)
        if self.setup.counts_tokens:
            return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}
        loss = loss / num_tokens
        return loss, {"lm loss": loss.detach().clone()}

    def _forward_step(self, data_iterator: Iterator, model: Any) -> tuple[torch.Tensor, Callable]:
        batch = next(data_iterator)
        if self.setup.starts_from_embeddings:
            batch["decoder_input"] = torch.randn(
                SEQ_LENGTH, MICRO_BATCH_SIZE, self.config.hidden_size, requires_grad=True
            )
            self.leaves.append(batch["decoder_input"])
        return model(attention_mask=None, **batch), functools.partial(self._loss, batch["loss_mask"])

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def step(self, get_forward_backward_func: Callable, **options: Any) -> list:
        """A training step in the form of Megatron's training loop, which passes neither p2p_communicator nor
        pg_collection."""
        self.zero_grad()
        return self.run(get_forward_backward_func, **options)

    def run(self, get_forward_backward_func: Callable, **options: Any) -> list:
        """The same, whose gradients are added to those that are there."""
        iterators = [self._micro_batches() for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iterators if self.setup.vp else iterators[0],
            model=self.chunks,
            num_microbatches=NUM_MICROBATCHES,
            seq_length=SEQ_LENGTH,
            micro_batch_size=MICRO_BATCH_SIZE,
            decoder_seq_length=SEQ_LENGTH,
            **{"forward_only": False, **options},
        )


def reported(losses: list) -> list[torch.Tensor]:
    """What the loss functions gave, as tensors; the same on every rank of a pipeline but in number."""
    return [loss["lm loss"] if isinstance(loss, dict) else loss for loss in losses]
