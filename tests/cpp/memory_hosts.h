// Several hosts within the process, for tests: ranks are threads, and so is the network.
#pragma once

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "collective/hosts_communicator.h"
#include "memory_store.h"

namespace pydist {

using Hosts = std::vector<std::vector<int>>;
inline const std::vector<Hosts> kHosts = {
    {{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}, {{0, 1}, {2}}, {{0}, {1}, {2}}, {{0, 1, 2}, {3}, {4, 5}}};

// Operations of all ranks, paired by their order; each copies what it gets once all have come.
class MemoryWire {
 public:
  explicit MemoryWire(int size) : size_(size), counts_(size, 0) {}
  struct Entry {
    SharedBytes from;
    std::vector<int64_t> sent;  // by rank
  };
  struct Meeting {
    std::vector<Entry> entries;
    int num_come = 0;
    int num_left = 0;
  };
  int size() const { return size_; }
  // What ranks have sent, in bytes; of an all_gather each part once.
  int64_t nbytes() const { return nbytes_.load(); }
  // As when a peer has died: what is under way, and all to come, ends with an error.
  void break_down() { is_broken_.store(true); }
  bool is_broken() const { return is_broken_.load(); }

  uint64_t come(int rank, Entry entry) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t number = counts_[rank]++;
    Meeting& meeting = meetings_[number];
    meeting.entries.resize(size_);
    // A copy, as of what has gone into a socket.
    int64_t nbytes = 0;
    for (const int64_t part : entry.sent) nbytes += part;
    nbytes_ += nbytes;
    SharedBytes copy = make_shared_bytes(nbytes);
    if (nbytes > 0) std::memcpy(copy.get(), entry.from.get(), nbytes);
    entry.from = copy;
    meeting.entries[rank] = std::move(entry);
    ++meeting.num_come;
    return number;
  }
  bool all_have_come(uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return meetings_.at(number).num_come == size_;
  }
  std::vector<Entry> leave(uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Meeting& meeting = meetings_.at(number);
    std::vector<Entry> entries = meeting.entries;
    if (++meeting.num_left == size_) meetings_.erase(number);
    return entries;
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::vector<uint64_t> counts_;
  std::map<uint64_t, Meeting> meetings_;
  std::atomic<int64_t> nbytes_{0};
  std::atomic<bool> is_broken_{false};
};

class MemoryNetwork final : public Network {
 public:
  MemoryNetwork(std::shared_ptr<MemoryWire> wire, int rank) : wire_(std::move(wire)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return wire_->size(); }
  MemoryWire& wire() { return *wire_; }
  Started all_to_all(const SharedBytes& from, const SharedBytes& to, size_t nbytes) override {
    const std::vector<int64_t> equal(size(), static_cast<int64_t>(nbytes));
    return all_to_all(from, equal, to, equal);
  }
  Started all_to_all(const SharedBytes& from, std::vector<int64_t> sent, const SharedBytes& to,
                     std::vector<int64_t> received) override {
    return start(from, std::move(sent), [to, received, rank = rank_](const auto& entries) {
      uint8_t* target = to.get();
      for (size_t r = 0; r < entries.size(); ++r) {
        int64_t begin = 0;
        for (int k = 0; k < rank; ++k) begin += entries[r].sent[k];
        CHECK(entries[r].sent[rank] == received[r]);
        std::memcpy(target, entries[r].from.get() + begin, received[r]);
        target += received[r];
      }
    });
  }
  Started all_gather(const SharedBytes& from, const SharedBytes& to, size_t nbytes) override {
    return start(from, {static_cast<int64_t>(nbytes)}, [to, nbytes](const auto& entries) {
      for (size_t r = 0; r < entries.size(); ++r) {
        CHECK(entries[r].sent[0] == static_cast<int64_t>(nbytes));
        std::memcpy(to.get() + r * nbytes, entries[r].from.get(), nbytes);
      }
    });
  }
  Started broadcast(const SharedBytes& data, size_t nbytes, int root) override {
    return start(data, {static_cast<int64_t>(nbytes)}, [data, nbytes, root](const auto& entries) {
      std::memcpy(data.get(), entries[root].from.get(), nbytes);
    });
  }

 private:
  using Take = std::function<void(const std::vector<MemoryWire::Entry>&)>;
  class Meeting final : public Exchange {
   public:
    Meeting(std::shared_ptr<MemoryWire> wire, uint64_t number, Take take)
        : wire_(std::move(wire)), number_(number), take_(std::move(take)) {}
    bool test() override { return wire_->is_broken() || wire_->all_have_come(number_); }
    void finish() override {
      if (wire_->is_broken()) throw NetworkError("the wire is broken");
      take_(wire_->leave(number_));
    }

   private:
    std::shared_ptr<MemoryWire> wire_;
    uint64_t number_;
    Take take_;
  };
  Started start(const SharedBytes& from, std::vector<int64_t> sent, Take take) {
    const uint64_t number = wire_->come(rank_, {from, std::move(sent)});
    return std::make_unique<Meeting>(wire_, number, std::move(take));
  }

  std::shared_ptr<MemoryWire> wire_;
  const int rank_;
};

class StoreOf final : public Store {
 public:
  StoreOf(MemoryStore& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override {
    store_.set(prefix_ + key, value);
  }
  std::string get(const std::string& key) override { return store_.get(prefix_ + key); }
  int64_t add(const std::string& key, int64_t amount) override {
    return store_.add(prefix_ + key, amount);
  }
  bool check(const std::string& key) override { return store_.check(prefix_ + key); }

 private:
  MemoryStore& store_;
  const std::string prefix_;
};

using Body = std::function<void(HostsCommunicator&, HostsTeam&)>;
// Of a rank, over its host's board.
using MakeMessages = std::function<std::unique_ptr<HostsMessages>(int, std::shared_ptr<Board>)>;

// Raised by a body whose rank ends there, without a word to the others.
struct Leaves {};

// body(communicator, team) on every rank, each a thread.
inline void on_hosts(const Hosts& hosts, const Body& body, double timeout_s = 20,
                     const MakeMessages& make_messages = nullptr) {
  MemoryStore store;
  const HostLayout layout(hosts);
  std::vector<std::shared_ptr<MemoryWire>> lanes;
  for (int k = 0; k < layout.num_lanes(); ++k) {
    lanes.push_back(std::make_shared<MemoryWire>(layout.num_hosts()));
  }
  const auto flat = std::make_shared<MemoryWire>(layout.num_ranks());
  HostsOptions options;
  options.name = "the test group";
  options.timeout_s = timeout_s;
  for (int r = 0; r < layout.num_ranks(); ++r) options.ranks.push_back(concat("rank ", r));
  for (int h = 0; h < layout.num_hosts(); ++h) options.host_names.push_back(concat("host-", h));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < layout.num_ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const int host = layout.host_of(rank);
        BoardOptions board;
        board.rank = layout.local_of(rank);
        board.size = layout.num_ranks_of(host);
        board.waits_fail_group = false;
        for (const int r : layout.ranks_of(host)) board.names.push_back(options.ranks[r]);
        StoreOf local(store, concat("host", host, "/"));
        HostsTeam team{layout, rank, ShmCommunicator::create(local, board), nullptr,
                       std::make_shared<MemoryNetwork>(flat, rank)};
        if (layout.has_lane(rank)) {
          team.lane = std::make_shared<MemoryNetwork>(lanes[layout.local_of(rank)], host);
        }
        std::unique_ptr<HostsMessages> messages;
        if (make_messages) {
          messages = make_messages(rank, std::shared_ptr<Board>(team.local, &team.local->board()));
        }
        HostsCommunicator communicator(team, std::make_unique<StoreOf>(store, "watch/"),
                                       std::move(messages), options);
        body(communicator, team);
        if (!communicator.board().failed()) communicator.barrier();
      } catch (const Leaves&) {
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::exit(1);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace pydist
