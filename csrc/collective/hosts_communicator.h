// One group's collectives and messages over several hosts: shared memory inside each, a network
// between them.
//
// Every collective begins with a meeting, in which all ranks learn each other's call, and the data
// where that is small; if calls differ, all raise before anything else has moved, and the group
// stays usable. Calls that are agreed on already and large do without. Then:
//
//   all_reduce, reduce             in shared memory and over the lanes: hosts_all_reduce.h
//   broadcast, broadcast_many      the root's host, the lanes, the other hosts: hosts_broadcast.h
//   the other ones                 one exchange between all ranks, over the flat network
//
// The local board has the group's failure, for all ranks of a host; HostsWatch carries it between
// hosts. A network breaks down as a whole: after a failure it is left behind, with its memory.
//
//   hosts_communicator.cpp   the calls and their meeting
//   hosts_transfers.cpp      what moves then
//   hosts_failures.cpp       what went wrong, and who is missing
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective/call.h"
#include "collective/call_counters.h"
#include "collective/communicator.h"
#include "collective/hosts_block.h"
#include "collective/hosts_messages.h"
#include "collective/hosts_team.h"
#include "collective/hosts_watch.h"

namespace pydist {

struct HostsOptions {
  std::string name;                     // for messages: "the default group"
  std::vector<std::string> ranks;       // how messages call them: "rank 1 (pid 1234, host b)"
  std::vector<std::string> host_names;  // by host
  double timeout_s = 1800;
  std::string remedy = "make a new group, or restart the job";
};

class HostsCommunicator final : public Communicator {
 public:
  // The local board's waits must not fail its group (see BoardOptions). `store` has fresh keys of
  // the group, over a connection that nobody else waits on.
  HostsCommunicator(HostsTeam team, std::unique_ptr<Store> store,
                    std::unique_ptr<HostsMessages> messages, HostsOptions options);
  ~HostsCommunicator() override;

  int rank() const override { return team_.rank; }
  int size() const override { return team_.layout.num_ranks(); }
  const std::string& name() const override { return options_.name; }
  std::string describe(int rank) const override { return options_.ranks[rank]; }
  double timeout_s() const override { return options_.timeout_s; }
  void set_timeout_s(double timeout_s) override;
  Board& board() { return team_.board(); }

  void run(const Collective& collective) override;
  std::shared_ptr<Request> start(Collective collective, std::shared_ptr<void> keep_alive) override;
  void send(const Buffer& buffer, int destination, int64_t tag) override;
  int receive(const Buffer& buffer, int source, int64_t tag) override;
  std::shared_ptr<Request> start_send(const Buffer& buffer, int destination, int64_t tag,
                                      std::shared_ptr<void> keep_alive) override;
  std::shared_ptr<Request> start_receive(const Buffer& buffer, int source, int64_t tag,
                                         std::shared_ptr<void> keep_alive) override;
  CommunicatorCounts counts() const override;
  void fail(const std::string& reason) noexcept override;

 private:
  // Shared with receives that are under way.
  struct MessageCounters {
    CallCounter sent, received;
  };
  using Describe = std::function<std::string()>;

  // hosts_communicator.cpp
  void execute(const Collective& collective);
  void meet(const Collective& collective, const Describe& operation);
  std::string why_refused(const Collective& collective) const;
  [[noreturn]] void raise_mismatch() const;
  const HostsBlock& block(int r) const;
  HostsMessages& messages(const Buffer& buffer, int64_t tag, const char* verb, int peer);
  std::string describe_message(const Buffer& buffer, int64_t tag, const char* verb, int peer) const;
  std::shared_ptr<Request> make_request(std::string description) const;

  // hosts_transfers.cpp
  void transfer(const Collective& collective, const Describe& operation);
  void take_small(const Collective& collective);
  void reduce_small(const Collective& collective);
  void reduce_to_root(const Collective& collective, const Describe& operation);
  void carry_broadcast_many(const Collective& collective, const Describe& operation);
  void broadcast_packed(const std::vector<Buffer>& members, uint8_t* packed, int root,
                        const Describe& operation);
  void carry_reduce_scatter(const Collective& collective, const Describe& operation);
  void carry_all_gather(const Collective& collective, const Describe& operation);
  void carry_gather(const Collective& collective, const Describe& operation);
  void carry_scatter(const Collective& collective, const Describe& operation);
  void carry_all_to_all(const Collective& collective, const Describe& operation);
  void check_splits(const Collective& collective, const Describe& operation);
  SharedBytes exchange(const void* sent, std::vector<int64_t> sent_nbytes,
                       std::vector<int64_t> received_nbytes, const Describe& operation);

  // hosts_failures.cpp
  [[noreturn]] void raise_failure(const Describe& operation);
  [[noreturn]] void raise_timeout(const Describe& operation);
  [[noreturn]] void raise_lost(const std::string& cause, const Describe& operation);
  std::string describe_absent(const HostsWatch::Signs& signs) const;
  std::string describe_ranks(const std::vector<int>& ranks) const;
  void leave_network() noexcept;

  HostsTeam team_;
  HostsOptions options_;
  uint64_t sequence_ = 0;                    // of the current call
  std::vector<uint8_t> blocks_;              // of its meeting, by rank
  std::unique_ptr<HostsMessages> messages_;  // may be null
  CallCounters counters_;
  const std::shared_ptr<MessageCounters> message_counters_ = std::make_shared<MessageCounters>();
  HostsWatch watch_;
  std::unique_ptr<OperationQueue> queue_;  // ends first
};

}  // namespace pydist
