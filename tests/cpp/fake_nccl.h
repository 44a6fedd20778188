// An NCCL without hardware that behaves like the real one (2.28): groups are launched in an order
// of NCCL's choice, by blocking communicators at a cost to the caller and by others later from
// another thread; a kernel occupies its stream until its peers come; and the destruction of a
// communicator waits for graphs and for its peers.
#pragma once

#include "fake_world.h"

namespace fake {

inline constexpr int64_t kBytesPerPeer = 48 << 20;  // of a communicator
inline bool world_has_revoke = true;                // NCCL 2.28.7 and later

int group_depth();  // of this thread
NcclApi make_api();

}  // namespace fake
