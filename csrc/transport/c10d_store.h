// Lets the engine meet its peers through torch.distributed's Store.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "transport/store.h"

namespace pydist {

// Keys are used as they are: pass a PrefixStore of a fresh prefix.
std::unique_ptr<Store> wrap_c10d_store(c10::intrusive_ptr<c10d::Store> store);

// The same store over a connection of its own, where it can have one: a watchdog must not wait
// behind a call that waits for a key.
c10::intrusive_ptr<c10d::Store> own_connection(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace pydist
