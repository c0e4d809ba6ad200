// The memory of a round's units in this process's arena, made at first use.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "bucket/layout.h"
#include "transport/arena.h"

namespace pydist {

class ArenaUnits {
 public:
  explicit ArenaUnits(const std::vector<Unit>& units) : memory_(units.size(), nullptr) {
    for (const Unit& unit : units) nbytes_.push_back(unit.nbytes());
  }

  void* memory(int unit) {
    if (memory_[unit] == nullptr) {
      memory_[unit] = Arena::instance().allocate(nbytes_[unit]);
      // Gaps that nobody packs are reduced along: they must not hold signalling values.
      std::memset(memory_[unit], 0, nbytes_[unit]);
    }
    return memory_[unit];
  }
  // Keeps it in place even when it has been given back.
  std::shared_ptr<void> hold(int unit) {
    void* held = memory(unit);
    Arena::instance().pin(held);
    return std::shared_ptr<void>(held, [](void* memory) { Arena::instance().unpin(memory); });
  }
  // The owner calls it once nobody can touch the memory; else it is given up for good.
  void give_back() noexcept {
    for (void*& memory : memory_) {
      if (memory != nullptr) Arena::instance().deallocate(memory);
      memory = nullptr;
    }
  }

 private:
  std::vector<size_t> nbytes_;
  std::vector<void*> memory_;  // null until used
};

}  // namespace pydist
