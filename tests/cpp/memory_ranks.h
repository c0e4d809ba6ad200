// A communicator whose ranks are threads of one process.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include "collective/shm_communicator.h"
#include "memory_store.h"
#include "raised.h"

namespace pydist {

// body(communicator) on every rank, each a thread.
inline void on_ranks(int size, const std::function<void(ShmCommunicator&)>& body,
                     double timeout_s = 20) {
  MemoryStore store;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        BoardOptions options;
        options.rank = rank;
        options.size = size;
        options.timeout_s = timeout_s;
        options.name = "the test group";
        auto communicator = ShmCommunicator::create(store, options);
        body(*communicator);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d of %d: %s\n", rank, size, error.what());
        std::exit(1);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace pydist
