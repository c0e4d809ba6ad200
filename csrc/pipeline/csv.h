// Schedules as comma-separated text: a line for each rank, an action in each field. Pure.
#pragma once

#include <string>
#include <string_view>

#include "pipeline/schedule.h"

namespace pydist {

std::string to_csv(const Schedule& schedule);
// Empty fields are nothing, as other programs write them for idle steps, and so are empty lines at
// the end. The validator is not asked.
// Raises ScheduleError with the line and the field.
Schedule from_csv(std::string name, std::string_view text);

}  // namespace pydist
