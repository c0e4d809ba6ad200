#include "collective/hosts_all_reduce.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace pydist {

HostsAllReduce::HostsAllReduce(const HostsTeam& team, const Collective& collective,
                               Describe operation)
    : team_(team),
      collective_(collective),
      operation_(std::move(operation)),
      sum_(team.layout, collective, team.board().isa()),
      plan_(collective.output.num_elements, dtype_nbytes(sum_.wire()), team.layout.num_hosts(),
            team.layout.num_lanes()),
      has_lane_(team.lane != nullptr) {}

void HostsAllReduce::make_memory() {
  const int64_t num_segments = plan_.num_segments();
  if (!has_lane_ || num_segments == 0) return;
  // All segments but the last are alike.
  const int64_t last = num_segments - 1;
  const int64_t sent = std::max(plan_.sent_elements(0), plan_.sent_elements(last));
  const int64_t received = std::max(plan_.received_elements(0), plan_.received_elements(last));
  for (int64_t i = 0; i < std::min<int64_t>(kDepth, num_segments); ++i) {
    HostsMemory& memory = *team_.memory;
    const auto run = static_cast<size_t>(2 * i);
    flights_[i].sent = memory.take(HostsMemory::kSent + run, sum_.wire_nbytes(sent));
    flights_[i].received = memory.take(HostsMemory::kReceived + run, sum_.wire_nbytes(received));
  }
}

void HostsAllReduce::run() {
  make_memory();
  const int64_t num_segments = plan_.num_segments();
  for (int64_t turn = 0; turn < num_segments + 2; ++turn) {
    if (turn < num_segments) {
      reduce_locally(turn);
      spread(turn);
    }
    if (turn >= 1 && turn <= num_segments) add(turn - 1);
    if (turn >= 2) deliver(turn - 2);
  }
}

Buffer HostsAllReduce::part(const HostsSpan& span) const {
  Buffer buffer = collective_.output;
  buffer.data = buffer.bytes() + static_cast<size_t>(span.begin) * dtype_nbytes(buffer.dtype);
  buffer.num_elements = span.count;
  return buffer;
}

bool HostsAllReduce::is_shared_out(int64_t t) const {
  return team_.local->size() == team_.layout.num_lanes() && plan_.has_equal_shares(t);
}

void HostsAllReduce::reduce_locally(int64_t t) {
  if (is_shared_out(t)) {
    return team_.local->reduce_scatter(part(plan_.segment(t)), part(my_share(t)), collective_.op);
  }
  team_.local->all_reduce(part(plan_.segment(t)), collective_.op);
}

void HostsAllReduce::await(Flight& flight) {
  team_.await(*flight.exchange, operation_);
  flight.exchange.reset();
}

void HostsAllReduce::spread(int64_t t) {
  const HostsSpan share = my_share(t);
  if (!has_lane_ || share.count == 0) return;
  Flight& now = flight(t);
  const size_t nbytes = sum_.wire_nbytes(plan_.sent_elements(t));
  const size_t filled = sum_.wire_nbytes(share.count);
  sum_.to_wire(part(share).data, now.sent.get(), share.count);
  std::memset(now.sent.get() + filled, 0, nbytes - filled);
  now.exchange = plan_.adds_everywhere(t)
                     ? team_.lane->all_gather(now.sent, now.received, nbytes)
                     : team_.lane->all_to_all(now.sent, now.received,
                                              sum_.wire_nbytes(plan_.slice_elements(t)));
}

// What was sent has gone by then: the sum takes its place.
void HostsAllReduce::add(int64_t t) {
  const HostsSpan share = my_share(t);
  if (!has_lane_ || share.count == 0) return;
  Flight& now = flight(t);
  await(now);
  if (plan_.adds_everywhere(t)) {
    const size_t stride = sum_.wire_nbytes(plan_.sent_elements(t));
    return sum_.add(now.received.get(), stride, now.sent.get(), share.count);
  }
  const size_t slice_nbytes = sum_.wire_nbytes(plan_.slice_elements(t));
  sum_.add(now.received.get(), slice_nbytes, now.sent.get(), plan_.slice_elements(t));
  now.exchange = team_.lane->all_gather(now.sent, now.received, slice_nbytes);
}

void HostsAllReduce::deliver(int64_t t) {
  const HostsSpan share = my_share(t);
  if (has_lane_ && share.count > 0) {
    Flight& now = flight(t);
    const bool gathers = now.exchange != nullptr;
    if (gathers) await(now);
    sum_.from_wire((gathers ? now.received : now.sent).get(), part(share).data, share.count);
  }
  if (team_.local->size() == 1) return;
  if (is_shared_out(t)) {
    return team_.local->all_gather(part(share), part(plan_.segment(t)));
  }
  for (int lane = 0; lane < team_.layout.num_lanes(); ++lane) {
    const HostsSpan span = plan_.share(t, lane);
    if (span.count > 0) team_.local->broadcast(part(span), lane);
  }
}

}  // namespace pydist
