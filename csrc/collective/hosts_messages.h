// Messages between any two ranks of several hosts: what a HostsCommunicator asks of those who carry
// them. Where the board has failed, every receive that has not ended raises PeerError.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "collective/buffer.h"
#include "collective/request.h"

namespace pydist {

class HostsMessages {
 public:
  virtual ~HostsMessages() = default;
  // The message is copied at once.
  virtual void send(const Buffer& buffer, int destination, int64_t tag) = 0;
  // `request` ends when it has come. The memory must stay until then, or `keep_alive` must hold it.
  virtual void receive(const Buffer& buffer, int source, int64_t tag,
                       std::shared_ptr<void> keep_alive, std::shared_ptr<Request> request) = 0;
};

}  // namespace pydist
