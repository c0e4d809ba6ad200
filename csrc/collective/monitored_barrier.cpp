#include "collective/monitored_barrier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "collective/communicator.h"
#include "collective/missing_ranks.h"

namespace pydist {

namespace {

constexpr double kShortest_s = 1e-3;  // to look for a note that has come
constexpr double kAnswer_s = 1;       // for rank 0's, who waits as long for the others

}  // namespace

void Communicator::monitored_barrier(double timeout_s, bool wait_all_ranks) {
  monitored_barrier_.run(*this, timeout_s, wait_all_ranks);
}

void MonitoredBarrier::run(Communicator& communicator, double timeout_s, bool wait_all_ranks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++number_;
  expected_.resize(static_cast<size_t>(communicator.size()));
  if (communicator.rank() == 0) return collect(communicator, timeout_s, wait_all_ranks);
  report(communicator, timeout_s);
}

void MonitoredBarrier::collect(Communicator& communicator, double timeout_s, bool wait_all_ranks) {
  const double deadline_s = monotonic_s() + timeout_s;
  std::vector<int> came;
  std::vector<int> missing;
  std::string names;
  for (int r = 1; r < communicator.size(); ++r) {
    if (await_note(communicator, r, deadline_s)) {
      came.push_back(r);
    } else if (missing.empty() || wait_all_ranks) {
      names += (missing.empty() ? "" : ", ") + communicator.describe(r);
      missing.push_back(r);
    }
  }
  std::string problem;
  if (!missing.empty()) {
    problem = concat("monitored_barrier number ", number_, " of ", communicator.name(), ": ", names,
                     " did not come within ", timeout_s,
                     " s; look at what those ranks do, or give them more time");
  }
  for (const int r : came) send_note(communicator, r, expected_[r].note->number, problem);
  if (!problem.empty()) throw MissingRanks(problem, std::move(missing));
}

void MonitoredBarrier::report(Communicator& communicator, double timeout_s) {
  const double deadline_s = monotonic_s() + timeout_s + kAnswer_s;
  send_note(communicator, 0, number_, "");
  PYDIST_CHECK(await_note(communicator, 0, deadline_s), TimeoutError, "monitored_barrier number ",
               number_, " of ", communicator.name(), ": ", communicator.describe(0),
               ", which collects all ranks, did not answer ",
               communicator.describe(communicator.rank()), " within ", timeout_s,
               " s; its own error names the ranks that are missing");
  const Note& note = *expected_[0].note;
  PYDIST_CHECK(note.problem[0] == '\0', TimeoutError, note.problem.data());
}

// False if there is none of this barrier by then. One of a later number comes from a rank that has
// called it more often than this one; its answer has its number.
bool MonitoredBarrier::await_note(Communicator& communicator, int from, double deadline_s) {
  Expected& expected = expected_[static_cast<size_t>(from)];
  for (;;) {
    if (!expected.request) {
      const Buffer buffer{expected.note.get(), sizeof(Note), DType::kUInt8};
      expected.request = communicator.start_receive(
          buffer, from, Communicator::kMonitoredBarrierTag, expected.note);
    }
    try {
      expected.request->wait(std::max(deadline_s - monotonic_s(), kShortest_s));
    } catch (const TimeoutError&) {
      if (!expected.request->test()) return false;
    }
    const auto request = std::exchange(expected.request, nullptr);
    if (request->error()) std::rethrow_exception(request->error());
    if (expected.note->number >= number_) return true;
  }
}

void MonitoredBarrier::send_note(Communicator& communicator, int to, uint64_t number,
                                 const std::string& problem) {
  const auto note = std::make_shared<Note>();
  note->number = number;
  std::memcpy(note->problem.data(), problem.data(),
              std::min(problem.size(), note->problem.size() - 1));
  communicator.start_send({note.get(), sizeof(Note), DType::kUInt8}, to,
                          Communicator::kMonitoredBarrierTag, note);
}

}  // namespace pydist
