// Who touched which memory last: finds two accesses of which neither comes before the other.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "base/device_runtime.h"
#include "clock.h"

namespace pydist::emulation {

class Shadow {
 public:
  // Records a fault where this access and an earlier one conflict.
  void access(const DeedPointer& deed, Access access, const void* data, size_t nbytes);
  // The memory goes away: what touched it must come before `freer`. From then on a fault is whoever
  // touches what was touched before, until allocate().
  void free(const Deed& freer, const void* data, size_t nbytes);
  void allocate(const void* data, size_t nbytes);
  // The last to write here, or null.
  DeedPointer last_write(const void* data) const;
  void clear() { segments_.clear(); }

 private:
  struct Segment {
    uintptr_t end;
    DeedPointer write;
    std::vector<DeedPointer> reads;
    bool is_freed = false;
  };
  using Segments = std::map<uintptr_t, Segment>;

  void split(uintptr_t at);
  static bool check_alive(const Deed& deed, const char* does, const Segment& segment,
                          uintptr_t begin);

  Segments segments_;  // by their beginnings; they do not overlap
};

}  // namespace pydist::emulation
