// The NCCL functions in use, as a table that is filled at run time from the copy that torch loaded,
// or by a test. They are declared here again, so that a build needs no nccl.h and works with every
// NCCL; `make compile-check` compares them with the headers of the installed NCCL.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <thread>

namespace pipecomm {

struct NcclComm;               // ncclComm_t is a pointer to one
using NcclStream = void*;      // cudaStream_t
enum class NcclResult : int {  // ncclResult_t
  success = 0,
  unhandled_cuda_error = 1,
  system_error = 2,
  internal_error = 3,
  invalid_argument = 4,
  invalid_usage = 5,
  remote_error = 6,
  in_progress = 7,
};
struct NcclUniqueId {  // ncclUniqueId
  char bytes[128];
};

inline constexpr int kNcclBytes = 1;           // ncclUint8: what is not reduced is moved as bytes
inline constexpr int kMinNcclVersion = 22700;  // the first with a reliable abort

// Options of a communicator, equal on every rank; -1 or "" leaves the choice to NCCL.
struct NcclConfig {
  int min_ctas = -1;  // thread blocks that one operation may occupy
  int max_ctas = -1;
  int num_channels_per_net_peer = -1;
  int traffic_class = -1;
  std::string name = "pipecomm";  // shown in NCCL's logs
};

struct NcclApi {
  NcclResult (*get_version)(int* version);
  const char* (*get_error_string)(NcclResult result);
  const char* (*get_last_error)(NcclComm* comm);
  NcclResult (*get_unique_id)(NcclUniqueId* id);
  NcclResult (*comm_get_async_error)(NcclComm* comm, NcclResult* result);
  NcclResult (*comm_finalize)(NcclComm* comm);
  NcclResult (*comm_destroy)(NcclComm* comm);
  NcclResult (*comm_abort)(NcclComm* comm);
  // Makes kernels and calls in flight return, and frees nothing; null before 2.28.7.
  NcclResult (*comm_revoke)(NcclComm* comm, int flags);
  NcclResult (*group_start)();
  NcclResult (*group_end)();
  NcclResult (*send)(const void* data, size_t count, int dtype, int peer, NcclComm* comm,
                     NcclStream stream);
  NcclResult (*recv)(void* data, size_t count, int dtype, int peer, NcclComm* comm,
                     NcclStream stream);
  NcclResult (*broadcast)(const void* source, void* destination, size_t count, int dtype, int root,
                          NcclComm* comm, NcclStream stream);
  NcclResult (*all_reduce)(const void* source, void* destination, size_t count, int dtype, int op,
                           NcclComm* comm, NcclStream stream);
  NcclResult (*reduce)(const void* source, void* destination, size_t count, int dtype, int op,
                       int root, NcclComm* comm, NcclStream stream);
  NcclResult (*reduce_scatter)(const void* source, void* destination, size_t count, int dtype,
                               int op, NcclComm* comm, NcclStream stream);
  NcclResult (*all_gather)(const void* source, void* destination, size_t count, int dtype,
                           NcclComm* comm, NcclStream stream);
  // ncclCommInitRankConfig, blocking unless NCCL_COMM_BLOCKING=0 is set.
  std::function<NcclResult(NcclComm** comm, int size, const NcclUniqueId& id, int rank,
                           const NcclConfig& config)>
      comm_init;
  // Sleeps between polls.
  std::function<void(std::chrono::microseconds)> sleep = [](std::chrono::microseconds duration) {
    std::this_thread::sleep_for(duration);
  };
};

// "2.28.9"
std::string nccl_version_text(int version_code);

// Why this version of NCCL cannot be used, or "".
std::string nccl_version_problem(int version_code);

// "ncclGroupEnd: remote process exited or there was a network error (Connection closed ...)"
std::string nccl_error_text(const NcclApi& api, const char* call, NcclResult result,
                            NcclComm* comm);

// The table of the copy of NCCL that this process has already loaded, found by soname; filled once.
// Throws std::runtime_error if there is none.
const NcclApi& loaded_nccl();

}  // namespace pipecomm
