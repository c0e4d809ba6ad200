#include "pipeline/channel_factory.h"

#include <utility>

#include "base/check.h"
#include "pipeline/shared_channel.h"
#include "transport/c10d_store.h"

namespace pydist {

std::shared_ptr<Channel> make_channel(c10::intrusive_ptr<c10d::Store> store,
                                      std::optional<c10::intrusive_ptr<c10d::ProcessGroup>> group,
                                      const ChannelOptions& options) {
  PYDIST_CHECK(!group, UsageError, "pipelines over a process group are not there yet");
  return SharedChannel::create(*wrap_c10d_store(std::move(store)), options);
}

}  // namespace pydist
