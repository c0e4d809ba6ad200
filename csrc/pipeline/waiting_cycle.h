// The smallest circle of entries that wait for each other, for an error that can be acted on. Pure.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "pipeline/readiness.h"
#include "pipeline/schedule.h"

namespace pydist {

// Each place waits for the next, and the last for the first: it needs what that gives, or stands
// after it in the same list. `visited` is how far each rank came; `giver` says where a value is
// given.
std::vector<Place> smallest_waiting_cycle(const Schedule& schedule, const std::vector<int>& visited,
                                          const std::function<Place(const StageValue&)>& giver);

// The circle in words.
std::string describe_waiting_cycle(const Schedule& schedule, const std::vector<Place>& cycle);

}  // namespace pydist
