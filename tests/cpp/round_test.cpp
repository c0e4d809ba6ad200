// Stress of the round protocol: random units, order, subsets and delays; a rank that raises; a rank
// killed inside a chunk.
//
//   round_test threads|processes  clean|raise|kill  [worlds] [seed]
//
// Every value that a rank gets is compared bit by bit with the mean it must be. Blocks are poisoned
// before they are given back, so that a late read shows as a wrong value and a late write as a
// changed poison. Without arguments: a short run of all that the build allows (ThreadSanitizer
// cannot follow processes).
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "bucket/shared_round.h"
#include "check.h"
#include "file_store.h"
#include "memory_store.h"
#include "transport/arena.h"

namespace {

using namespace pydist;

enum class Fault { kNone, kRaise, kKill };

constexpr float kPoison = -1e30f;
constexpr int kNumRounds = 40;

thread_local std::mt19937 random_number;
// Counts down to this process's death inside a chunk; below zero: immortal.
thread_local int chunks_to_live = -1;

void delay_or_die() {
  if (chunks_to_live >= 0 && chunks_to_live-- == 0) ::raise(SIGKILL);
  switch (random_number() % 16) {
    case 0:
      std::this_thread::yield();
      break;
    case 1:
      ::usleep(random_number() % 60);
      break;
    default:
      break;
  }
}

struct World {
  int size = 2;
  int victim = -1;
  int fault_round = 0;
  Fault fault = Fault::kNone;
  std::vector<Unit> units;
  unsigned seed = 0;
};

World random_world(std::mt19937& random, Fault fault) {
  World world;
  world.size = 2 + static_cast<int>(random() % 3);
  world.fault = fault;
  world.victim = static_cast<int>(random() % world.size);
  world.fault_round = 1 + static_cast<int>(random() % (kNumRounds - 1));
  world.seed = random();
  const int num_units = 1 + static_cast<int>(random() % 8);
  for (int u = 0; u < num_units; ++u) {
    // Up to three chunks of 16,384 elements.
    const int64_t elements = 1 + static_cast<int64_t>(random() % 40000);
    world.units.push_back(Unit{DType::kFloat32, elements, true, {{u, 0}}});
  }
  return world;
}

float contribution(int rank, int round, int unit, int64_t i) {
  return static_cast<float>((rank * 7919 + round * 104729 + unit * 31 + i * 17) % 1000) / 8.0f +
         1e-3f * static_cast<float>(rank);
}

// One rank's life. Returns 0 after all rounds, 2 after a failure that it survived.
class RankRun {
 public:
  RankRun(const World& world, int rank, Store& store) : world_(world), rank_(rank) {
    random_number.seed(world.seed + 977 * static_cast<unsigned>(rank));
    RoundOptions options;
    options.units = world.units;
    options.unit_names.assign(world.units.size(), "a unit");
    options.num_parameters = static_cast<int>(world.units.size());
    options.timeout_s = 60;
    options.on_chunk = delay_or_die;
    BoardOptions board;
    board.rank = rank;
    board.size = world.size;
    round_ = SharedRound::create(store, board, options);
    blocks_.assign(world.units.size(), nullptr);
  }

  int run() {
    try {
      for (number_ = 1; number_ <= kNumRounds; ++number_) step();
      return 0;
    } catch (const PeerError&) {
    } catch (const std::logic_error&) {
      round_->fail(concat("rank ", rank_, " raised on purpose"));
    }
    CHECK(round_->drain());
    for (float* block : blocks_) poison(block, block == nullptr ? 0 : sizes_[block]);
    for (int look = 0; look < 50; ++look) {
      delay_or_die();
      for (const auto& [block, elements] : sizes_) {
        for (int64_t i = 0; i < elements; ++i) CHECK(block[i] == kPoison);
      }
    }
    return 2;
  }

 private:
  void step() {
    const bool faulty = rank_ == world_.victim && number_ == world_.fault_round;
    if (faulty && world_.fault == Fault::kKill)
      chunks_to_live = static_cast<int>(random_number() % 3);
    RoundRecord record(static_cast<int>(world_.units.size()));
    std::vector<int> order;
    for (size_t u = 0; u < world_.units.size(); ++u) {
      if (random_number() % 8 != 0) order.push_back(static_cast<int>(u));
    }
    std::shuffle(order.begin(), order.end(), random_number);
    round_->begin(divisor());
    for (const int unit : order) {
      give(unit, true);
      record.used.set(unit);
      if (faulty && world_.fault == Fault::kRaise && random_number() % 3 == 0) {
        throw std::logic_error("on purpose");
      }
      round_->progress();
    }
    if (faulty && world_.fault == Fault::kRaise) throw std::logic_error("on purpose");
    const std::vector<RoundRecord>& records = round_->end(record);
    Bitmap used(static_cast<int>(world_.units.size()));
    for (const RoundRecord& other : records) used.merge(other.used);
    for (size_t u = 0; u < world_.units.size(); ++u) {
      const int unit = static_cast<int>(u);
      if (used.test(unit) && blocks_[u] == nullptr) give(unit, false);
    }
    round_->finish();
    verify_and_free(records);
  }

  int divisor() const { return number_ % 3; }

  void give(int unit, bool used) {
    const int64_t elements = world_.units[unit].num_elements;
    auto* block = static_cast<float*>(Arena::instance().allocate(elements * sizeof(float)));
    for (int64_t i = 0; i < elements; ++i) {
      block[i] = used ? contribution(rank_, number_, unit, i) : 0.0f;
    }
    blocks_[unit] = block;
    sizes_[block] = elements;
    delay_or_die();
    round_->publish(unit, block);
  }

  void verify_and_free(const std::vector<RoundRecord>& records) {
    for (size_t u = 0; u < world_.units.size(); ++u) {
      float* block = blocks_[u];
      if (block == nullptr) continue;
      for (int64_t i = 0; i < world_.units[u].num_elements; ++i) {
        float sum = 0;
        for (int r = 0; r < world_.size; ++r) {
          if (records[r].used.test(static_cast<int>(u))) {
            sum += contribution(r, number_, static_cast<int>(u), i);
          }
        }
        const float mean =
            sum * (1.0f / static_cast<float>(divisor() > 0 ? divisor() : world_.size));
        CHECK(std::memcmp(&mean, &block[i], sizeof(float)) == 0);
      }
      poison(block, world_.units[u].num_elements);
      sizes_.erase(block);
      Arena::instance().deallocate(block);
      blocks_[u] = nullptr;
    }
  }

  static void poison(float* block, int64_t elements) {
    std::fill(block, block + elements, kPoison);
  }

  const World& world_;
  int rank_;
  int number_ = 0;
  std::unique_ptr<SharedRound> round_;
  std::vector<float*> blocks_;
  std::map<float*, int64_t> sizes_;
};

void check_statuses(const World& world, const std::vector<int>& statuses) {
  for (int r = 0; r < world.size; ++r) {
    const bool victim = r == world.victim;
    if (world.fault == Fault::kNone) CHECK(statuses[r] == 0);
    if (world.fault == Fault::kRaise && victim) CHECK(statuses[r] == 2);
    // The victim of a kill may have found no chunk to claim, and lived.
    if (!victim) CHECK(statuses[r] == 0 || statuses[r] == 2);
  }
}

void run_threads(const World& world) {
  MemoryStore store;
  std::vector<int> statuses(world.size);
  std::vector<std::thread> threads;
  for (int r = 0; r < world.size; ++r) {
    threads.emplace_back([&, r] { statuses[r] = RankRun(world, r, store).run(); });
  }
  for (std::thread& thread : threads) thread.join();
  check_statuses(world, statuses);
}

void run_processes(const World& world) {
  char directory[] = "/tmp/pydist-round-XXXXXX";
  CHECK(::mkdtemp(directory) != nullptr);
  std::vector<pid_t> children;
  for (int r = 0; r < world.size; ++r) {
    const pid_t child = ::fork();
    if (child == 0) {
      FileStore store(directory);
      int status = 1;
      {
        RankRun run(world, r, store);
        status = run.run();
      }
      ::_exit(status);
    }
    children.push_back(child);
  }
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child);
    if (WIFSIGNALED(status)) CHECK(WTERMSIG(status) == SIGKILL && world.fault == Fault::kKill);
    statuses.push_back(WIFSIGNALED(status) ? -1 : WEXITSTATUS(status));
  }
  check_statuses(world, statuses);
  CHECK(std::system(concat("rm -r ", directory).c_str()) == 0);
}

void run(bool processes, Fault fault, int worlds, unsigned seed) {
  std::mt19937 random(seed);
  for (int w = 0; w < worlds; ++w) {
    const World world = random_world(random, fault);
    processes ? run_processes(world) : run_threads(world);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) {
    const std::string fault = argv[2];
    run(std::string(argv[1]) == "processes",
        fault == "kill"    ? Fault::kKill
        : fault == "raise" ? Fault::kRaise
                           : Fault::kNone,
        argc > 3 ? std::atoi(argv[3]) : 20, argc > 4 ? std::atoi(argv[4]) : 1);
    return 0;
  }
  // Processes first: they are forked from a process that has no arena yet.
#if !defined(__SANITIZE_THREAD__)
  for (const Fault fault : {Fault::kNone, Fault::kRaise, Fault::kKill}) run(true, fault, 12, 1);
#endif
  for (const Fault fault : {Fault::kNone, Fault::kRaise}) run(false, fault, 6, 2);
  return 0;
}
