// Owns the reading and writing of schedules as comma-separated text.
#include "pipeline/csv.h"

#include <utility>
#include <vector>

#include "base/check.h"

namespace pydist {

namespace {

// Takes what stands before the first `separator` off the front of `rest`.
std::string_view take_until(char separator, std::string_view* rest) {
  const size_t end = rest->find(separator);
  const std::string_view field = rest->substr(0, end);
  rest->remove_prefix(end == std::string_view::npos ? rest->size() : end + 1);
  return field;
}

std::string_view trimmed(std::string_view field) {
  constexpr const char* kBlanks = " \t\r\"";
  const size_t begin = field.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return field.substr(begin, field.find_last_not_of(kBlanks) + 1 - begin);
}

std::vector<Entry> parse_line(std::string_view line, size_t line_number) {
  std::vector<Entry> entries;
  for (size_t field_number = 1; !line.empty(); ++field_number) {
    const std::string_view field = trimmed(take_until(',', &line));
    if (field.empty()) continue;
    try {
      entries.push_back(Entry::parse(field));
    } catch (const ScheduleError& error) {
      throw ScheduleError(
          concat("line ", line_number, ", field ", field_number, ": ", error.what()));
    }
  }
  return entries;
}

}  // namespace

std::string to_csv(const Schedule& schedule) {
  std::string text;
  for (const auto& entries : schedule.actions) {
    for (size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) text += ",";
      text += entries[i].text();
    }
    text += "\n";
  }
  return text;
}

Schedule from_csv(std::string name, std::string_view text) {
  std::vector<std::vector<Entry>> actions;
  for (size_t line_number = 1; !text.empty(); ++line_number) {
    actions.push_back(parse_line(take_until('\n', &text), line_number));
  }
  while (!actions.empty() && actions.back().empty()) actions.pop_back();
  PYDIST_CHECK(!actions.empty(), ScheduleError, "schedule '", name,
               "': the text is empty; expected a line for each rank, with fields such as 0F3");
  return schedule_of(std::move(name), std::move(actions));
}

}  // namespace pydist
