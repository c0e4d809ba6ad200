// When each action of a schedule runs, and what that keeps in memory, from costs alone. Pure.
//
// A rank runs its list in order and waits only for values. A value from another rank arrives
// `communication` after the action that gives it has ended; links carry any number at once. An
// overlapped pair takes as long as both one after the other.
#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/schedule.h"

namespace pydist {

// Of one microbatch, by stage; in any unit of time.
struct Costs {
  std::vector<double> forward;
  std::vector<double> backward;
  std::vector<double> input;
  std::vector<double> weight;
  double communication = 0.0;
  // What a microbatch holds from the end of F to that of B or I, and from that of I to that of W.
  std::vector<double> nbytes_after_forward = {};
  std::vector<double> nbytes_after_input = {};

  double of(const Action& action) const;
};

struct TimeSpan {
  double begin = 0.0;
  double end = 0.0;
};

// Peaks are counted in microbatches of all stages that a rank holds.
struct Simulation {
  double makespan = 0.0;
  double makespan_bubble = 0.0;  // makespan less the work of the rank that has most
  double span_bubble = 0.0;      // the most that a rank waits between its first and last action
  std::vector<double> peak_activations = {};      // by rank: from F to B or W
  std::vector<double> peak_after_forward = {};    // from F to B or I
  std::vector<double> peak_after_input = {};      // from I to W
  std::vector<double> peak_nbytes = {};           // zero where the costs have no bytes
  std::vector<int> peak_parked = {};              // messages that have arrived and are not used yet
  std::vector<std::vector<TimeSpan>> idle = {};   // by rank, from 0 to the makespan
  std::vector<std::vector<TimeSpan>> times = {};  // by rank and entry
};

// Raises ScheduleError where the schedule is not valid.
Simulation simulate(const Schedule& schedule, const Costs& costs);

// Every entry takes one step: the picture that schedules are drawn as.
Simulation simulate_steps(const Schedule& schedule);

}  // namespace pydist
