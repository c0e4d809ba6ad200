// Which host and lane every rank belongs to, and who does what of a sum over hosts. Pure
// arithmetic.
//
// Ranks have a local index, counted from 0 on their host in rank order. Lane k is made of the ranks
// with local index k, one on each host; there are as many lanes as the smallest host has ranks, and
// what is behind them only takes part inside its host:
//
//             lane 0    lane 1
//   host 0    rank 0    rank 1    rank 2
//   host 1    rank 3    rank 4
//
// A buffer is cut into segments, a segment into one share per lane, a share into one slice per
// host. The rank of lane k on host h owns slice h of share k:
//
//   buffer    |      segment 0      |      segment 1      | ...
//   segment   |  share 0 | share 1  |
//   share     | slice 0 | slice 1 |
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pydist {

class HostLayout {
 public:
  // Each host's ranks in ascending order; together they are 0..n-1.
  explicit HostLayout(std::vector<std::vector<int>> hosts) : hosts_(std::move(hosts)) {
    for (const auto& ranks : hosts_) num_ranks_ += static_cast<int>(ranks.size());
    host_of_.resize(num_ranks_);
    local_of_.resize(num_ranks_);
    num_lanes_ = num_ranks_;
    for (size_t h = 0; h < hosts_.size(); ++h) {
      const int count = static_cast<int>(hosts_[h].size());
      num_lanes_ = std::min(num_lanes_, count);
      most_ranks_ = std::max(most_ranks_, count);
      for (int l = 0; l < count; ++l) {
        host_of_[hosts_[h][l]] = static_cast<int>(h);
        local_of_[hosts_[h][l]] = l;
      }
    }
  }

  int num_ranks() const { return num_ranks_; }
  int num_hosts() const { return static_cast<int>(hosts_.size()); }
  int num_lanes() const { return num_lanes_; }
  int most_ranks() const { return most_ranks_; }  // of a host
  bool is_even() const { return num_lanes_ == most_ranks_; }
  const std::vector<int>& ranks_of(int host) const { return hosts_[host]; }
  int num_ranks_of(int host) const { return static_cast<int>(hosts_[host].size()); }
  int host_of(int rank) const { return host_of_[rank]; }
  int local_of(int rank) const { return local_of_[rank]; }
  bool has_lane(int rank) const { return local_of_[rank] < num_lanes_; }

 private:
  std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_, local_of_;
  int num_ranks_ = 0, num_lanes_ = 0, most_ranks_ = 0;
};

// Elements [begin, begin + count) of the buffer.
struct HostsSpan {
  int64_t begin;
  int64_t count;
};

class HostsPlan {
 public:
  // An operation of the network costs some 0.2 ms: what 10 Gbit/s carry in that time is 256 KiB, so
  // several of them under way hide it from segments of this size on. Beyond the largest, overlap
  // gains nothing, and the first segment's local reduction, which nothing hides, would show.
  static constexpr int64_t kMinSegmentNbytes = int64_t{512} << 10;
  static constexpr int64_t kMaxSegmentNbytes = int64_t{4} << 20;
  static constexpr int64_t kSegments = 8;
  // Below this one exchange costs less than two, though more bytes travel.
  static constexpr int64_t kOneExchangeNbytes = int64_t{16} << 10;
  static constexpr int64_t kAlignment = 64;  // elements: whole cache lines of any type

  // `element_nbytes` are those of what travels.
  HostsPlan(int64_t num_elements, size_t element_nbytes, int num_hosts, int num_lanes)
      : num_elements_(num_elements),
        element_nbytes_(static_cast<int64_t>(element_nbytes)),
        num_hosts_(num_hosts),
        num_lanes_(num_lanes) {
    const int64_t nbytes = std::clamp(num_elements * element_nbytes_ / kSegments, kMinSegmentNbytes,
                                      kMaxSegmentNbytes);
    set_segment_elements(nbytes / element_nbytes_);
  }

  // About so many; public for tests. Whole lines for every lane, so that shares are equal.
  void set_segment_elements(int64_t elements) {
    segment_ = align(divide_up(elements, num_lanes_)) * num_lanes_;
  }

  int64_t num_segments() const { return divide_up(num_elements_, segment_); }
  HostsSpan segment(int64_t t) const {
    const int64_t begin = std::min(t * segment_, num_elements_);
    return {begin, std::min(segment_, num_elements_ - begin)};
  }
  // May be empty.
  HostsSpan share(int64_t t, int lane) const {
    const HostsSpan whole = segment(t);
    const int64_t each = share_elements(whole);
    const int64_t begin = std::min(lane * each, whole.count);
    return {whole.begin + begin, std::min(each, whole.count - begin)};
  }
  bool has_equal_shares(int64_t t) const {
    const HostsSpan whole = segment(t);
    return whole.count == num_lanes_ * share_elements(whole);
  }
  // Of every slice in this segment's shares; what is behind a share's end is filled up.
  int64_t slice_elements(int64_t t) const {
    return align(divide_up(share_elements(segment(t)), num_hosts_));
  }
  // What one rank sends at first, and what it receives for that.
  int64_t sent_elements(int64_t t) const {
    return adds_everywhere(t) ? share_elements(segment(t)) : slice_elements(t) * num_hosts_;
  }
  int64_t received_elements(int64_t t) const {
    return adds_everywhere(t) ? sent_elements(t) * num_hosts_ : sent_elements(t);
  }
  // True where all hosts send each other all of a share, and each adds it up. Between two hosts
  // that is what slices would come to anyway: as many bytes, but one exchange instead of two.
  bool adds_everywhere(int64_t t) const {
    return num_hosts_ == 2 ||
           share_elements(segment(t)) * element_nbytes_ * num_hosts_ <= kOneExchangeNbytes;
  }

 private:
  static int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
  static int64_t align(int64_t elements) {
    return std::max<int64_t>(divide_up(elements, kAlignment), 1) * kAlignment;
  }
  int64_t share_elements(const HostsSpan& whole) const {
    return align(divide_up(whole.count, num_lanes_));
  }

  int64_t num_elements_, element_nbytes_;
  int num_hosts_, num_lanes_;
  int64_t segment_;
};

}  // namespace pydist
