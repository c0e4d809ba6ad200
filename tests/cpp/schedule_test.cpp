// Schedules as plain C++, under the sanitizers: every kind of every size is valid, lowers to
// messages that match, survives its text, and whatever is done to it gives an answer or a
// ScheduleError.
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "pipeline/builders.h"
#include "pipeline/csv.h"
#include "pipeline/grid.h"
#include "pipeline/lowering.h"
#include "pipeline/readiness.h"
#include "pipeline/search.h"
#include "pipeline/simulator.h"
#include "pipeline/validator.h"

namespace {

using namespace pydist;

constexpr int kMaxRanks = 8;
constexpr int kMaxStagesPerRank = 4;

// Sends and receives by (from, to, value's stage, is a gradient, microbatch).
using Messages = std::map<std::tuple<int, int, int, bool, int>, int>;

void count_messages(const Schedule& schedule, int rank, const PlannedAction& planned,
                    Messages* messages) {
  const Action& action = planned.action;
  const bool is_forward = action.kind == ActionKind::kForward;
  if (planned.sends_to != kNoRank) {
    CHECK(given_by(action));
    ++(*messages)[{rank, planned.sends_to, action.stage, !is_forward, action.microbatch}];
  }
  if (planned.receives_from != kNoRank) {
    const int giver = is_forward ? action.stage - 1 : action.stage + 1;
    CHECK(schedule.rank_of_stage[giver] == planned.receives_from);
    --(*messages)[{planned.receives_from, rank, giver, !is_forward, action.microbatch}];
  }
}

// Everything sent is received, once, and each stage's gradients are completed once, at its end.
void check_lowering(const Schedule& schedule, bool has_backward) {
  Messages messages;
  std::vector<int> completed(schedule.rank_of_stage.size(), 0);
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    const std::vector<Step> steps = lower(schedule, rank);
    CHECK(steps.size() == schedule.actions[rank].size());
    const auto look_at = [&](const PlannedAction& planned) {
      count_messages(schedule, rank, planned, &messages);
      if (accumulates(planned.action)) CHECK(completed[planned.action.stage] == 0);
      if (planned.completes_gradients) ++completed[planned.action.stage];
    };
    for (const Step& step : steps) {
      look_at(step.first);
      if (step.second) look_at(*step.second);
    }
  }
  for (const auto& [key, balance] : messages) {
    // A gradient of stage s goes to s-1 and an output to s+1: what nobody takes is not sent.
    CHECK(balance == 0);
  }
  for (const int times : completed) CHECK(times == (has_backward ? 1 : 0));
}

bool same_actions(const Schedule& a, const Schedule& b) {
  return a.actions == b.actions && a.rank_of_stage == b.rank_of_stage &&
         a.num_microbatches == b.num_microbatches;
}

void check_schedule(const Schedule& schedule) {
  const Validity validity = validate(schedule);
  for (const bool in_order : validity.accumulates_in_order) CHECK(in_order);
  check_lowering(schedule, validity.has_backward);
  CHECK(same_actions(schedule, from_csv(schedule.name, to_csv(schedule))));
  const Simulation simulation = simulate_steps(schedule);
  size_t longest = 0;
  for (const auto& entries : schedule.actions) longest = std::max(longest, entries.size());
  CHECK(simulation.makespan >= static_cast<double>(longest));
  CHECK(!grid_of_times(schedule, simulation).empty());
  CHECK(!grid_of_lists(schedule, {{0, 0}}).empty());
}

void every_size_works() {
  int num_built = 0;
  for (const std::string& kind : schedule_kinds()) {
    for (int p = 1; p <= kMaxRanks; ++p) {
      for (const int m : {1, 2, 3, 5, 7, 8, 13, 16, 20}) {
        for (int v = 1; v <= kMaxStagesPerRank; ++v) {
          Schedule schedule;
          try {
            schedule = build_schedule(kind, p, m, v);
          } catch (const ScheduleError&) {
            continue;  // this number of stages, or of microbatches
          }
          check_schedule(schedule);
          ++num_built;
        }
      }
    }
  }
  CHECK(num_built > 1000);
}

// Random lists: often incomplete, misplaced or circular. No answer is expected, only one at all.
Schedule random_schedule(std::mt19937& random) {
  const auto below = [&](unsigned n) { return static_cast<int>(random() % n); };
  Schedule schedule{"random", 1 + below(3), {}, {}};
  schedule.actions.resize(static_cast<size_t>(1 + below(3)));
  const int num_stages = 1 + below(4);
  for (int s = 0; s < num_stages; ++s)
    schedule.rank_of_stage.push_back(below(schedule.num_ranks()));
  const auto action = [&] {
    return Action{below(num_stages + (below(40) == 0)), static_cast<ActionKind>(below(4)),
                  below(schedule.num_microbatches + (below(40) == 0))};
  };
  for (int i = below(20); i > 0; --i) {
    Entry entry{action()};
    if (below(8) == 0) entry.second = action();
    schedule.actions[below(schedule.num_ranks())].push_back(entry);
  }
  return schedule;
}

// Valid but for the order of two entries of a rank, or of all of them.
Schedule shuffled_schedule(std::mt19937& random) {
  Schedule schedule = build_schedule("interleaved-zb", 1 + random() % 4, 1 + random() % 6, 2);
  auto& entries = schedule.actions[random() % schedule.actions.size()];
  const size_t count = random() % 2 == 0 ? 1 : entries.size();
  for (size_t i = 0; i < count; ++i) {
    std::swap(entries[random() % entries.size()], entries[random() % entries.size()]);
  }
  return schedule;
}

void anything_gets_an_answer() {
  std::mt19937 random(20);
  int num_valid = 0;
  constexpr int kNumTries = 6000;
  for (int i = 0; i < kNumTries; ++i) {
    const Schedule schedule = i % 2 == 0 ? random_schedule(random) : shuffled_schedule(random);
    try {
      check_lowering(schedule, validate(schedule).has_backward);
      ++num_valid;
    } catch (const ScheduleError& error) {
      CHECK(std::string(error.what()).find("schedule '") == 0);
    }
  }
  CHECK(num_valid > 50 && num_valid < kNumTries - 1000);
}

void any_text_gets_an_answer() {
  std::mt19937 random(21);
  const std::string letters = "0123456789FBIW&,\n -x";
  int num_read = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string text;
    for (unsigned length = random() % 12; length > 0; --length) {
      text += letters[random() % letters.size()];
    }
    try {
      const Schedule schedule = from_csv("text", text);
      CHECK(same_actions(schedule, from_csv("text", to_csv(schedule))));
      ++num_read;
    } catch (const ScheduleError&) {
    }
  }
  CHECK(num_read > 10);
}

// What the search finds is valid and keeps to its cap.
void searches_are_valid() {
  std::mt19937 random(22);
  const auto numbers = [&](int count, int low, int high) {
    std::vector<double> values;
    for (int i = 0; i < count; ++i) {
      values.push_back(low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)));
    }
    return values;
  };
  int num_refused = 0;
  for (int i = 0; i < 60; ++i) {
    SearchRequest request{1 + static_cast<int>(random() % 3), 1 + static_cast<int>(random() % 4),
                          1 + static_cast<int>(random() % 3)};
    const int num_stages = request.num_ranks * request.stages_per_rank;
    request.costs = {numbers(num_stages, 0, 3),
                     numbers(num_stages, 2, 5),
                     numbers(num_stages, 1, 3),
                     numbers(num_stages, 1, 3),
                     1.0,
                     numbers(num_stages, 1, 3),
                     numbers(num_stages, 1, 3)};
    if (i % 3 > 0) request.cap_nbytes = numbers(request.num_ranks, 3, 12);
    try {
      const Schedule schedule = find_best_schedule(request);
      for (const bool in_order : validate(schedule).accumulates_in_order) CHECK(in_order);
      const Simulation found = simulate(schedule, request.costs);
      for (size_t rank = 0; rank < request.cap_nbytes.size(); ++rank) {
        CHECK(found.peak_nbytes[rank] <= request.cap_nbytes[rank]);
      }
    } catch (const ScheduleError&) {
      CHECK(!request.cap_nbytes.empty());
      ++num_refused;
    }
  }
  CHECK(num_refused > 0 && num_refused < 40);
}

}  // namespace

int main() {
  every_size_works();
  anything_gets_an_answer();
  any_text_gets_an_answer();
  searches_are_valid();
}
