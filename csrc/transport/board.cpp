#include "transport/board.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/clock.h"
#include "base/fork.h"
#include "base/interrupt.h"
#include "transport/wait_limit.h"

namespace pydist {

namespace {

constexpr double kSpin_s = 50e-6;   // longer than a reduction of a few chunks takes
constexpr double kYield_s = 1e-3;   // yields cost little while others are about to finish
constexpr double kSlice_s = 50e-3;  // how late a death or a signal may be noticed
constexpr size_t kReasonNbytes = 960;

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, double timeout_s) {
  timespec limit{};
  limit.tv_sec = static_cast<time_t>(timeout_s);
  limit.tv_nsec = static_cast<long>((timeout_s - static_cast<double>(limit.tv_sec)) * 1e9);
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &limit, nullptr,
            0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr,
            0);
}

}  // namespace

// Written once, by the rank that wins the exchange on `failed`; `reason` is valid once
// `reason_ready` is set.
struct alignas(kCacheLineNbytes) Board::Header {
  std::atomic<uint64_t> failed;  // 0, or 1 + the rank that failed first
  std::atomic<uint32_t> reason_ready;
  char reason[kReasonNbytes];
};

struct alignas(kCacheLineNbytes) Board::Doorbell {
  std::atomic<uint32_t> rings;     // writers: peers of its rank
  std::atomic<uint32_t> sleepers;  // writer: threads of its rank
  std::atomic<uint32_t> arrived;   // writer: its rank, once
};

Board::Board(const BoardOptions& options, std::vector<std::shared_ptr<Peer>> peers, Isa isa)
    : options_(options),
      peers_(std::move(peers)),
      isa_(isa),
      spin_(options.size <= usable_cpus()) {}

Board::~Board() = default;

size_t Board::mapped_nbytes() const {
  return sizeof(Header) + options_.size * sizeof(Doorbell) + options_.payload_nbytes;
}

void Board::use(std::shared_ptr<Mapping> mapping) {
  mapping_ = std::move(mapping);
  header_ = reinterpret_cast<Header*>(mapping_->data());
  doorbells_ = reinterpret_cast<Doorbell*>(mapping_->data() + sizeof(Header));
  payload_ = reinterpret_cast<uint8_t*>(doorbells_ + options_.size);
}

// Everybody has mapped the board once everybody has arrived; only then may its owner publish
// anything.
void Board::arrive() {
  doorbells_[rank()].arrived.store(1, std::memory_order_release);
  ring();
  wait(
      [this] {
        for (int r = 0; r < size(); ++r) {
          if (doorbells_[r].arrived.load(std::memory_order_acquire) == 0) return r;
        }
        return kNobody;
      },
      [this] { return "the set-up of " + name(); });
}

std::string Board::describe(int r) const {
  if (!options_.names.empty()) return options_.names[r];
  std::string text = concat("rank ", r, " (");
  if (!options_.global_ranks.empty() && options_.global_ranks[r] != r) {
    text += concat("global rank ", options_.global_ranks[r], ", ");
  }
  return concat(text, "pid ", peers_[r]->pid(), ")");
}

void Board::ring() {
  // Pairs with the increment of `sleepers` in sleep(): either the sleeper sees the publication that
  // precedes this fence, or we see the sleeper.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) wake(r);
  }
}

void Board::ring(int r) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake(r);
}

void Board::wake(int r) {
  Doorbell& doorbell = doorbells_[r];
  if (doorbell.sleepers.load(std::memory_order_relaxed) == 0) return;
  doorbell.rings.fetch_add(1, std::memory_order_release);
  futex_wake_all(doorbell.rings);
}

bool Board::sleep(const std::function<int()>& awaited, double slice_s) {
  Doorbell& doorbell = doorbells_[rank()];
  doorbell.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t rings = doorbell.rings.load(std::memory_order_acquire);
  const bool satisfied = awaited() == kNobody;
  if (!satisfied && !failed()) futex_wait(doorbell.rings, rings, slice_s);
  doorbell.sleepers.fetch_sub(1, std::memory_order_release);
  return satisfied;
}

void Board::wait_slowly(const std::function<int()>& awaited,
                        const std::function<std::string()>& operation, Patience patience) {
  check_process();
  const bool endless = patience == Patience::kEndless;
  constexpr int kProbes = 64;  // of the flag per look at the clock
  const double limit_s = WaitLimit::or_else(timeout_s());
  const double start_s = monotonic_s();
  for (;;) {
    const double waited_s = monotonic_s() - start_s;
    const bool spinning = spin_ && !endless && waited_s < kSpin_s;
    const bool yielding = !spinning && !endless && waited_s < kYield_s;
    if (spinning) {
      for (int probe = 0; probe < kProbes; ++probe) {
        if (awaited() == kNobody) return;
        cpu_pause();
      }
    } else if (yielding) {
      ::sched_yield();
    } else {
      const double left_s = endless ? kSlice_s : std::max(1e-3, limit_s - waited_s);
      if (sleep(awaited, std::min(kSlice_s, left_s))) return;
      run_interrupt_check(operation);
    }
    const int missing = awaited();
    if (missing == kNobody) return;
    // What we wait for may have been published just before the failure, or by a rank that then
    // left.
    if (failed()) {
      if (awaited() == kNobody) return;
      raise_failed(operation);
    }
    const int dead = dead_rank(missing, !spinning && !yielding);
    if (dead != kNobody) {
      if (awaited() == kNobody) return;
      raise_dead(dead, operation);
    }
    if (!endless && waited_s >= limit_s) raise_timeout(missing, operation);
  }
}

void Board::run_interrupt_check(const std::function<std::string()>& operation) {
  try {
    check_interrupt();
  } catch (...) {
    if (options_.waits_fail_group) fail(describe(rank()) + " was interrupted in " + operation());
    throw;
  }
}

// The life mutex tells of a death at once and costs a load; `thoroughly` asks the kernel too, in
// case it has not marked it (as under user-mode emulation).
int Board::dead_rank(int missing, bool thoroughly) const {
  for (int r = 0; r < size(); ++r) {
    if (missing != kAnybody && r != missing) continue;
    if (!peers_[r]->alive() || (thoroughly && peers_[r]->gone())) return r;
  }
  return kNobody;
}

void Board::raise_dead(int r, const std::function<std::string()>& operation) {
  fail(concat(describe(r), " died or left while ", describe(rank()), " waited in ", operation(),
              " (", options_.clue, ")"));
  raise_failed(operation);
}

void Board::check(const std::function<std::string()>& operation) {
  check_process();
  if (failed()) raise_failed(operation);
}

void Board::check_process() const {
  PYDIST_CHECK(!in_forked_child(), UsageError, name(),
               " belongs to the process that forked this one; ",
               "a forked child (a DataLoader worker, say) must not communicate");
}

void Board::fail(const std::string& reason) noexcept {
  if (in_forked_child()) return;
  uint64_t none = 0;
  // seq_cst: pairs with the busy flags of claimants, see bucket/round.h.
  if (header_->failed.compare_exchange_strong(none, static_cast<uint64_t>(rank()) + 1,
                                              std::memory_order_seq_cst)) {
    const size_t length = std::min(reason.size(), kReasonNbytes - 1);
    std::memcpy(header_->reason, reason.data(), length);
    header_->reason_ready.store(1, std::memory_order_release);
  }
  ring();
}

bool Board::failed() const { return header_->failed.load(std::memory_order_seq_cst) != 0; }

int Board::failed_rank() const {
  return static_cast<int>(header_->failed.load(std::memory_order_seq_cst)) - 1;
}

bool Board::may_still_write(int r) const { return !peers_[r]->gone(); }

std::string Board::failure() const {
  // The first to fail may be about to write its reason, or may have died before it could.
  const double deadline_s = monotonic_s() + 0.1;
  while (header_->reason_ready.load(std::memory_order_acquire) == 0 && monotonic_s() < deadline_s) {
    ::sched_yield();
  }
  const bool has_reason = header_->reason_ready.load(std::memory_order_acquire) != 0;
  return has_reason ? std::string(header_->reason) : describe(failed_rank()) + " failed";
}

void Board::raise_failed(const std::function<std::string()>& operation) {
  const std::string reason = failure();
  const std::string own = operation();
  const std::string me = options_.names.empty() ? concat("rank ", rank()) : describe(rank());
  // Where it was this rank that gave the reason, it has said so already.
  const bool is_known = failed_rank() == rank() && reason.find(own) != std::string::npos;
  throw PeerError(concat(reason, "; ", name(), " cannot be used any more",
                         is_known ? "" : concat(" (", me, " was in ", own, ")"), ": ",
                         options_.remedy));
}

void Board::raise_timeout(int missing, const std::function<std::string()>& operation) {
  const std::string whom = missing == kAnybody ? std::string("its peers") : describe(missing);
  const std::string text = concat(describe(rank()), " waited ", WaitLimit::or_else(timeout_s()),
                                  " s for ", whom, " in ", operation());
  if (options_.waits_fail_group) fail(text);
  throw TimeoutError(concat(text, "; is that rank still running, and does it make the same calls? ",
                            "(the limit is the timeout of the group, or PYDIST_TIMEOUT_S)"));
}

}  // namespace pydist
