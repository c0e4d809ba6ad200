#include "collective/hosts_broadcast.h"

#include <cstring>
#include <utility>

namespace pydist {

HostsBroadcast::HostsBroadcast(const HostsTeam& team, const Buffer& buffer, int root,
                               Describe operation)
    : team_(team),
      buffer_{buffer.data, static_cast<int64_t>(buffer.nbytes()), DType::kUInt8, buffer.block},
      root_(root),
      operation_(std::move(operation)),
      plan_(buffer_.num_elements, 1, team.layout.num_hosts(), team.layout.num_lanes()),
      has_lane_(team.lane != nullptr) {}

void HostsBroadcast::run() {
  if (has_data()) team_.local->broadcast(buffer_, team_.layout.local_of(root_));
  const int64_t num_segments = plan_.num_segments();
  for (int64_t turn = 0; turn <= num_segments; ++turn) {
    if (turn < num_segments) carry(turn);
    if (turn >= 1) deliver(turn - 1);
  }
}

Buffer HostsBroadcast::part(const HostsSpan& span) const {
  return {buffer_.bytes() + span.begin, span.count, DType::kUInt8, buffer_.block};
}

void HostsBroadcast::carry(int64_t t) {
  const HostsSpan share = my_share(t);
  if (!has_lane_ || share.count == 0) return;
  const auto nbytes = static_cast<size_t>(share.count);
  const auto run = static_cast<size_t>(2 * (t % kDepth));
  Flight& now = flights_[t % kDepth];
  now.bytes = team_.memory->take(HostsMemory::kSent + run, nbytes);
  if (has_data()) std::memcpy(now.bytes.get(), part(share).data, nbytes);
  now.exchange = team_.lane->broadcast(now.bytes, nbytes, team_.layout.host_of(root_));
}

void HostsBroadcast::deliver(int64_t t) {
  const HostsSpan share = my_share(t);
  if (has_lane_ && share.count > 0) {
    Flight& now = flights_[t % kDepth];
    team_.await(*now.exchange, operation_);
    now.exchange.reset();
    if (!has_data()) std::memcpy(part(share).data, now.bytes.get(), share.count);
  }
  if (has_data() || team_.local->size() == 1) return;
  for (int lane = 0; lane < team_.layout.num_lanes(); ++lane) {
    const HostsSpan span = plan_.share(t, lane);
    if (span.count > 0) team_.local->broadcast(part(span), lane);
  }
}

}  // namespace pydist
