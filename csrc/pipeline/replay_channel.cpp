#include "pipeline/replay_channel.h"

#include <utility>

#include "base/check.h"

namespace pydist {

void ReplayChannel::begin_step(StepKind kind) {
  if (!replays_) real_->begin_step(kind);
}

void ReplayChannel::send(int destination, Message message) {
  if (!replays_) real_->send(destination, std::move(message));
}

Message ReplayChannel::receive(int source, const MessageKey& key, const Describe& describe) {
  const Place place = place_of(source, key);
  if (replays_) {
    const auto found = kept_.find(place);
    PYDIST_CHECK(found != kept_.end(), Error, "no message was recorded ", describe());
    return found->second;
  }
  Message message = real_->receive(source, key, describe);
  // The stage may change its own in place, and the channel uses memory again that nobody holds.
  Message kept = message;
  for (Slot& slot : kept.slots) {
    if (slot.tensor.defined()) slot.tensor = slot.tensor.clone();
  }
  kept_.insert_or_assign(place, std::move(kept));
  return message;
}

bool ReplayChannel::has_arrived(int source, const MessageKey& key) {
  return replays_ || real_->has_arrived(source, key);
}

void ReplayChannel::flush(const Describe& describe) {
  if (!replays_) real_->flush(describe);
}

void ReplayChannel::end_step(const Describe& describe) {
  if (!replays_) real_->end_step(describe);
}

void ReplayChannel::fail(const std::string& reason) noexcept {
  if (!replays_) real_->fail(reason);
}

}  // namespace pydist
