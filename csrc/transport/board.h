// One group's shared board: flags that all its ranks map, who failed, who is alive, and how to
// wait.
//
// A board is one sealed memfd, made by rank 0 and handed to the peers by descriptor. It starts with
// the group's failure record and one line of doorbell per rank; the rest, the payload, belongs to
// the board's owner (a communicator or a round), which lays it out as it likes.
//
//   | failure record | doorbell[0] .. doorbell[n-1] | payload ... |
//
// Rules for owners: every flag in the payload is an atomic on its own cache line with one writer,
// or says why not. After publishing a flag call ring(); to wait for one call wait().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "base/mapping.h"
#include "transport/peer.h"
#include "transport/store.h"

namespace pydist {

constexpr size_t kCacheLineNbytes = 64;

// A monotonic counter with one writer, alone on its cache line.
struct alignas(kCacheLineNbytes) Counter {
  std::atomic<uint64_t> value;
};

struct BoardOptions {
  int rank = 0;
  int size = 1;
  size_t payload_nbytes = 0;      // equal on all ranks; zero-filled, charged at once
  double timeout_s = 1800;        // of set-up and of every wait
  std::string name = "group";     // for messages: "the default group", "the reducer of MyModel"
  std::vector<int> global_ranks;  // for messages; empty: 0..size-1
  // How messages call the ranks where the board is only a part of a group; empty: "rank 1 (pid 4)".
  std::vector<std::string> names = {};
  // What to do after a failure, and where to look after a death.
  std::string remedy = "make a new group, or restart the job";
  std::string clue = "what did it print last?";
  // Waits that time out or are interrupted fail the group for good; else they raise on this rank
  // alone, and the owner tells the others.
  bool waits_fail_group = true;
};

class Board {
 public:
  static constexpr int kNobody = -1;
  static constexpr int kAnybody = -2;

  // Collective over all ranks. Raises HostError (below) on every rank where the ranks do not share
  // a host.
  static std::shared_ptr<Board> create(Store& store, const BoardOptions& options);
  ~Board();
  Board(const Board&) = delete;

  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  double timeout_s() const { return options_.timeout_s; }
  void set_timeout_s(double timeout_s) { options_.timeout_s = timeout_s; }
  const std::string& name() const { return options_.name; }
  uint8_t* payload() const { return payload_; }
  size_t payload_nbytes() const { return options_.payload_nbytes; }
  // The lowest instruction set of all ranks, so that all run the same kernels.
  Isa isa() const { return isa_; }
  // Where this process sees the arena of rank r, this rank's own included.
  uint8_t* arena_base(int r) const { return peers_[r]->arena_base(); }
  // "rank 1 (pid 1234)"; a subgroup's rank also gets its global rank.
  std::string describe(int r) const;

  // Wakes the peers that sleep on this board. Call after every publication; costs a fence and a
  // load per peer.
  void ring();
  // The same for one peer, or for this rank's own threads.
  void ring(int r);

  // Blocks until awaited() returns kNobody; otherwise it returns the rank that is missing, or
  // kAnybody where any peer's death would mean waiting in vain. It is called often, but never again
  // once it has returned kNobody: it may take what it finds. Spins, yields, then sleeps in slices.
  // Raises PeerError when a peer has died or the group has failed, TimeoutError (and fails the
  // group, so that all peers raise) after timeout_s(), and what a signal handler raises (fails the
  // group too; see BoardOptions::waits_fail_group). `operation` is called only to word an error,
  // such as "all_reduce of 1024 float32".
  template <class Awaited, class Describe>
  void wait(Awaited&& awaited, Describe&& operation) {
    if (awaited() == kNobody) return;
    wait_slowly(std::ref(awaited), std::ref(operation), Patience::kLimited);
  }
  // The same for a thread that works behind the caller's back: sleeps at once, however long.
  template <class Awaited, class Describe>
  void watch(Awaited&& awaited, Describe&& operation) {
    wait_slowly(std::ref(awaited), std::ref(operation), Patience::kEndless);
  }

  // Raises UsageError in a forked child, which must not touch the board. A plain load.
  void check_process() const;
  // Raises PeerError if the group has failed. Cheap: two loads.
  void check(const std::function<std::string()>& operation);
  // Marks the group as failed for good, with the first caller's reason (a whole sentence that names
  // this rank), and wakes everybody. Never throws.
  void fail(const std::string& reason) noexcept;
  // Any failure marked (not: dead peers nobody has noticed). seq_cst: pairs with a busy flag stored
  // before.
  bool failed() const;
  // Why, once it has.
  std::string failure() const;
  // Rank that failed first, or kNobody.
  int failed_rank() const;
  // False once rank r's process has died or left. A plain load.
  bool alive(int r) const { return peers_[r]->alive(); }
  // True while rank r's process has not exited entirely, so that its threads might still store into
  // shared memory.
  bool may_still_write(int r) const;

 private:
  struct Header;
  struct Doorbell;
  enum class Patience { kLimited, kEndless };
  Board(const BoardOptions& options, std::vector<std::shared_ptr<Peer>> peers, Isa isa);
  void make(Store& store);
  void join(Store& store, const ProcessCard& maker, double deadline_s);
  size_t mapped_nbytes() const;
  void use(std::shared_ptr<Mapping> mapping);
  void arrive();
  void wait_slowly(const std::function<int()>& awaited,
                   const std::function<std::string()>& operation, Patience patience);
  void wake(int r);
  bool sleep(const std::function<int()>& awaited, double slice_s);
  void run_interrupt_check(const std::function<std::string()>& operation);
  int dead_rank(int missing, bool thoroughly) const;
  [[noreturn]] void raise_dead(int r, const std::function<std::string()>& operation);
  [[noreturn]] void raise_failed(const std::function<std::string()>& operation);
  [[noreturn]] void raise_timeout(int missing, const std::function<std::string()>& operation);

  BoardOptions options_;
  std::vector<std::shared_ptr<Peer>> peers_;
  Isa isa_;
  bool spin_;  // false where local ranks outnumber usable cores
  std::shared_ptr<Mapping> mapping_;
  Header* header_ = nullptr;
  Doorbell* doorbells_ = nullptr;
  uint8_t* payload_ = nullptr;
};

// The ranks of a group cannot share memory (several hosts, network namespaces or users); says which
// two and why.
class HostError : public Error {
 public:
  using Error::Error;
};

}  // namespace pydist
