// A schedule as text, a column for each rank. Pure.
#pragma once

#include <string>
#include <vector>

#include "pipeline/schedule.h"
#include "pipeline/simulator.h"

namespace pydist {

// Each rank's list from top to bottom, with the marked places between asterisks. Long lists are
// shortened to what is around the marks.
std::string grid_of_lists(const Schedule& schedule, const std::vector<Place>& marked);

// A row for each time at which something starts: "|" goes on, "." waits.
std::string grid_of_times(const Schedule& schedule, const Simulation& simulation);

}  // namespace pydist
