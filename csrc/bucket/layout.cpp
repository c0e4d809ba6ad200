#include "bucket/layout.h"

#include <map>
#include <utility>

namespace pydist {

std::vector<Unit> make_layout(const std::vector<ParameterSpec>& parameters,
                              const std::vector<int>& order, const LayoutOptions& options) {
  std::vector<Unit> units;
  std::map<std::pair<DType, int>, size_t>
      open;  // (dtype, group) -> index of the bucket being filled
  size_t cap_nbytes = options.first_cap_nbytes;
  for (const int index : order) {
    const ParameterSpec& parameter = parameters[index];
    if (parameter.num_elements == 0) continue;
    const bool alone = parameter.nbytes() >= options.alone_nbytes;
    const auto key = std::make_pair(parameter.dtype, parameter.group);
    auto found = open.find(key);
    if (alone || found == open.end()) {
      units.push_back(Unit{parameter.dtype, 0, alone, {}});
      if (!alone) found = open.emplace(key, units.size() - 1).first;
    }
    Unit& unit = alone ? units.back() : units[found->second];
    unit.members.push_back(Member{index, unit.num_elements});
    unit.num_elements += parameter.num_elements;
    if (!alone && unit.nbytes() >= cap_nbytes) {
      open.erase(found);
      cap_nbytes = options.bucket_cap_nbytes;
    }
  }
  return units;
}

}  // namespace pydist
