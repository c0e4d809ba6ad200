#include "pipeline/step_channel.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include "base/check.h"
#include "base/fork.h"

namespace pydist {

namespace {

const char* kind_name(StepKind kind) {
  switch (kind) {
    case StepKind::kTrain:
      return "train";
    case StepKind::kEvaluate:
      return "evaluate";
    case StepKind::kForward:
      return "forward";
  }
  return "an unknown kind";
}

std::string describe_key(const MessageKey& key) {
  if (key.kind == MessageKind::kResult) return "the result of the step";
  const char* what = key.kind == MessageKind::kActivation ? "the input" : "the gradient";
  std::string text = concat(what, " of stage ", key.stage, ", microbatch ", key.microbatch);
  if (key.port != 0) text += concat(", skip portal ", key.port);
  return text;
}

std::string with_purpose(const std::string& text, const Describe& describe) {
  const std::string purpose = describe();
  return purpose.empty() ? text : concat(text, ", ", purpose);
}

bool same(const MessageKey& a, const MessageKey& b) {
  return a.kind == b.kind && a.stage == b.stage && a.microbatch == b.microbatch && a.port == b.port;
}

}  // namespace

StepChannel::~StepChannel() {
  if (links_ == nullptr) return;
  if (in_forked_child()) {
    links_->forget();
  } else if (state_ != State::kBetween) {
    // Peers may never receive what is on its way.
    links_->abandon("the pipeline ended after a step that failed");
  }
}

std::string StepChannel::describe_step(const Stamp& stamp) const {
  std::string text = concat("step ", stamp.step, " (", kind_name(stamp.kind), ")");
  if (stamp.generation > 1) text += concat(" since failure ", stamp.generation - 1);
  return text;
}

// -- steps ---------------------------------------------------------------------------------------

void StepChannel::begin_step(StepKind kind) {
  try {
    check_all();
  } catch (const std::exception& error) {
    state_ = State::kBetween;  // it is this step that fails
    fail(error.what());
    throw;
  }
  if (state_ == State::kInStep) {
    fail(concat(describe(rank()), " left ", describe_step(stamp_), " without ending it"));
  }
  hand_over();
  take_in();
  begin_links();
  look_for_failure(stamp_.step + 1);
  pool_.end_step();
  trim_memory();
  stamp_.kind = kind;
  ++stamp_.step;
  state_ = State::kInStep;
}

// Here, what a failed step has left is received.
void StepChannel::begin_links() {
  if (links_ == nullptr) return;
  try {
    links_->begin_step();
  } catch (const std::exception& error) {
    state_ = State::kBetween;
    fail(concat(describe(rank()), " raised at the begin of a step: ", error.what()));
    throw;
  }
}

void StepChannel::flush(const Describe& describe) {
  check_step("flush");
  await(
      [&] {
        const int kept = hand_over();
        take_in_and_post();
        if (kept != kNobody) look_for_failure(stamp_.step);
        return kept;
      },
      [&] { return concat("sending in ", describe_step(stamp_), " ", describe()); });
}

void StepChannel::end_step(const Describe& describe) {
  check_step("end_step");
  for (int r = 0; r < size(); ++r) {
    if (r != rank()) post_end_of_step(r, stamp_);
  }
  await(
      [&] {
        const int kept = hand_over();
        take_in();  // of the next step already, which may be on another stream
        look_for_mismatch();
        const int missing = kept != kNobody ? kept : first_in_step();
        // A rank that was interrupted in here has told the others before that it has ended.
        look_for_failure(stamp_.step, missing == kNobody);
        return missing;
      },
      [&] { return with_purpose(concat("ending ", describe_step(stamp_)), describe); });
  check_nothing_left();
  if (links_ != nullptr) links_->end_step();
  state_ = State::kBetween;
}

void StepChannel::fail(const std::string& reason) noexcept {
  if (state_ == State::kFailed || in_forked_child()) return;
  // Between steps all have ended the last one: it is the next that fails.
  const uint64_t step = stamp_.step + (state_ == State::kBetween ? 1 : 0);
  publish({stamp_.generation, step, is_mismatch_, reason});
  end_generation();
}

void StepChannel::end_generation() noexcept {
  ++stamp_.generation;
  stamp_.step = 0;
  state_ = State::kFailed;
  is_mismatch_ = false;
  for (Heard& heard : peers_) drop_past(heard);
}

// What belongs to a generation that is over.
void StepChannel::drop_past(Heard& heard) noexcept {
  const auto is_past = [&](const Stamp& stamp) { return stamp.generation < stamp_.generation; };
  heard.ended.erase(std::remove_if(heard.ended.begin(), heard.ended.end(), is_past),
                    heard.ended.end());
  heard.parked.remove_if([&](const Parked& parked) {
    if (!is_past(parked.stamp)) return false;
    ++counters_.num_dropped;
    --num_parked_;
    return true;
  });
}

bool StepChannel::has_ended(int peer) const {
  const std::vector<Stamp>& ended = peers_[peer].ended;
  return std::any_of(ended.begin(), ended.end(), [&](const Stamp& theirs) {
    return theirs.generation == stamp_.generation && theirs.step >= stamp_.step;
  });
}

int StepChannel::first_in_step() const {
  for (int r = 0; r < size(); ++r) {
    if (r != rank() && !has_ended(r)) return r;
  }
  return kNobody;
}

// All have ended the step, so all that was sent in it is here.
void StepChannel::check_nothing_left() {
  for (int r = 0; r < size(); ++r) {
    for (const Parked& parked : peers_[r].parked) {
      if (!parked.stamp.same_step(stamp_)) continue;
      raise_mismatch(concat(describe(r), " sent ", describe_key(parked.message.key), " to ",
                            describe(rank()), " in ", describe_step(stamp_),
                            ", which did not want it; do both run the same schedule, with the "
                            "same number of microbatches?"));
    }
  }
}

// -- messages ------------------------------------------------------------------------------------

void StepChannel::check_step(const char* call) const {
  PYDIST_CHECK(!in_forked_child(), UsageError, call,
               ": a forked child must not use the channel of the process that forked it");
  PYDIST_CHECK(state_ == State::kInStep, UsageError, call, " on ", describe(rank()),
               " outside of a step");
}

void StepChannel::check_peer(int peer, const char* call) const {
  PYDIST_CHECK(peer != rank() && peer >= 0 && peer < size(), UsageError, call, ": rank ", peer,
               " is not a peer of ", describe(rank()));
}

void StepChannel::send(int destination, Message message) {
  check_peer(destination, "send");
  check_step("send");
  check_sendable(message, links_ == nullptr ? at::kCPU : links_->device());
  if (links_ != nullptr) links_->take_out(destination, message, describe_key(message.key));
  try {
    post(destination, message, stamp_);
  } catch (const std::exception& error) {
    // What the device sends has no message now.
    if (links_ != nullptr) links_->abandon(concat(describe(rank()), " raised ", error.what()));
    throw;
  }
  ++counters_.num_messages;
  counters_.moved_nbytes += image_nbytes(message);
}

// In a step.
void StepChannel::take_in_and_post() {
  take_in();
  if (links_ != nullptr) links_->post();
}

void StepChannel::arrive(int source, const uint8_t* envelope, const uint8_t* payload) {
  ImageHeader header;
  std::memcpy(&header, envelope, sizeof(header));
  const Stamp stamp = header.stamp();
  Heard& heard = peers_[source];
  heard.last = stamp;
  const bool is_past = stamp.generation < stamp_.generation;
  if (is_past && header.ends_step != 0) return;
  if (is_past && links_ == nullptr) {
    ++counters_.num_dropped;
    return;
  }
  if (header.ends_step != 0) {
    if (heard.ended.empty() || heard.ended.back().generation < stamp.generation) {
      heard.ended.push_back(stamp);
    } else {
      heard.ended.back() = stamp;
    }
    return;
  }
  Message message = read_message(envelope, payload, pool_);
  std::shared_ptr<DeviceLinks::Arrival> arrival;
  if (links_ != nullptr) arrival = links_->announce(source, message, describe_key(message.key));
  if (is_past) {
    ++counters_.num_dropped;
    return;
  }
  heard.parked.push_back({stamp, std::move(message), std::move(arrival)});
  counters_.peak_parked = std::max(counters_.peak_parked, ++num_parked_);
}

std::list<StepChannel::Parked>::iterator StepChannel::find(int source, const MessageKey& key) {
  std::list<Parked>& parked = peers_[source].parked;
  return std::find_if(parked.begin(), parked.end(), [&](const Parked& candidate) {
    return candidate.stamp.same_step(stamp_) && candidate.stamp.kind == stamp_.kind &&
           same(candidate.message.key, key);
  });
}

std::optional<Message> StepChannel::take(int source, const MessageKey& key) {
  const auto found = find(source, key);
  if (found == peers_[source].parked.end()) return std::nullopt;
  std::optional<Message> message(std::move(found->message));
  if (links_ != nullptr) links_->hand_out(source, *found->arrival, *message);
  peers_[source].parked.erase(found);
  --num_parked_;
  return message;
}

bool StepChannel::has_arrived(int source, const MessageKey& key) {
  check_peer(source, "has_arrived");
  check_step("has_arrived");
  hand_over();
  take_in_and_post();
  return find(source, key) != peers_[source].parked.end();
}

Message StepChannel::receive(int source, const MessageKey& key, const Describe& describe) {
  check_peer(source, "receive");
  check_step("receive");
  const auto operation = [&] {
    return with_purpose(concat("receiving ", describe_key(key), " in ", describe_step(stamp_)),
                        describe);
  };
  std::optional<Message> message;
  await(
      [&] {
        hand_over();
        take_in_and_post();
        if ((message = take(source, key))) return kNobody;
        const bool in_vain = has_ended(source);
        look_for_failure(stamp_.step, in_vain);  // it may have been interrupted while ending it
        look_for_mismatch();
        if (in_vain) {
          raise_mismatch(concat(this->describe(source), " ended ", describe_step(stamp_),
                                " without sending what ", this->describe(rank()),
                                " waits for: it was ", operation(),
                                "; do both run the same schedule, with the same number of "
                                "microbatches?"));
        }
        return source;
      },
      operation);
  return std::move(*message);
}

// -- waiting -------------------------------------------------------------------------------------

// Errors leave the wait by its regular end: those that wait are counted.
template <class Missing>
void StepChannel::await(Missing&& missing, const Describe& describe) {
  std::exception_ptr error;
  const auto guarded = [&]() -> int {
    try {
      return missing();
    } catch (...) {
      error = std::current_exception();
      return kNobody;
    }
  };
  if (guarded() != kNobody) {
    try {
      wait(guarded, describe);
    } catch (const PeerError& peer_error) {  // dead: all shall know
      if (links_ != nullptr) links_->abandon(peer_error.what());
      fail(peer_error.what());
      throw;
    }
  }
  if (error) std::rethrow_exception(error);
}

// A peer may be one step ahead, and fail there, before we have heard that all ended this one.
void StepChannel::look_for_failure(uint64_t step, bool urgent) {
  const std::optional<Failure> failure = find_failure({stamp_.generation, step}, urgent);
  if (!failure) return;
  std::string text = failure->text;
  if (state_ != State::kInStep) {
    const bool is_next = failure->step > stamp_.step;
    text += concat(" (", describe(rank()),
                   is_next ? " was about to begin that step)"
                           : " has completed that step, and was about to begin the next)");
  }
  end_generation();
  if (links_ != nullptr) {  // of a death too, which the device would wait on
    try {
      check_all();
    } catch (const Error&) {  // the next step says so
    }
  }
  if (failure->is_mismatch) throw MismatchError(text);
  throw PeerError(text);
}

// Whether any step will work.
void StepChannel::check_all() {
  try {
    check();
    if (links_ != nullptr) links_->check();
  } catch (const UsageError&) {  // of a forked child
    throw;
  } catch (const Error& error) {
    if (links_ != nullptr) links_->abandon(error.what());
    throw;
  }
}

void StepChannel::look_for_mismatch() {
  for (int r = 0; r < size(); ++r) {
    const Stamp& theirs = peers_[r].last;
    if (r == rank() || !theirs.same_step(stamp_) || theirs.kind == stamp_.kind) continue;
    raise_mismatch(concat(describe(rank()), " is in ", describe_step(stamp_), ", but ", describe(r),
                          " in ", describe_step(theirs),
                          "; make both call the same methods in the same order"));
  }
}

void StepChannel::raise_mismatch(const std::string& text) {
  is_mismatch_ = true;
  throw MismatchError(text);
}

ChannelCounters StepChannel::counters() const {
  ChannelCounters counters = counters_;
  counters.pool_nbytes = pool_.nbytes();
  if (links_ != nullptr) {
    counters.device_nbytes = links_->moved_nbytes();
    counters.num_described = links_->num_described();
  }
  return counters;
}

}  // namespace pydist
