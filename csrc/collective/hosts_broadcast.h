// A broadcast of bytes over hosts: within the root's host first, then each lane carries its shares,
// segment by segment (see hosts_plan.h), to the other hosts, which give one segment to all their
// ranks while the next one is under way.
#pragma once

#include <functional>
#include <string>

#include "collective/hosts_team.h"

namespace pydist {

class HostsBroadcast {
 public:
  using Describe = std::function<std::string()>;

  HostsBroadcast(const HostsTeam& team, const Buffer& buffer, int root, Describe operation);
  // For tests; before run().
  void set_segment_nbytes(int64_t nbytes) { plan_.set_segment_elements(nbytes); }
  void run();

 private:
  static constexpr int kDepth = 2;  // segments under way
  struct Flight {
    SharedBytes bytes;
    Network::Started exchange;
  };

  void carry(int64_t t);
  void deliver(int64_t t);
  Buffer part(const HostsSpan& span) const;
  HostsSpan my_share(int64_t t) const { return plan_.share(t, team_.local_rank()); }
  bool has_data() const { return team_.layout.host_of(root_) == team_.host(); }

  const HostsTeam& team_;
  const Buffer buffer_;  // of bytes
  const int root_;
  const Describe operation_;
  HostsPlan plan_;
  const bool has_lane_;
  Flight flights_[kDepth];
};

}  // namespace pydist
