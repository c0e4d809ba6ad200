// Messages of a communicator over hosts: what it makes of whoever carries them. Ranks are threads;
// made for the sanitizers.
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "memory_hosts.h"
#include "memory_messages.h"

using namespace pydist;

namespace {

void on_hosts_with_messages(const Hosts& hosts, const Body& body, double timeout_s = 20) {
  const auto mail = std::make_shared<MemoryMail>();
  on_hosts(hosts, body, timeout_s, [mail](int rank, const std::shared_ptr<Board>&) {
    return std::make_unique<MemoryMessages>(mail, rank);
  });
}

Buffer one(int64_t& value) { return {&value, 1, DType::kInt64}; }

// Everybody to everybody, tags in another order than they are asked for.
void test_messages() {
  for (const Hosts& hosts : kHosts) {
    on_hosts_with_messages(hosts, [&](HostsCommunicator& c, HostsTeam&) {
      const auto n = static_cast<uint64_t>(c.size());
      for (int r = 0; r < c.size(); ++r) {
        if (r == c.rank()) continue;
        int64_t first = 100 * c.rank() + r, second = -first;
        c.start_send(one(first), r, 1, nullptr)->wait();
        c.send(one(second), r, 0);
      }
      for (int r = 0; r < c.size(); ++r) {
        if (r == c.rank()) continue;
        int64_t first = 0, second = 0;
        const auto request = c.start_receive(one(first), r, 1, nullptr);
        CHECK(c.receive(one(second), r, 0) == r);
        request->wait();
        CHECK(request->source() == r);
        CHECK(first == 100 * r + c.rank() && second == -first);
      }
      const CommunicatorCounts counts = c.counts();
      CHECK(counts.sent.calls == 2 * (n - 1) && counts.sent.nbytes == 16 * (n - 1));
      CHECK(counts.received.calls == 2 * (n - 1) && counts.received.nbytes == 16 * (n - 1));
    });
  }
}

template <class ErrorType, class BodyType>
std::string message_of(BodyType&& body) {
  try {
    body();
  } catch (const ErrorType& error) {
    return error.what();
  }
  CHECK(!"the error was not raised");
  return "";
}

void test_any_source_and_misuse() {
  on_hosts_with_messages(kHosts[2], [&](HostsCommunicator& c, HostsTeam&) {
    int64_t value = c.rank();
    if (c.rank() > 0) {
      c.send(one(value), 0, 5);
    } else {
      int64_t sum = 0;
      for (int k = 0; k < 2; ++k) {
        const int source = c.receive(one(value), Communicator::kAnySource, 5);
        CHECK(source == value);
        sum += value;
      }
      CHECK(sum == 3);
    }
    message_of<UsageError>([&] { c.send(one(value), c.rank(), 0); });
    message_of<UsageError>([&] { c.send(one(value), Communicator::kAnySource, 0); });
    message_of<UsageError>([&] { c.receive(one(value), 3, 0); });
  });
}

// Who does not come is named on all that did, and the group stays usable.
void test_monitored_barrier() {
  on_hosts_with_messages(kHosts[0], [&](HostsCommunicator& c, HostsTeam&) {
    c.monitored_barrier(20, false);
    if (c.rank() == 1 || c.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(800));
    } else {
      const std::string text = message_of<TimeoutError>([&] { c.monitored_barrier(0.3, true); });
      CHECK(c.rank() != 0 || text.find("rank 1, rank 2 did not come") != std::string::npos);
    }
    c.barrier();
    CHECK(c.counts().sent.calls == 0);  // its messages are the engine's own
  });
}

// A message that never comes ends the group, and the other hosts hear of it.
void test_timeout() {
  on_hosts_with_messages(
      kHosts[0],
      [&](HostsCommunicator& c, HostsTeam&) {
        int64_t value = 0;
        if (c.rank() == 1) {
          const std::string text = message_of<TimeoutError>([&] { c.receive(one(value), 2, 7); });
          CHECK(text.find("rank 1 waited 0.5 s in recv of 1 int64 with tag 7") == 0);
          return;
        }
        for (int i = 0; i < 1000 && !c.board().failed(); ++i) {
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
        }
        const std::string text = message_of<PeerError>([&] { c.send(one(value), 1, 7); });
        CHECK(text.find("rank 1 waited 0.5 s in recv") != std::string::npos);
      },
      0.5);
}

}  // namespace

int main() {
  test_messages();
  test_any_source_and_misuse();
  test_monitored_barrier();
  test_timeout();
  return 0;
}
