#include "collective/call_counters.h"

#include "collective/call_rules.h"

namespace pydist {

void CallCounters::add(const Collective& collective) {
  size_t nbytes =
      works_in_place(collective.operation) ? collective.output.nbytes() : collective.input.nbytes();
  for (const Buffer& buffer : collective.buffers) nbytes += buffer.nbytes();
  counters_[static_cast<size_t>(collective.operation)].add(nbytes);
}

}  // namespace pydist
