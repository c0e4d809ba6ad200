#include "pipeline/arena_blocks.h"

#include <algorithm>

#include "transport/arena.h"

namespace pydist {

namespace {

constexpr uint64_t kIdleSteps = 8;        // train and evaluate may take turns
constexpr size_t kGranularity = 4 << 10;  // shapes that differ a little share blocks

}  // namespace

ArenaBlocks::~ArenaBlocks() {
  for (const Free& free : free_) deallocate(free.block);
}

void ArenaBlocks::deallocate(const Block& block) {
  Arena::instance().deallocate(block.data);
  nbytes_ -= block.nbytes;
}

ArenaBlocks::Block ArenaBlocks::take(size_t nbytes) {
  nbytes = (nbytes + kGranularity - 1) / kGranularity * kGranularity;
  // The one that was given back last is the likeliest to lie in a cache.
  const auto found = std::find_if(free_.rbegin(), free_.rend(),
                                  [&](const Free& free) { return free.block.nbytes == nbytes; });
  if (found != free_.rend()) {
    const Block block = found->block;
    free_.erase(std::next(found).base());
    return block;
  }
  if (nbytes > max_nbytes_ - std::min(nbytes_, max_nbytes_)) return {};
  void* data = Arena::instance().try_allocate(nbytes);
  if (data == nullptr) return {};
  nbytes_ += nbytes;
  return {static_cast<uint8_t*>(data), nbytes};
}

void ArenaBlocks::give_back(Block block) { free_.push_back({block, step_}); }

void ArenaBlocks::end_step() {
  ++step_;
  const auto is_idle = [&](const Free& free) { return free.last_step + kIdleSteps < step_; };
  for (const Free& free : free_) {
    if (is_idle(free)) deallocate(free.block);
  }
  free_.erase(std::remove_if(free_.begin(), free_.end(), is_idle), free_.end());
}

}  // namespace pydist
