// What went wrong with a call over several hosts: who is missing, and how the others learn of it.
#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "collective/hosts_communicator.h"

namespace pydist {

namespace {

constexpr double kReason_s = 0.5;  // for the reason of a rank whose connections have broken
constexpr useconds_t kSleep_us = 5000;

// Networks that are left behind, for as long as the process lives.
void keep_for_ever(std::shared_ptr<Network> network) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<Network>>;
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(network));
}

}  // namespace

void HostsCommunicator::fail(const std::string& reason) noexcept {
  board().fail(reason);
  watch_.tell(reason);
}

// Called where an exception is being handled; raises it, or one that says more.
void HostsCommunicator::raise_failure(const Describe& operation) {
  leave_network();
  try {
    throw;
  } catch (const TimeoutError&) {
    raise_timeout(operation);
  } catch (const NetworkError& error) {
    raise_lost(error.what(), operation);
  } catch (
      const PeerError&) {  // the board has failed: by a rank of this host, or through the Store
    watch_.tell(board().failure());
    throw;
  } catch (...) {
    fail(concat(describe(rank()), " was interrupted, or failed, in ", operation()));
    throw;
  }
}

void HostsCommunicator::raise_timeout(const Describe& operation) {
  const HostsWatch::Signs signs = watch_.ask();
  const std::string text = concat(describe(rank()), " waited ", options_.timeout_s, " s for ",
                                  describe_absent(signs), " in ", operation());
  fail(text);
  throw TimeoutError(concat(text,
                            "; is every rank still running, and does it make the same calls? "
                            "(the limit is the timeout of the group, or PYDIST_TIMEOUT_S)"));
}

// A broken connection does not say whose it was: a peer that raised has told why, one that died
// gives no sign of life.
void HostsCommunicator::raise_lost(const std::string& cause, const Describe& operation) {
  const double deadline_s = monotonic_s() + kReason_s;
  while (!board().failed() && monotonic_s() < deadline_s) ::usleep(kSleep_us);
  board().check(operation);
  HostsWatch::Signs signs = watch_.ask();
  board().check(operation);
  signs.behind.clear();  // alive, and not here yet
  const std::string text =
      concat(describe_absent(signs), " gave no sign of life after a connection broke, says ",
             describe(rank()), " in ", operation(), " (", cause, ")");
  fail(text);
  throw PeerError(concat(text, "; ", name(), " cannot be used any more: ", options_.remedy));
}

std::string HostsCommunicator::describe_absent(const HostsWatch::Signs& signs) const {
  std::vector<int> absent = signs.silent;
  absent.insert(absent.end(), signs.behind.begin(), signs.behind.end());
  std::sort(absent.begin(), absent.end());
  std::string text = absent.empty() ? std::string("a peer") : describe_ranks(absent);
  if (!signs.store_answers) {
    text += concat(
        " (the Store does not answer either, so it may be its host alone: rank 0's, as a "
        "rule, which is ",
        describe(0), ")");
  }
  return text;
}

// Whole hosts by their names.
std::string HostsCommunicator::describe_ranks(const std::vector<int>& ranks) const {
  std::string text;
  for (int h = 0; h < team_.layout.num_hosts(); ++h) {
    std::string names;
    int count = 0;
    for (const int r : team_.layout.ranks_of(h)) {
      if (!std::binary_search(ranks.begin(), ranks.end(), r)) continue;
      names += concat(count++ > 0 ? ", " : "", describe(r));
    }
    if (count == 0) continue;
    const bool is_whole = count == team_.layout.num_ranks_of(h);
    const std::string part =
        is_whole ? concat("host ", options_.host_names[h], " (", names, ")") : names;
    text += concat(text.empty() ? "" : ", ", part);
  }
  return text;
}

// What is under way may never end, and whoever ended the network would wait for it.
void HostsCommunicator::leave_network() noexcept {
  for (std::shared_ptr<Network>* network : {&team_.lane, &team_.flat}) {
    if (*network != nullptr) keep_for_ever(std::move(*network));
  }
}

}  // namespace pydist
