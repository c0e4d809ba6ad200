// What goes wrong between hosts: calls that differ, ranks that do not come, hosts that are lost,
// signals. Ranks are threads; made for the sanitizers.
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/interrupt.h"
#include "check.h"
#include "memory_hosts.h"

using namespace pydist;

namespace {

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

template <class ErrorType>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const ErrorType& error) {
    return error.what();
  }
  CHECK(!"the error was not raised");
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "'%s' is not in '%s'\n", part.c_str(), text.c_str());
  return false;
}

void test_mismatches() {
  on_hosts(kHosts[2], [&](HostsCommunicator& c, HostsTeam&) {
    std::vector<float> array(3000, 1.0f);
    const int64_t count = c.rank() == 2 ? 2000 : 3000;
    const std::string text = message_of<MismatchError>(
        [&] { c.all_reduce({array.data(), count, DType::kFloat32}, ReduceOp::kSum); });
    CHECK(contains(text, "rank 2 called all_reduce(sum) of 2000 float32"));
    CHECK(array[0] == 1.0f);
    if (c.rank() == 1) {
      message_of<UsageError>([&] { c.broadcast({array.data(), 3000, DType::kFloat32}, 7); });
    } else {
      CHECK(contains(message_of<MismatchError>([&] { c.barrier(); }), "root 7 of 3 ranks"));
    }
    c.all_reduce({array.data(), 3000, DType::kFloat32}, ReduceOp::kSum);  // goes on
    CHECK(array[2999] == 3.0f);
  });
}

// A rank that never comes is named on all others, wherever it is.
void test_timeouts() {
  for (const int absent : {0, 1, 2, 3}) {
    on_hosts(
        kHosts[0],
        [&](HostsCommunicator& c, HostsTeam&) {
          if (c.rank() == absent) {
            for (int i = 0; i < 1000 && !c.board().failed(); ++i) {
              std::this_thread::sleep_for(std::chrono::milliseconds(20));
            }
            CHECK(c.board().failed());
            return;
          }
          std::string text;
          try {
            c.barrier();
            CHECK(!"nobody was missed");
          } catch (const TimeoutError& error) {
            text = error.what();
          } catch (const PeerError& error) {
            text = error.what();
          }
          CHECK(contains(text, concat("s for rank ", absent, " in barrier")));
        },
        0.5);
  }
}

// A failure reaches the ranks of other hosts, waiting or not.
void test_failures() {
  on_hosts(kHosts[0], [&](HostsCommunicator& c, HostsTeam&) {
    if (c.rank() == 3) return c.fail("rank 3 has had enough");
    CHECK(contains(message_of<PeerError>([&] { c.barrier(); }), "rank 3 has had enough"));
    CHECK(contains(message_of<PeerError>([&] { c.barrier(); }), "rank 3 has had enough"));
  });
}

// Splits that do not fit: known to all ranks before anything moves.
void test_splits() {
  on_hosts(kHosts[2], [&](HostsCommunicator& c, HostsTeam&) {
    std::vector<int32_t> input(3), output(3);
    Collective call;
    call.operation = Operation::kAllToAll;
    call.input_splits = {1, 1, 1};
    call.output_splits = {1, 1, 1};
    if (c.rank() == 0) call.input_splits = {1, 2, 0};
    call.input = {input.data(), 3, DType::kInt32};
    call.output = {output.data(), 3, DType::kInt32};
    const std::string text = message_of<MismatchError>([&] { c.run(call); });
    CHECK(contains(text, "rank 0 sends 2 elements to rank 1, which expects 1"));
    c.barrier();  // goes on
    CHECK(c.counts().collectives[size_t(Operation::kAllToAll)].calls == 0);
  });
}

// Connections break, and nobody hears of the lost host any more: its name is in all errors.
void test_lost_host() {
  on_hosts(kHosts[4], [&](HostsCommunicator& c, HostsTeam& team) {
    if (team.host() == 2) {
      if (team.lane) {
        sleep_ms(200);
        static_cast<MemoryNetwork&>(*team.lane).wire().break_down();
      }
      throw Leaves{};
    }
    std::vector<float> array(100000, 1.0f);
    const std::string text = message_of<PeerError>([&] {
      c.all_reduce({array.data(), int64_t(array.size()), DType::kFloat32}, ReduceOp::kSum);
    });
    CHECK(contains(text, "host host-2 (rank 4, rank 5) gave no sign of life"));
    CHECK(contains(message_of<PeerError>([&] { c.barrier(); }), "host-2"));
  });
}

// What another thread of this host finds wrong reaches the other hosts too, call or not.
void test_failed_board() {
  on_hosts(kHosts[0], [&](HostsCommunicator& c, HostsTeam&) {
    if (c.rank() == 1) c.board().fail("rank 1 found something");
    for (int i = 0; i < 1000 && !c.board().failed(); ++i) sleep_ms(20);
    CHECK(contains(message_of<PeerError>([&] { c.barrier(); }), "rank 1 found something"));
  });
}

struct Interrupt : std::runtime_error {
  Interrupt() : std::runtime_error("a signal handler raised") {}
};
thread_local bool is_interrupted = false;
void raise_if_interrupted() {
  if (is_interrupted) throw Interrupt();
}

// A handler that raises while its rank waits for one of its host (0), or for other hosts (2), ends
// the group for everybody; so does one while it waits for a request.
void test_interrupts() {
  set_interrupt_check(&raise_if_interrupted);
  for (const int who : {0, 2}) {
    for (const bool starts : {false, true}) {
      on_hosts(kHosts[2], [&](HostsCommunicator& c, HostsTeam&) {
        std::vector<float> array(100000, 1.0f);
        Collective call;
        call.operation = Operation::kAllReduce;
        call.output = {array.data(), int64_t(array.size()), DType::kFloat32};
        if (c.rank() == who) {
          is_interrupted = true;
          message_of<Interrupt>([&] {
            if (!starts) return c.run(call);
            c.start(call, nullptr)->wait();
          });
          is_interrupted = false;
          message_of<PeerError>([&] { c.barrier(); });
          return;
        }
        sleep_ms(600);
        const std::string text = message_of<PeerError>([&] { c.run(call); });
        CHECK(contains(text, concat("rank ", who, " was interrupted")));
      });
    }
  }
  set_interrupt_check(nullptr);
}

}  // namespace

int main() {
  test_mismatches();
  test_splits();
  test_timeouts();
  test_failures();
  test_lost_host();
  test_failed_board();
  test_interrupts();
  return 0;
}
