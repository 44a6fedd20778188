// Fills the function table from the libnccl that torch has loaded.
#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "transport/nccl/nccl_config.h"

namespace pipecomm {
namespace {

constexpr int kVersion228 = 22800;

template <class Function>
void fill(void* library, const char* name, Function& slot) {
  slot = reinterpret_cast<Function>(dlsym(library, name));
  if (!slot) throw std::runtime_error(std::string("the loaded NCCL has no ") + name);
}

NcclResult init(NcclInitRankConfig init_rank_config, int version, NcclComm** comm, int size,
                const NcclUniqueId& id, int rank, const NcclConfig& options) {
  NcclConfigV228 config;
  if (version < kVersion228) {
    config.size = offsetof(NcclConfigV228, num_channels_per_net_peer);
    config.version = kMinNcclVersion;
  }
  // A call of a non-blocking communicator starts a thread: a group of one send and one receive then
  // takes 112 us of the host, instead of 38 (medians, H100).
  config.blocking = 1;
  if (options.min_ctas > 0) config.min_ctas = options.min_ctas;
  if (options.max_ctas > 0) config.max_ctas = options.max_ctas;
  if (options.traffic_class >= 0) config.traffic_class = options.traffic_class;
  config.comm_name = options.name.c_str();
  if (options.num_channels_per_net_peer > 0)
    config.num_channels_per_net_peer = options.num_channels_per_net_peer;
  return init_rank_config(comm, size, id, rank, &config);
}

NcclApi load() {
  void* library = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_NOW);
  if (!library) throw std::runtime_error("this torch has loaded no libnccl.so.2");
  NcclApi api{};
  fill(library, "ncclGetVersion", api.get_version);
  int version = 0;
  api.get_version(&version);
  if (const std::string problem = nccl_version_problem(version); !problem.empty())
    throw std::runtime_error(problem);
  fill(library, "ncclGetErrorString", api.get_error_string);
  fill(library, "ncclGetLastError", api.get_last_error);
  fill(library, "ncclGetUniqueId", api.get_unique_id);
  fill(library, "ncclCommGetAsyncError", api.comm_get_async_error);
  fill(library, "ncclCommFinalize", api.comm_finalize);
  fill(library, "ncclCommDestroy", api.comm_destroy);
  fill(library, "ncclCommAbort", api.comm_abort);
  api.comm_revoke = reinterpret_cast<decltype(api.comm_revoke)>(dlsym(library, "ncclCommRevoke"));
  fill(library, "ncclGroupStart", api.group_start);
  fill(library, "ncclGroupEnd", api.group_end);
  fill(library, "ncclSend", api.send);
  fill(library, "ncclRecv", api.recv);
  fill(library, "ncclBroadcast", api.broadcast);
  fill(library, "ncclAllReduce", api.all_reduce);
  fill(library, "ncclReduce", api.reduce);
  fill(library, "ncclReduceScatter", api.reduce_scatter);
  fill(library, "ncclAllGather", api.all_gather);
  NcclInitRankConfig init_rank_config = nullptr;
  fill(library, "ncclCommInitRankConfig", init_rank_config);
  api.comm_init = [init_rank_config, version](NcclComm** comm, int size, const NcclUniqueId& id,
                                              int rank, const NcclConfig& config) {
    return init(init_rank_config, version, comm, size, id, rank, config);
  };
  return api;
}

}  // namespace

const NcclApi& loaded_nccl() {
  static const NcclApi api = load();
  return api;
}

}  // namespace pipecomm
