// Makes the channel that suits a group of ranks.
#pragma once

#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "pipeline/channel.h"
#include "pipeline/channel_options.h"
#include "pipeline/device_links.h"

namespace pydist {

// Collective. `store` has a prefix of its own. Without a group the ranks share memory (else
// HostError); with one, it is the channel's own. `device`: where the stages' tensors are; nothing
// means the CPU.
std::shared_ptr<Channel> make_channel(c10::intrusive_ptr<c10d::Store> store,
                                      std::optional<c10::intrusive_ptr<c10d::ProcessGroup>> group,
                                      const ChannelOptions& options,
                                      const std::optional<DeviceLinkOptions>& device);

}  // namespace pydist
