// Failures and signs of life between hosts, through the Store: one thread that looks at it, so that
// nobody who waits for data waits for the Store, whose own host may be the one that is lost. No
// torch.
//
//   news       set with any of the others, so that a look is one question
//   failure    why the group has ended: the first to fail sets it
//   sign       somebody misses somebody: every rank answers in
//   sign/<r>   how far rank r has come: "<calls begun> <calls ended>"
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "transport/store.h"

namespace pydist {

class HostsWatch {
 public:
  // The ranks of this host, who learn of failures in their own way. Both are called on the thread.
  struct Host {
    std::function<std::string()> failure;                // empty while there is none
    std::function<void(const std::string&)> on_failure;  // one that another rank told, once
  };
  HostsWatch(std::unique_ptr<Store> store, int rank, int size, Host host);
  // Waits a moment for what is still to be told, and never for a Store that does not answer.
  ~HostsWatch();

  // This rank begins, or has ended, its next call: while it is in one, the Store is looked at more
  // often.
  void begin();
  void end();
  // Lets all ranks know why the group ends, sooner than the next look at the host would. Does not
  // wait.
  void tell(const std::string& reason) noexcept;

  struct Signs {
    bool store_answers = false;
    std::vector<int> silent;  // gave no sign of life
    std::vector<int> behind;  // are not in this rank's call, nor beyond it
  };
  // Asks all ranks for signs of life and waits for them, not long.
  Signs ask();

 private:
  struct State;
  static void watch(const std::shared_ptr<State>& state);

  // Shared with the thread, which is left behind where the Store does not answer.
  const std::shared_ptr<State> state_;
};

}  // namespace pydist
