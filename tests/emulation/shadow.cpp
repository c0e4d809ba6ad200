#include "shadow.h"

#include <algorithm>

#include "faults.h"

namespace pydist::emulation {

namespace {

std::string range(uintptr_t begin, uintptr_t end) {
  return concat("bytes [", reinterpret_cast<const void*>(begin), ", +", end - begin, ")");
}

// Whether they are ordered; a fault where not.
bool check_order(const Deed& earlier, const char* did, const Deed& later, const char* does,
                 uintptr_t begin, uintptr_t end) {
  if (earlier.is_before(later) || later.is_before(earlier)) return true;
  record_fault(concat(later.what, " ", does, " ", range(begin, end), " that ", earlier.what, " ",
                      did, ", and neither comes before the other"));
  return false;
}

}  // namespace

void Shadow::split(uintptr_t at) {
  auto next = segments_.upper_bound(at);
  if (next == segments_.begin()) return;
  auto found = std::prev(next);
  if (found->first == at || found->second.end <= at) return;
  Segment rest = found->second;
  found->second.end = at;
  segments_.emplace(at, std::move(rest));
}

bool Shadow::check_alive(const Deed& deed, const char* does, const Segment& segment,
                         uintptr_t begin) {
  if (!segment.is_freed) return true;
  record_fault(concat(deed.what, " ", does, " ", range(begin, segment.end), ", which was freed"));
  return false;
}

void Shadow::access(const DeedPointer& deed, Access access, const void* data, size_t nbytes) {
  if (nbytes == 0) return;
  const bool writes = access == Access::kWrite;
  uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + nbytes;
  split(begin);
  split(end);
  bool sound = true;  // one fault a call is enough
  while (begin < end) {
    auto found = segments_.lower_bound(begin);
    if (found == segments_.end() || found->first > begin) {  // a gap: nobody was here
      const uintptr_t until = found == segments_.end() ? end : std::min(end, found->first);
      found = segments_.emplace(begin, Segment{until, nullptr, {}, false}).first;
    }
    Segment& segment = found->second;
    const char* does = writes ? "writes" : "reads";
    sound = sound && check_alive(*deed, does, segment, begin);
    if (sound && segment.write != nullptr) {
      sound = check_order(*segment.write, "wrote", *deed, does, begin, segment.end);
    }
    std::vector<DeedPointer>& reads = segment.reads;
    if (writes) {
      for (const DeedPointer& read : reads) {
        sound = sound && check_order(*read, "reads", *deed, does, begin, segment.end);
      }
      reads.clear();
      if (segment.write == nullptr || !deed->is_before(*segment.write)) segment.write = deed;
    } else {
      // Whoever comes after this read comes after those before it.
      reads.erase(std::remove_if(reads.begin(), reads.end(),
                                 [&](const DeedPointer& read) { return read->is_before(*deed); }),
                  reads.end());
      reads.push_back(deed);
    }
    begin = segment.end;
  }
}

void Shadow::free(const Deed& freer, const void* data, size_t nbytes) {
  if (nbytes == 0) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + nbytes;
  split(begin);
  split(end);
  bool sound = true;
  auto found = segments_.lower_bound(begin);
  while (found != segments_.end() && found->first < end) {
    Segment& segment = found->second;
    if (segment.write != nullptr) segment.reads.push_back(segment.write);
    for (const DeedPointer& deed : segment.reads) {
      if (!sound || deed->is_before(freer)) continue;
      record_fault(concat(freer.what, " frees ", range(found->first, segment.end), ", which ",
                          deed->what, " uses and is not known to be done with"));
      sound = false;
    }
    segment.write = nullptr;
    segment.reads.clear();
    segment.is_freed = true;
    ++found;
  }
}

void Shadow::allocate(const void* data, size_t nbytes) {
  if (nbytes == 0) return;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + nbytes;
  split(begin);
  split(end);
  segments_.erase(segments_.lower_bound(begin), segments_.lower_bound(end));
}

DeedPointer Shadow::last_write(const void* data) const {
  const uintptr_t at = reinterpret_cast<uintptr_t>(data);
  auto next = segments_.upper_bound(at);
  if (next == segments_.begin()) return nullptr;
  const auto found = std::prev(next);
  return found->second.end > at ? found->second.write : nullptr;
}

}  // namespace pydist::emulation
