// Owns the times and the memory of a schedule under given costs.
#include "pipeline/simulator.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "pipeline/readiness.h"
#include "pipeline/validator.h"

namespace pydist {

namespace {

using Duration = std::function<double(const Entry&)>;

// Runs every entry as early as it may, and notes how long messages lie at their receiver.
class Clock {
 public:
  Clock(const Schedule& schedule, double communication, Duration duration)
      : schedule_(schedule),
        communication_(communication),
        duration_(std::move(duration)),
        ended_(schedule, 0.0),
        free_at_(schedule.actions.size(), 0.0),
        arrivals_(schedule.actions.size()) {}

  void run(Simulation* result) {
    result->times.resize(schedule_.actions.size());
    visit_in_order(schedule_, [&](Place place, const Entry& entry) {
      const double begin = std::max(free_at_[place.rank], inputs_arrive(place.rank, entry));
      const double end = begin + duration_(entry);
      note_messages(place.rank, entry, begin);
      for_each_action(entry, [&](const Action& action) {
        if (const auto value = given_by(action)) ended_[*value] = end;
      });
      free_at_[place.rank] = end;
      result->times[place.rank].push_back({begin, end});
    });
    for (auto& arrivals : arrivals_) result->peak_parked.push_back(peak(&arrivals));
  }

 private:
  template <class Visit>
  void for_each_arrival(int rank, const Entry& entry, Visit visit) const {
    for_each_action(entry, [&](const Action& action) {
      for (const StageValue& value : needs_of(action, schedule_.num_stages())) {
        const bool travels = schedule_.rank_of_stage[value.stage] != rank;
        visit(ended_[value] + (travels ? communication_ : 0.0), travels);
      }
    });
  }

  double inputs_arrive(int rank, const Entry& entry) const {
    double latest = 0.0;
    for_each_arrival(rank, entry, [&](double time, bool) { latest = std::max(latest, time); });
    return latest;
  }

  void note_messages(int rank, const Entry& entry, double begin) {
    for_each_arrival(rank, entry, [&](double time, bool travels) {
      if (!travels || time >= begin) return;
      arrivals_[rank].emplace_back(time, 1);
      arrivals_[rank].emplace_back(begin, -1);
    });
  }

  // What is used at a time has gone before what arrives then.
  static int peak(std::vector<std::pair<double, int>>* changes) {
    std::sort(changes->begin(), changes->end());
    int now = 0;
    int most = 0;
    for (const auto& [time, change] : *changes) most = std::max(most, now += change);
    return most;
  }

  const Schedule& schedule_;
  const double communication_;
  const Duration duration_;
  ByStageValue<double> ended_;
  std::vector<double> free_at_;
  std::vector<std::vector<std::pair<double, int>>> arrivals_;  // (time, one more or less) by rank
};

// What one rank holds as its list goes on. Only an I makes a W necessary.
struct Held {
  int after_forward = 0;
  int after_input = 0;
  double nbytes = 0.0;

  // Of a pair both have given before either lets go, so what adds comes first.
  void start(const Action& action, const Costs& costs) {
    if (action.kind != ActionKind::kForward) return;
    ++after_forward;
    nbytes += forward_nbytes(action, costs);
  }
  void finish(const Action& action, const Costs& costs) {
    const double kept = at(costs.nbytes_after_input, action);
    switch (action.kind) {
      case ActionKind::kForward:
        break;
      case ActionKind::kBackward:
        --after_forward;
        nbytes -= forward_nbytes(action, costs);
        break;
      case ActionKind::kInput:
        --after_forward;
        ++after_input;
        nbytes += kept - forward_nbytes(action, costs);
        break;
      case ActionKind::kWeight:
        --after_input;
        nbytes -= kept;
        break;
    }
  }

 private:
  static double at(const std::vector<double>& nbytes, const Action& action) {
    return nbytes.empty() ? 0.0 : nbytes[static_cast<size_t>(action.stage)];
  }
  static double forward_nbytes(const Action& action, const Costs& costs) {
    return at(costs.nbytes_after_forward, action);
  }
};

void measure_memory(const Schedule& schedule, const Costs& costs, Simulation* result) {
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    Held held;
    int after_forward = 0;
    int after_input = 0;
    int both = 0;
    double nbytes = 0.0;
    const auto note = [&] {
      after_forward = std::max(after_forward, held.after_forward);
      after_input = std::max(after_input, held.after_input);
      both = std::max(both, held.after_forward + held.after_input);
      nbytes = std::max(nbytes, held.nbytes);
    };
    for (const Entry& entry : schedule.actions[rank]) {
      for_each_action(entry, [&](const Action& action) { held.start(action, costs); });
      note();
      for_each_action(entry, [&](const Action& action) { held.finish(action, costs); });
      note();
    }
    const double stages = schedule.num_stages_on(rank);
    result->peak_activations.push_back(both / stages);
    result->peak_after_forward.push_back(after_forward / stages);
    result->peak_after_input.push_back(after_input / stages);
    result->peak_nbytes.push_back(nbytes);
  }
}

void measure_bubbles(Simulation* result) {
  double most_work = 0.0;
  for (const auto& times : result->times) {
    double work = 0.0;
    for (const TimeSpan& span : times) work += span.end - span.begin;
    most_work = std::max(most_work, work);
    if (times.empty()) continue;
    result->makespan = std::max(result->makespan, times.back().end);
    const double span = times.back().end - times.front().begin;
    result->span_bubble = std::max(result->span_bubble, span - work);
  }
  result->makespan_bubble = result->makespan - most_work;
  for (const auto& times : result->times) {
    std::vector<TimeSpan> idle;
    double free_at = 0.0;
    const auto wait_until = [&](double time) {
      if (time > free_at) idle.push_back({free_at, time});
    };
    for (const TimeSpan& span : times) {
      wait_until(span.begin);
      free_at = span.end;
    }
    wait_until(result->makespan);
    result->idle.push_back(std::move(idle));
  }
}

Simulation simulate_with(const Schedule& schedule, const Costs& costs, Duration duration) {
  validate(schedule);
  Simulation result;
  Clock(schedule, costs.communication, std::move(duration)).run(&result);
  measure_memory(schedule, costs, &result);
  measure_bubbles(&result);
  return result;
}

}  // namespace

double Costs::of(const Action& action) const {
  const auto stage = static_cast<size_t>(action.stage);
  switch (action.kind) {
    case ActionKind::kForward:
      return forward[stage];
    case ActionKind::kBackward:
      return backward[stage];
    case ActionKind::kInput:
      return input[stage];
    case ActionKind::kWeight:
      return weight[stage];
  }
  return 0.0;
}

Simulation simulate(const Schedule& schedule, const Costs& costs) {
  return simulate_with(schedule, costs, [&](const Entry& entry) {
    double duration = 0.0;
    for_each_action(entry, [&](const Action& action) { duration += costs.of(action); });
    return duration;
  });
}

Simulation simulate_steps(const Schedule& schedule) {
  return simulate_with(schedule, Costs{}, [](const Entry&) { return 1.0; });
}

}  // namespace pydist
