// Threads that run what users attached to futures.
#pragma once

#include <functional>

namespace pydist {

// Soon, in a thread that nothing of the engine waits for. A task may wait for others.
void run_callbacks_elsewhere(std::function<void()> task);

}  // namespace pydist
