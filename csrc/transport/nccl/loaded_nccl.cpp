// Fills the function table from the libnccl that torch has loaded.
#include <dlfcn.h>
#include <nccl.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "transport/nccl/nccl_api.h"

namespace pipecomm {
namespace {

static_assert(NCCL_VERSION_CODE >= kMinNcclVersion, "nccl.h is older than 2.27");
static_assert(sizeof(ncclUniqueId) == sizeof(NcclUniqueId));
static_assert(sizeof(ncclResult_t) == sizeof(NcclResult) && sizeof(ncclDataType_t) == sizeof(int));
static_assert(ncclUint8 == kNcclBytes);
static_assert(ncclUnhandledCudaError == int(NcclResult::unhandled_cuda_error) &&
              ncclSystemError == int(NcclResult::system_error) &&
              ncclInternalError == int(NcclResult::internal_error) &&
              ncclInvalidArgument == int(NcclResult::invalid_argument) &&
              ncclInvalidUsage == int(NcclResult::invalid_usage) &&
              ncclRemoteError == int(NcclResult::remote_error) &&
              ncclInProgress == int(NcclResult::in_progress));

// Two types are the same to the calling convention: equal, two enums or an enum and its int, or
// two pointers (to opaque structures that only have different names).
template <class Ours, class Theirs>
constexpr bool kSameInCalls =
    std::is_same_v<Ours, Theirs> || (std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>) ||
    (std::is_enum_v<Theirs> && sizeof(Ours) == sizeof(Theirs) &&
     (std::is_enum_v<Ours> || std::is_same_v<Ours, int>));

template <class Ours, class Theirs>
constexpr bool kSameFunction = false;
template <class R, class... Args, class TheirR, class... TheirArgs>
constexpr bool kSameFunction<R (*)(Args...), TheirR (*)(TheirArgs...)> =
    sizeof...(Args) == sizeof...(TheirArgs) && kSameInCalls<R, TheirR> &&
    (kSameInCalls<Args, TheirArgs> && ...);

template <class Theirs, class Ours>
void fill(void* library, const char* name, Ours& slot) {
  static_assert(kSameFunction<Ours, Theirs>, "nccl_api.h and nccl.h declare different functions");
  slot = reinterpret_cast<Ours>(dlsym(library, name));
  if (!slot) throw std::runtime_error(std::string("the loaded NCCL has no ") + name);
}

using InitRankConfig = decltype(&ncclCommInitRankConfig);

NcclResult init(InitRankConfig init_rank_config, NcclComm** comm, int size, const NcclUniqueId& id,
                int rank, const NcclConfig& options) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  // A call of a non-blocking communicator starts a thread: a group of one send and one receive then
  // takes 112 us of the host, and 38 so (medians, H100).
  config.blocking = 1;
  if (options.min_ctas > 0) config.minCTAs = options.min_ctas;
  if (options.max_ctas > 0) config.maxCTAs = options.max_ctas;
  if (options.traffic_class >= 0) config.trafficClass = options.traffic_class;
  if (!options.name.empty()) config.commName = options.name.c_str();
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
  if (options.num_channels_per_net_peer > 0)
    config.nChannelsPerNetPeer = options.num_channels_per_net_peer;
#endif
  ncclUniqueId unique_id;
  std::copy(std::begin(id.bytes), std::end(id.bytes), unique_id.internal);
  return NcclResult(
      init_rank_config(reinterpret_cast<ncclComm_t*>(comm), size, unique_id, rank, &config));
}

NcclApi load() {
  void* library = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_NOW);
  if (!library) throw std::runtime_error("this torch has loaded no libnccl.so.2");
  NcclApi api{};
  fill<decltype(&ncclGetVersion)>(library, "ncclGetVersion", api.get_version);
  int version = 0;
  api.get_version(&version);
  if (const std::string problem = nccl_version_problem(version); !problem.empty())
    throw std::runtime_error(problem);
  fill<decltype(&ncclGetErrorString)>(library, "ncclGetErrorString", api.get_error_string);
  fill<decltype(&ncclGetLastError)>(library, "ncclGetLastError", api.get_last_error);
  fill<decltype(&ncclGetUniqueId)>(library, "ncclGetUniqueId", api.get_unique_id);
  fill<decltype(&ncclCommGetAsyncError)>(library, "ncclCommGetAsyncError",
                                         api.comm_get_async_error);
  fill<decltype(&ncclCommFinalize)>(library, "ncclCommFinalize", api.comm_finalize);
  fill<decltype(&ncclCommDestroy)>(library, "ncclCommDestroy", api.comm_destroy);
  fill<decltype(&ncclCommAbort)>(library, "ncclCommAbort", api.comm_abort);
  fill<decltype(&ncclGroupStart)>(library, "ncclGroupStart", api.group_start);
  fill<decltype(&ncclGroupEnd)>(library, "ncclGroupEnd", api.group_end);
  fill<decltype(&ncclSend)>(library, "ncclSend", api.send);
  fill<decltype(&ncclRecv)>(library, "ncclRecv", api.recv);
  fill<decltype(&ncclBroadcast)>(library, "ncclBroadcast", api.broadcast);
  InitRankConfig init_rank_config = nullptr;
  fill<InitRankConfig>(library, "ncclCommInitRankConfig", init_rank_config);
  api.comm_init = [init_rank_config](NcclComm** comm, int size, const NcclUniqueId& id, int rank,
                                     const NcclConfig& config) {
    return init(init_rank_config, comm, size, id, rank, config);
  };
  return api;
}

}  // namespace

const NcclApi& loaded_nccl() {
  static const NcclApi api = load();
  return api;
}

}  // namespace pipecomm
