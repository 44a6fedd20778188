"""Mutations of the library, over all layers, and the tests that must detect them (mutations.py).

Each is a bug that would affect users. `old` is in the file exactly once; when the code changes, its mutation
is rewritten. `tests` are files, the cheapest first: those of tests/cpp need no module.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = [
    # ---- csrc/plan
    Mutation(
        "split-remainder-goes-last",
        "csrc/plan/split.cpp",
        "++sizes[i];",
        "++sizes[world_size - 1 - i];",
        ("tests/cpp/test_plan.cpp", "tests/test_split_gather.py"),
    ),
    Mutation(
        "sends-share-a-wrong-copy",  # peers with the same number of boxes get the same data
        "csrc/plan/lower.cpp",
        "earlier.first->boxes == send.boxes;",
        "earlier.first->boxes.size() == send.boxes.size();",
        ("tests/cpp/test_exchange.cpp", "tests/test_all_to_all.py"),
    ),
    # ---- csrc/copy
    Mutation(
        "copy-loses-the-last-bytes",  # of a run that is no multiple of a cache line
        "csrc/copy/copy_cpu.cpp",
        "  if (slab == num_slabs) return bytes;\n",
        "",
        ("tests/cpp/test_copy_cpu.cpp", "tests/test_all_to_all.py"),
    ),
    Mutation(
        "bf16-is-cut-off",  # not rounded
        "csrc/copy/float_formats.h",
        "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
        "bits >> 16",
        ("tests/cpp/test_copy_cpu.cpp", "tests/test_split_gather.py"),
    ),
    # ---- csrc/message
    Mutation(
        "dtypes-are-not-compared",  # fp16 arrives in a tensor of bf16
        "csrc/message/descriptor.cpp",
        "(dtype == other.dtype && num_dims == other.num_dims && shape == other.shape)",
        "(num_dims == other.num_dims && shape == other.shape)",
        ("tests/cpp/test_operation.cpp", "tests/test_bad_calls.py"),
    ),
    Mutation(
        "done-operation-keeps-tensors",  # while its handle exists
        "csrc/message/operation.cpp",
        "  const auto kept = std::move(kept_);\n",
        "",
        ("tests/cpp/test_operation.cpp", "tests/test_lifetime.py"),
    ),
    # ---- csrc/transport/tcp
    Mutation(
        "window-is-never-given-back",  # small messages stop after 4 MiB
        "csrc/transport/tcp/peer_link.cpp",
        "  channel.unanswered_bytes -= inline_bytes(*request);\n",
        "",
        ("tests/cpp/test_peer_link.cpp", "tests/test_p2p.py"),
    ),
    Mutation(
        "late-peer-is-not-told",  # of a failure before the two have met
        "csrc/transport/tcp/tcp_peers.cpp",
        "    peer.connection.link().say_failure(*failure_);\n",
        "",
        ("tests/cpp/test_tcp.cpp", "tests/test_faults.py"),
    ),
    Mutation(
        "consequence-before-cause",  # "has closed" is reported before the failure that made the peer close
        "csrc/transport/tcp/tcp_peers.cpp",
        "  settle(false);\n",
        "  settle(false);\n  settle(true);\n",
        ("tests/cpp/test_tcp.cpp", "tests/cpp/test_collective_line.cpp", "tests/test_faults.py"),
    ),
    # ---- csrc/transport/shm
    Mutation(
        "slow-reader-is-overtaken",  # the ring of a broadcast is overwritten before it has been read
        "csrc/transport/shm/multicast.cpp",
        "if (used + record_span(static_cast<uint64_t>(chunk)) > memory_.num_bytes) return false;",
        "if (used > memory_.num_bytes) return false;",
        ("tests/cpp/test_shm.cpp", "tests/cpp/test_fuzz_shm.cpp", "tests/test_shm.py"),
    ),
    Mutation(
        "verdict-is-overwritten",  # about one message by that about the next
        "csrc/transport/shm/lane.cpp",
        "if (leaves_verdict && lane_.has_verdict.load() != 0)",
        "if (false)",
        ("tests/cpp/test_shm.cpp", "tests/cpp/test_fuzz_shm.cpp", "tests/test_bad_calls.py"),
    ),
    Mutation(
        "window-is-not-checked",  # a broken peer makes this rank write where it must not
        "csrc/transport/shm/window.cpp",
        "        part.offset_bytes > receiver.window_bytes() - *span || part.position_bytes < position ||\n",
        "        part.position_bytes < position ||\n",
        ("tests/cpp/test_shm.cpp", "tests/cpp/test_fuzz_shm.cpp", "tests/test_shm.py"),
    ),
    # ---- csrc/routes
    Mutation(
        "leaves-before-it-has-told",  # a failed rank ends before neighbours that still look for it learn why
        "csrc/routes/routed_transport.cpp",
        "  if (!has_met_all()) say_farewell();\n",
        "",
        ("tests/cpp/test_routed.cpp", "tests/test_faults.py"),
    ),
    # ---- csrc/engine
    Mutation(
        "last-failure-counts",  # and not the first one
        "csrc/engine/dispatch_end.cpp",
        "if (failure_ || closed()) return;",
        "if (closed()) return;",
        ("tests/cpp/test_communicator.cpp", "tests/test_faults.py"),
    ),
    Mutation(
        "channel-order-is-lost",  # an exchange overtakes those that wait on its channel
        "csrc/engine/sequencer.cpp",
        "if (steps_.empty() && (!after ||",
        "if ((!after ||",
        ("tests/cpp/test_communicator.cpp", "tests/test_stage_relay.py"),
    ),
    Mutation(
        "plan-of-other-strides",  # what was prepared for one layout of a tensor serves another one
        "csrc/engine/prepared_exchange.cpp",
        "if (!(tensor.strides == entry.strides[idx++])) return false;",
        "if (tensor.strides.size() != entry.strides[idx++].size()) return false;",
        (
            "tests/cpp/test_exchange.cpp",
            "tests/cpp/test_staging.cpp",
            "tests/test_distributed.py",
        ),
    ),
    Mutation(
        "tree-takes-other-arguments",  # ranks of a large group call a collective with different arguments
        "csrc/engine/agreement_tree.cpp",
        "other.objects | (common != other.common ? 1 : 0);",
        "other.objects;",
        (
            "tests/cpp/test_collective_line.cpp",
            "tests/cpp/test_scale_model.cpp",
            "tests/test_communicator.py",
        ),
    ),
    Mutation(
        "deadline-runs-while-queued",  # an exchange that follows others times out early
        "csrc/engine/host_execution.cpp",
        "                         operation->restart(dispatch_.deadline_from_now());\n",
        "",
        ("tests/cpp/test_communicator.cpp", "tests/test_stage_relay.py"),
    ),
    Mutation(
        "streams-do-not-wait",  # for the latest operation of their lane on another stream
        "csrc/engine/device/device_execution.cpp",
        "latest.stream != stream && latest.capture",
        "latest.stream == stream && latest.capture",
        ("tests/cpp/test_device.cpp", "tests/cpp/test_device_lanes.cpp"),
    ),
    Mutation(
        "packed-sends-are-freed-early",  # the memory of an asynchronous send is reused before it is sent
        "csrc/engine/device/device_execution.cpp",
        "    if (is_async && packed) operation->keep(packed);\n",
        "",
        ("tests/cpp/test_device_strides.cpp", "tests/cpp/test_device.cpp"),
    ),
    Mutation(
        "early-claims-are-forgotten",  # a mismatch over NCCL is not found if the peer was first
        "csrc/engine/device/message_check.cpp",
        "    if (order.claims.size() < kMaxClaimsAhead) order.claims.emplace(theirs.seq, claim);\n",
        "",
        ("tests/cpp/test_device_checks.cpp", "tests/cpp/test_device.cpp"),
    ),
    # ---- csrc/bindings
    Mutation(
        "receive-bumps-no-version",  # autograd does not see that a saved tensor was overwritten
        "csrc/bindings/communicator.cpp",
        "  if (access == Access::write) written_.push_back(std::move(argument.tensor));\n",
        "",
        ("tests/test_p2p.py",),
    ),
    # ---- Python: core, communicator, distributed, parallel_state
    Mutation(
        "only-some-ranks-disagree",  # the others continue, and hang later
        "python/pipecomm_ext/core/rendezvous.py",
        "for rank, other in enumerate(everybody):",
        "for rank, other in enumerate(everybody[: self.rank + 1]):",
        ("tests/test_topology.py", "tests/test_communicator.py"),
    ),
    Mutation(
        "refused-on-another-channel",
        "python/pipecomm_ext/communicator/communicator.py",
        "self._c.refuse(op, summary_of(error), members, channel)",
        "self._c.refuse(op, summary_of(error), members)",
        ("tests/test_communicator.py", "tests/test_stage_relay.py"),
    ),
    Mutation(
        "global-rank-in-a-subgroup",
        "python/pipecomm_ext/distributed.py",
        "return dist.get_group_rank(group, global_rank)",
        "return global_rank",
        ("tests/test_distributed.py",),
    ),
    Mutation(
        "chain-ends-at-the-last-rank",  # of a small stage, not at its first
        "python/pipecomm_ext/parallel_state/pipeline.py",
        "ranks[idx if idx < len(ranks) else 0]",
        "ranks[min(idx, len(ranks) - 1)]",
        ("tests/test_topology.py", "tests/test_vtp.py"),
    ),
    # ---- Python: sequence_parallel, relay
    Mutation(
        "compiled-gradient-scale",  # in a compiled graph the gradient is not scaled
        "python/pipecomm_ext/sequence_parallel/split_gather_pair.py",
        "ctx.num_each, ctx.grad_scale, ctx.scale)",
        "ctx.num_each, ctx.scale, ctx.grad_scale)",
        ("tests/test_compiled_operations.py",),
    ),
    Mutation(
        "gradients-add-up-in-bf16",
        "csrc/copy/reduce_cpu.cpp",
        "results[i] = combine(results[i], Format::load(from[i]));",
        "results[i] = Format::load(Format::store(combine(results[i], Format::load(from[i]))));",
        ("tests/cpp/test_reduce_cpu.cpp", "tests/test_stage_relay.py", "tests/test_reductions.py"),
    ),
    # ---- Python: schedules
    Mutation(
        "check-takes-w-before-i",
        "python/pipecomm_ext/schedules/flow.py",
        "0 <= forward < inputs < weights and whole < 0",
        "0 <= forward < inputs and 0 <= weights and whole < 0",
        ("tests/schedules/test_check.py",),
    ),
    Mutation(
        "group-waits-for-itself",  # a receive shares a group with the send that it depends on
        "python/pipecomm_ext/schedules/lowering.py",
        "may_depend = kind == RECV and begun >= first_sent",
        "may_depend = False",
        ("tests/schedules/test_lowering.py", "tests/schedules/test_check.py"),
    ),
    Mutation(
        "1f1b-holds-one-more",  # activation than it must
        "python/pipecomm_ext/schedules/generators/classic.py",
        "num_warmup=min(M, P - 1 - stage)",
        "num_warmup=min(M, P - stage)",
        ("tests/schedules/test_generators.py",),
    ),
    Mutation(
        "simulated-streams-overlap",  # groups of a rank do not wait for each other
        "python/pipecomm_ext/schedules/program_run.py",
        "max(head.posted, self._queue_clock[rank])",
        "head.posted",
        (
            "tests/schedules/test_timeline.py",
            "tests/schedules/test_lowering.py",
            "tests/schedules/test_check.py",
        ),
    ),
    # ---- Python: runtime
    Mutation(
        "activations-live-on",  # until the end of the step
        "python/pipecomm_ext/runtime/executor.py",
        "        alive = self._alive.pop((stage, micro))\n        run_backward(",
        "        alive = self._alive[stage, micro]\n        run_backward(",
        ("tests/schedules/test_executor_traces.py", "tests/schedules/test_executor.py"),
    ),
    Mutation(
        "message-overtakes-a-deferred",  # one whose shape is not known yet
        "python/pipecomm_ext/runtime/border_channels.py",
        "if callable(specs) or self._deferred.get((peer, channel)):",
        "if callable(specs):",
        (
            "tests/schedules/test_executor_values.py",
            "tests/schedules/test_executor_topology.py",
            "tests/test_border.py",
        ),
    ),
    Mutation(
        "norm-counts-shared-twice",
        "python/pipecomm_ext/runtime/gradients.py",
        "self._shared[first] = self._rank == min(copies)",
        "self._shared[first] = True",
        ("tests/schedules/test_gradients.py",),
    ),
    # ---- Python: pipeline_parallel, mindspeed, dualpipe, integrations, diagnostics
    Mutation(
        "loss-ignores-context-parallel",
        "python/pipecomm_ext/pipeline_parallel/loss_scaling.py",
        "return loss * cp_size / num_microbatches,",
        "return loss / num_microbatches,",
        ("tests/test_pipeline_steps.py",),
    ),
    Mutation(
        "mean-before-all-have-come",  # of what several ranks send
        "python/pipecomm_ext/mindspeed/named_peers.py",
        "for work in self._works:\n            work.wait(timeout)",
        "for work in self._works[:1]:\n            work.wait(timeout)",
        ("tests/test_vtp.py",),
    ),
    Mutation(
        "dualpipe-cuts-unequal-chunks",  # whose losses then weigh differently
        "python/pipecomm_ext/dualpipe.py",
        "if tensor.size(self.batch_dim) % num_chunks:",
        "if tensor.size(self.batch_dim) < num_chunks:",
        ("tests/schedules/test_dualpipe.py",),
    ),
    Mutation(
        "loss-of-a-piece",  # is divided by the labels of the piece, not of the batch
        "python/pipecomm_ext/integrations/transformers/batch.py",
        '(whole["shift_labels"] != IGNORED)',
        '(piece["shift_labels"] != IGNORED)',
        ("tests/test_transformers_integration.py",),
    ),
    Mutation(
        "doctor-reads-the-older-record",
        "python/pipecomm_ext/diagnostics/flight_report.py",
        'known.head["time"] < head["time"]',
        'known.head["time"] > head["time"]',
        ("tests/test_flight.py",),
    ),
]
