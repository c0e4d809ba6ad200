// The sum of a buffer over hosts, segment by segment; see hosts_plan.h for the cut.
//
// A segment goes through five steps, of which those marked ~ are under way in the network while
// this thread does something else:
//
//   reduce    the ranks of each host reduce the segment among themselves, in place: each its lane's
//             share, or where a host has ranks without a lane all of it
//   ~ spread  each lane sends slice h of its share to host h
//   add       the owner adds what all hosts sent it, in host order, and rounds once
//   ~ gather  each lane collects the sums of all slices
//   deliver   each lane's rank gives its share to its host's other ranks
//
//   turn      0        1        2        3        4
//   reduce    0        1        2        3
//   spread     0~~~~~~~~1~~~~~~~~2~~~~~~~~3~~~~~~~
//   add                 0        1        2        3
//   gather               0~~~~~~~~1~~~~~~~~2~~~~~~~~3~~~
//   deliver                       0        1        2 ...
//
// The network always has something to do while there are segments, and the order of what is
// started is the same on all hosts. Where every host adds everything (few bytes, or two hosts), the
// share itself is gathered, and there is no second exchange.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "collective/hosts_sum.h"
#include "collective/hosts_team.h"

namespace pydist {

class HostsAllReduce {
 public:
  using Describe = std::function<std::string()>;

  HostsAllReduce(const HostsTeam& team, const Collective& collective, Describe operation);
  // For tests; before run().
  void set_segment_elements(int64_t elements) { plan_.set_segment_elements(elements); }
  void run();

 private:
  static constexpr int kDepth = 3;  // segments under way
  struct Flight {
    SharedBytes sent;
    SharedBytes received;
    Network::Started exchange;
  };

  void make_memory();
  void reduce_locally(int64_t t);
  void spread(int64_t t);
  void add(int64_t t);
  void deliver(int64_t t);
  Buffer part(const HostsSpan& span) const;
  // True if each rank of this host needs its own share of the local sum alone.
  bool is_shared_out(int64_t t) const;
  Flight& flight(int64_t t) { return flights_[t % kDepth]; }
  HostsSpan my_share(int64_t t) const { return plan_.share(t, team_.local_rank()); }
  void await(Flight& flight);

  const HostsTeam& team_;
  const Collective& collective_;
  const Describe operation_;
  HostsSum sum_;
  HostsPlan plan_;
  const bool has_lane_;
  Flight flights_[kDepth];
};

}  // namespace pydist
