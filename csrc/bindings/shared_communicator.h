// A communicator that Python objects share: itself, and handles of its operations.
#pragma once

#include <memory>

#include "bindings/python.h"
#include "engine/communicator.h"

namespace pipecomm {

// Whichever of them is dropped last, the threads of the communicator are joined without the GIL, since
// they may need it. If it is dropped on a thread of the library, which may be one of those, another
// thread deletes the communicator. In a fork, which has none of these threads, it is never deleted.
std::shared_ptr<Communicator> shared_with_python(std::unique_ptr<Communicator> made);

}  // namespace pipecomm
