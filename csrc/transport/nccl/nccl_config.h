// NCCL's options structure as NCCL 2.28 declares it; later versions append to it, and accept the
// shorter one of an earlier version.
#pragma once

#include <climits>
#include <cstddef>

#include "transport/nccl/nccl_api.h"

namespace pipecomm {

struct NcclConfigV228 {  // ncclConfig_t
  static constexpr int kUndefined = INT_MIN;

  size_t size = sizeof(NcclConfigV228);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 22800;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
  int traffic_class = kUndefined;
  const char* comm_name = nullptr;
  int collnet_enable = kUndefined;
  int cta_policy = kUndefined;
  int shrink_share = kUndefined;
  int nvls_ctas = kUndefined;
  int num_channels_per_net_peer = kUndefined;  // from 2.28 on
  int nvlink_centric_sched = kUndefined;
};

// ncclCommInitRankConfig
using NcclInitRankConfig = NcclResult (*)(NcclComm** comm, int size, NcclUniqueId id, int rank,
                                          NcclConfigV228* config);

}  // namespace pipecomm
