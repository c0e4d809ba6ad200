#include "pipeline/channel_factory.h"

#include <utility>

#include "pipeline/process_group_channel.h"
#include "pipeline/shared_channel.h"
#include "transport/c10d_store.h"

namespace pydist {

namespace {

std::shared_ptr<StepChannel> make_host_channel(
    c10::intrusive_ptr<c10d::Store> store,
    std::optional<c10::intrusive_ptr<c10d::ProcessGroup>> group, const ChannelOptions& options) {
  std::unique_ptr<Store> own = wrap_c10d_store(std::move(store));
  if (!group) return SharedChannel::create(*own, options);
  return std::make_shared<ProcessGroupChannel>(std::move(*group), std::move(own), options);
}

}  // namespace

std::shared_ptr<Channel> make_channel(c10::intrusive_ptr<c10d::Store> store,
                                      std::optional<c10::intrusive_ptr<c10d::ProcessGroup>> group,
                                      const ChannelOptions& options,
                                      const std::optional<DeviceLinkOptions>& device) {
  std::shared_ptr<StepChannel> channel = make_host_channel(store, std::move(group), options);
  if (device) channel->use(std::make_unique<DeviceLinks>(store, options, *device));
  return channel;
}

}  // namespace pydist
