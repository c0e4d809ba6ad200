#include "collective/hosts_team.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/interrupt.h"
#include "base/polling.h"

namespace pydist {

namespace {

constexpr useconds_t kSleep_us = 50;  // a small part of what an exchange through sockets takes

Buffer bytes_of(const void* data, size_t nbytes) {
  return {const_cast<void*>(data), static_cast<int64_t>(nbytes), DType::kUInt8};
}

}  // namespace

SharedBytes make_shared_bytes(size_t nbytes) {
  return SharedBytes(new uint8_t[std::max<size_t>(nbytes, 1)], std::default_delete<uint8_t[]>());
}

SharedBytes HostsMemory::take(size_t run, size_t nbytes) {
  if (nbytes > kMaxKeptNbytes) return make_shared_bytes(nbytes);
  if (run >= runs_.size()) runs_.resize(run + 1);
  Kept& kept = runs_[run];
  if (kept.bytes == nullptr || kept.nbytes < nbytes) kept = {make_shared_bytes(nbytes), nbytes};
  return kept.bytes;
}

void HostsTeam::await(Exchange& exchange, const std::function<std::string()>& operation) const {
  Polling polling(kSleep_us);
  while (!exchange.test()) {
    if (board().failed()) board().check(operation);
    if (!polling.pause()) continue;
    check_interrupt();
    PYDIST_CHECK(polling.waited_s() < timeout_s, TimeoutError, local->describe(local_rank()),
                 " waited ", timeout_s, " s for other hosts in ", operation());
  }
  exchange.finish();
}

void HostsTeam::gather_all(const void* mine, size_t nbytes, uint8_t* all,
                           const std::function<std::string()>& operation) const {
  const int num_hosts = layout.num_hosts();
  const size_t block = nbytes * static_cast<size_t>(layout.most_ranks());
  const size_t total = block * static_cast<size_t>(num_hosts);
  const SharedBytes blocks = memory->take(HostsMemory::kMeetingReceived, total);
  // This host's block, where lane 0 gets those of all hosts anyway.
  uint8_t* own = blocks.get() + static_cast<size_t>(host()) * block;
  const size_t own_nbytes = nbytes * static_cast<size_t>(layout.num_ranks_of(host()));
  local->all_gather(bytes_of(mine, nbytes), bytes_of(own, own_nbytes));
  if (local_rank() == 0) {
    // To each host directly: a ring would take as many steps as there are hosts.
    const SharedBytes sent = memory->take(HostsMemory::kMeetingSent, total);
    std::memset(sent.get(), 0, total);
    for (int h = 0; h < num_hosts; ++h) {
      std::memcpy(sent.get() + static_cast<size_t>(h) * block, own, own_nbytes);
    }
    await(*lane->all_to_all(sent, blocks, block), operation);
  }
  local->broadcast(bytes_of(blocks.get(), total), 0);
  for (int h = 0; h < num_hosts; ++h) {
    for (int l = 0; l < layout.num_ranks_of(h); ++l) {
      std::memcpy(all + static_cast<size_t>(layout.ranks_of(h)[l]) * nbytes,
                  blocks.get() + static_cast<size_t>(h) * block + static_cast<size_t>(l) * nbytes,
                  nbytes);
    }
  }
}

}  // namespace pydist
