// Waiting on a board: what is called how often, who is named, and that a failure stays.
#include "transport/board.h"

#include <unistd.h>

#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "base/clock.h"
#include "check.h"
#include "memory_store.h"

namespace {

using namespace pydist;

void on_ranks(int size, double timeout_s, const std::function<void(Board&)>& body) {
  MemoryStore store;
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      BoardOptions options;
      options.rank = r;
      options.size = size;
      options.payload_nbytes = 4096;
      options.timeout_s = timeout_s;
      body(*Board::create(store, options));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::string operation() { return "a test"; }

template <class ErrorType>
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const ErrorType& error) {
    return error.what();
  }
  return "";
}

// A predicate may take what it finds (a message, say), so it must not be asked again. Once a wait
// sleeps, it asks before and after each sleep: the condition comes true at each of these.
void test_a_satisfied_predicate_is_never_asked_again() {
  on_ranks(2, 30, [](Board& board) {
    for (int satisfied_at = 1; satisfied_at <= 4; ++satisfied_at) {
      const double start_s = monotonic_s();
      int asked_late = 0;
      board.wait(
          [&] {
            if (monotonic_s() < start_s + 5e-3) return 1 - board.rank();  // until it sleeps
            CHECK(asked_late < satisfied_at);
            return ++asked_late == satisfied_at ? Board::kNobody : 1 - board.rank();
          },
          operation);
      CHECK(asked_late == satisfied_at);
    }
  });
}

void test_a_timeout_names_who_is_missing_and_fails_the_group() {
  std::atomic<bool> timed_out{false};
  on_ranks(3, 1, [&](Board& board) {
    if (board.rank() == 2) {  // waits for nobody, and learns of the failure at its next call
      while (!timed_out.load()) ::usleep(1000);
      const std::string text = message_of<PeerError>([&] { board.check(operation); });
      CHECK(text.find("for rank 2") != std::string::npos);
      return;
    }
    const std::string text = message_of<Error>([&] { board.wait([] { return 2; }, operation); });
    CHECK(text.find("for rank 2") != std::string::npos);
    CHECK(text.find("a test") != std::string::npos);
    timed_out.store(true);
    CHECK(board.failed());
  });
}

void test_the_first_reason_stays() {
  std::atomic<int> arrived{0};
  on_ranks(2, 30, [&](Board& board) {
    if (board.rank() == 0) {
      board.fail("rank 0 has had enough");
      board.fail("another reason");
    } else {
      const std::string text =
          message_of<PeerError>([&] { board.wait([] { return 0; }, operation); });
      CHECK(text.find("rank 0 has had enough") != std::string::npos);
      CHECK(text.find("another") == std::string::npos);
    }
    CHECK(board.failed_rank() == 0 || board.rank() == 0);
    ++arrived;
    while (arrived.load() < 2) ::usleep(1000);
  });
}

}  // namespace

int main() {
  test_a_satisfied_predicate_is_never_asked_again();
  test_a_timeout_names_who_is_missing_and_fails_the_group();
  test_the_first_reason_stays();
  std::printf("board_test: passed\n");
  return 0;
}
