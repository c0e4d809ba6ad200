// Owns the layout of a schedule as text.
#include "pipeline/grid.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>

namespace pydist {

namespace {

// A list longer than this is shown only around the marks, this many rows before and after.
constexpr int kMaxRows = 64;
constexpr int kRowsAround = 6;

using Row = std::vector<std::string>;

// Columns as wide as their widest cell, without spaces at the ends of lines. An empty row becomes
// a line with "...".
std::string render(const std::vector<Row>& rows) {
  std::vector<size_t> widths;
  for (const Row& row : rows) {
    widths.resize(std::max(widths.size(), row.size()), 0);
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line = row.empty() ? "..." : std::string(widths[0] - row[0].size(), ' ') + row[0];
    for (size_t i = 1; i < row.size(); ++i) {
      line += "  " + row[i] + std::string(widths[i] - row[i].size(), ' ');
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

Row head(const char* first, int num_ranks) {
  Row row{first};
  for (int rank = 0; rank < num_ranks; ++rank) row.push_back(concat("rank ", rank));
  return row;
}

// At most six digits, and none after the point that are zero.
std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.6g", value);
  return text;
}

std::vector<bool> shown_rows(int num_rows, const std::vector<Place>& marked) {
  std::vector<bool> shown(static_cast<size_t>(num_rows), num_rows <= kMaxRows || marked.empty());
  for (const Place& place : marked) {
    const int begin = std::max(0, place.index - kRowsAround);
    const int end = std::min(num_rows, place.index + kRowsAround + 1);
    for (int row = begin; row < end; ++row) shown[row] = true;
  }
  return shown;
}

// Times at which something starts, in order; those that differ by rounding are one.
std::vector<double> starts_of(const Simulation& simulation, double tolerance) {
  std::vector<double> all;
  for (const auto& times : simulation.times) {
    for (const TimeSpan& span : times) all.push_back(span.begin);
  }
  std::sort(all.begin(), all.end());
  std::vector<double> starts;
  for (const double start : all) {
    if (starts.empty() || start > starts.back() + tolerance) starts.push_back(start);
  }
  return starts;
}

}  // namespace

std::string grid_of_lists(const Schedule& schedule, const std::vector<Place>& marked) {
  size_t num_rows = 0;
  for (const auto& entries : schedule.actions) num_rows = std::max(num_rows, entries.size());
  const std::vector<bool> shown = shown_rows(static_cast<int>(num_rows), marked);
  std::vector<Row> rows{head("", schedule.num_ranks())};
  for (int index = 0; index < static_cast<int>(num_rows); ++index) {
    if (!shown[index]) {
      if (!rows.back().empty()) rows.emplace_back();
      continue;
    }
    Row row{std::to_string(index)};
    for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
      const auto& entries = schedule.actions[rank];
      std::string cell = index < static_cast<int>(entries.size()) ? entries[index].text() : "";
      const Place here{rank, index};
      if (std::find(marked.begin(), marked.end(), here) != marked.end()) cell = "*" + cell + "*";
      row.push_back(std::move(cell));
    }
    rows.push_back(std::move(row));
  }
  return render(rows);
}

std::string grid_of_times(const Schedule& schedule, const Simulation& simulation) {
  const double tolerance = simulation.makespan * 1e-9;
  const std::vector<double> starts = starts_of(simulation, tolerance);
  // The row of what happens at `time`, which may lie behind the last start.
  const auto row_at = [&](double time) {
    return std::lower_bound(starts.begin(), starts.end(), time - tolerance) - starts.begin();
  };
  std::vector<Row> rows{head("time", schedule.num_ranks())};
  for (const double start : starts) {
    rows.emplace_back(static_cast<size_t>(schedule.num_ranks()) + 1);
    rows.back()[0] = number(start);
  }
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    const auto cell = [&](int64_t row) -> std::string& {
      return rows[static_cast<size_t>(row) + 1][static_cast<size_t>(rank) + 1];
    };
    int64_t filled = 0;
    for (size_t i = 0; i < schedule.actions[rank].size(); ++i) {
      const int64_t begin = row_at(simulation.times[rank][i].begin);
      for (; filled < begin; ++filled) cell(filled) = ".";
      // An entry that takes no time shares its row with the next.
      if (filled > begin) cell(begin) += " ";
      if (filled == begin) ++filled;
      cell(begin) += schedule.actions[rank][i].text();
      for (; filled < row_at(simulation.times[rank][i].end); ++filled) cell(filled) = "|";
    }
  }
  return render(rows);
}

}  // namespace pydist
