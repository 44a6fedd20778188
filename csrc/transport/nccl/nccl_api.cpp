#include "transport/nccl/nccl_api.h"

namespace pipecomm {

std::string nccl_version_text(int version_code) {
  return std::to_string(version_code / 10000) + "." + std::to_string(version_code / 100 % 100) +
         "." + std::to_string(version_code % 100);
}

std::string nccl_version_problem(int version_code) {
  if (version_code >= kMinNcclVersion) return "";
  return "NCCL " + nccl_version_text(version_code) + " is loaded, at least " +
         nccl_version_text(kMinNcclVersion) + " is needed (older ones cannot be aborted safely)";
}

std::string nccl_error_text(const NcclApi& api, const char* call, NcclResult result,
                            NcclComm* comm) {
  std::string text = std::string(call) + ": " + api.get_error_string(result);
  const char* detail = comm ? api.get_last_error(comm) : nullptr;
  if (detail && *detail) text += std::string(" (") + detail + ")";
  return text;
}

}  // namespace pipecomm
