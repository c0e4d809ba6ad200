#include "bucket/layout.h"

#include <algorithm>
#include <map>
#include <utility>

namespace pydist {

std::vector<Unit> make_layout(const std::vector<ParameterSpec>& parameters,
                              const std::vector<int>& order, const LayoutOptions& options) {
  struct Group {
    size_t bucket = 0;  // index of the unit being filled
    bool filling = false;
    size_t num_closed = 0;
  };
  std::vector<Unit> units;
  std::map<std::pair<DType, int>, Group> groups;
  for (const int index : order) {
    const ParameterSpec& parameter = parameters[index];
    if (parameter.num_elements == 0) continue;
    const bool alone = !parameter.flat && parameter.nbytes() >= options.alone_nbytes;
    Group& group = groups[std::make_pair(parameter.dtype, parameter.group)];
    if (alone || !group.filling) {
      units.push_back(Unit{parameter.dtype, 0, alone, {}});
      if (!alone) group = {units.size() - 1, true, group.num_closed};
    }
    Unit& unit = alone ? units.back() : units[group.bucket];
    unit.members.push_back(Member{index, unit.num_elements});
    unit.num_elements += parameter.num_elements;
    if (alone || parameter.flat) continue;
    const size_t last = options.caps_nbytes.size() - 1;
    if (unit.nbytes() >= options.caps_nbytes[std::min(group.num_closed, last)]) {
      group.filling = false;
      ++group.num_closed;
    }
  }
  return units;
}

}  // namespace pydist
