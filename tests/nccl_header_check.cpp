// Compares our declarations of NCCL with a header of NCCL. It only has to compile:
//   g++ -std=c++20 -fsyntax-only -Icsrc -I<NCCL's include> -I<CUDA's include> tests/nccl_header_check.cpp
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "transport/nccl/nccl_api.h"
#include "transport/nccl/nccl_config.h"
#include "transport/nccl/nccl_reductions.h"

namespace pipecomm {
namespace {

// Two types are the same to the calling convention: equal, two enums or an enum and its int, two
// pointers (to structures that only have different names), or structures of one size.
template <class Ours, class Theirs>
constexpr bool kSameInCalls =
    std::is_same_v<Ours, Theirs> || (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) ||
    (std::is_enum_v<Theirs> && sizeof(Ours) == sizeof(Theirs) &&
     (std::is_enum_v<Ours> || std::is_same_v<Ours, int>)) ||
    (std::is_class_v<Ours> && std::is_class_v<Theirs> && sizeof(Ours) == sizeof(Theirs) &&
     std::is_trivially_copyable_v<Ours> && std::is_trivially_copyable_v<Theirs>);

template <class Ours, class Theirs>
constexpr bool kSameFunction = false;
template <class R, class... Args, class TheirR, class... TheirArgs>
constexpr bool kSameFunction<R (*)(Args...), TheirR (*)(TheirArgs...)> =
    sizeof...(Args) == sizeof...(TheirArgs) && kSameInCalls<R, TheirR> &&
    (kSameInCalls<Args, TheirArgs> && ...);

#define SAME_FUNCTION(ours, theirs) \
  static_assert(kSameFunction<decltype(NcclApi::ours), decltype(&theirs)>)
SAME_FUNCTION(get_version, ncclGetVersion);
SAME_FUNCTION(get_error_string, ncclGetErrorString);
SAME_FUNCTION(get_last_error, ncclGetLastError);
SAME_FUNCTION(get_unique_id, ncclGetUniqueId);
SAME_FUNCTION(comm_get_async_error, ncclCommGetAsyncError);
SAME_FUNCTION(comm_finalize, ncclCommFinalize);
SAME_FUNCTION(comm_destroy, ncclCommDestroy);
SAME_FUNCTION(comm_abort, ncclCommAbort);
SAME_FUNCTION(group_start, ncclGroupStart);
SAME_FUNCTION(group_end, ncclGroupEnd);
SAME_FUNCTION(send, ncclSend);
SAME_FUNCTION(recv, ncclRecv);
SAME_FUNCTION(broadcast, ncclBroadcast);
SAME_FUNCTION(all_reduce, ncclAllReduce);
SAME_FUNCTION(reduce, ncclReduce);
SAME_FUNCTION(reduce_scatter, ncclReduceScatter);
SAME_FUNCTION(all_gather, ncclAllGather);
static_assert(kSameFunction<NcclInitRankConfig, decltype(&ncclCommInitRankConfig)>);

static_assert(sizeof(ncclUniqueId) == sizeof(NcclUniqueId));
static_assert(ncclUint8 == kNcclBytes);
static_assert(nccl_dtype(dtypes::kInt8) == ncclInt8);
static_assert(nccl_dtype(dtypes::kUInt8) == ncclUint8);
static_assert(nccl_dtype(dtypes::kInt32) == ncclInt32);
static_assert(nccl_dtype(dtypes::kUInt32) == ncclUint32);
static_assert(nccl_dtype(dtypes::kInt64) == ncclInt64);
static_assert(nccl_dtype(dtypes::kUInt64) == ncclUint64);
static_assert(nccl_dtype(dtypes::kFloat16) == ncclFloat16);
static_assert(nccl_dtype(dtypes::kFloat32) == ncclFloat32);
static_assert(nccl_dtype(dtypes::kFloat64) == ncclFloat64);
static_assert(nccl_dtype(dtypes::kBFloat16) == ncclBfloat16);
static_assert(nccl_operator(Reduction::kSum) == ncclSum);
static_assert(nccl_operator(Reduction::kProduct) == ncclProd);
static_assert(nccl_operator(Reduction::kMax) == ncclMax);
static_assert(nccl_operator(Reduction::kMin) == ncclMin);
static_assert(nccl_operator(Reduction::kMean) == ncclAvg);
static_assert(ncclSuccess == int(NcclResult::success));
static_assert(ncclUnhandledCudaError == int(NcclResult::unhandled_cuda_error));
static_assert(ncclSystemError == int(NcclResult::system_error));
static_assert(ncclInternalError == int(NcclResult::internal_error));
static_assert(ncclInvalidArgument == int(NcclResult::invalid_argument));
static_assert(ncclInvalidUsage == int(NcclResult::invalid_usage));
static_assert(ncclRemoteError == int(NcclResult::remote_error));
static_assert(ncclInProgress == int(NcclResult::in_progress));

#define SAME_FIELD(ours, theirs)                                                    \
  static_assert(offsetof(NcclConfigV228, ours) == offsetof(ncclConfig_t, theirs) && \
                sizeof(NcclConfigV228::ours) == sizeof(ncclConfig_t::theirs))
SAME_FIELD(size, size);
SAME_FIELD(magic, magic);
SAME_FIELD(version, version);
SAME_FIELD(blocking, blocking);
SAME_FIELD(cga_cluster_size, cgaClusterSize);
SAME_FIELD(min_ctas, minCTAs);
SAME_FIELD(max_ctas, maxCTAs);
SAME_FIELD(net_name, netName);
SAME_FIELD(split_share, splitShare);
SAME_FIELD(traffic_class, trafficClass);
SAME_FIELD(comm_name, commName);
SAME_FIELD(collnet_enable, collnetEnable);
SAME_FIELD(cta_policy, CTAPolicy);
SAME_FIELD(shrink_share, shrinkShare);
SAME_FIELD(nvls_ctas, nvlsCTAs);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
SAME_FIELD(num_channels_per_net_peer, nChannelsPerNetPeer);
SAME_FIELD(nvlink_centric_sched, nvlinkCentricSched);
#endif

// NCCL reads a field that is not set as the initializer of its header leaves it.
constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
constexpr NcclConfigV228 kOurs;
static_assert(kOurs.magic == kTheirs.magic && kOurs.blocking == kTheirs.blocking &&
              kOurs.net_name == kTheirs.netName && kOurs.traffic_class == kTheirs.trafficClass);

}  // namespace
}  // namespace pipecomm
